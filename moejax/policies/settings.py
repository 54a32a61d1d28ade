"""A policy's settings: checks, whose errors name the setting, its value and what is allowed."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from moejax.errors import MoejaxError


def check_number(
    name: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    integer: bool = False,
    below: bool = False,
    above: bool = False,
) -> None:
    """Raises MoejaxError unless low <= value <= high.

    With `below` or `above`, high or low itself is refused as well.
    """
    kinds = int if integer else int | float
    said = f"from {low:g} to {high:g}" if high < math.inf else f"{low:g} or more"
    if below:
        said = f"from {low:g} to less than {high:g}"
    if above:
        said = f"above {low:g}"
    kind = "an integer" if integer else "a number"
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise MoejaxError(f"{name}={value!r} must be {kind}, {said}")
    out = (below and value == high) or (above and value == low) or value == math.inf
    if not low <= value <= high or out:
        raise MoejaxError(f"{name}={value!r} must be {kind}, {said}")


def check_flag(name: str, value: object) -> None:
    """Raises MoejaxError unless it is True or False."""
    if not isinstance(value, bool):
        raise MoejaxError(f"{name}={value!r} must be True or False")


def check_text(name: str, value: object) -> None:
    """Raises MoejaxError unless it is a string."""
    if not isinstance(value, str):
        raise MoejaxError(f"{name}={value!r} must be a string")


def check_numbers(name: str, values: object, low: float, *, integer: bool = False) -> None:
    """Raises MoejaxError unless it is a tuple of numbers of `low` or more."""
    if not isinstance(values, tuple):
        raise MoejaxError(f"{name}={values!r} must be a tuple of numbers")
    for value in values:
        check_number(name, value, low, integer=integer)


def check_array(name: str, values: object, *, of_profile: bool = False) -> None:
    """Raises MoejaxError unless it is a finite number, or an array or a tuple of them.

    With `of_profile` it must be an array.
    """
    try:
        found = np.asarray(values)
        finite = found.dtype.kind in "fiu" and bool(np.isfinite(found).all())
    except ValueError:  # rows of unequal length
        finite = False
    if not finite:
        raise MoejaxError(f"{name}={values!r} must be finite numbers")
    if of_profile and not hasattr(values, "shape"):
        raise MoejaxError(f"{name}={values!r} must be an array, as a profile has it")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raises MoejaxError unless it is one of the allowed words."""
    if value not in allowed:
        raise MoejaxError(f"{name}={value!r} must be one of {', '.join(allowed)}")


class ByContent:
    """Compares and hashes a frozen dataclass (`eq=False`) by the content of its arrays."""

    def __eq__(self, other: object) -> bool:
        """Compares class and content."""
        if not isinstance(other, ByContent) or type(other) is not type(self):
            return NotImplemented
        return self is other or self._content == other._content

    def __hash__(self) -> int:
        """Hashes the content."""
        return self._content[0]

    @functools.cached_property
    def _content(self) -> tuple[int, Any]:
        """Computes the content once: programs are looked up by it, and the arrays are large."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        content = tuple(_hashable(getattr(self, field.name)) for field in fields)
        return hash(content), content


def _hashable(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_hashable(part) for part in value)
    return (value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
