"""Reads FP8 checkpoints in blocks of 128 x 128, the experts one by one or fused.

PREFIX.weight            F8_E4M3 [N, K]
PREFIX.weight_scale_inv  F32 or BF16 [ceil(N / 128), ceil(K / 128)]

w = weight weight_scale_inv. Fused experts: PREFIX [E, N, K] and PREFIX_scale_inv.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from moejax.checkpoints.formats.interfaces import FLOATS, Format, Fp8Kind, StoredMatrix, Tensors
from moejax.errors import MoejaxError
from moejax.weights.qtensor import FP8_BLOCK, Fp8Tensor

_FP8 = "float8_e4m3fn"


def parse_fp8(fields: Mapping[str, Any]) -> Format:
    """Reads the quantization_config of an FP8 checkpoint; raises MoejaxError."""
    block = fields.get("weight_block_size")
    if block != [FP8_BLOCK, FP8_BLOCK]:
        raise MoejaxError(
            f"quantization_config.weight_block_size is {block!r}; of fp8, blocks of "
            f"[{FP8_BLOCK}, {FP8_BLOCK}] can be read"
        )
    for name, known in (("fmt", "e4m3"), ("expert_dtype", "fp8")):
        value = fields.get(name)
        if value not in (None, known):
            raise MoejaxError(f"quantization_config.{name} is {value!r}, expected {known!r}")
    # The scales of activations, which are not quantized here.
    return Format(_find, extras=(".activation_scale", ".input_scale"))


def _find(prefix: str, shape: tuple[int, ...], tensors: Tensors) -> StoredMatrix | None:
    values, scales = f"{prefix}.weight", f"{prefix}.weight_scale_inv"
    if len(shape) == 3:
        values, scales = prefix, f"{prefix}_scale_inv"
    is_fp8 = values in tensors and tensors[values].dtype.name == _FP8
    if not is_fp8 and scales not in tensors:
        return None
    *lead, num_rows, num_inputs = shape
    blocks = (*lead, -(-num_rows // FP8_BLOCK), -(-num_inputs // FP8_BLOCK))
    fits = [tensors.fits(values, shape, [_FP8]), tensors.fits(scales, blocks, FLOATS)]
    if not all(fits):
        return None

    def read() -> Fp8Tensor:
        arrays: dict[str, Any] = {
            "values": tensors.read(values),
            "scales": tensors.read(scales).astype(np.float32),
        }
        matrix = Fp8Tensor(**arrays)
        matrix.check()
        return matrix

    return StoredMatrix(names=(values, scales), kind=Fp8Kind(), read=read)
