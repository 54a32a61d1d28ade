"""Blocks of pairs (token, expert), sorted by matrix; a block has one matrix. Pure jnp."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_dequant_matmul.reference import Assignments
from pallas_kernels.packed import PackedMatrices


class Blocks(NamedTuple):
    """`num_blocks` blocks, of which the first `used` hold pairs; device data of static shapes."""

    tier: jax.Array  # int32[num_blocks]; -1 of blocks of skipped pairs
    slot: jax.Array  # int32[num_blocks]
    pairs: jax.Array  # int32[num_blocks, rows]: t A + a; T A where there is none
    used: jax.Array  # int32[1]


def _max_blocks(num_pairs: int, rows: int, num_matrices: int) -> int:
    """Most blocks needed: each matrix adds at most one partial block."""
    return min(num_pairs, num_pairs // rows + num_matrices)


def make_blocks(assignments: Assignments, tiers: Sequence[PackedMatrices], rows: int) -> Blocks:
    """Sorts pairs by tier and slot, those of one matrix in their order, skipped ones last.

    Args:
      tiers: arrays or their shapes; only the numbers of slots matter.
    """
    tier, slot = (part.reshape(-1) for part in (assignments.tier, assignments.slot))
    num_pairs = tier.shape[0]
    most = max(weights.num_slots for weights in tiers)
    num_matrices = sum(weights.num_slots for weights in tiers) + 1
    num_blocks = _max_blocks(num_pairs, rows, num_matrices)
    runs = (tier >= 0) & (tier < len(tiers))
    key = jnp.where(runs, tier * most + jnp.clip(slot, 0, most - 1), len(tiers) * most)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    key = key[order]
    index = jnp.arange(num_pairs, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.ones(1, jnp.bool_), key[1:] != key[:-1]])
    within = index - jax.lax.cummax(jnp.where(starts, index, 0))
    block = jnp.cumsum((within % rows == 0).astype(jnp.int32)) - 1
    pairs = jnp.full((num_blocks, rows), num_pairs, jnp.int32)
    empty = jnp.full(num_blocks, -1, jnp.int32)
    return Blocks(
        tier=empty.at[block].set(jnp.where(runs, tier, -1)[order]),
        slot=empty.at[block].set(slot[order]),
        pairs=pairs.at[block, within % rows].set(order),
        used=block[-1:] + 1,
    )
