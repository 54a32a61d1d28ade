"""Random packed weights of every kind, and their values by plain numpy.

    packed, values = draw(rng, (2, 8, 32, 16), SPECS["int3_ranks"])

`values` (float64) come from the codes, scales and factors before they are packed, by the definition
alone; nothing of `moejax.weights.qtensor` computes them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.weights.qtensor import (
    FP8_BLOCK,
    Compensator,
    Fp8Tensor,
    QTensor,
    Weight,
    dense,
    from_codes,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One kind of packed weight; `bits` 0 is FP8."""

    bits: int
    group_size: int = 0  # 0: one group a row
    zero_kind: str = "float"
    factors: tuple[int, ...] = ()  # bits of each compensator's factors, 16: bfloat16
    permuted: bool = False
    scale_dtype: str = "float32"


SPECS = {
    "int2": Spec(bits=2, group_size=8),
    "int3": Spec(bits=3, group_size=10),  # ragged last groups
    "int4_symmetric": Spec(bits=4, zero_kind="symmetric"),
    "int8_integer": Spec(bits=8, group_size=16, zero_kind="integer", scale_dtype="float16"),
    "int3_ranks": Spec(bits=3, group_size=8, factors=(16,)),
    "int2_int8_ranks": Spec(bits=2, group_size=16, factors=(8, 3), scale_dtype="float16"),
    "int4_int4_ranks": Spec(bits=4, group_size=5, zero_kind="symmetric", factors=(4,)),
    "int4_permuted": Spec(bits=4, group_size=8, zero_kind="integer", permuted=True),
    "int3_permuted": Spec(bits=3, group_size=7, permuted=True),
    "fp8": Spec(bits=0),
}


def draw(rng: np.random.Generator, shape: tuple[int, ...], spec: Spec) -> tuple[Weight, np.ndarray]:
    """A weight [..., N, K] of a kind, on the device, and its values in float64, about 0.3."""
    if spec.bits == 0:
        return _draw_fp8(rng, shape)
    *lead, rows, inputs = shape
    group_size = min(spec.group_size or inputs, inputs)
    tensor, values = _draw_codes(rng, shape, spec.bits, group_size, spec.zero_kind, spec)
    if spec.permuted:
        order = rng.permuted(np.tile(np.arange(inputs), (*lead, 1)), axis=-1).astype(np.int32)
        unpermuted = np.empty_like(values)
        for place in np.ndindex(*lead):
            unpermuted[place][:, order[place]] = values[place]
        return dataclasses.replace(tensor, permutation=jnp.asarray(order)), unpermuted
    bounds = np.linspace(0, rows, len(spec.factors) + 1).astype(int)  # one after the other
    compensators = []
    for i, bits in enumerate(spec.factors):
        span = slice(bounds[i], bounds[i + 1])
        compensator, terms = _draw_compensator(rng, tuple(lead), span, inputs, bits)
        compensators.append(compensator)
        values[..., span, :] += terms
    tensor = dataclasses.replace(tensor, compensators=tuple(compensators))
    tensor.check()
    return tensor, values


def _draw_codes(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    bits: int,
    group_size: int,
    zero_kind: str,
    spec: Spec,
) -> tuple[QTensor, np.ndarray]:
    groups = -(-shape[-1] // group_size)
    codes = rng.integers(0, 2**bits, shape).astype(np.uint8)
    step = 1.0 / 2**bits  # of codes, so that values are of one size at any width
    scales = (step * (0.7 + 0.6 * rng.random((*shape[:-1], groups)))).astype(spec.scale_dtype)
    middle = (2**bits - 1) / 2
    zeros = middle + rng.uniform(-0.5, 0.5, scales.shape)
    zeros = np.round(zeros) if zero_kind == "integer" else zeros.astype(spec.scale_dtype)
    # Packed by numpy: JAX would compile each operation of each shape.
    packed = from_codes(
        codes, scales.astype(np.float32), zeros.astype(np.float32), bits=bits,
        group_size=group_size, zero_kind=zero_kind, scale_dtype=np.dtype(spec.scale_dtype),
    )  # fmt: skip
    packed = jax.tree.map(jnp.asarray, packed)
    if zero_kind == "symmetric":
        zeros = np.full_like(scales, 2 ** (bits - 1))
    values = np.empty(shape)
    for k in range(shape[-1]):
        g = k // group_size
        shifted = codes[..., k].astype(np.float64) - zeros[..., g].astype(np.float64)
        values[..., k] = shifted * scales[..., g].astype(np.float64)
    return packed, values


def _draw_compensator(
    rng: np.random.Generator, lead: tuple[int, ...], span: slice, inputs: int, bits: int
) -> tuple[Compensator, np.ndarray]:
    """Ranks 0..3, the first matrix none; pools in an order that is not that of the matrices."""
    rows = span.stop - span.start
    num = int(np.prod(lead))
    ranks = rng.integers(0, 4, num)
    ranks[0] = 0 if num > 1 else 2
    order = rng.permutation(num)
    starts = np.zeros(num, int)
    starts[order] = np.cumsum(ranks[order]) - ranks[order]
    u, u_values = _draw_factor(rng, int(ranks.sum()), rows, bits)
    v, v_values = _draw_factor(rng, int(ranks.sum()), inputs, bits)
    terms = np.zeros((num, rows, inputs))
    for i in range(num):
        for r in range(starts[i], starts[i] + ranks[i]):
            terms[i] += np.outer(u_values[r], v_values[r])
    compensator = Compensator(
        u=u,
        v=v,
        start=jnp.asarray(starts.reshape(lead), jnp.int32),
        rank=jnp.asarray(ranks.reshape(lead), jnp.int32),
        first_row=span.start,
        num_rows=rows,
        max_rank=4,
    )
    return compensator, terms.reshape(*lead, rows, inputs)


def _draw_factor(
    rng: np.random.Generator, total: int, length: int, bits: int
) -> tuple[Any, np.ndarray]:
    if bits == 16:
        values = (0.4 * rng.standard_normal((total, length))).astype(ml_dtypes.bfloat16)
        return jnp.asarray(values), values.astype(np.float64)
    group_size = min(8, length)
    return _draw_codes(rng, (total, length), bits, group_size, "symmetric", Spec(bits=bits))


def _draw_fp8(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Fp8Tensor, np.ndarray]:
    values = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    blocks = tuple(-(-size // FP8_BLOCK) for size in shape[-2:])
    scales = (0.2 + 0.2 * rng.random((*shape[:-2], *blocks))).astype(np.float32)
    wide = np.empty(shape)
    for n, k in np.ndindex(*shape[-2:]):
        scale = scales[..., n // FP8_BLOCK, k // FP8_BLOCK].astype(np.float64)
        wide[..., n, k] = values[..., n, k].astype(np.float64) * scale
    tensor = Fp8Tensor(values=jnp.asarray(values), scales=jnp.asarray(scales))
    tensor.check()
    return tensor, wide


def values_of(weight: Weight) -> np.ndarray:
    """Float32 values of a weight; by numpy if it has no compensators, which needs no compiler."""
    if isinstance(weight, QTensor) and weight.compensators:
        return np.asarray(jax.jit(dense, static_argnums=1)(weight, jnp.float32))
    host = jax.device_get(weight)
    values = host if isinstance(host, np.ndarray) else dense(host, jnp.float32)
    return np.asarray(values).astype(np.float32)


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays in a tree, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
