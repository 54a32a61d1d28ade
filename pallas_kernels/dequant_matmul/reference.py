"""Dequantizing product in plain jnp and float32; never optimised."""

import jax
import jax.numpy as jnp

from pallas_kernels.packed import LowRank, PackedMatrices, dequantize, low_rank_factors


def dequant_matmul_reference(
    x: jax.Array,
    weights: PackedMatrices,
    slot: jax.Array,
    low_rank: tuple[LowRank, ...],
    out_dtype: jnp.dtype,
) -> jax.Array:
    """Computes `api.dequant_matmul` in plain JAX."""
    x32 = x.astype(jnp.float32)
    y = jnp.einsum("mk,nk->mn", x32, dequantize(weights, slot), precision="highest")
    for terms in low_rank:
        u, v = low_rank_factors(terms, slot)
        thin = jnp.einsum("mk,rk->mr", x32, v, precision="highest")
        term = jnp.einsum("mr,rn->mn", thin, u, precision="highest")
        y = y.at[:, terms.first_row : terms.first_row + terms.num_rows].add(term)
    return y.astype(out_dtype)
