"""Grids of settings in text: "slots=8:80:8", "retention=0.5,0.75", "slots=24/104"."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from moejax.errors import MoejaxError

_WORDS = {"true": True, "false": False, "none": None}
_WORD = re.compile(r"[\w+./~-]*\w")
MAX_SETTINGS = 100_000


def single(text: str) -> dict[str, Any]:
    """Reads one policy's settings, "retention=0.75,low=skip", divided by commas or spaces.

    Raises:
      MoejaxError: it cannot be read, or a setting has several values.
    """
    try:
        found = settings(part for part in re.split(r"[,\s]+", text) if part)
    except MoejaxError as error:
        raise MoejaxError(str(error).removeprefix("grid: ")) from error
    if len(found) > 1:
        raise MoejaxError(f"{text!r} gives a setting several values; moejax.sweep takes those")
    return found[0]


def settings(axes: Iterable[str]) -> list[dict[str, Any]]:
    """Combines the values of some axes in every way, the last axis fastest.

    Args:
      axes: "name=values", see `_axis`; a text without "=" is one more value of the axis before it.
    """
    joined: list[str] = []
    for text in axes:
        if joined and "=" not in text:
            joined[-1] += f",{text}"
        else:
            joined.append(text)
    read = [_axis(text) for text in joined]
    names = [name for name, _ in read]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MoejaxError(f"grid: {', '.join(twice)} stands twice")
    _check_size(math.prod(len(values) for _, values in read))
    found = itertools.product(*(values for _, values in read))
    return [dict(zip(names, values, strict=True)) for values in found]


def eighths(num_experts: int, num_tiers: int) -> list[dict[str, Any]]:
    """Default grid: slots of 1/8, 2/8, ... of the experts, in every tier."""
    sizes = sorted({max(1, num_experts * part // 8) for part in range(1, 9)})
    return [{"slots": size if num_tiers == 1 else (size,) * num_tiers} for size in sizes]


def _axis(text: str) -> tuple[str, list[Any]]:
    """Reads a name and its values: a list "a,b,c", or a range "first:last:step".

    A value is a number, true, false, none, numbers of several tiers, "24/104", or a word, such as a
    name, "dynaexq+dymoe", or the path of a file. A range includes its last value.
    """
    name, equals, values = text.partition("=")
    if not equals or not name.isidentifier() or not values:
        raise MoejaxError(f"grid: {text!r} is not NAME=VALUES, such as slots=8:80:8 or slots=8,24")
    found: list[Any] = []
    for part in values.split(","):
        found += _range(text, part) if ":" in part else [_value(text, part)]
    return name, found


def _range(text: str, part: str) -> list[Any]:
    try:
        numbers = [float(number) for number in part.split(":")]
        first, last, step = numbers if len(numbers) == 3 else (*numbers, 1.0)
    except ValueError as error:
        raise MoejaxError(f"grid: {text!r}: {part!r} is not FIRST:LAST:STEP") from error
    if not np.isfinite(numbers).all() or step <= 0 or last < first:
        raise MoejaxError(f"grid: {text!r}: {part!r} holds no number")
    count = int(np.floor((last - first) / step + 1e-9)) + 1
    _check_size(count)
    values = [round(first + i * step, 12) for i in range(count)]
    whole = all(number == int(number) for number in (first, step))
    return [int(value) for value in values] if whole else values


def _check_size(count: int) -> None:
    if count > MAX_SETTINGS:
        raise MoejaxError(f"grid: {count} settings; at most {MAX_SETTINGS}: take larger steps")


def _value(text: str, part: str) -> Any:
    if part.lower() in _WORDS:
        return _WORDS[part.lower()]
    numbers = [_number(one) for one in part.split("/")]
    if None not in numbers:
        return tuple(numbers) if len(numbers) > 1 else numbers[0]
    if not _WORD.fullmatch(part):
        raise MoejaxError(f"grid: {text!r}: {part!r} is no value")
    return part


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def described(setting: Mapping[str, Any]) -> str:
    """Writes a setting as it would be typed: "slots=24/104 retention=0.75"."""

    def value(of: Any) -> str:
        return "/".join(map(str, of)) if isinstance(of, tuple) else str(of)

    return " ".join(f"{name}={value(of)}" for name, of in setting.items())
