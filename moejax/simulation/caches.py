"""The engine's cache (`moejax.memory.residency`) under many settings at once, to the last hit.

LRU slots a layer, misses in order of id into victims, the scan rule, look-ahead prefetch. Where the
engine compares all pairs of slots, this keeps for each expert one number that orders the victims,
    key = 2 (E' * last use + expert) + brought ahead and not used yet,
E' the power of two from E on, and finds the n smallest one after the other: a pass over E each, no
sort, the settings side by side on the last axis. 100 settings x 10,000 tokens x 48 layers x 128
experts take half a minute of one core.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.simulation.workload import Workload

ABSENT = np.int32(2**31 - 1)  # the key of an expert that is in no slot
# What is counted, of each phase, layer and setting; names as in `moejax.ledger`, but for `fetches`:
# times that a layer fetched what it needed.
COUNTED = (
    "steps",
    "needed",
    "hits",
    "misses",
    "admitted",
    "streamed",
    "evictions",
    "prefetched",
    "prefetch_hits",
    "prefetch_waste",
    "fetches",
)
PHASES = ("prefill", "decode")


class Settings(NamedTuple):
    """K settings: slots int32[K], 0 loads on demand; prefetch int32[K], experts brought ahead."""

    slots: jax.Array
    prefetch: jax.Array


class Caches(NamedTuple):
    """The state: key int32[M, E, K]; filled int32[M, K], slots that hold something."""

    key: jax.Array
    filled: jax.Array


class Outcome(NamedTuple):
    """What happened.

    counts: int32[2, M, len(COUNTED), K], by phase as in `PHASES`.
    ahead: int32[2, P + 1, K], how often a layer brought so many experts ahead.
    """

    counts: jax.Array
    ahead: jax.Array


def max_steps(num_experts: int) -> int:
    """The longest trace that the keys can number."""
    return int(ABSENT) // (2 * _stride(num_experts)) - 1


@functools.partial(jax.jit, static_argnames=("most_ahead",))
def simulate(workload: Workload, settings: Settings, most_ahead: int) -> Outcome:
    """Replays all steps from an empty cache.

    Args:
      workload: of fewer than `max_steps` steps.
      settings: of which none brings more than `most_ahead` experts ahead.
      most_ahead: static, at most P of the workload.
    """
    num_layers, num_settings = workload.num_layers, len(settings.slots)
    num_experts = workload.num_experts
    caches = Caches(
        jnp.full((num_layers, num_experts, num_settings), ABSENT),
        jnp.zeros((num_layers, num_settings), jnp.int32),
    )
    outcome = Outcome(
        jnp.zeros((2, num_layers, len(COUNTED), num_settings), jnp.int32),
        jnp.zeros((2, most_ahead + 1, num_settings), jnp.int32),
    )

    def step(carry: tuple[Caches, Outcome], now: tuple[jax.Array, ...]) -> tuple[tuple, None]:
        caches, outcome = carry
        clock, needed, foreseen, rank, is_decode, wide_at = now
        phase = is_decode.astype(jnp.int32)
        counts: dict[str, jax.Array] = {}
        if most_ahead:
            caches, counts = _look_ahead(caches, settings, clock, foreseen, rank, most_ahead)
            much = jnp.arange(most_ahead + 1, dtype=jnp.int32)[:, None, None]
            times = (counts["prefetched"][None] == much).sum(axis=1, dtype=jnp.int32)
            outcome = outcome._replace(ahead=outcome.ahead.at[phase].add(times))
        if workload.has_wide:
            caches, found = jax.lax.cond(
                wide_at >= 0,
                lambda: _wide_plan(caches, settings, clock, workload.wide[wide_at]),
                lambda: _plan(caches, settings, clock, needed),
            )
        else:
            caches, found = _plan(caches, settings, clock, needed)
        for name, amount in found.items():
            counts[name] = counts[name] + amount if name in counts else amount
        zero = jnp.zeros_like(caches.filled)
        row = jnp.stack([counts.get(name, zero) for name in COUNTED], axis=1)
        outcome = outcome._replace(counts=outcome.counts.at[phase].add(row))
        return (caches, outcome), None

    clocks = jnp.arange(1, workload.num_steps + 1, dtype=jnp.int32)
    w = workload
    steps = (clocks, w.needed, w.foreseen, w.rank, w.is_decode, w.wide_at)
    (_, outcome), _ = jax.lax.scan(step, (caches, outcome), steps)
    return outcome


def _plan(
    caches: Caches, settings: Settings, clock: jax.Array, needed: jax.Array
) -> tuple[Caches, dict[str, jax.Array]]:
    """A layer's `plan` for int32[M, W] needed experts; counts [M, K]."""
    key, filled = caches
    num_experts = key.shape[1]
    keys = _at(key, needed)  # [M, W, K]
    real = (needed < num_experts)[:, :, None]
    hit, miss = real & (keys < ABSENT), real & (keys == ABSENT)
    num_hits, num_misses = _num(hit), _num(miss)
    protected = (needed[:, :, None] == _index(num_experts, -1)).any(axis=1)
    free = settings.slots[None] - filled
    room = jnp.where(num_hits + num_misses <= settings.slots[None], num_misses, free)
    order = _order(miss)
    come = miss & (order < room[:, None])
    taken = _take(key, protected[:, :, None], free, _num(come), filled, needed.shape[1])
    fresh = jnp.where(hit | come, _key(clock, needed[:, :, None], num_experts), ABSENT)
    key = _put(taken.key, needed, fresh)
    counts = _plan_counts(hit, miss, come)
    counts["prefetch_hits"] = _num(hit & _is_ahead(keys))
    counts |= {"evictions": taken.evictions, "prefetch_waste": taken.waste}
    return Caches(key, taken.filled), counts


def _look_ahead(
    caches: Caches,
    settings: Settings,
    clock: jax.Array,
    foreseen: jax.Array,
    rank: jax.Array,
    most: int,
) -> tuple[Caches, dict[str, jax.Array]]:
    """`predict` for the experts int32[M, P] that the layer before foresaw; counts [M, K]."""
    key, filled = caches
    num_experts = key.shape[1]
    limit = jnp.minimum(jnp.minimum(settings.prefetch, settings.slots), most)[None, None]
    wanted = (foreseen < num_experts)[:, :, None] & (rank[:, :, None] < limit)
    new = wanted & (_at(key, foreseen) == ABSENT)
    here = foreseen[:, :, None] == _index(num_experts, -1)
    ranks = jnp.where(here, rank[:, :, None], num_experts).min(axis=1)
    free = settings.slots[None] - filled
    taken = _take(key, ranks[:, :, None] < limit, free, _num(new), filled, most)
    coming = _key(clock, foreseen[:, :, None], num_experts) + 1
    fresh = jnp.where(new, coming, _at(taken.key, foreseen))
    key = _put(taken.key, foreseen, fresh)
    return Caches(key, taken.filled), {
        "prefetched": _num(new),
        "evictions": taken.evictions,
        "prefetch_waste": taken.waste,
    }


class _Taken(NamedTuple):
    """key and filled after victims left; counts [M, K]."""

    key: jax.Array
    filled: jax.Array
    evictions: jax.Array
    waste: jax.Array


def _take(
    key: jax.Array,
    protected: jax.Array,
    free: jax.Array,
    num_coming: jax.Array,
    filled: jax.Array,
    most: int,
) -> _Taken:
    """Room for those who come: free slots, then those of the least recent use.

    Args:
      key: int32[M, E, K].
      protected: bool[M, E, 1 or K], experts that stay.
      free: int32[M, K].
      num_coming: int32[M, K].
      filled: int32[M, K].
      most: static, of those who come.
    """
    candidates = jnp.where(protected, ABSENT, key)
    victims: list[jax.Array] = []
    for _ in range(most):
        left = candidates if not victims else _above(candidates, victims[-1])
        victims.append(left.min(axis=1))
    found = jnp.stack(victims, axis=1)  # [M, W, K]
    num_gone = jnp.maximum(num_coming - free, 0)
    gone = _index(found.shape[1]) < num_gone[:, None]
    last = jnp.where(gone, found, -1).max(axis=1)
    return _Taken(
        key=jnp.where(candidates <= last[:, None], ABSENT, key),
        filled=filled + jnp.minimum(num_coming, free),
        evictions=num_gone,
        waste=_num(gone & _is_ahead(found)),
    )


def _wide_plan(
    caches: Caches, settings: Settings, clock: jax.Array, needed: jax.Array
) -> tuple[Caches, dict[str, jax.Array]]:
    """`_plan` for any number of experts, bool[M, E]: by sorting."""
    key, filled = caches
    num_experts = key.shape[1]
    wanted = needed[:, :, None]
    hit, miss = wanted & (key < ABSENT), wanted & (key == ABSENT)
    num_needed = needed.sum(axis=1, dtype=jnp.int32)[:, None]
    free = settings.slots[None] - filled
    room = jnp.where(num_needed <= settings.slots[None], _num(miss), free)
    order = _order(miss)
    come = miss & (order < room[:, None])
    num_coming = _num(come)
    victims = jnp.sort(jnp.where(wanted, ABSENT, key), axis=1)
    num_gone = jnp.maximum(num_coming - free, 0)
    gone = _index(num_experts) < num_gone[:, None]
    last = jnp.where(gone, victims, -1).max(axis=1)
    kept = jnp.where(~wanted & (key <= last[:, None]), ABSENT, key)
    counts = _plan_counts(hit, miss, come)
    counts["prefetch_hits"] = _num(hit & _is_ahead(key))
    counts |= {"evictions": num_gone, "prefetch_waste": _num(gone & _is_ahead(victims))}
    key = jnp.where(hit | come, _key(clock, _index(num_experts), num_experts), kept)
    return Caches(key, filled + jnp.minimum(num_coming, free)), counts


def _plan_counts(hit: jax.Array, miss: jax.Array, come: jax.Array) -> dict[str, jax.Array]:
    num_misses, num_coming = _num(miss), _num(come)
    return {
        "steps": jnp.ones_like(num_misses),
        "needed": _num(hit) + num_misses,
        "hits": _num(hit),
        "misses": num_misses,
        "admitted": num_coming,
        "streamed": num_misses - num_coming,
        "fetches": (num_misses > 0).astype(jnp.int32),
    }


def _above(values: jax.Array, least: jax.Array) -> jax.Array:
    return jnp.where(values > least[:, None], values, ABSENT)


def _stride(num_experts: int) -> int:
    return 1 << (num_experts - 1).bit_length()


def _key(clock: jax.Array, expert: jax.Array, num_experts: int) -> jax.Array:
    return 2 * (_stride(num_experts) * clock + expert)


def _is_ahead(key: jax.Array) -> jax.Array:
    return (key < ABSENT) & (key & 1 == 1)


def _at(key: jax.Array, experts: jax.Array) -> jax.Array:
    """[M, E, K] at experts int32[M, W]; ABSENT beyond E."""
    layers = jnp.arange(len(key), dtype=jnp.int32)[:, None]
    return key.at[layers, experts].get(mode="fill", fill_value=int(ABSENT))


def _put(key: jax.Array, experts: jax.Array, values: jax.Array) -> jax.Array:
    """[M, E, K] with values [M, W, K] at experts int32[M, W]; none beyond E."""
    layers = jnp.arange(len(key), dtype=jnp.int32)[:, None]
    return key.at[layers, experts].set(values, mode="drop")


def _num(mask: jax.Array) -> jax.Array:
    """int32[M, K] of bool[M, n, K]."""
    return mask.sum(axis=1, dtype=jnp.int32)


def _order(mask: jax.Array) -> jax.Array:
    """int32[M, n, K], how many before each are set."""
    ones = mask.astype(jnp.int32)
    return jnp.cumsum(ones, axis=1) - ones


def _index(size: int, axis: int = 1) -> jax.Array:
    """0, 1, ... along an axis of three."""
    return jnp.expand_dims(
        jnp.arange(size, dtype=jnp.int32), [i for i in range(3) if i != axis % 3]
    )
