"""Substitution of missing experts: BuddyMoE's score (eq. 3) and its Algorithm 1.

Tokens are independent; the ranks of a token are visited in order, so that the result is that of the
printed loops, not of the CUDA kernel's race (section 4). U_t holds all experts that the router
chose, the missing ones too, as printed, and the buddies so far.

Axes: N tokens, A experts a token, E experts of a layer, H places of a buddy list that are searched.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import buddy_search
from pallas_kernels.buddy_search import Gate

# "ranks" visits a token's ranks one after the other, on any device.
# "kernel" is one launch (`pallas_kernels.buddy_search`) where lists are in their order.
Form = Literal["ranks", "kernel"]


class Candidates(NamedTuple):
    """Possible buddies of each pair, before those of the token's other pairs are known."""

    ids: jax.Array  # int32[N, A, H], -1 for none
    # float32[N, A, H], the larger first, equal ones by place; None: by place
    priority: jax.Array | None = None


class Substitution(NamedTuple):
    """Result of the search, for every pair."""

    ids: jax.Array  # int32[N, A], the buddy's where `replaced`, else the router's
    replaced: jax.Array  # bool[N, A]
    # bool[N, A], wanted, and the token's budget was not spent yet; where it is not `replaced`,
    # there is no buddy
    searched: jax.Array


def candidates_of(
    ids: jax.Array, lists: jax.Array, resident: jax.Array, depth: jax.Array
) -> jax.Array:
    """Finds each pair's listed buddies that are resident and not chosen (lines 15-17).

    int32[N, A, H], -1 for none.

    Args:
      ids: int32[N, A], the router's choice.
      lists: int32[E, H], buddies of each expert, the best first; -1 pads.
      resident: bool[E].
      depth: int32[], how far lists are searched, at most H.
    """
    listed = lists.at[ids].get(mode="clip")
    usable = (listed >= 0) & resident.at[listed].get(mode="clip")
    usable &= jnp.arange(lists.shape[1], dtype=jnp.int32)[None, None] < depth
    for rank in range(ids.shape[1]):
        usable &= listed != ids[:, rank, None, None]
    return jnp.where(usable, listed, -1)


def normalized_logits(probabilities: jax.Array) -> jax.Array:
    """Normalised logits z^ of eq. 3: the router's, up to a constant, scaled to 0..1.

    float32[N, E], 0 where all are equal. The paper names no norm; this one leaves 1 + eta z^
    positive.
    """
    logits = jnp.log(jnp.maximum(probabilities, float(np.finfo(np.float32).tiny)))
    least = jnp.min(logits, axis=-1, keepdims=True)
    span = jnp.max(logits, axis=-1, keepdims=True) - least
    return (logits - least) / jnp.where(span > 0, span, 1.0)


def buddy_score(
    candidates: jax.Array,  # int32[N, A, H], of `candidates_of`
    q: jax.Array,  # float32[N, A, H], of each candidate
    logits: jax.Array,  # float32[N, E], of `normalized_logits`
    hops: jax.Array,  # float32[E], partitions between the tokens' device and each expert's
    eta: jax.Array,  # float32[]
    kappa: jax.Array,  # float32[]
) -> jax.Array:
    """Score of eq. 3: Psi(j | i, x) = q_(j|i) (1 + eta z^_j(x)) (1 - kappa hop(j)).

    float32[N, A, H]; 0 where there is no candidate.
    """
    safe = jnp.maximum(candidates, 0)
    flat = safe.reshape(len(safe), -1)
    local = jnp.take_along_axis(logits, flat, axis=1, mode="clip").reshape(safe.shape)
    psi = q * (1 + eta * local) * (1 - kappa * hops.at[safe].get(mode="clip"))
    return jnp.where(candidates >= 0, psi, 0.0)


def in_order(candidates: Candidates) -> jax.Array:
    """Sorts candidates by falling priority, then by place; drops priorities <= 0.

    int32[N, A, H], -1 for none; by comparing all pairs of a list.
    """
    ids, value = candidates
    if value is None:
        return ids
    place = jnp.arange(ids.shape[-1], dtype=jnp.int32)
    earlier, apart = place[None, :] < place[:, None], place[None, :] != place[:, None]
    mine, other = value[..., :, None], value[..., None, :]
    # A compiler may work out both sides anew and round them differently: nobody is before itself.
    before = ((other > mine) & apart[None, None]) | ((other == mine) & earlier[None, None])
    order = jnp.sum(before, axis=-1, dtype=jnp.int32)
    usable = jnp.where(value > 0, ids, -1)
    comes = order[..., None, :] == place[None, None, :, None]
    return jnp.max(jnp.where(comes, usable[..., None, :], -1), axis=-1)


def substitute(
    ids: jax.Array,
    candidates: Candidates,
    wanted: jax.Array,
    budget: jax.Array,
    *,
    last_first: bool = False,
) -> Substitution:
    """Runs Algorithm 1 with the budget rho (section 5.1): no expert serves a token twice.

    Args:
      ids: int32[N, A], the router's choice, by falling weight.
      wanted: bool[N, A], pairs whose expert is missing and may be replaced.
      budget: int32[], rho, the most replacements per token.
      last_first: visits ranks from the least weight on, which then get the budget first.
    """
    ordered = in_order(candidates)
    num_tokens, width, depth = ordered.shape
    place = jnp.arange(depth, dtype=jnp.int32)[None]
    num_replaced = jnp.zeros(num_tokens, jnp.int32)
    taken: list[jax.Array] = []
    buddies, searched = [num_replaced] * width, [num_replaced > 0] * width
    for rank in reversed(range(width)) if last_first else range(width):
        mine, asks = ordered[:, rank], wanted[:, rank] & (num_replaced < budget)
        free = (mine >= 0) & asks[:, None]
        for buddy in taken:
            free &= mine != buddy[:, None]
        first = jnp.min(jnp.where(free, place, depth), axis=-1, keepdims=True)
        buddy = jnp.max(jnp.where(place == first, mine, -1), axis=-1)
        buddies[rank], searched[rank] = buddy, asks
        num_replaced += (buddy >= 0).astype(jnp.int32)
        taken.append(buddy)
    # Without the barrier every reader computes it again: 24 s of compiling 16 layers against 9.
    chosen = jax.lax.optimization_barrier(jnp.stack(buddies, axis=1))
    return Substitution(
        jnp.where(chosen >= 0, chosen, ids), chosen >= 0, jnp.stack(searched, axis=1)
    )


def search(
    ids: jax.Array,
    lists: jax.Array,
    layer: jax.Array,
    resident: jax.Array,
    allowed: jax.Array,
    depth: jax.Array,
    budget: jax.Array,
    gate: Gate,
    replaced: jax.Array,
    *,
    last_first: bool = False,
) -> tuple[Substitution, jax.Array]:
    """Finds candidates and substitutes them in one kernel launch, without priorities.

    Returns the substitution, and the counts with its pairs.

    Args:
      ids: int32[N, A], by falling weight.
      lists: int32[M, E, H], of all layers.
      layer, depth, budget: int32[].
      resident: bool[E], of that layer, or int32[M, K], as `Observation.tables`.
      allowed: bool[N] or bool[N, A], tokens or pairs whose missing experts may be replaced if the
        gate passes the token.
      replaced: int32[M, E], donate it.
    """
    found = buddy_search.search(
        ids, lists, layer, resident, allowed, depth, budget, gate, replaced, last_first=last_first
    )
    assert found.replaced is not None
    return Substitution(found.ids, found.ids != ids, found.searched), found.replaced
