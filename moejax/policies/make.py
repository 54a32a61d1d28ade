"""Policies by name."""

import dataclasses
import difflib
import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax.errors import MoejaxError
from moejax.policies.base import AnyPolicy, Policy
from moejax.policies.baselines import OnDemand, Resident
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.compose import Compose
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq

# Each a frozen dataclass whose fields are the settings.
POLICIES: Mapping[str, type[Any]] = {
    "resident": Resident,
    "on_demand": OnDemand,
    "dynaexq": DynaExq,
    "dymoe": DyMoE,
    "buddymoe": BuddyMoe,
    "compose": Compose,
}
# The parts of `compose` by the names of its fields; a setting goes to all parts that have it.
PARTS = {"hotness": "dynaexq", "importance": "dymoe", "buddies": "buddymoe"}
DEFAULT_PARTS = "dynaexq+dymoe"


def _class_of(name: str) -> type[Any]:
    """Finds the class of a policy: one of `POLICIES`, or "module:Class" of the user's own.

    The module is searched on Python's path and in the current directory.

    Raises:
      MoejaxError: there is no such class, or it is not a policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise MoejaxError(f"there is no policy {name!r}; {_meant(name, POLICIES)}")
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):  # `moejax`, unlike `python -m moejax`, does not look there
        sys.path.append(here)
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's code: whatever it raises is input
        said = f"{type(error).__name__}: {error}"
        raise MoejaxError(f"policy {name} cannot be imported ({said})") from error
    bases = inspect.getmro(found) if inspect.isclass(found) else ()
    if Policy not in bases or not hasattr(found, "__dataclass_fields__"):
        raise MoejaxError(
            f"policy {name} is no dataclass that derives from moejax.policies.base.Policy"
        )
    if inspect.isabstract(found):
        lacks = ", ".join(sorted(found.__abstractmethods__))
        raise MoejaxError(f"policy {name} lacks {lacks}")
    return found


def make_policy(name: str, **settings: Any) -> AnyPolicy:
    """Makes the policy of this name with these settings; the others keep their defaults.

    Args:
      name: of `POLICIES`, or "module:Class".
      **settings: fields of that class; lists become tuples.

    Raises:
      MoejaxError: an unknown name or setting, or a value that is not allowed.
    """
    check_settings(name, settings)
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    if name == "compose":
        return _composed(**given)
    made: AnyPolicy = _class_of(name)(**given)
    return made


def with_kernels(policy: AnyPolicy, platform: str) -> AnyPolicy:
    """Replaces parts of a policy by kernels on a "gpu"; decisions stay equal."""
    if platform != "gpu":
        return policy
    if isinstance(policy, BuddyMoe):
        return dataclasses.replace(policy, form="kernel")
    if isinstance(policy, Compose) and policy.buddies is not None:
        buddies = dataclasses.replace(policy.buddies, form="kernel")
        return dataclasses.replace(policy, buddies=buddies)
    return policy


def parts_of(name: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Policies that work inside one: itself, or the parts of `compose`.

    A class of the user's own counts as the policy that it derives from.
    """
    if name != "compose":
        names = {policy: known for known, policy in POLICIES.items()}
        return (next((names[of] for of in _class_of(name).mro() if of in names), name),)
    parts = tuple(str(settings.get("parts", DEFAULT_PARTS)).split("+"))
    if unknown := [part for part in parts if part not in PARTS.values()]:
        raise MoejaxError(f"parts: {unknown[0]!r} is none of {', '.join(PARTS.values())}")
    return parts


def _composed(parts: str = DEFAULT_PARTS, **settings: Any) -> Compose:
    chosen = parts_of("compose", {"parts": parts})
    made: dict[str, Any] = {}
    for field, part in PARTS.items():
        if part in chosen:
            known = settings_of(part)
            own = {name: value for name, value in settings.items() if name in known}
            made[field] = POLICIES[part](**own)
    return Compose(**made)


def check_settings(name: str, settings: Mapping[str, Any]) -> None:
    """Raises MoejaxError for an unknown policy or setting, or one of no part in use."""
    every, parts = settings_of(name), parts_of(name, settings)
    known = settings_of(name, parts)
    for setting in settings:
        if setting not in every:
            raise MoejaxError(f"policy {name} has no setting {setting!r}; {_meant(setting, every)}")
        if setting not in known:
            raise MoejaxError(f"{setting} is of no part of parts={'+'.join(parts)}")


def settings_of(name: str, parts: Sequence[str] = tuple(PARTS.values())) -> dict[str, Any]:
    """Settings of a policy and their defaults; for `compose`, those of some parts."""
    if name == "compose":
        found: dict[str, Any] = {"parts": DEFAULT_PARTS}
        for part in reversed(parts):
            found |= settings_of(part)
        return found
    return {field.name: field.default for field in dataclasses.fields(_class_of(name))}


def _meant(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(known), 1)
    listed = ", ".join(known) or "it has none"
    return f"did you mean {close[0]!r}? known: {listed}" if close else f"known: {listed}"
