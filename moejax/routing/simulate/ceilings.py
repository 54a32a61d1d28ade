"""Belady's cache, the upper bound on hits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.routing.simulate.workload import Workload

NEVER = np.int32(2**31 - 1)


class Needed(NamedTuple):
    """Experts needed and those resident, int32[2, M, K], by phase."""

    needed: jax.Array
    hits: jax.Array


class NextUses(NamedTuple):
    """Next step that needs each expert of a step; `NEVER` for none.

    narrow: int32[S, M, W], of `Workload.needed`.
    wide: int32[S', M, E], of the steps in `Workload.wide`.
    """

    narrow: jax.Array | np.ndarray
    wide: jax.Array | np.ndarray


def next_uses(workload: Workload) -> NextUses:
    """Finds the next uses of every step, on the host, from the last step back."""
    needed, wide_at = np.asarray(workload.needed), np.asarray(workload.wide_at)
    wide = np.asarray(workload.wide)
    layers = np.arange(workload.num_layers)[:, None]
    found = NextUses(np.full(needed.shape, NEVER), np.full(wide.shape, NEVER))
    # One column more, for what is no expert.
    following = np.full((workload.num_layers, workload.num_experts + 1), NEVER)
    for s in range(len(needed) - 1, -1, -1):
        if (place := wide_at[s]) >= 0:
            found.wide[place] = following[:, :-1]
            following[:, :-1][wide[place]] = s
        else:
            found.narrow[s] = following[layers, needed[s]]
            following[layers, needed[s]] = s
    return found


@jax.jit
def belady(workload: Workload, coming: NextUses, slots: jax.Array) -> Needed:
    """Counts the most hits that any cache can have, prefetch aside (Belady, 1966).

    After each step, of the resident and the needed experts, those of the nearest next use stay; an
    expert needed now may pass through without a slot, like in the engine's transient slots.
    Prefetch moves a miss to an earlier time, not away: the bytes are a bound for it too.

    Args:
      workload: of fewer than 2^31 / E steps.
      coming: from `next_uses`.
      slots: int32[K].
    """
    num_layers, num_experts = workload.num_layers, workload.num_experts
    stride = 1 << (num_experts - 1).bit_length()
    last = NEVER // stride - 1
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    layer = jnp.arange(num_layers, dtype=jnp.int32)[:, None]
    shape = (num_layers, num_experts, len(slots))

    def step(
        carry: tuple[jax.Array, jax.Array, Needed], now: tuple[Any, ...]
    ) -> tuple[tuple[jax.Array, jax.Array, Needed], None]:
        held, uses, so_far = carry  # bool[M, E, K], int32[M, E]
        needed, narrow_uses, is_decode, wide_at = now
        wide = wide_at >= 0
        mask = _needs(workload, needed, wide_at)
        uses = uses.at[layer, needed].set(narrow_uses, mode="drop")
        if workload.has_wide:
            uses = jnp.where(wide & mask, coming.wide[wide_at], uses)
        # Unequal for each expert, so that a bound tells those who stay; NEVER goes first.
        order = (jnp.minimum(uses, last) * stride + expert[None])[:, :, None]
        hits = (held & mask[:, :, None]).sum(axis=1, dtype=jnp.int32)
        candidates = held | mask[:, :, None]
        excess = candidates.sum(axis=1, dtype=jnp.int32) - slots[None]
        ranked = jnp.where(candidates, order, -1)
        if workload.has_wide:
            bound = jax.lax.cond(
                wide,
                lambda: _bound_by_sorting(ranked, excess),
                lambda: _bound_by_search(ranked, excess, needed.shape[1]),
            )
        else:
            bound = _bound_by_search(ranked, excess, needed.shape[1])
        held = candidates & (order < bound[:, None])
        phase = is_decode.astype(jnp.int32)
        count = jnp.broadcast_to(mask.sum(axis=1, dtype=jnp.int32)[:, None], hits.shape)
        so_far = Needed(so_far.needed.at[phase].add(count), so_far.hits.at[phase].add(hits))
        return (held, uses, so_far), None

    zeros = jnp.zeros((2, num_layers, len(slots)), jnp.int32)
    w = workload
    steps = (w.needed, coming.narrow, w.is_decode, w.wide_at)
    start = (jnp.zeros(shape, bool), jnp.full(shape[:2], NEVER), Needed(zeros, zeros))
    return jax.lax.scan(step, start, steps)[0][2]


def _bound_by_search(ranked: jax.Array, excess: jax.Array, most: int) -> jax.Array:
    """Finds the excess-th largest, int32[M, K], of at most `most`; NEVER for none."""
    bound = below = jnp.full(excess.shape, NEVER)
    for i in range(most):
        below = jnp.where(ranked < below[:, None], ranked, -1).max(axis=1)
        bound = jnp.where(i < excess, below, bound)
    return bound


def _bound_by_sorting(ranked: jax.Array, excess: jax.Array) -> jax.Array:
    falling = -jnp.sort(-ranked, axis=1)
    place = jnp.clip(excess - 1, 0, ranked.shape[1] - 1)[:, None]
    found = jnp.take_along_axis(falling, place, axis=1)[:, 0]
    return jnp.where(excess > 0, found, NEVER)


def _needs(workload: Workload, needed: jax.Array, wide_at: jax.Array) -> jax.Array:
    """Mask bool[M, E] of the experts a step needs."""
    mask = _marked(needed, workload.num_experts)
    if workload.has_wide:
        mask = jnp.where(wide_at >= 0, workload.wide[wide_at], mask)
    return mask


def _marked(needed: jax.Array, num_experts: int) -> jax.Array:
    """Converts ids int32[M, W] to a mask bool[M, E]."""
    expert = jnp.arange(num_experts, dtype=jnp.int32)[None, None]
    return (needed[:, :, None] == expert).any(axis=1)
