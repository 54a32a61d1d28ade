"""Reads the MXFP4 experts of gpt-oss, in the layout of their publisher.

    PREFIX_blocks  U8 [E, N, G, 16], two codes of a group a byte, the first in the low bits
    PREFIX_scales  U8 [E, N, G], an exponent for the 32 codes of a group

w = E2M1(code) 2^(scale - 127), `pallas_kernels.mxfp4`. All else is stored in floats.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from moejax.checkpoints.formats import bitstream
from moejax.checkpoints.formats.interfaces import (
    Format,
    StoredMatrix,
    Tensors,
    broken,
    codes_matrix,
)
from moejax.checkpoints.safetensors_reader import StoredTensor, read_array
from moejax.errors import MoejaxError
from moejax.weights.qtensor import MXFP4, QTensor
from pallas_kernels import mxfp4

_arranged = bitstream.on_host(jax.jit(mxfp4.arrange))


def parse_mxfp4(fields: Mapping[str, Any]) -> Format:
    """Reads the quantization_config of an MXFP4 checkpoint, which has no settings."""
    del fields
    return Format(_find)


def _find(prefix: str, shape: tuple[int, ...], tensors: Tensors) -> StoredMatrix | None:
    blocks, scales = f"{prefix}_blocks", f"{prefix}_scales"
    if blocks not in tensors:
        return None
    *lead, num_inputs = shape
    num_groups, rest = divmod(num_inputs, mxfp4.GROUP_SIZE)
    if rest:
        raise MoejaxError(
            f"{prefix} has {num_inputs} inputs, no multiple of the {mxfp4.GROUP_SIZE} that share a "
            "scale in MXFP4; config.json is not that of these weights"
        )
    num_bytes = mxfp4.GROUP_SIZE * mxfp4.BITS // 8
    fits = [
        tensors.fits(blocks, (*lead, num_groups, num_bytes), ["uint8"]),
        tensors.fits(scales, (*lead, num_groups), ["uint8"]),
    ]
    if not all(fits):
        return None
    return _matrix(tensors, tensors[blocks], tensors[scales], lead)


def _matrix(
    tensors: Tensors, blocks: StoredTensor, scales: StoredTensor, lead: list[int]
) -> StoredMatrix:
    """Builds what is read of the blocks and scales of matrices [*lead, K]."""

    def read() -> QTensor:
        exponents = read_array(scales)
        if (exponents > mxfp4.LARGEST).any():
            said = f"holds scales above {mxfp4.LARGEST}, more than 2^81, which no weights need"
            raise broken(tensors, scales.name, said)
        num_inputs = exponents.shape[-1] * mxfp4.GROUP_SIZE
        stream = read_array(blocks).reshape(*lead, -1).view(np.int32)
        words = bitstream.repacked_stream(stream, None, bits=mxfp4.BITS, num_codes=num_inputs)
        return codes_matrix(MXFP4, num_inputs, _arranged(words), exponents, None)

    def expert(index: int) -> StoredMatrix:
        first, second = (stored.part(index, stored.shape[1:]) for stored in (blocks, scales))
        return _matrix(tensors, first, second, lead[1:])

    return StoredMatrix(
        names=(blocks.name, scales.name),
        kind=MXFP4,
        read=read,
        expert=expert if len(lead) > 1 else None,
    )
