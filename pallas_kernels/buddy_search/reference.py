"""Buddy search in plain jnp; never optimised."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LEAST = float(np.finfo(np.float32).tiny)  # below which no probability is taken to a logarithm


class Gate(NamedTuple):
    """TAE gate of BuddyMoE (eq. 1): the tokens that tolerate a buddy."""

    probabilities: jax.Array  # float32[N, E], the router's softmax
    # float32[M]; a token tolerates buddies if its activating entropy exceeds its layer's
    tau: jax.Array
    margin: jax.Array  # float32[], gamma; and if its first two probabilities differ by less
    temperature: jax.Array  # float32[], of p~, the probabilities of the chosen experts renormalized


class Found(NamedTuple):
    """Result of the search, for every pair."""

    ids: jax.Array  # int32[N, A], the buddy's if there is one; else the router's choice
    searched: jax.Array  # bool[N, A], wanted, and the token's budget was not spent yet
    # int32[M, E], the counts given, with the pairs of each expert that a buddy serves; None where
    # none were given
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
    found, searched = search_pairs(
        ids, lists[layer, ids], resident, wanted, depth, budget, last_first=last_first
    )
    if replaced is not None:
        missed = jnp.where(found != ids, ids, replaced.shape[1])
        replaced = replaced.at[layer, missed.reshape(-1)].add(1, mode="drop")
    return Found(found, searched, replaced)


def search_pairs(
    ids: jax.Array,
    listed: jax.Array,  # int32[N, A, H], possible buddies of each pair, the best first; -1 for none
    resident: jax.Array,  # bool[E]
    wanted: jax.Array,  # bool[N, A], pairs whose expert is missing and may be replaced
    depth: jax.Array,
    budget: jax.Array,
    *,
    last_first: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Runs Algorithm 1 over pairs with lists of their own; `api.search` has the other arguments.

    Returns:
      `Found.ids` and `Found.searched`.
    """
    width, places = ids.shape[1], jnp.arange(listed.shape[2], dtype=jnp.int32)
    usable = (listed >= 0) & resident.at[listed].get(mode="clip") & (places < depth)[None, None]
    num_replaced = jnp.zeros(len(ids), jnp.int32)
    buddies, searched = [num_replaced] * width, [num_replaced > 0] * width
    taken = list(ids.T)
    for rank in reversed(range(width)) if last_first else range(width):
        mine, asks = listed[:, rank], wanted[:, rank] & (num_replaced < budget)
        free = usable[:, rank] & asks[:, None]
        for other in taken:
            free &= mine != other[:, None]
        first = jnp.min(jnp.where(free, places[None], len(places)), axis=1, keepdims=True)
        buddy = jnp.max(jnp.where(places[None] == first, mine, -1), axis=1)
        buddies[rank], searched[rank] = buddy, asks
        num_replaced += (buddy >= 0).astype(jnp.int32)
        taken.append(buddy)
    chosen = jnp.stack(buddies, axis=1)
    return jnp.where(chosen >= 0, chosen, ids), jnp.stack(searched, axis=1)
