"""Reads AWQ checkpoints ("gemm"), and AutoRound's in their packing.

PREFIX.qweight  I32 [K, N / 8], eight codes a word, of columns 0 2 4 6 1 3 5 7
PREFIX.qzeros   I32 [G, N / 8], likewise
PREFIX.scales   F16 [G, N]

w = (q - zero) scale, four bits.
"""

import functools
from collections.abc import Mapping
from typing import Any

from moejax.checkpoints.formats import bitstream
from moejax.checkpoints.formats import config_fields as settings
from moejax.checkpoints.formats.interfaces import (
    FLOATS,
    Format,
    StoredMatrix,
    Tensors,
    codes_matrix,
    scale_dtype,
)
from moejax.errors import MoejaxError
from moejax.weights.qtensor import CodesKind, QTensor
from pallas_kernels import layout

_BITS, _CODES_A_WORD = 4, 8


def parse_awq(fields: Mapping[str, Any]) -> Format:
    """Reads the quantization_config of an AWQ checkpoint; raises MoejaxError."""
    version = settings.text(fields, "version", "checkpoint_format", "format", default="gemm")
    if version != "gemm":
        raise MoejaxError(
            f"quantization_config has version {version!r}; of awq, 'gemm' can be read"
        )
    if settings.bits(fields) != _BITS:
        raise MoejaxError(f"quantization_config.bits is {fields['bits']}; awq has 4")
    # Some writers give every module a bias of zeros.
    return Format(functools.partial(_find, settings.group_size(fields)), extras=(".bias",))


def _find(
    group_size: int | None, prefix: str, shape: tuple[int, ...], tensors: Tensors
) -> StoredMatrix | None:
    qweight, qzeros, scales = (f"{prefix}.{x}" for x in ("qweight", "qzeros", "scales"))
    if qweight not in tensors:
        return None
    num_rows, num_inputs = shape
    if num_rows % _CODES_A_WORD:
        raise MoejaxError(
            f"{prefix} has {num_rows} outputs, which AWQ words cannot hold; config.json is not "
            "that of these weights"
        )
    num_words = num_rows // _CODES_A_WORD
    group_size = min(group_size or num_inputs, num_inputs)
    num_groups = layout.num_groups(num_inputs, group_size)
    fits = [
        tensors.fits(qweight, (num_inputs, num_words), ["int32"]),
        tensors.fits(qzeros, (num_groups, num_words), ["int32"]),
        tensors.fits(scales, (num_groups, num_rows), FLOATS),
    ]
    if not all(fits):
        return None
    kind = CodesKind(
        bits=_BITS,
        group_size=group_size,
        zero_kind="integer",
        scale_dtype=scale_dtype(tensors[scales]),
    )

    def read() -> QTensor:
        words = bitstream.packed(bitstream.awq_codes(tensors.read(qweight)).T, bits=_BITS)
        zeros = bitstream.awq_codes(tensors.read(qzeros)).T
        return codes_matrix(kind, num_inputs, words, tensors.read(scales).T, zeros)

    return StoredMatrix(names=(qweight, qzeros, scales), kind=kind, read=read)
