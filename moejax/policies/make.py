"""Policies by name."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moejax.errors import MoejaxError
from moejax.policies.base import AnyPolicy
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.compose import Compose
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq
from moejax.policies.on_demand import OnDemand
from moejax.policies.resident import Resident
from moejax.policies.substitution import Form

# Each a frozen dataclass whose fields are the settings.
POLICIES: Mapping[str, Callable[..., AnyPolicy]] = {
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


def make_policy(name: str, **settings: Any) -> AnyPolicy:
    """The policy of this name with these settings; those not given have their defaults.

    Args:
      name: of `POLICIES`.
      **settings: fields of that class; lists become tuples.

    Raises:
      MoejaxError: an unknown name or setting, or a value that is not allowed.
    """
    check_settings(name, settings)
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    if name == "compose":
        return _composed(**given)
    return POLICIES[name](**given)


def with_kernels(policy: AnyPolicy, platform: str) -> AnyPolicy:
    """The same decisions by kernels, where the platform is "gpu" and there are some."""
    return _searching(policy, "kernel") if platform == "gpu" else policy


def side_by_side(policy: AnyPolicy, platform: str) -> AnyPolicy:
    """The same decisions by what is fast for many settings at once, without kernels."""
    return policy if platform == "gpu" else _searching(policy, "ranks")


def _searching(policy: AnyPolicy, form: Form) -> AnyPolicy:
    """With buddies found so, unless a form was asked for."""
    if isinstance(policy, BuddyMoe) and policy.form == "table":
        return dataclasses.replace(policy, form=form)
    if isinstance(policy, Compose) and policy.buddies is not None:
        buddies: Any = _searching(policy.buddies, form)
        return dataclasses.replace(policy, buddies=buddies)
    return policy


def parts_of(name: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The policies that work in one: itself, or the parts of `compose`.

    Raises:
      MoejaxError: a part is none of dynaexq, dymoe and buddymoe.
    """
    if name != "compose":
        return (name,)
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
    """Raises MoejaxError for a policy or a setting that there is not, or not in the parts."""
    if name not in POLICIES:
        raise MoejaxError(f"there is no policy {name!r}; {_meant(name, POLICIES)}")
    every, parts = settings_of(name), parts_of(name, settings)
    known = settings_of(name, parts)
    for setting in settings:
        if setting not in every:
            raise MoejaxError(f"policy {name} has no setting {setting!r}; {_meant(setting, every)}")
        if setting not in known:
            raise MoejaxError(f"{setting} is of no part of parts={'+'.join(parts)}")


def settings_of(name: str, parts: Sequence[str] = tuple(PARTS.values())) -> dict[str, Any]:
    """The settings of a policy and their defaults; of `compose`, those of some parts."""
    if name == "compose":
        found: dict[str, Any] = {"parts": DEFAULT_PARTS}
        for part in reversed(parts):
            found |= settings_of(part)
        return found
    fields = dataclasses.fields(POLICIES[name])  # type: ignore[arg-type]
    return {field.name: field.default for field in fields}


def _meant(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(known), 1)
    listed = ", ".join(known) or "it has none"
    return f"did you mean {close[0]!r}? known: {listed}" if close else f"known: {listed}"
