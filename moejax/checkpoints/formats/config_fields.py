"""Reads the fields of a quantization_config, with one line for what is not understood."""

import re
from collections.abc import Mapping
from typing import Any

from moejax.errors import MoejaxError
from pallas_kernels import layout


def text(fields: Mapping[str, Any], *names: str, default: str = "") -> str:
    """The first of the fields `names` that is set, in lower case.

    Raises:
      MoejaxError: it is no string.
    """
    for name in names:
        value = fields.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise _not_understood(name, value, "a string")
            return value.lower()
    return default


def bits(fields: Mapping[str, Any], name: str = "bits") -> int:
    """Reads the width of codes.

    Raises:
      MoejaxError: it is none of those that can be read.
    """
    value = fields.get(name)
    if type(value) is not int or value not in layout.BITS:
        raise _not_understood(name, value, " or ".join(map(str, layout.BITS)))
    return value


def group_size(fields: Mapping[str, Any], default: int | None = None) -> int | None:
    """Inputs of a group; None where it is a whole row (-1 in the files).

    Raises:
      MoejaxError: it is neither positive nor -1.
    """
    value = fields.get("group_size", default)
    if value is None or value == -1:
        return None
    if type(value) is not int or value < 1:
        raise _not_understood("group_size", value, "a positive integer or -1")
    return value


def flag(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Reads a boolean field.

    Raises:
      MoejaxError: it is set to something else.
    """
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _not_understood(name, value, "true or false")
    return value


def mapping(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Reads an object field, empty where it is not set.

    Raises:
      MoejaxError: it is set to something else.
    """
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _not_understood(name, value, "an object")
    return value


def pattern(name: str, expression: str) -> re.Pattern[str]:
    """Reads a field as a regular expression.

    Raises:
      MoejaxError: it is none.
    """
    try:
        return re.compile(expression)
    except re.error as error:
        raise MoejaxError(
            f"quantization_config.{name} has the pattern {expression!r}: {error}"
        ) from error


def _not_understood(name: str, value: Any, expected: str) -> MoejaxError:
    return MoejaxError(f"quantization_config.{name} is {value!r}, expected {expected}")
