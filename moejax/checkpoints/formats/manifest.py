"""Manifest of our own format, quantization.json: each matrix's form, each file's content.

    {"layout": LAYOUT,
     "tensors": {"PREFIX.weight": {"shape": [N, K], "method": ..., "bits": ..., "group_size": ...,
                                   "zero_kind": ..., "scale_dtype": ..., "rank": r,
                                   "factor_bits": ..., "factor_group_size": 64,
                                   "planes": [2, 4], "compensated_bits": 2,
                                   "refined_ranks": {"4": r},
                                   "relative_error": ..., "bytes": ...}, ...},
     "files": {"model-00001-of-00025.safetensors": {"size": bytes, "sha256": hex}, ...},
     "totals": {...}}

A reader needs `bits`, `group_size` and, where factors are packed in other groups than 64,
`factor_group_size`; of bit planes `planes`, the widths that codes were chosen for, and
`compensated_bits`, the one that factors named for no width belong to. It checks `layout`, `shape`,
`zero_kind` and the files. The rest is for people.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moejax.errors import MoejaxError
from moejax.files.whole import file_digest
from moejax.models.hf.config import read_json
from moejax.weights.qtensor import FACTOR_GROUP_SIZE, ZERO_KINDS, planes_refusal
from pallas_kernels import layout

MANIFEST_FILE = "quantization.json"
METHOD = "moejax"  # the quant_method of config.json


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixEntry:
    """A matrix's entry in the manifest, as far as a reader needs it."""

    shape: tuple[int, ...]
    bits: int
    group_size: int
    zero_kind: str
    factor_group_size: int
    planes: tuple[int, ...] = ()  # widths of bit planes, rising; (): one array of codes
    compensated_bits: int = 0  # width of the factors named for none, if there are planes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of a checkpoint."""

    path: Path
    matrices: Mapping[str, MatrixEntry]  # by Hugging Face name, with ".weight"
    files: Mapping[str, tuple[int, str]]  # size in bytes and SHA-256 by file name


def quantization_config() -> dict[str, str]:
    """The quantization_config that config.json of such a checkpoint has."""
    return {"quant_method": METHOD, "layout": layout.LAYOUT, "manifest": MANIFEST_FILE}


def read_manifest(directory: Path, config: Mapping[str, Any]) -> Manifest:
    """The manifest that `config`, the quantization_config, names.

    MoejaxError if it is missing or broken, or its layout is not this version's.
    """
    name = config.get("manifest", MANIFEST_FILE)
    if not isinstance(name, str) or name != Path(name).name:
        raise MoejaxError(f"quantization_config has manifest {name!r}, expected a file name")
    path = directory / name
    if not path.exists():
        raise MoejaxError(f"no {name} in {directory}; copy the whole checkpoint again")
    fields = read_json(path)
    for place, said in (("config.json", config), (name, fields)):
        tag = said.get("layout")
        if tag != layout.LAYOUT:
            raise MoejaxError(
                f"{directory / place}: the weights have layout {tag!r}, this version reads "
                f"{layout.LAYOUT!r}; quantize the model again"
            )
    entries = _object(path, fields, "tensors")
    matrices = {name: matrix_entry(path, name, entry) for name, entry in entries.items()}
    return Manifest(path=path, matrices=matrices, files=_file_entries(path, fields))


def read_files(directory: Path) -> Manifest | None:
    """The manifest's files alone, of weights in any format that `moejax.quantize` writes.

    None where there is no manifest; raises MoejaxError where it is broken.
    """
    path = directory / MANIFEST_FILE
    if not path.exists():
        return None
    return Manifest(path=path, matrices={}, files=_file_entries(path, read_json(path)))


def check_files(manifest: Manifest, *, checksums: bool) -> None:
    """Raises MoejaxError unless the files beside a manifest are what it says.

    Args:
      checksums: read all files whole and compare SHA-256 too. Else only sizes are compared, and
        only of the weights: who mends config.json or a tokenizer need not write a new manifest.
    """
    directory = manifest.path.parent
    for name, (size, sha256) in manifest.files.items():
        path = directory / name
        if not checksums and path.suffix != ".safetensors":
            continue
        if not path.is_file():
            raise MoejaxError(f"{path} is missing, {manifest.path.name} lists it; copy it again")
        if path.stat().st_size != size:
            raise MoejaxError(
                f"{path} has {path.stat().st_size:,} bytes, {size:,} by {manifest.path.name}; copy "
                "the whole checkpoint again"
            )
        if checksums and file_digest(path).sha256 != sha256:
            raise MoejaxError(
                f"{path} is not what was written (its SHA-256 is not that of "
                f"{manifest.path.name}); copy it again"
            )


def matrix_entry(path: Path, name: str, entry: Any) -> MatrixEntry:
    """Reads an entry of "tensors"; raises MoejaxError where it is not understood."""
    try:
        found = MatrixEntry(
            shape=tuple(entry["shape"]),
            bits=entry["bits"],
            group_size=entry["group_size"],
            zero_kind=entry["zero_kind"],
            factor_group_size=entry.get("factor_group_size") or FACTOR_GROUP_SIZE,
            planes=tuple(entry.get("planes", ())),
            compensated_bits=entry.get("compensated_bits", 0),
        )
        sizes = (*found.shape, found.group_size, found.factor_group_size)
        is_whole = all(type(size) is int and size > 0 for size in sizes) and len(found.shape) == 2
    except (KeyError, TypeError, AttributeError) as error:
        raise MoejaxError(f"{path}: the entry of {name} is broken ({error!r})") from error
    if found.planes:
        is_whole = (
            is_whole
            and all(type(bits) is int for bits in found.planes)
            and planes_refusal(found.planes) is None
            and found.planes[-1] == found.bits
            and found.zero_kind == "float"
            and (not entry.get("rank") or found.compensated_bits in found.planes)
        )
    if not is_whole or found.bits not in layout.BITS or found.zero_kind not in ZERO_KINDS:
        raise MoejaxError(f"{path}: the entry of {name} is not understood: {entry}")
    return found


def _file_entries(path: Path, fields: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    found = {}
    for name, entry in _object(path, fields, "files").items():
        if (
            name != Path(name).name
            or not isinstance(entry, dict)
            or type(entry.get("size")) is not int
            or not isinstance(entry.get("sha256"), str)
        ):
            raise MoejaxError(f"{path}: the entry of file {name} is not understood: {entry}")
        found[name] = entry["size"], entry["sha256"]
    return found


def _object(path: Path, fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise MoejaxError(f"{path} has no object {name!r}; copy it again")
    return value
