"""The operation in plain jnp; never optimised."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Found(NamedTuple):
    """What came of the search, for every pair.

    Attributes:
      ids: int32[N, A], the buddy's where there is one, which the router did not choose; else the
        router's choice.
      searched: bool[N, A], wanted, and the token's budget was not spent yet.
    """

    ids: jax.Array
    searched: jax.Array


def search_reference(
    ids: jax.Array,
    lists: jax.Array,
    layer: jax.Array,
    resident: jax.Array,
    wanted: jax.Array,
    depth: jax.Array,
    budget: jax.Array,
    *,
    last_first: bool,
) -> Found:
    """See `api.search`."""
    width, places = ids.shape[1], jnp.arange(lists.shape[2], dtype=jnp.int32)[None]
    num_replaced = jnp.zeros(len(ids), jnp.int32)
    found, searched, taken = ids, jnp.zeros(ids.shape, bool), ids
    for rank in reversed(range(width)) if last_first else range(width):
        asks = wanted[:, rank] & (num_replaced < budget)
        listed = lists[layer, ids[:, rank]]
        usable = (listed >= 0) & resident[jnp.maximum(listed, 0)] & (places < depth)
        usable &= ~jnp.any(listed[:, :, None] == taken[:, None, :], axis=2) & asks[:, None]
        some, place = jnp.any(usable, axis=1), jnp.argmax(usable, axis=1)
        buddy = jnp.take_along_axis(listed, place[:, None], axis=1)[:, 0]
        found = found.at[:, rank].set(jnp.where(some, buddy, ids[:, rank]))
        taken = jnp.concatenate([taken, jnp.where(some, buddy, -1)[:, None]], axis=1)
        searched = searched.at[:, rank].set(asks)
        num_replaced += some.astype(jnp.int32)
    return Found(found, searched)
