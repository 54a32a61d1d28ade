"""Policies by name."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moejax.errors import MoejaxError
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq
from moejax.policies.interface import AnyPolicy
from moejax.policies.on_demand import OnDemand
from moejax.policies.resident import Resident

# Each a frozen dataclass whose fields are the settings.
POLICIES: Mapping[str, Callable[..., AnyPolicy]] = {
    "resident": Resident,
    "on_demand": OnDemand,
    "dynaexq": DynaExq,
    "dymoe": DyMoE,
    "buddymoe": BuddyMoe,
}


def make_policy(name: str, **settings: Any) -> AnyPolicy:
    """The policy of this name with these settings; those not given have their defaults.

    Args:
      name: of `POLICIES`.
      **settings: fields of that class; lists become tuples.

    Raises:
      MoejaxError: an unknown name or setting, or a value that is not allowed.
    """
    check_settings(name, settings)
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    return POLICIES[name](**given)


def check_settings(name: str, settings: Iterable[str]) -> None:
    """Raises MoejaxError for a policy or a setting's name that there is not."""
    if name not in POLICIES:
        raise MoejaxError(f"there is no policy {name!r}; {_meant(name, POLICIES)}")
    known = settings_of(name)
    for setting in settings:
        if setting not in known:
            raise MoejaxError(f"policy {name} has no setting {setting!r}; {_meant(setting, known)}")


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a policy and their defaults."""
    fields = dataclasses.fields(POLICIES[name])  # type: ignore[arg-type]
    return {field.name: field.default for field in fields}


def _meant(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(known), 1)
    listed = ", ".join(known) or "it has none"
    return f"did you mean {close[0]!r}? known: {listed}" if close else f"known: {listed}"
