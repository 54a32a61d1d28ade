"""Grouped products in plain jnp and float32; never optimised."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.assignments import Assignments
from pallas_kernels.gating import Gating
from pallas_kernels.packed import LowRank, PackedMatrices, dequantize, low_rank_factors


def _product(
    pair: tuple[jax.Array, jax.Array], weights: PackedMatrices, low_rank: tuple[LowRank, ...]
) -> jax.Array:
    """Multiplies one row (float32[K] and its slot) by one matrix: float32[N]."""
    x, slot = pair
    y = jnp.einsum("k,nk->n", x, dequantize(weights, slot), precision="highest")
    for terms in low_rank:
        u, v = low_rank_factors(terms, slot)
        thin = jnp.einsum("k,rk->r", x, v, precision="highest")
        term = jnp.einsum("r,rn->n", thin, u, precision="highest")
        y = y.at[terms.first_row : terms.first_row + terms.num_rows].add(term)
    return y


def product_reference(
    rows: jax.Array,
    assignments: Assignments,
    tiers: Sequence[PackedMatrices],
    low_rank: Sequence[tuple[LowRank, ...]],
    tiles: Any,
    target: Any,
    bias: jax.Array | None = None,
    gating: Gating | None = None,
) -> jax.Array:
    """Computes a product of `api.PRODUCT` in plain JAX; a pair whose tier is out of range is 0."""
    del tiles, target
    width = assignments.slot.shape[1]
    tier, slot = assignments.tier.reshape(-1), assignments.slot.reshape(-1)
    flat = jnp.repeat(rows, width, axis=0) if rows.ndim == 2 else rows.reshape(tier.size, -1)
    rows32 = flat.astype(jnp.float32)
    y = jnp.zeros((tier.size, tiers[0].num_outputs), jnp.float32)
    for i, (weights, terms) in enumerate(zip(tiers, low_rank, strict=True)):
        one = functools.partial(_product, weights=weights, low_rank=terms)
        y = jnp.where((tier == i)[:, None], jax.lax.map(one, (rows32, slot)), y)
    if bias is not None:
        ran = (tier >= 0) & (tier < len(tiers))
        y = y + jnp.where(ran[:, None], bias.astype(jnp.float32).reshape(y.shape), 0.0)
    if gating is None:
        return y.reshape(1, *assignments.slot.shape, -1)
    return gating(*jnp.split(y, 2, axis=1)).astype(rows.dtype).reshape(*assignments.slot.shape, -1)


def combine(products: jax.Array, ran: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Sums weight[t, a] product[t, a] in float32, in the order of a and of parts.

    Args:
      products: float[P, T, A, N], P parts of each pair's product; undefined if it did not run.

    Returns:
      [T, N].
    """
    weighted = products.astype(jnp.float32) * weight[None, :, :, None]
    terms = jnp.where(ran[None, :, :, None], weighted, 0.0)
    # Written out: of a reduction XLA chooses the order, by what it puts into the same kernel.
    parts = [terms[part, :, a] for part in range(terms.shape[0]) for a in range(terms.shape[2])]
    return functools.reduce(jnp.add, parts).astype(dtype)
