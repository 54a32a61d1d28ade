"""Pallas-Triton implementation: one launch, a program per row, held in registers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.target import Target, platform_refusal
from pallas_kernels.triton.elements import iota, power_above

Ref = Any
Operand = jax.Array | jax.ShapeDtypeStruct
MAX_WIDTH = 8192
THREAD_VALUES = 8  # of a row: one load of 16 bytes
MAX_WARPS = 16


def refusal(x: Operand, target: Target) -> str | None:
    """Reason why this implementation refuses, or None."""
    reasons = [platform_refusal(target)]
    if x.shape[1] > MAX_WIDTH:
        reasons.append(f"rows of {x.shape[1]}, more than {MAX_WIDTH}")
    return "; ".join(filter(None, reasons)) or None


def _body(
    layer_ref: Ref, scales_ref: Ref, x_ref: Ref, *refs: Ref, eps: float, zero_centred: bool
) -> None:
    """Program n runs row n; `refs`: delta, the sum and the result, or the result alone."""
    row, width = pl.program_id(0), x_ref.shape[1]
    columns = iota(power_above(width))
    real = columns < width

    def load(ref: Ref, row: jax.Array) -> jax.Array:
        return pltriton.load(ref.at[row, columns], mask=real, other=0.0).astype(jnp.float32)

    dtype, out_ref = x_ref.dtype, refs[-1]
    y, scale = load(x_ref, row), load(scales_ref, layer_ref[()])
    if len(refs) > 1:
        delta_ref, sum_ref = refs[:2]
        y = (y + load(delta_ref, row)).astype(dtype)
        pltriton.store(sum_ref.at[row, columns], y, mask=real)
        y = y.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.sum(y * y) / width + eps)
    normed = y * inverse_rms
    if zero_centred:
        scale = 1.0 + scale
    else:
        normed = normed.astype(dtype).astype(jnp.float32)
    pltriton.store(out_ref.at[row, columns], (normed * scale).astype(dtype), mask=real)


def residual_norm_triton(
    x: jax.Array,
    delta: jax.Array | None,
    scales: jax.Array,
    layer: jax.Array,
    *,
    eps: float,
    zero_centred: bool,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """Computes `api.residual_norm` by Triton; one launch."""
    num_rows, width = x.shape
    out_shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    operands = (x,) if delta is None else (x, delta)
    more = ("" if delta is None else "sum", "centred" if zero_centred else "")
    name = ("residual_norm", x.dtype.name, str(width), *more)
    found = launch.triton_call(
        functools.partial(_body, eps=eps, zero_centred=zero_centred),
        name="_".join(filter(None, name)),
        grid=(num_rows,),
        out_shape=[out_shape] * len(operands),
        num_warps=min(MAX_WARPS, max(1, power_above(width) // (32 * THREAD_VALUES))),
        num_stages=1,
        interpret=target.simulated,
    )(layer, scales, *operands)
    return (x if delta is None else found[0]), found[-1]
