"""Fields of run configurations: names, meanings, types; to and from `ml_collections`."""

import dataclasses
import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from ml_collections import config_dict

from moejax.errors import MoejaxError

_T = TypeVar("_T")


def option(default: _T, meaning: str) -> _T:
    """A dataclass field with the line that `--help` prints for it."""
    return dataclasses.field(default=default, metadata={"help": meaning})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What one main runs; every field has a default, and a meaning that `--help` prints.

    A field whose default is a RunConfig is a group of fields, named `group.field` on the command
    line and in errors; groups hold no groups.

    Attributes:
      gone: fields of earlier versions, and what to do instead.
    """

    gone: ClassVar[Mapping[str, str]] = types.MappingProxyType({})

    def check(self) -> None:
        """Raises MoejaxError naming the first field whose value is not allowed, and the range."""


_Config = TypeVar("_Config", bound=RunConfig)


def to_config_dict(config: RunConfig) -> config_dict.ConfigDict:
    """The fields of a run configuration as a locked ConfigDict: values change, names do not."""
    return config_dict.ConfigDict(dataclasses.asdict(config)).lock()


def from_config_dict(config_class: type[_Config], values: config_dict.ConfigDict) -> _Config:
    """A checked `config_class` from a ConfigDict; fields that it lacks keep their defaults.

    Raises:
      MoejaxError: a field is unknown (the nearest real one is named), has another type than the
        default, or has a value that is not allowed.
    """
    default = config_class()
    defaults = {option.name: option.default for option in options(default)}
    typed: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in _flat(values):
        check_field_name(name, default)
        group, _, field = name.rpartition(".")
        into = groups.setdefault(group, {}) if group else typed
        into[field] = _as_type_of(name, value, defaults[name])
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
    """Every value and its name; what a group holds is named `group.field`."""
    for name, value in values.items():
        if isinstance(value, config_dict.ConfigDict):
            yield from ((f"{name}.{field}", part) for field, part in _flat(value))
        else:
            yield name, value


@dataclasses.dataclass(frozen=True)
class Option:
    """A field of a run configuration as the command line names it."""

    name: str  # "seed", "memory.device_gib"
    default: Any
    meaning: str


def options(config: RunConfig) -> list[Option]:
    """The fields, with the values of `config` for defaults; in place of a group its own fields."""
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, RunConfig):
            parts = options(value)
            found += [dataclasses.replace(p, name=f"{field.name}.{p.name}") for p in parts]
        else:
            found.append(Option(field.name, value, field.metadata["help"]))
    return found


def check_field_name(name: str, config: RunConfig) -> None:
    """Raises MoejaxError naming the nearest field of `config`, unless `name` is one."""
    known = [option.name for option in options(config)]
    if name in known:
        return
    if name in config.gone:
        raise MoejaxError(f"there is no config field {name!r} any more: {config.gone[name]}")
    if group := [option for option in known if option.startswith(f"{name}.")]:
        raise MoejaxError(f"{name} has no value of its own; it is a group: {', '.join(group)}")
    same = [option for option in known if option.rpartition(".")[2] == name]
    nearest = same or difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    meant = " or ".join(map(repr, nearest))
    raise MoejaxError(f"there is no config field {name!r}; did you mean {meant}?")


def _as_type_of(name: str, value: Any, default: Any) -> Any:
    """`value` in the type of `default`: an int serves as a float, a list as a tuple.

    The items of a tuple are of the type of the default's first; of () they are texts.
    """
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, tuple) and default and not isinstance(default[0], str):
        if isinstance(value, list | tuple):
            return tuple(_as_type_of(name, item, default[0]) for item in value)
        raise MoejaxError(f'{name}={value!r} must be numbers: --config.{name}="(1, 2)"')
    if isinstance(default, tuple):
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        quoted = f"--config.{name}=\"'5'\""
        raise MoejaxError(f"{name}={value!r} must be strings; quote a number: {quoted}")
    if type(value) is not type(default):
        raise MoejaxError(f"{name}={value!r} must be of type {type(default).__name__}")
    return value
