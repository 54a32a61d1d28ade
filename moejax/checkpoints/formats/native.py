"""The package's own format: the tensors of one quantized matrix, there and back.

    PREFIX.words        U32 [N, W], rows packed by `pallas_kernels.layout`
    PREFIX.scales       F16 or F32 [N, G]
    PREFIX.zeros        of the scales' dtype (float zero point) or U8 (integer); absent: symmetric
    PREFIX.permutation  I32 [K], GPTQ's act-order; absent: none
    PREFIX.u, PREFIX.v  BF16 [r, N] (U transposed) and [r, K], the compensator of rank r; or packed
    PREFIX.u.words, PREFIX.u.scales, PREFIX.v.words, PREFIX.v.scales
                        rows of symmetric codes, again by the layout

Bits and rank follow from the shapes; the group sizes are in the manifest.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from moejax.weights.qtensor import Compensator, Factor, QTensor
from pallas_kernels import layout

FACTOR_GROUP_SIZE = 64
_BF16 = np.dtype(ml_dtypes.bfloat16)


def matrix_tensors(prefix: str, matrix: QTensor) -> dict[str, np.ndarray]:
    """Returns the tensors that store one matrix in a safetensors file.

    Args:
      prefix: the Hugging Face name of the matrix without ".weight".
      matrix: [N, K], with at most one compensator, which covers all rows. The file gets
        only the rows of its factor pools that the matrix owns, and none where its rank is 0.

    Raises:
      ValueError: `matrix` is not whole (`QTensor.check`), a stack, or has more compensators.
    """
    matrix.check()
    if matrix.ndim != 2:
        raise ValueError(f"{prefix} is a stack {matrix.shape}; write one matrix at a time")
    tensors = {"words": matrix.words, "scales": matrix.scales}
    if matrix.zeros is not None:
        tensors["zeros"] = matrix.zeros
    if matrix.permutation is not None:
        tensors["permutation"] = matrix.permutation
    tensors |= _factor_tensors(prefix, matrix)
    return {
        f"{prefix}.{name}": np.ascontiguousarray(tensor)  # from the device as well
        for name, tensor in tensors.items()
    }


def matrix_from_tensors(
    prefix: str,
    tensors: Mapping[str, np.ndarray],
    *,
    num_inputs: int,
    group_size: int,
    factor_group_size: int = FACTOR_GROUP_SIZE,
) -> QTensor:
    """Builds a matrix from its tensors, with numpy leaves; the reverse of `matrix_tensors`.

    Args:
      prefix: as in `matrix_tensors`.
      tensors: by full name; those of other prefixes are left alone.
      num_inputs: K.
      group_size: inputs of a group of codes.
      factor_group_size: inputs of a group of packed factors; shorter rows are one group.

    Raises:
      ValueError: the tensors do not fit each other.
      KeyError: one is missing.
    """
    words = tensors[f"{prefix}.words"]
    compensators: tuple[Compensator, ...] = ()
    if f"{prefix}.u" in tensors or f"{prefix}.u.words" in tensors:
        shape = (words.shape[0], num_inputs)
        compensators = (compensator_from_tensors(prefix, tensors, shape, factor_group_size),)
    matrix = QTensor(
        words=_any(words),
        scales=_any(tensors[f"{prefix}.scales"]),
        zeros=_any(tensors.get(f"{prefix}.zeros")),
        permutation=_any(tensors.get(f"{prefix}.permutation")),
        compensators=compensators,
        num_inputs=num_inputs,
        bits=bits_of_words(words.shape[-1], num_inputs),
        group_size=group_size,
    )
    matrix.check()
    return matrix


def compensator_from_tensors(
    prefix: str,
    tensors: Mapping[str, np.ndarray],
    shape: tuple[int, int],
    factor_group_size: int = FACTOR_GROUP_SIZE,
) -> Compensator:
    """Builds a [N, K] matrix's compensator from the tensors of its factors."""
    u, v = (
        _factor(f"{prefix}.{name}", tensors, length, factor_group_size)
        for name, length in zip("uv", shape, strict=True)
    )
    return whole_compensator(u, v)


def whole_compensator(u: Factor, v: Factor) -> Compensator:
    """Builds the compensator of all rows of one matrix.

    Args:
      u: [r, N], U transposed.
      v: [r, K].
    """
    rank, num_rows = u.shape
    return Compensator(
        u=u,
        v=v,
        start=_any(np.zeros((), np.int32)),
        rank=_any(np.array(rank, np.int32)),
        first_row=0,
        num_rows=num_rows,
        max_rank=rank,
    )


def bits_of_words(num_words: int, num_codes: int) -> int:
    """Bits of the codes of which `num_codes` fill `num_words` words.

    Raises:
      ValueError: no width fits.
    """
    for bits in layout.BITS:
        if layout.num_words(num_codes, bits) == num_words:
            return bits
    raise ValueError(f"{num_words} words hold {num_codes} codes of no width")


def _factor_tensors(prefix: str, matrix: QTensor) -> dict[str, Any]:
    if not matrix.compensators:
        return {}
    compensator, *others = matrix.compensators
    if others or compensator.first_row or compensator.num_rows != matrix.shape[0]:
        raise ValueError(f"{prefix} has compensators of parts of its rows; write its parts")
    start, rank = int(compensator.start), int(compensator.rank)
    tensors: dict[str, Any] = {}
    for name, factor in (("u", compensator.u), ("v", compensator.v)):
        if not rank:
            continue
        rows = slice(start, start + rank)
        if not isinstance(factor, QTensor):
            tensors[name] = np.asarray(factor[rows]).astype(_BF16)
        elif factor.zeros is not None or factor.compensators or factor.permutation is not None:
            raise ValueError(f"the factor {name} of {prefix} is not symmetric and plain")
        else:
            tensors |= {f"{name}.words": factor.words[rows], f"{name}.scales": factor.scales[rows]}
    return tensors


def _factor(name: str, tensors: Mapping[str, np.ndarray], length: int, group_size: int) -> Factor:
    if name in tensors:
        return _any(tensors[name])
    words = tensors[f"{name}.words"]
    factor = QTensor(
        words=_any(words),
        scales=_any(tensors[f"{name}.scales"]),
        zeros=None,
        num_inputs=length,
        bits=bits_of_words(words.shape[-1], length),
        group_size=min(group_size, length),
    )
    factor.check()
    return factor


def _any(array: Any) -> Any:
    """Returns a numpy leaf typed as jax.Array; copies nothing to a device."""
    return array
