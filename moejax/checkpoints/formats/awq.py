"""Reads AWQ checkpoints ("gemm"), and AutoRound's in their packing.

PREFIX.qweight  I32 [K, N / 8], eight codes a word, of columns 0 2 4 6 1 3 5 7
PREFIX.qzeros   I32 [G, N / 8], likewise
PREFIX.scales   F16 [G, N]

w = (q - zero) scale, four bits.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moejax.checkpoints.formats import bitstream
from moejax.checkpoints.formats import config_fields as settings
from moejax.checkpoints.formats.gptq import codes_matrix
from moejax.checkpoints.formats.interfaces import (
    FLOATS,
    CodesKind,
    StoredMatrix,
    Tensors,
    scale_dtype,
)
from moejax.errors import MoejaxError
from moejax.weights.qtensor import QTensor
from pallas_kernels import layout

_BITS, _CODES_A_WORD = 4, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class AwqFormat:
    """AWQ with the settings of one checkpoint."""

    group_size: int | None  # None: per channel

    def extras(self, prefix: str) -> tuple[str, ...]:
        """A bias of zeros, which some writers give to every module."""
        return (f"{prefix}.bias",)

    def find(self, prefix: str, shape: tuple[int, ...], tensors: Tensors) -> StoredMatrix | None:
        """See `Format`."""
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
        group_size = min(self.group_size or num_inputs, num_inputs)
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
            words = bitstream.repacked_awq(tensors.read(qweight))
            zeros = bitstream.awq_codes(tensors.read(qzeros)).T
            return codes_matrix(kind, words, tensors.read(scales).T, zeros, None, num_inputs)

        return StoredMatrix(names=(qweight, qzeros, scales), kind=kind, read=read)


def parse_awq(fields: Mapping[str, Any]) -> AwqFormat:
    """The reader for the quantization_config of an AWQ checkpoint.

    Raises:
      MoejaxError: something in it is not understood.
    """
    version = settings.text(fields, "version", "checkpoint_format", "format", default="gemm")
    if version != "gemm":
        raise MoejaxError(
            f"quantization_config has version {version!r}; of awq, 'gemm' can be read"
        )
    if settings.bits(fields) != _BITS:
        raise MoejaxError(f"quantization_config.bits is {fields['bits']}; awq has 4")
    return AwqFormat(group_size=settings.group_size(fields))
