"""Fields of a quantization_config; a MoejaxError of one line names what is not understood."""

import re
from collections.abc import Mapping
from typing import Any

from moejax.errors import MoejaxError
from pallas_kernels import layout


def text(fields: Mapping[str, Any], *names: str, default: str = "") -> str:
    """The first of the fields `names` that is set, in lower case."""
    for name in names:
        value = fields.get(name)
        if value is not None:
            return str(_typed(name, value, str, "a string")).lower()
    return default


def bits(fields: Mapping[str, Any], name: str = "bits") -> int:
    """Reads the width of codes."""
    value = fields.get(name)
    if type(value) is not int or value not in layout.BITS:
        raise _not_understood(name, value, " or ".join(map(str, layout.BITS)))
    return value


def group_size(fields: Mapping[str, Any]) -> int | None:
    """Inputs of a group; None where it is a whole row (-1 in the files)."""
    value = fields.get("group_size")
    if value is None or value == -1:
        return None
    if type(value) is not int or value < 1:
        raise _not_understood("group_size", value, "a positive integer or -1")
    return value


def flag(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Reads a boolean field."""
    value = fields.get(name)
    return default if value is None else bool(_typed(name, value, bool, "true or false"))


def mapping(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Reads an object field, empty where it is not set."""
    value = fields.get(name)
    return {} if value is None else dict(_typed(name, value, dict, "an object"))


def pattern(name: str, expression: str) -> re.Pattern[str]:
    """Compiles a field's regular expression."""
    try:
        return re.compile(expression)
    except re.error as error:
        raise MoejaxError(
            f"quantization_config.{name} has the pattern {expression!r}: {error}"
        ) from error


def _typed(name: str, value: Any, kind: type, expected: str) -> Any:
    if not isinstance(value, kind):
        raise _not_understood(name, value, expected)
    return value


def _not_understood(name: str, value: Any, expected: str) -> MoejaxError:
    return MoejaxError(f"quantization_config.{name} is {value!r}, expected {expected}")
