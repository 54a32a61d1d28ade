"""Blocks of pairs (token, a), sorted by matrix; a block has one matrix. Pure jnp.

Rows are not padded: a block is a span of the sorted pairs; its last tile of tokens reaches into the
next matrix's rows, and the results for these are not stored. So nothing here grows with the number
of matrices of a stack but a table of a few words each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packed import PackedMatrices

SLOT, FIRST, END, BAND_FIRST, BAND_LENGTH = range(5)  # columns of `_ExpertBlocks.table`


class _ExpertBlocks(NamedTuple):
    """Blocks of pairs of one matrix; device data of static shapes."""

    order: jax.Array  # int32[P]: pairs t A + a by tier and slot, those that are skipped last
    # int32[num_blocks, 5]: the matrix's slot; the span of `order`; the blocks of the same matrix
    # that are worked off together. What is beyond the last tier's blocks means nothing.
    table: jax.Array
    first_block: jax.Array  # int32[tiers + 1]: of each tier, then the end of the last


def _max_blocks(num_pairs: int, rows: int, num_matrices: int) -> int:
    """Most blocks needed: each matrix adds at most one partial block."""
    return min(num_pairs, num_pairs // rows + num_matrices)


def make_expert_blocks(
    tier: jax.Array, slot: jax.Array, tiers: Sequence[PackedMatrices], rows: int, band: int
) -> _ExpertBlocks:
    """Sorts pairs by tier and slot, those of one matrix in their order.

    Args:
      tier: int32[T, A]; outside 0 .. tiers - 1 for pairs that are skipped.
      slot: int32[T, A]; clipped to the tier's, as JAX does.
      tiers: arrays or their shapes; only the numbers of slots matter.
    """
    tier, slot = tier.reshape(-1), slot.reshape(-1)
    counts = [weights.num_slots for weights in tiers]
    before = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)  # matrices of earlier tiers
    num_matrices = int(before[-1])
    runs = (tier >= 0) & (tier < len(tiers))
    of = jnp.where(runs, tier, 0)
    places = jnp.asarray(before)[of] + jnp.clip(slot, 0, jnp.asarray(counts, jnp.int32)[of] - 1)
    keys, order = jax.lax.sort(
        (
            jnp.where(runs, places, num_matrices).astype(jnp.int32),
            jnp.arange(tier.shape[0], dtype=jnp.int32),
        ),
        num_keys=1,
        is_stable=True,
    )
    matrices = jnp.arange(num_matrices + 1, dtype=jnp.int32)
    starts = _search(keys, matrices, "left")
    lengths = starts[1:] - starts[:-1]
    blocks = -(-lengths // rows)
    after = jnp.cumsum(blocks, dtype=jnp.int32)  # blocks up to and with each matrix

    block = jnp.arange(_max_blocks(tier.shape[0], rows, num_matrices), dtype=jnp.int32)
    matrix = jnp.minimum(_search(after, block, "right"), num_matrices - 1)
    within = block - (after - blocks)[matrix]
    first = starts[matrix] + within * rows
    banded = within // band * band
    columns = [
        matrix - jnp.asarray(before)[_search(jnp.asarray(before), matrix, "right") - 1],
        first,
        jnp.minimum(first + rows, starts[matrix + 1]),
        block - within + banded,
        jnp.minimum(band, blocks[matrix] - banded),
    ]
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), after])
    return _ExpertBlocks(order=order, table=jnp.stack(columns, axis=1), first_block=ends[before])


def _search(ordered: jax.Array, values: jax.Array, side: str) -> jax.Array:
    # Few kernels either way: a loop would launch some for each of its steps.
    few = ordered.shape[0] * values.shape[0] <= 2**23
    method = "compare_all" if few else "scan_unrolled"
    found = jnp.searchsorted(ordered, values, side=side, method=method)
    return found.astype(jnp.int32)
