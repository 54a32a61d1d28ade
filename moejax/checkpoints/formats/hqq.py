"""Reads HQQ checkpoints in safetensors.

PREFIX.W_q    the codes [N K / g, g], a row a group, packed along the rows by `packing`:
              8bit_u8 U8 [R, g]; 4bit_u8 U8 [R / 2, g], the first half of the rows above the
              second; 2bit_u8 U8 [R / 4, g], the first quarter uppermost; 3bit_32 I32
              [ceil(R / 10), g], the first tenth at bit 27
PREFIX.scale  [R, 1]
PREFIX.zero   [R, 1], float
PREFIX.nbits, group_size, axis, shape, packing, ...  scalars and short lists

w = (q - zero) scale, reshaped to [N, K].
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from moejax.checkpoints.formats import bitstream
from moejax.checkpoints.formats.interfaces import (
    FLOATS,
    Format,
    StoredMatrix,
    Tensors,
    broken,
    codes_matrix,
    scale_dtype,
)
from moejax.errors import MoejaxError
from moejax.weights.qtensor import CodesKind, QTensor

# Entries that the library's modules save beside codes, scales and zeros.
_METADATA = (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float",
    "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict",
    "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Packing:
    """Packing of rows by the library: word j holds rows j, j + R / n, j + 2 R / n, ..."""

    bits: int  # that hold a code
    rows_a_word: int
    dtype: str

    def unpack(self, words: np.ndarray, num_rows: int) -> np.ndarray:
        """uint8[num_rows, g]."""
        shifts = range(self.bits * (self.rows_a_word - 1), -1, -self.bits)
        mask = (1 << self.bits) - 1
        parts = [((words >> shift) & mask).astype(np.uint8) for shift in shifts]
        return np.concatenate(parts)[:num_rows]


_PACKINGS = {
    "8bit_u8": _Packing(8, 1, "uint8"),
    "4bit_u8": _Packing(4, 2, "uint8"),
    "2bit_u8": _Packing(2, 4, "uint8"),
    "3bit_32": _Packing(3, 10, "int32"),
}


def parse_hqq(fields: Mapping[str, Any]) -> Format:
    """Reads the quantization_config of an HQQ checkpoint; each module repeats its settings."""
    del fields
    return Format(_find, extras=tuple(f".{name}" for name in _METADATA))


def _find(prefix: str, shape: tuple[int, ...], tensors: Tensors) -> StoredMatrix | None:
    codes, scale, zero = (f"{prefix}.{x}" for x in ("W_q", "scale", "zero"))
    if codes not in tensors:
        return None
    num_rows, num_inputs = shape
    packing = _packing(prefix, tensors)
    group_size = _group_size(prefix, shape, tensors)
    num_groups = num_inputs // group_size
    size = num_rows * num_groups
    words = (math.ceil(size / packing.rows_a_word), group_size)
    fits = [
        tensors.fits(codes, words, [packing.dtype]),
        tensors.fits(scale, (size, 1), FLOATS),
        tensors.fits(zero, (size, 1), FLOATS),
    ]
    if not all(fits):
        return None
    is_half = {tensors[scale].dtype, tensors[zero].dtype} == {np.dtype(np.float16)}
    kind = CodesKind(
        bits=packing.bits,
        group_size=group_size,
        zero_kind="float",
        scale_dtype=scale_dtype(tensors[scale]) if is_half else "float32",
    )

    def read() -> QTensor:
        unpacked = packing.unpack(tensors.read(codes), size).reshape(shape)
        words = bitstream.packed(unpacked, bits=kind.bits)
        scales, zeros = (tensors.read(name).reshape(num_rows, num_groups) for name in (scale, zero))
        return codes_matrix(kind, num_inputs, words, scales, zeros)

    return StoredMatrix(names=(codes, scale, zero), kind=kind, read=read)


def _packing(prefix: str, tensors: Tensors) -> _Packing:
    """Returns a module's packing by its stored name, else by its bits."""
    name = "".join(map(chr, _list(f"{prefix}.packing", tensors) or []))
    if not name:
        nbits = _scalar(f"{prefix}.nbits", tensors)
        name = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8"}.get(nbits or 0, f"{nbits}")
    if name not in _PACKINGS:
        raise MoejaxError(
            f"{prefix} has HQQ's packing {name!r}; {', '.join(_PACKINGS)} can be read"
        )
    if _scalar(f"{prefix}.view_as_float", tensors):
        raise MoejaxError(
            f"{prefix} was saved with view_as_float, its codes under a float type; save it without"
        )
    return _PACKINGS[name]


def _group_size(prefix: str, shape: tuple[int, ...], tensors: Tensors) -> int:
    """Inputs of a group; raises MoejaxError unless groups are runs of inputs of one output."""
    if _scalar(f"{prefix}.axis", tensors) == 0:
        raise MoejaxError(
            f"{prefix} has HQQ's axis 0, groups of different outputs and inputs, which have no "
            "place in a row's scales; quantize the model again with axis=1"
        )
    stored = _list(f"{prefix}.shape", tensors)
    if stored is not None and stored != list(shape):
        name = f"{prefix}.shape"
        raise broken(tensors, name, f"says {stored}, config.json {list(shape)}")
    columns = tensors[f"{prefix}.W_q"].shape
    group_size = _scalar(f"{prefix}.group_size", tensors) or (columns[1] if columns[1:] else 0)
    if not 1 <= group_size <= shape[1] or shape[1] % group_size:
        raise MoejaxError(
            f"{prefix} has groups of {group_size} codes, which are no part of its {shape[1]} "
            "inputs: groups that go on in the next row cannot be read"
        )
    return group_size


def _scalar(name: str, tensors: Tensors) -> int | None:
    return int(tensors.read(name).reshape(-1)[0]) if name in tensors else None


def _list(name: str, tensors: Tensors) -> list[int] | None:
    return [int(number) for number in tensors.read(name).reshape(-1)] if name in tensors else None
