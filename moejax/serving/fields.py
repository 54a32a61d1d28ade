"""Fields of a request's body, typed and checked; every error names its field."""

import difflib
import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from moejax.serving.errors import ApiError


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body, or an ApiError."""
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # of text that is not UTF-8, too
        reason = str(error) or type(error).__name__
        raise ApiError(f"the body is not JSON: {reason}", code="invalid_json") from error
    if not isinstance(found, dict):
        raise ApiError(f"the body must be a JSON object, not {_kind(found)}", code="invalid_json")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


class Fields:
    """A body, each of whose fields is to be read, ignored or refused; null is as if absent."""

    def __init__(self, body: Mapping[str, Any], where: str = ""):
        """Wraps an object; `where` is its place in the body, such as "stream_options."."""
        self._values = {name: value for name, value in body.items() if value is not None}
        self._where = where
        self._known: set[str] = set()

    def take(self, name: str) -> Any:
        """A field of any type; None where it is absent."""
        self._known.add(name)
        return self._values.get(name)

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raises an ApiError about a field."""
        raise ApiError(f"{self._where}{name}: {why}", param=f"{self._where}{name}")

    def wrong_type(self, name: str, value: Any, wanted: str) -> NoReturn:
        """Raises an ApiError about a field's type."""
        self.refuse(name, f"must be {wanted}, not {_kind(value)}")

    def _typed(self, name: str, kinds: Any, wanted: str) -> Any:
        """A field of one of some types; None where it is absent. 1 is not True."""
        value = self.take(name)
        if value is not None and not (
            isinstance(value, kinds) and isinstance(value, bool) == (kinds is bool)
        ):
            self.wrong_type(name, value, wanted)
        return value

    def integer(self, name: str, default: Any, low: int, high: int) -> Any:
        """An int from `low` to `high`."""
        if isinstance(given := self.take(name), float) and given.is_integer():
            self._values[name] = int(given)
        if (value := self._typed(name, int, "an integer")) is None:
            return default
        if not low <= value <= high:
            self.refuse(name, f"{_short(value)} must be from {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A finite number from `low` to `high`."""
        if (value := self._typed(name, int | float, "a number")) is None:
            return default
        if not low <= value <= high or not math.isfinite(value):
            self.refuse(name, f"{_short(value)} must be from {low:g} to {high:g}")
        return float(value)

    def boolean(self, name: str, default: Any) -> Any:
        """True or False."""
        value = self._typed(name, bool, "true or false")
        return default if value is None else value

    def text(self, name: str, default: Any) -> Any:
        """A text of valid Unicode."""
        value = self.take(name)
        return default if value is None else self.checked_text(name, value)

    def checked_text(self, name: str, value: Any) -> str:
        """The value, if it is a text."""
        if not isinstance(value, str):
            self.wrong_type(name, value, "a string")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            self.refuse(name, f"half a surrogate pair at character {error.start}")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; empty where it is absent."""
        return self._typed(name, dict, "an object") or {}

    def refuse_but(self, neutral: Mapping[str, Collection[Any]], why: str) -> None:
        """Refuses fields that are not supported unless their value asks for nothing."""
        for name, allowed in neutral.items():
            value = self.take(name)
            if value is not None and not any(_same(value, one) for one in allowed):
                self.refuse(name, why)

    def refuse_unknown(self, ignored: Collection[str] = ()) -> list[str]:
        """Refuses unread fields but `ignored` ones, whose names it returns."""
        known = self._known | set(ignored)
        for name in self._values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                self.refuse(_short(name), f"there is no such field{hint}")
        return [name for name in self._values if name not in self._known]


def _same(value: Any, other: Any) -> bool:
    """Whether values are equal and of one kind: 1 is not True."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _short(value: Any) -> str:
    """Shortens a value of the body to fit a line."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    said = str(value)
    return said if len(said) <= 60 else said[:60] + "..."


def _kind(value: Any) -> str:
    """The name of a JSON value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return names.get(type(value), "null" if value is None else "a number")
