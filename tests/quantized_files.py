"""Quantized matrices as other libraries store them, written with numpy from the formats' texts.

Nothing here uses the package's layout or packing: a bit stream is made of single bits.
"""

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix of codes: w[n, k] = (codes[n, k] - zeros[n, g(k)]) scales[n, g(k)]."""

    codes: np.ndarray  # uint8[N, K], inputs as they are
    scales: np.ndarray  # [N, G]
    zeros: np.ndarray  # int64 or float [N, G]
    groups: np.ndarray  # int32[K], the group of each input

    @property
    def weights(self) -> np.ndarray:
        """float32[N, K]."""
        scales = self.scales.astype(np.float32)[:, self.groups]
        zeros = self.zeros.astype(np.float32)[:, self.groups]
        return (self.codes.astype(np.float32) - zeros) * scales


def random_matrix(
    shape: tuple[int, int],
    *,
    bits: int,
    group_size: int,
    symmetric: bool = False,
    act_order: bool = False,
    dtype: Any = np.float16,
    seed: int = 0,
    order_seed: int | None = None,
) -> Matrix:
    """Random codes, scales and integer zeros of all values."""
    rng = np.random.default_rng(seed)
    num_rows, num_inputs = shape
    groups = np.arange(num_inputs, dtype=np.int32) // group_size
    if act_order:
        order_rng = np.random.default_rng(seed if order_seed is None else order_seed)
        groups = order_rng.permutation(groups)
    size = (num_rows, int(groups.max()) + 1)
    drawn = rng.integers(0, 2**bits - 1, size, endpoint=True)
    return Matrix(
        codes=rng.integers(0, 2**bits, shape, dtype=np.uint8),
        scales=rng.uniform(0.01, 0.1, size).astype(dtype),
        zeros=np.full(size, 2 ** (bits - 1)) if symmetric else drawn,
        groups=groups,
    )


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows [R, C] as int32[R, ceil(C bits / 32)], low bits first."""
    digits = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, bitorder="little")
    flat = digits[..., :bits].reshape(codes.shape[0], -1)
    padded = np.pad(flat, [(0, 0), (0, -flat.shape[1] % 32)])
    return np.packbits(padded, axis=-1, bitorder="little").view("<i4")


def awq_words(codes: np.ndarray) -> np.ndarray:
    """Rows [R, N] of 4 bits as int32[R, N / 8]."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for nibble, column in enumerate(_AWQ_COLUMNS):
        words |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
    return words.view(np.int32)


def gptq_v1_zeros(zeros: np.ndarray, bits: int) -> np.ndarray:
    """Zero points [G, N] as GPTQModel writes them in version 1: int32[G, N bits / 32].

    2, 4 and 8 bits are packed first and lowered as whole words, a borrow going on to the next
    field; 3 bits field by field.
    """
    if bits == 3:
        return stream((zeros - 1) % 8, 3)
    ones = sum(1 << bit for bit in range(0, 32, bits))
    return (stream(zeros, bits).view(np.uint32) - np.uint32(ones)).view(np.int32)


def gptq(matrix: Matrix, bits: int, *, is_v1: bool, has_groups: bool = True) -> dict:
    """The tensors of a GPTQ module, without prefix."""
    pack_zeros = gptq_v1_zeros if is_v1 else stream
    tensors = {
        "qweight": stream(matrix.codes, bits).T,
        "qzeros": pack_zeros(matrix.zeros.T, bits),
        "scales": matrix.scales.T,
    }
    return tensors | ({"g_idx": matrix.groups} if has_groups else {})


def awq(matrix: Matrix) -> dict:
    """The tensors of an AWQ module, without prefix."""
    return {
        "qweight": awq_words(matrix.codes.T),
        "qzeros": awq_words(matrix.zeros.T),
        "scales": matrix.scales.T,
    }


def compressed_tensors(matrix: Matrix, bits: int, *, symmetric: bool, act_order: bool = False):
    """The tensors of a pack-quantized module, without prefix."""
    tensors = {
        "weight_packed": stream(matrix.codes, bits),
        "weight_scale": matrix.scales,
        "weight_shape": np.array(matrix.codes.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = stream(matrix.zeros.T, bits).T
    if act_order:
        tensors["weight_g_idx"] = matrix.groups
    return tensors


def fp8(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> tuple[dict, np.ndarray]:
    """The tensors of an FP8 module, without prefix, and its weights."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scales = rng.uniform(0.5, 2, blocks).astype(dtype)
    repeated = scales.astype(np.float32).repeat(128, -2).repeat(128, -1)
    weights = values.astype(np.float32) * repeated[..., : shape[-2], : shape[-1]]
    return {"weight": values, "weight_scale_inv": scales}, weights


def write(path: Path, tensors: dict[str, Any]) -> None:
    """A safetensors file; FP8 by torch, which writes it as others do."""
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    if not any(array.dtype == ml_dtypes.float8_e4m3fn for array in arrays.values()):
        save_file(arrays, path)
        return
    import torch
    from safetensors.torch import save_file as save_torch_file

    save_torch_file({name: _to_torch(array, torch) for name, array in arrays.items()}, path)


def _to_torch(array: np.ndarray, torch: Any) -> Any:
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
