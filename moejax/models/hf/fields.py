"""Reads and checks fields of a config.json; each error names the wrong one."""

from collections.abc import Mapping
from typing import Any

from moejax.errors import MoejaxError

# Numbers are computed with as float32.
LARGEST = 3e38
# Where transformers 4 keeps what rope is, and where transformers 5 does, which reads both.
ROPES = ("rope_scaling", "rope_parameters")


def rope_field(fields: Mapping[str, Any], name: str) -> Any:
    """Reads a rope field; both objects and the top level must agree."""
    nested = {f"{rope}.{name}": object_field(fields, rope).get(name) for rope in ROPES}
    return agreed({**nested, name: fields.get(name)})


def object_field(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Reads a JSON object, empty if it is missing."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MoejaxError(f"{name} is {value!r}, expected a JSON object")
    return value


def flag(fields: Mapping[str, Any], name: str) -> bool:
    """Reads true or false, false if it is missing."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise MoejaxError(f"{name} is {value!r}, expected true or false")
    return bool(value)


def agreed(spellings: Mapping[str, Any]) -> Any:
    """Returns the one value that the spellings of a field agree on; None if none is set."""
    given = {name: value for name, value in spellings.items() if value is not None}
    values = list(given.values())
    if any(value != values[0] for value in values[1:]):
        said = " but ".join(f"{name} says {value!r}" for name, value in given.items())
        raise MoejaxError(f"{said}; they mean the same, remove the wrong one")
    return values[0] if values else None


def integer(
    fields: Mapping[str, Any], *names: str, default: int | None = None, most: int | None = None
) -> int:
    """Returns the positive integer, up to `most`, on which all set `names` agree."""
    value = agreed({name: fields.get(name) for name in names})
    if value is None:
        value = default
    if value is None:
        raise _absent(fields, names, "a positive integer")
    if type(value) is not int or value < 1:
        raise MoejaxError(f"{names[-1]} is {value!r}, expected a positive integer")
    if most is not None and value > most:
        raise MoejaxError(f"{names[-1]} is {value}, expected at most {most}")
    return value


def number(fields: Mapping[str, Any], name: str, *, default: float | None = None) -> float:
    """Reads a positive finite number."""
    value = fields.get(name)
    if value is None:
        value = default
    if value is None:
        raise _absent(fields, (name,), "a positive finite number")
    if type(value) not in (int, float) or not 0 < value <= LARGEST:
        raise MoejaxError(f"{name} is {value!r}, expected a positive finite number")
    return float(value)


def _absent(fields: Mapping[str, Any], names: tuple[str, ...], expected: str) -> MoejaxError:
    """Says that a needed field is missing or null; some are null by default."""
    if not (nulls := [name for name in names if name in fields]):
        return MoejaxError(f"{names[-1]} is missing")
    said = f"{nulls[-1]} is null, in the file or by default, expected {expected}"
    return MoejaxError(f"{said}; write the model's own")


def sparse_layers(fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Sparse layers of Qwen3: every `decoder_sparse_step`-th, save those named as MLP only."""
    step = integer(fields, "decoder_sparse_step")
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise MoejaxError(f"mlp_only_layers is {dense!r}, expected a list of layers")
    left_out = set(dense)
    return tuple(i for i in range(num_layers) if i not in left_out and (i + 1) % step == 0)
