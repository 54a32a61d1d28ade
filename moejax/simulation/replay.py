"""A trace through any policy (`moejax.policies`): what runs where, and what crosses the link.

The policy's own functions decide; around them stand pools of each tier under LRU (or the policy's
`keep`), DyMoE's rules for an expert that is in several tiers (`policies.mixed_cache`), look-ahead a
layer before, and bulk transfers between calls, of which so many experts come as the link carries.
Layers run one after the other, as in the engine; settings side by side (`vmap`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.policies import mixed_cache
from moejax.policies.interface import SKIPPED, AnyPolicy, Decision, Observation, Requests
from moejax.simulation import pools
from moejax.simulation.segments import Tokens

# int32[2, len(EVENTS), T] by phase and tier, names as in `moejax.ledger`; `reused`: hits in a tier
# better than asked for; `bulk`: experts that transfers brought.
EVENTS = (
    "needed",
    "hits",
    "reused",
    "misses",
    "admitted",
    "streamed",
    "evictions",
    "prefetched",
    "prefetch_hits",
    "prefetch_waste",
    "bulk",
)


class Tally(NamedTuple):
    """Sums over steps and layers, by phase (prefill, decode).

    events: int32[2, len(EVENTS), T].
    steps: int32[2], steps of the model.
    fetches: int32[2], times that a layer fetched what it needed.
    ahead: int32[2, E + 1, T], how often a layer brought so many experts of a tier ahead.
    gate: float32[2, T + 3], gate mass by tier, skipped, substituted, and of all.
    """

    events: jax.Array
    steps: jax.Array
    fetches: jax.Array
    ahead: jax.Array
    gate: jax.Array


class Running(NamedTuple):
    """Of one setting: state of the policy, keys int32[M, T, E], clock int32[], sums."""

    state: Any
    keys: jax.Array
    clock: jax.Array
    tally: Tally


@dataclasses.dataclass(frozen=True)
class Replay:
    """Static facts.

    Attributes:
      policy: whose functions run.
      foreseen: P, experts whose probability the trace foresees for a token; 0: nobody looks ahead.
      by_pairs: see `pools.Search`.
    """

    policy: AnyPolicy
    foreseen: int
    by_pairs: bool

    def search(self, most: int, num_experts: int) -> pools.Search:
        """For at most so many who come."""
        return pools.Search(min(most, num_experts), self.by_pairs)


def begin(state: Any, slots: jax.Array, num_layers: int, num_experts: int) -> Running:
    """Before any token.

    Args:
      state: of the policy's `init`.
      slots: int32[T], of a layer.
      num_layers: M.
      num_experts: E.
    """
    num_tiers = len(slots)
    keys = pools.initial(slots, num_experts)
    tally = Tally(
        jnp.zeros((2, len(EVENTS), num_tiers), jnp.int32),
        jnp.zeros(2, jnp.int32),
        jnp.zeros(2, jnp.int32),
        jnp.zeros((2, num_experts + 1, num_tiers), jnp.int32),
        jnp.zeros((2, num_tiers + 3), jnp.float32),
    )
    keys = jnp.broadcast_to(keys[None], (num_layers, *keys.shape))
    return Running(state, keys, jnp.asarray(2, jnp.int32), tally)


@functools.partial(jax.jit, static_argnames=("replay", "is_prefill"), donate_argnames=("running",))
def run_calls(
    running: Running,
    slots: jax.Array,
    bulk: jax.Array,
    tokens: Tokens,
    *,
    replay: Replay,
    is_prefill: bool,
) -> Running:
    """Runs calls of several steps each, of K settings; after each call come bulk transfers.

    Args:
      running: stacked, [K, ...]; donated.
      slots: int32[K, T].
      bulk: int32[K], experts that a call's transfers bring at most.
      tokens: [calls, steps, ...].
      replay: static.
      is_prefill: static.
    """

    def call(running: Running, now: Tokens, slots: jax.Array, bulk: jax.Array) -> Running:
        def step(running: Running, step: Tokens) -> tuple[Running, None]:
            return _step(replay, is_prefill, slots, running, step), None

        running, _ = jax.lax.scan(step, running, now)
        return _transfer(replay, slots, bulk, running, int(not is_prefill))

    def calls(running: Running, now: Tokens) -> tuple[Running, None]:
        each = jax.vmap(call, in_axes=(0, None, 0, 0))
        return each(running, now, slots, bulk), None

    return jax.lax.scan(calls, running, tokens)[0]


def _step(
    replay: Replay, is_prefill: bool, slots: jax.Array, running: Running, tokens: Tokens
) -> Running:
    phase = int(not is_prefill)
    num_experts = running.keys.shape[-1]

    def layer(carry: tuple[Any, jax.Array], now: tuple[Any, ...]) -> tuple[Any, Any]:
        state, ahead = carry
        index, key, of_layer = now
        ids, weights, probabilities, importance, predicted = of_layer.dense(num_experts)
        brought = {"prefetched": jnp.zeros(len(slots), jnp.int32)}
        if replay.foreseen:
            how = replay.search(replay.foreseen * len(ids), num_experts)
            key, brought = _bring_ahead(slots, key, ahead, running.clock, how)
        observation = Observation(
            layer=index,
            probabilities=probabilities,
            ids=ids,
            weights=weights,
            active=tokens.active,
            resident=key > 0,
            importance=importance if is_prefill else None,
            predicted=predicted if replay.foreseen else None,
            is_prefill=is_prefill,
        )
        decision, state = replay.policy.decide(state, observation)
        key, events, gate = _serve(
            slots, key, decision, observation, running.clock, replay.search(ids.size, num_experts)
        )
        following = jnp.full(num_experts, -1, jnp.int32)
        if decision.ahead is not None:
            following = decision.ahead
        events = events | {name: events.get(name, 0) + n for name, n in brought.items()}
        zero = jnp.zeros(len(slots), jnp.int32)
        row = jnp.stack([events.get(name, zero) for name in EVENTS])
        return (state, following), (key, row, brought["prefetched"], gate)

    none = jnp.full(num_experts, -1, jnp.int32)
    layers = jnp.arange(len(running.keys), dtype=jnp.int32)
    (state, _), (keys, rows, brought, gates) = jax.lax.scan(
        layer, (running.state, none), (layers, running.keys, tokens.by_layer())
    )
    t = running.tally
    ran = jnp.any(tokens.active).astype(jnp.int32)
    many = jnp.arange(num_experts + 1, dtype=jnp.int32)[:, None, None]
    times = jnp.sum(brought[None] == many, axis=1, dtype=jnp.int32)
    missed = jnp.sum(rows[:, EVENTS.index("misses")], axis=1) > 0
    tally = Tally(
        events=t.events.at[phase].add(jnp.sum(rows, axis=0)),
        steps=t.steps.at[phase].add(ran),
        fetches=t.fetches.at[phase].add(jnp.sum(missed, dtype=jnp.int32)),
        ahead=t.ahead.at[phase].add(times * ran),
        gate=t.gate.at[phase].add(jnp.sum(gates, axis=0)),
    )
    return Running(state, keys, running.clock + 1, tally)


def _bring_ahead(
    slots: jax.Array, key: jax.Array, ahead: jax.Array, clock: jax.Array, how: pools.Search
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """int32[T, E] after the experts foreseen by the layer before came; counts [T]."""
    num_tiers, num_experts = key.shape
    tier = jnp.arange(num_tiers, dtype=jnp.int32)[:, None]
    wanted = ahead[None] == tier
    # A copy as good or better serves.
    there = key > 0
    served = jnp.stack([jnp.any(there[: t + 1], axis=0) for t in range(num_tiers)])
    new = wanted & ~served
    keys, moved = _admit_each(key, new, wanted, slots, 2 * clock + 1, None, how)
    came = new & (keys > 0)
    leaving = jnp.any(came, axis=0)[None] & ~came & (slots[:, None] < num_experts)
    counts = {
        "prefetched": moved.admitted,
        "evictions": moved.evictions,
        "prefetch_waste": moved.waste,
    }
    return jnp.where(leaving, 0, keys), counts


def _serve(
    slots: jax.Array,
    key: jax.Array,
    decision: Decision,
    observation: Observation,
    clock: jax.Array,
    how: pools.Search,
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
    """Keys after a layer ran as decided, counts [T] by name, gate mass float32[T + 3]."""
    num_tiers, num_experts = key.shape
    active = observation.active
    found = mixed_cache.served(key > 0, decision, active)
    tier = jnp.arange(num_tiers, dtype=jnp.int32)[:, None]
    runs = found.tier[None] == tier  # bool[T, E]
    misses = runs & found.fetched[None]
    hits = runs & ~found.fetched[None]
    key = jnp.where(found.leaving & (slots[:, None] < num_experts), 0, key)
    events = {
        "needed": _num(runs),
        "hits": _num(hits),
        "reused": _num(hits & found.reused[None]),
        "misses": _num(misses),
        "prefetch_hits": _num(hits & (key & 1 == 1)),
    }
    key = jnp.where(hits, 2 * clock, key)
    key, sums = _admit_each(key, misses, runs, slots, 2 * clock, decision.keep, how)
    events |= {
        "admitted": sums.admitted,
        "streamed": sums.streamed,
        "evictions": sums.evictions,
        "prefetch_waste": sums.waste,
    }
    weights = jnp.where(active[:, None], observation.weights, 0.0)
    computed = decision.tier != SKIPPED
    at = jnp.where(computed, found.tier[decision.ids], -1)
    by_tier = jnp.sum(jnp.where(at[None] == tier[:, :, None], weights[None], 0.0), axis=(1, 2))
    skipped = jnp.sum(jnp.where(computed, 0.0, weights))
    other = computed & (decision.ids != observation.ids)
    replaced = jnp.sum(jnp.where(other, weights, 0.0))
    gate = jnp.concatenate([by_tier, jnp.stack([skipped, replaced, jnp.sum(weights)])])
    return key, events, gate


def _transfer(
    replay: Replay, slots: jax.Array, bulk: jax.Array, running: Running, phase: int
) -> Running:
    """Asks the policy for transfers; the first `bulk` of those that move bytes arrive."""
    num_layers, num_tiers, num_experts = running.keys.shape
    requests, state = replay.policy.transfers(running.state, running.keys > 0)
    if not len(requests.layer):
        return running._replace(state=state)
    valid, moves = _moving(requests, running.keys)
    order = jnp.cumsum(moves.astype(jnp.int32)) - moves.astype(jnp.int32)
    done = valid & (order < bulk)
    place = tuple(
        jnp.where(done, index, size)
        for index, size in (
            (requests.layer, num_layers),
            (requests.tier, num_tiers),
            (requests.expert, num_experts),
        )
    )
    wanted = jnp.zeros(running.keys.shape, bool).at[place].set(True, mode="drop")
    elsewhere = jnp.any(wanted, axis=1, keepdims=True) & ~wanted
    is_full = (slots >= num_experts)[None, :, None]
    keys = jnp.where(elsewhere & ~is_full, 0, running.keys)
    new = wanted & (keys == 0)

    how = replay.search(num_experts, num_experts)

    def of_layer(key: jax.Array, coming: jax.Array) -> tuple[jax.Array, pools.Moved]:
        return _admit_each(key, coming, coming, slots, 2 * running.clock + 1, None, how)

    keys, moved = jax.vmap(of_layer)(keys, new)
    counts = {
        "bulk": moved.admitted,
        "evictions": moved.evictions,
        "prefetch_waste": moved.waste,
    }
    zero = jnp.zeros_like(moved.admitted)
    row = jnp.stack([jnp.sum(counts.get(name, zero), axis=0) for name in EVENTS])
    tally = running.tally._replace(events=running.tally.events.at[phase].add(row))
    return Running(state, keys, running.clock, tally)


def _admit_each(
    key: jax.Array,
    coming: jax.Array,
    protected: jax.Array,
    slots: jax.Array,
    stamp: jax.Array,
    keep: jax.Array | None,
    how: pools.Search,
) -> tuple[jax.Array, pools.Moved]:
    """`pools.admit` of every tier; the first four have its axis."""

    def admit(
        key: jax.Array, coming: jax.Array, protected: jax.Array, slots: jax.Array
    ) -> tuple[jax.Array, pools.Moved]:
        return pools.admit(key, coming, protected, slots, stamp, keep, how)

    return jax.vmap(admit)(key, coming, protected, slots)


def _moving(requests: Requests, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bool[R], which ask for something, and which of them move bytes."""
    valid = requests.layer >= 0
    there = keys[requests.layer, requests.tier, requests.expert] > 0
    return valid, valid & ~there


def _num(mask: jax.Array) -> jax.Array:
    """int32[T] of bool[T, E]."""
    return jnp.sum(mask, axis=1, dtype=jnp.int32)
