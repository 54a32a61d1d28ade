"""Pallas-Triton implementation: one launch, a program per row, held in registers."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.residual_norm.reference import PairTerms
from pallas_kernels.target import Target, platform_refusal
from pallas_kernels.triton.elements import Int, iota, power_above

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
    """Program n runs row n; `refs`: what is added, if anything, the sum, and the result."""
    row, width = pl.program_id(0), x_ref.shape[1]
    columns = iota(power_above(width))
    real = columns < width

    def load(ref: Ref, *row: Int, wanted: Any = True) -> jax.Array:
        mask = real & wanted
        return pltriton.load(ref.at[*row, columns], mask=mask, other=0.0).astype(jnp.float32)

    dtype, out_ref = x_ref.dtype, refs[-1]
    y, scale = load(x_ref, row), load(scales_ref, layer_ref[()])
    if len(refs) > 1:
        *added, sum_ref, _ = refs
        if len(added) == 1:
            delta = load(added[0], row)
        else:
            delta = _sum_of_terms(row, added, load).astype(dtype).astype(jnp.float32)
        y = (y + delta).astype(dtype)
        pltriton.store(sum_ref.at[row, columns], y, mask=real)
        y = y.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.sum(y * y) / width + eps)
    normed = y * inverse_rms
    if zero_centred:
        scale = 1.0 + scale
    else:
        normed = normed.astype(dtype).astype(jnp.float32)
    pltriton.store(out_ref.at[row, columns], (normed * scale).astype(dtype), mask=real)


def _sum_of_terms(row: Int, terms: Sequence[Ref], load: Callable[..., jax.Array]) -> jax.Array:
    """Adds a row's terms, the leaves of `PairTerms`, in the order of `combine`."""
    products_ref, tier_ref, weight_ref = terms
    num_parts, _, width, _ = products_ref.shape
    total = None
    for part, a in itertools.product(range(num_parts), range(width)):
        ran = tier_ref[row, a] >= 0
        weight = jnp.where(ran, weight_ref[row, a], 0.0)
        term = load(products_ref, part, row, a, wanted=ran) * weight
        total = term if total is None else total + term
    assert total is not None
    return total


def residual_norm_triton(
    x: jax.Array,
    delta: jax.Array | PairTerms | None,
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
    added = jax.tree.leaves(delta)
    operands = (x, *added)
    kind = {0: "", 1: "sum"}.get(len(added), "terms")
    more = (kind, "centred" if zero_centred else "")
    name = ("residual_norm", x.dtype.name, str(width), *more)
    found = launch.triton_call(
        functools.partial(_body, eps=eps, zero_centred=zero_centred),
        name="_".join(filter(None, name)),
        grid=(num_rows,),
        out_shape=[out_shape] * (2 if added else 1),
        num_warps=min(MAX_WARPS, max(1, power_above(width) // (32 * THREAD_VALUES))),
        num_stages=1,
        interpret=target.simulated,
    )(layer, scales, *operands)
    return (x if delta is None else found[0]), found[-1]
