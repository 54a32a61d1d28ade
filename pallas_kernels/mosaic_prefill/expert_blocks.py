"""Blocks of pairs (token, a), sorted by matrix; a block has one matrix. Pure jnp.

Rows are not padded: a block is a span of the sorted pairs; its last tile of tokens reaches into the
next matrix's rows, and the results for these are not stored. So nothing here grows with the number
of matrices of a stack but a table of a few words each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

SLOT, FIRST, END, BAND_FIRST, BAND_LENGTH = range(5)  # columns of `ExpertBlocks.table`


class ExpertBlocks(NamedTuple):
    """Blocks of pairs of one matrix; device data of static shapes."""

    order: jax.Array  # int32[P]: pairs t A + a by tier and slot, those that are skipped last
    # int32[num_blocks, 5]: the matrix's slot; the span of `order`; the blocks of the same matrix
    # that are worked off together. What is beyond the last tier's blocks means nothing.
    table: jax.Array
    first_block: jax.Array  # int32[tiers + 1]: of each tier, then the end of the last


def make_expert_blocks(
    tier: jax.Array, slot: jax.Array, counts: Sequence[int], rows: int, band: int
) -> ExpertBlocks:
    """Sorts pairs by tier and slot, those of one matrix in their order.

    Nothing but the pairs and the tiers is counted: a stack may have the matrices of all layers.

    Args:
      tier: int32[T, A]; outside 0 .. tiers - 1 for pairs that are skipped.
      slot: int32[T, A]; clipped to the tier's, as JAX does.
      counts: slots of each tier.
    """
    tier, slot = tier.reshape(-1), slot.reshape(-1)
    num_pairs, num_tiers, most = tier.shape[0], len(counts), max(counts)
    runs = (tier >= 0) & (tier < num_tiers)
    last = jnp.asarray(counts, jnp.int32)[jnp.where(runs, tier, 0)] - 1
    skipped, pairs = num_tiers * most, jnp.arange(num_pairs, dtype=jnp.int32)
    keys = jnp.where(runs, tier * most + jnp.clip(slot, 0, last), skipped).astype(jnp.int32)
    keys, order = jax.lax.sort((keys, pairs), num_keys=1, is_stable=True)

    start = _search(keys, keys, "left")  # of each pair its matrix's first one
    begins = ((pairs - start) % rows == 0) & (keys < skipped)
    number = jnp.cumsum(begins, dtype=jnp.int32) - 1
    # Each matrix adds at most one partial block.
    num_blocks = min(num_pairs, num_pairs // rows + sum(counts))
    places = jnp.where(begins, number, num_blocks)
    first = jnp.full(num_blocks, num_pairs - 1, jnp.int32).at[places].set(pairs, mode="drop")

    matrix, start = keys[first], start[first]
    end = _search(keys, matrix, "right")
    within = (first - start) // rows
    banded = within // band * band
    columns = [
        matrix % most,
        first,
        jnp.minimum(first + rows, end),
        jnp.arange(num_blocks, dtype=jnp.int32) - within + banded,
        jnp.minimum(band, -(-(end - start) // rows) - banded),
    ]
    firsts = jnp.arange(num_tiers + 1, dtype=jnp.int32) * most  # keys of the tiers' first matrices
    before = jnp.sum(begins[None] & (keys[None] < firsts[:, None]), axis=1, dtype=jnp.int32)
    return ExpertBlocks(order=order, table=jnp.stack(columns, axis=1), first_block=before)


def _search(ordered: jax.Array, values: jax.Array, side: str) -> jax.Array:
    # Few kernels either way: a loop would launch some for each of its steps.
    few = ordered.shape[0] * values.shape[0] <= 2**23
    method = "compare_all" if few else "scan_unrolled"
    found = jnp.searchsorted(ordered, values, side=side, method=method)
    return found.astype(jnp.int32)
