"""Fields of run configurations: names, meanings, types, and their conversions."""

import ast
import dataclasses
import difflib
import itertools
import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from ml_collections import config_dict

from moejax.errors import MoejaxError

_T = TypeVar("_T")

_BOOLEANS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


def option(
    default: _T,
    meaning: str,
    *,
    # whether commas divide a list's items on the command line; else each flag is one item
    commas: bool = True,
    kind: type[int | float] | None = None,  # type of a number whose None means "not given"
    least: float | None = None,  # the least number; without it no number is refused
    most: float = math.inf,
    choices: Collection[Any] = (),  # all values but the default; () for any
    needed: str = "",  # what a text must be that may not be empty
    of: Sequence[str] = (),  # options without which any value but 0 or "" has no effect
) -> _T:
    """Declares a dataclass field with its `--help` line and what `RunConfig.check` allows."""
    metadata = {"help": meaning, "commas": commas, "kind": kind, "least": least, "most": most}
    metadata |= {"choices": choices, "needed": needed, "of": of}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Configuration of one main; every field has a default and a `--help` line.

    A field whose default is a RunConfig is a group of fields, named `group.field` on the command
    line and in errors; groups are not nested.
    """

    command: ClassVar[str] = ""  # the command that runs it, "" for a group

    def check(self) -> None:
        """Raises MoejaxError naming the first field with a bad value, and what it must be."""
        for field in dataclasses.fields(self):
            value, of = getattr(self, field.name), field.metadata
            least, most, choices = of["least"], of["most"], of["choices"]
            said = of["needed"] if value == "" else ""
            if choices and value not in choices and value != field.default:
                said = f"one of {', '.join(map(str, choices))}"
            elif least is not None and not (least <= value <= most and value != math.inf):
                said = f"from {least} to {most}" if most < math.inf else f"at least {least}"
                said = "0 or more" if said == "at least 0" else said
                said += f" ({of['help']})" if least < 0 else ""  # what a number below 0 means
                said += " and finite" if value == math.inf else ""
            if said:
                raise MoejaxError(f"{field.name}={value!r} must be {said}")
            lacking = [name for name in of["of"] if not operator.attrgetter(name)(self)]
            if value and value != field.default and lacking:
                said = " and ".join(lacking)
                raise MoejaxError(
                    f"{field.name}={value!r} has no effect without {said}: give {said}, or leave "
                    f"{field.name} out"
                )

    def moved(self, name: str) -> str:
        """Flag that replaces a field of an earlier version; "" for none."""
        del name
        return ""

    def more_help(self) -> list[str]:
        """Lines that `--help` prints after the fields, for the given values."""
        return []


_Config = TypeVar("_Config", bound=RunConfig)


def to_config_dict(config: RunConfig) -> config_dict.ConfigDict:
    """Converts a run configuration to a locked ConfigDict: values change, names do not."""
    return config_dict.ConfigDict(dataclasses.asdict(config)).lock()


def from_config_dict(
    config_class: type[_Config],
    values: config_dict.ConfigDict,
    # values by name ("memory.slots"), which take precedence
    overrides: Mapping[str, Any] | None = None,
) -> _Config:
    """Builds a checked `config_class` from a ConfigDict; missing fields keep defaults.

    Raises:
      MoejaxError: a field is unknown (the nearest real one is named), has another type than the
        default, or has a value that is not allowed.
    """
    default = config_class()
    by_name = {option.name: option for option in options(default)}
    typed: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in itertools.chain(_flat(values), (overrides or {}).items()):
        check_field_name(name, default)
        group, _, field = name.rpartition(".")
        into = groups.setdefault(group, {}) if group else typed
        of = by_name[name]
        if of.kind is None or value is not None:
            value = _as_type_of(name, value, of.default if of.kind is None else of.kind())
        into[field] = value
    for group, fields in groups.items():
        part = type(getattr(default, group))(**fields)
        try:
            part.check()
        except MoejaxError as error:
            raise MoejaxError(f"{group}.{error}") from error
        typed[group] = part
    config = config_class(**typed)
    config.check()
    return config


def _flat(values: config_dict.ConfigDict) -> Iterator[tuple[str, Any]]:
    """Yields every value and its name; a group's fields are named `group.field`."""
    for name, value in values.items():
        if isinstance(value, config_dict.ConfigDict):
            yield from ((f"{name}.{field}", part) for field, part in _flat(value))
        else:
            yield name, value


@dataclasses.dataclass(frozen=True)
class Option:
    """A field of a run configuration, by its name on the command line."""

    name: str  # "seed", "memory.device_gib"
    default: Any
    meaning: str
    commas: bool = True
    kind: type[int | float] | None = None  # of a number that may be None


def options(config: RunConfig) -> list[Option]:
    """Lists the fields, with `config`'s values as defaults; groups are expanded."""
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, RunConfig):
            parts = options(value)
            found += [dataclasses.replace(p, name=f"{field.name}.{p.name}") for p in parts]
        else:
            of = field.metadata
            found.append(Option(field.name, value, of["help"], of["commas"], of["kind"]))
    return found


def check_fields(values: config_dict.ConfigDict, config_class: type[RunConfig]) -> None:
    """Raises MoejaxError if values belong to another command, or a field is unknown."""
    names = [name for name, _ in _flat(values)]
    default = config_class()
    if set(names) <= {option.name for option in options(default)}:
        return
    fitting = []
    for other in _descendants(RunConfig):
        known = {option.name for option in options(other())} if other.command else set()
        if known.issuperset(names):
            fitting.append((len(known), other.command))
    if fitting:
        raise MoejaxError(f"made for {min(fitting)[1]}, not for {config_class.command}")
    for name in names:
        check_field_name(name, default)


def _descendants(config_class: type[RunConfig]) -> Iterator[type[RunConfig]]:
    for derived in config_class.__subclasses__():
        yield derived
        yield from _descendants(derived)


def value_of(option: Option, texts: Sequence[str]) -> Any:
    """Parses a field's value from the command line.

    Args:
      texts: one for each use of its flag. The last counts; all of them for a list, which may also
        be written in Python's form: ('int4', 'int2').
    """
    name, default, text = option.name, option.default, texts[-1]
    if option.kind is not None:
        return None if text.lower() == "none" else _number(name, text, option.kind)
    if isinstance(default, tuple):
        items = [item for one in texts for item in _items(one, commas=option.commas)]
        if default and not isinstance(default[0], str):
            return tuple(_number(name, item, type(default[0])) for item in items)
        return tuple(map(str, items))
    if isinstance(default, bool):
        if text.lower() not in _BOOLEANS:
            raise MoejaxError(f"{name}={text!r} must be true or false")
        return _BOOLEANS[text.lower()]
    if isinstance(default, int | float):
        return _number(name, text, type(default))
    return text


def _items(text: str, *, commas: bool) -> list[Any]:
    """Splits the items of a list in one flag."""
    if text[:1] in ("(", "[", "'", '"'):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = None
        if isinstance(value, str | tuple | list):
            return [value] if isinstance(value, str) else list(value)
    if not commas:
        return [text]
    return [item.strip() for item in text.split(",") if item.strip()]


def _number(name: str, value: Any, kind: type) -> Any:
    try:
        return kind(value) if isinstance(value, str) else _as_type_of(name, value, kind())
    except ValueError as error:
        said = "a whole number" if kind is int else "a number"
        raise MoejaxError(f"{name}={value!r} must be {said}") from error


def groups(config: RunConfig) -> dict[str, RunConfig]:
    """Groups of fields, by name."""
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in found.items() if isinstance(value, RunConfig)}


def moved(name: str, config: RunConfig) -> str:
    """Flag that replaces a former field, named with its group or without; "" for none."""
    group, _, field = name.rpartition(".")
    found = [part.moved(field) for key, part in groups(config).items() if group in ("", key)]
    if group in ("", "config"):
        found.append(config.moved(field))
    return next(filter(None, found), "")


def check_field_name(name: str, config: RunConfig) -> None:
    """Raises MoejaxError naming the nearest field of `config`, unless `name` is one."""
    known = [option.name for option in options(config)]
    if name in known:
        return
    if flag := moved(name, config):
        raise MoejaxError(f"{name} is now written {flag}")
    if group := [option for option in known if option.startswith(f"{name}.")]:
        raise MoejaxError(f"{name} has no value of its own; it is a group: {', '.join(group)}")
    same = [option for option in known if option.rpartition(".")[2] == name]
    nearest = same or difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    meant = " or ".join(map(repr, nearest))
    raise MoejaxError(f"there is no config field {name!r}; did you mean {meant}?")


def _as_type_of(name: str, value: Any, default: Any) -> Any:
    """Converts `value` to the type of `default`: an int to a float, a list to a tuple.

    A tuple's items have the type of the default's first item; for () they are texts.
    """
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, tuple) and default and not isinstance(default[0], str):
        if isinstance(value, list | tuple):
            return tuple(_as_type_of(name, item, default[0]) for item in value)
        raise MoejaxError(f"{name}={value!r} must be a list of numbers: --config.{name}=1,2")
    if isinstance(default, tuple):
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise MoejaxError(f"{name}={value!r} must be a tuple of strings, such as ('a', '5')")
    if type(value) is not type(default):
        raise MoejaxError(f"{name}={value!r} must be of type {type(default).__name__}")
    return value
