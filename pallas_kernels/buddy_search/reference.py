"""Buddy search in plain jnp; never optimised."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LEAST = float(np.finfo(np.float32).tiny)  # below which no probability is taken to a logarithm


class Gate(NamedTuple):
    """TAE gate of BuddyMoE (eq. 1): the tokens that tolerate a buddy.

    Attributes:
      probabilities: float32[N, E], the router's softmax.
      tau: float32[M]; a token tolerates buddies if its activating entropy exceeds its layer's.
      margin: float32[], gamma; and if its first two probabilities differ by less.
      temperature: float32[], of p~, the probabilities of the chosen experts renormalized.
    """

    probabilities: jax.Array
    tau: jax.Array
    margin: jax.Array
    temperature: jax.Array


class Found(NamedTuple):
    """Result of the search, for every pair.

    Attributes:
      ids: int32[N, A], the buddy's if there is one; else the router's choice.
      searched: bool[N, A], wanted, and the token's budget was not spent yet.
      replaced: int32[M, E], the counts given, with the pairs of each expert that a buddy serves;
        None where none were given.
    """

    ids: jax.Array
    searched: jax.Array
    replaced: jax.Array | None


def _tolerates(gate: Gate, ids: jax.Array, layer: jax.Array) -> jax.Array:
    """Mask bool[N] of tokens that a gate lets pass."""
    chosen = jnp.take_along_axis(gate.probabilities, ids, axis=1)
    logits = jnp.log(jnp.maximum(chosen, LEAST)) / gate.temperature
    shares = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    shares = shares / jnp.sum(shares, axis=1, keepdims=True)
    width = ids.shape[1]
    if width == 1:
        return (gate.tau[layer] < 0) & jnp.broadcast_to(gate.margin > 1, len(ids))
    nats = -jnp.sum(shares * jnp.log(jnp.maximum(shares, LEAST)), axis=1)
    entropy = jnp.clip(nats / math.log(width), 0.0, 1.0)
    return (entropy > gate.tau[layer]) & (shares[:, 0] - shares[:, 1] < gate.margin)


def search_reference(
    ids: jax.Array,
    lists: jax.Array,
    layer: jax.Array,
    resident: jax.Array,
    allowed: jax.Array,
    depth: jax.Array,
    budget: jax.Array,
    gate: Gate | None,
    replaced: jax.Array | None,
    *,
    last_first: bool,
) -> Found:
    """Computes `api.search` in plain JAX."""
    if resident.ndim == 2:
        resident = resident[layer, : lists.shape[1]] >= 0
    allowed = allowed.reshape(len(ids), -1)  # of tokens or of pairs
    if gate is not None:
        allowed &= _tolerates(gate, ids, layer)[:, None]
    wanted = allowed & ~resident[ids]
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
    if replaced is not None:
        missed = jnp.where(found != ids, ids, replaced.shape[1])
        replaced = replaced.at[layer, missed.reshape(-1)].add(1, mode="drop")
    return Found(found, searched, replaced)
