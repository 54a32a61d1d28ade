"""Belady's cache, the upper bound on hits."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.routing.trace import DECODE, Trace

NEVER = np.int32(2**31 - 1)
_BLOCK_BYTES = 2**26  # of the next uses of the layers that run side by side
MAX_SEARCHED = 32  # steps that need more experts of a layer sort instead of searching


class Needed(NamedTuple):
    """Experts needed and those resident, int32[2, M, K], by phase."""

    needed: jax.Array
    hits: jax.Array


def needed_experts(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Mask bool[S, M, E] of the experts that each step needs, and bool[S], whether it decodes."""
    _, starts, step = np.unique(trace.step, return_index=True, return_inverse=True)
    masks = np.zeros((len(starts), trace.num_layers, trace.num_experts), bool)
    layers = np.arange(trace.num_layers)[None, :, None]
    masks[step[:, None, None], layers, trace.ids] = True
    return masks, trace.phase[starts] == DECODE


def next_uses(masks: np.ndarray) -> np.ndarray:
    """Next step, int32[S, M, E], that needs each expert after a step; `NEVER` for none."""
    found = np.full(masks.shape, NEVER)
    for s in range(len(masks) - 2, -1, -1):
        found[s] = np.where(masks[s + 1], np.int32(s + 1), found[s + 1])
    return found


def belady(masks: np.ndarray, is_decode: np.ndarray, slots: jax.Array) -> Needed:
    """Counts the most hits that any cache can have, prefetch aside (Belady, 1966).

    After each step, of the resident and the needed experts, those of the nearest next use stay; an
    expert needed now may pass through without a slot, like in the engine's transient slots.
    Prefetch moves a miss to an earlier time, not away: the bytes are a bound for it too. Masks are
    those of `needed_experts`, of fewer than 2^31 / E steps; slots are int32[K].
    """
    counts = masks.sum(axis=2).max(axis=1)
    narrow = counts <= MAX_SEARCHED
    num_steps, num_layers, num_experts = masks.shape
    block, parts = max(1, _BLOCK_BYTES // (4 * num_steps * num_experts)), []
    for first in range(0, num_layers, block):
        some = masks[:, first : first + block]
        steps = jax.tree.map(jnp.asarray, (some, next_uses(some), is_decode, ~narrow))
        most = int(counts[narrow].max(initial=1))
        parts.append(_scan(steps, slots, most=most, sorts=not narrow.all()))
    return jax.tree.map(lambda *of: jnp.concatenate(of, axis=1), *parts)


@functools.partial(jax.jit, static_argnames=("most", "sorts"))
def _scan(steps: tuple[jax.Array, ...], slots: jax.Array, *, most: int, sorts: bool) -> Needed:
    """Runs Belady's cache; without `sorts` no branch makes a GPU's program wait for the host."""
    _, num_layers, num_experts = steps[0].shape
    stride = 1 << (num_experts - 1).bit_length()
    last = NEVER // stride - 1
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    shape = (num_layers, num_experts, len(slots))

    def step(
        carry: tuple[jax.Array, Needed], now: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, Needed], None]:
        held, so_far = carry  # bool[M, E, K]
        mask, uses, decodes, is_wide = now
        # Unequal for each expert, so that a bound tells those who stay; NEVER goes first.
        order = (jnp.minimum(uses, last) * stride + expert[None])[:, :, None]
        hits = (held & mask[:, :, None]).sum(axis=1, dtype=jnp.int32)
        candidates = held | mask[:, :, None]
        excess = candidates.sum(axis=1, dtype=jnp.int32) - slots[None]
        ranked = jnp.where(candidates, order, -1)
        if sorts:
            bound = jax.lax.cond(
                is_wide,
                lambda: _bound_by_sorting(ranked, excess),
                lambda: _bound_by_search(ranked, excess, most),
            )
        else:
            bound = _bound_by_search(ranked, excess, most)
        held = candidates & (order < bound[:, None])
        phase = decodes.astype(jnp.int32)
        count = jnp.broadcast_to(mask.sum(axis=1, dtype=jnp.int32)[:, None], hits.shape)
        so_far = Needed(so_far.needed.at[phase].add(count), so_far.hits.at[phase].add(hits))
        return (held, so_far), None

    zeros = jnp.zeros((2, num_layers, len(slots)), jnp.int32)
    start = (jnp.zeros(shape, bool), Needed(zeros, zeros))
    return jax.lax.scan(step, start, steps)[0][1]


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
