"""Replays a trace through any policy: what runs in which tier, and bytes over the link.

The policy's own functions decide. Around them are pools of each tier under LRU, DyMoE's rules for
an expert that is in several tiers (`cache_plan.resolve_tiers`), prefetch one layer ahead, and bulk
transfers between calls, which arrive some calls after their request (`DELAY`) and of which a
limited number is in flight. Settings run side by side (`vmap`), and so do the layers of a step if
the policy's layers are independent (`moejax.policies.by_layer`), with equal results; else one after
the other.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.policies.base import (
    AnyPolicy,
    Decision,
    Observation,
    Requests,
    pairs_with_room,
)
from moejax.policies.by_layer import vmap_decide
from moejax.routing.simulate import pools
from moejax.routing.simulate.layer_pools import admit_each, prefetch_experts, serve
from moejax.routing.simulate.segments import LayerTokens, Tokens

# int32[2, len(EVENTS), T] by phase and tier, names as in `moejax.experts.ledger`; `reused`: hits
# in a tier better than asked for; `bulk`: experts that transfers brought.
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


# Calls that run between the one after which a policy asks for an expert and the first that its copy
# serves: the engine reads the answer before the next, then copies the row, sends it, and writes the
# slot, each before a call of its own.
DELAY = 4
_HELD = 1  # calls for which the block of a copy is not free once it serves


class Tally(NamedTuple):
    """Sums over steps and layers, by phase (prefill, decode).

    events: int32[2, len(EVENTS), T]. steps: int32[2], steps of the model. fetches: int32[2], times
    that a layer fetched misses. ahead: int32[2, E + 1, T], how often a layer prefetched so many
    experts of a tier. gate: float32[2, T + 3], gate mass by tier, skipped, substituted, and of all.
    """

    events: jax.Array
    steps: jax.Array
    fetches: jax.Array
    ahead: jax.Array
    gate: jax.Array


class Running(NamedTuple):
    """Replay of one setting: policy state, keys int32[M, T, E], clock int32[], sums.

    coming: int8[M, T, E], transfers in flight: calls since the request, from 1; 0 for none.
    """

    state: Any
    keys: jax.Array
    coming: jax.Array
    clock: jax.Array
    tally: Tally


@dataclasses.dataclass(frozen=True)
class Replay:
    """Static facts of a replay.

    Attributes:
      policy: whose functions run.
      foreseen: P, experts whose probability the trace predicts for a token; 0: no prefetch.
      one_by_one: runs the layers of a step in turn, even if the policy's are independent.
      on_gpu: compiles what is fast on a GPU.
      delay: calls from a request to its arrival; 0: it serves the next call.
    """

    policy: AnyPolicy
    foreseen: int
    delay: int = DELAY
    one_by_one: bool = False
    on_gpu: bool = False

    @property
    def axes(self) -> Any:
        """Layer axes of the policy's state; None: layers run in turn."""
        return None if self.one_by_one else self.policy.layer_axes

    def search(self, most: int, num_experts: int) -> pools.Search:
        """Search for at most `most` admissions."""
        by_pairs = self.on_gpu and self.axes is None
        return pools.Search(min(most, num_experts), by_pairs, self.on_gpu)


def begin(state: Any, slots: jax.Array, num_layers: int, num_experts: int) -> Running:
    """Replay state before any token.

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
    coming = jnp.zeros(keys.shape, jnp.int8)
    return Running(state, keys, coming, jnp.asarray(2, jnp.int32), tally)


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
    """Runs calls of several steps each, of K settings; bulk transfers precede each call.

    Args:
      running: stacked, [K, ...]; donated.
      slots: int32[K, T].
      bulk: int32[K], most experts in flight.
      tokens: [calls, steps, ...].
      replay: static.
      is_prefill: static.
    """

    def call(running: Running, now: Tokens, slots: jax.Array, bulk: jax.Array) -> Running:
        def step(running: Running, step: Tokens) -> tuple[Running, None]:
            return _step(replay, is_prefill, slots, running, step), None

        running = _transfer(replay, slots, bulk, running, int(not is_prefill))
        return jax.lax.scan(step, running, now)[0]

    def calls(running: Running, now: Tokens) -> tuple[Running, None]:
        each = jax.vmap(call, in_axes=(0, None, 0, 0))
        return each(running, now, slots, bulk), None

    return jax.lax.scan(calls, running, tokens)[0]


class _Layer(NamedTuple):
    """Result of one layer's step, or stacked: keys int32[T, E], the rest as in `Tally`."""

    keys: jax.Array
    events: jax.Array
    brought: jax.Array
    gate: jax.Array


def _step(
    replay: Replay, is_prefill: bool, slots: jax.Array, running: Running, tokens: Tokens
) -> Running:
    phase = int(not is_prefill)
    num_experts = running.keys.shape[-1]
    through = _one_by_one if replay.axes is None else _side_by_side
    state, done = through(replay, is_prefill, slots, running, tokens)
    t = running.tally
    ran = jnp.any(tokens.active).astype(jnp.int32)
    many = jnp.arange(num_experts + 1, dtype=jnp.int32)[:, None, None]
    times = jnp.sum(done.brought[None] == many, axis=1, dtype=jnp.int32)
    missed = jnp.sum(done.events[:, EVENTS.index("misses")], axis=1) > 0
    tally = Tally(
        events=t.events.at[phase].add(jnp.sum(done.events, axis=0)),
        steps=t.steps.at[phase].add(ran),
        fetches=t.fetches.at[phase].add(jnp.sum(missed, dtype=jnp.int32)),
        ahead=t.ahead.at[phase].add(times * ran),
        gate=t.gate.at[phase].add(jnp.sum(done.gate, axis=0)),
    )
    return Running(state, done.keys, running.coming, running.clock + 1, tally)


def _one_by_one(
    replay: Replay, is_prefill: bool, slots: jax.Array, running: Running, tokens: Tokens
) -> tuple[Any, _Layer]:
    """Runs all layers in turn; returns the policy's state and the layers' results."""
    num_layers, _, num_experts = running.keys.shape

    def layer(carry: tuple[Any, jax.Array], now: tuple[Any, ...]) -> tuple[Any, _Layer]:
        state, ahead = carry
        index, key, of_layer = now
        seen = _seen(replay, is_prefill, tokens.active, key, index, of_layer)
        key, brought = _brought(replay, slots, running.clock, key, ahead, seen)
        seen = dataclasses.replace(seen, resident=key > 0)
        decision, state = replay.policy.decide(state, seen)
        done = _served(replay, slots, running.clock, key, brought, decision, seen)
        return (state, _following(decision, num_experts)), done

    (state, _), done = jax.lax.scan(
        layer,
        (running.state, jnp.full(num_experts, -1, jnp.int32)),
        (jnp.arange(num_layers, dtype=jnp.int32), running.keys, tokens.by_layer()),
    )
    return state, done


def _side_by_side(
    replay: Replay, is_prefill: bool, slots: jax.Array, running: Running, tokens: Tokens
) -> tuple[Any, _Layer]:
    """Runs `_one_by_one` with all layers vmapped."""
    num_layers, _, num_experts = running.keys.shape
    keys, state = running.keys, running.state
    see = functools.partial(_seen, replay, is_prefill, tokens.active)
    seen = jax.vmap(see)(keys, jnp.arange(num_layers, dtype=jnp.int32), tokens.by_layer())
    ahead = jnp.full((num_layers, num_experts), -1, jnp.int32)
    if replay.foreseen:  # what is brought ahead does not depend on what is there
        decision, _ = vmap_decide(replay.policy, replay.axes, state, seen)
        if decision.ahead is not None:
            ahead = jnp.concatenate([ahead[:1], decision.ahead[:-1]])
    bring = functools.partial(_brought, replay, slots, running.clock)
    keys, brought = jax.vmap(bring)(keys, ahead, seen)
    seen = dataclasses.replace(seen, resident=keys > 0)
    decision, state = vmap_decide(replay.policy, replay.axes, state, seen)
    serve = functools.partial(_served, replay, slots, running.clock)
    return state, jax.vmap(serve)(keys, brought, decision, seen)


def _seen(
    replay: Replay,
    is_prefill: bool,
    active: jax.Array,
    key: jax.Array,
    layer: jax.Array,
    of_layer: LayerTokens,
) -> Observation:
    """Builds the observation of a layer."""
    ids, weights, probabilities, importance, predicted = of_layer.dense(key.shape[-1])
    return Observation(
        layer=layer,
        probabilities=probabilities,
        ids=ids,
        weights=weights,
        active=active,
        resident=key > 0,
        importance=importance if is_prefill else None,
        predicted=predicted if replay.foreseen else None,
        is_prefill=is_prefill,
    )


def _brought(
    replay: Replay,
    slots: jax.Array,
    clock: jax.Array,
    key: jax.Array,
    ahead: jax.Array,
    seen: Observation,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs `prefetch_experts` if the replay prefetches."""
    if not replay.foreseen:
        return key, {"prefetched": jnp.zeros(len(slots), jnp.int32)}
    how = replay.search(replay.foreseen * len(seen.ids), key.shape[-1])
    return prefetch_experts(slots, key, ahead, clock, how)


def _following(decision: Decision, num_experts: int) -> jax.Array:
    """Tier, int32[E], in which to prefetch each expert of the next layer; -1 for none."""
    none = jnp.full(num_experts, -1, jnp.int32)
    return none if decision.ahead is None else decision.ahead


def _served(
    replay: Replay,
    slots: jax.Array,
    clock: jax.Array,
    key: jax.Array,
    brought: dict[str, jax.Array],
    decision: Decision,
    seen: Observation,
) -> _Layer:
    """Runs `serve` and adds the prefetch."""
    how = replay.search(seen.ids.size, key.shape[-1])
    key, events, gate = serve(slots, key, decision, seen, clock, how)
    events = events | {name: events.get(name, 0) + n for name, n in brought.items()}
    zero = jnp.zeros(len(slots), jnp.int32)
    row = jnp.stack([events.get(name, zero) for name in EVENTS])
    return _Layer(key, row, brought["prefetched"], gate)


def _transfer(
    replay: Replay, slots: jax.Array, bulk: jax.Array, running: Running, phase: int
) -> Running:
    """Requests transfers of the policy; earlier requests arrive."""
    num_layers, num_tiers, num_experts = running.keys.shape
    held, coming = (_HELD if replay.delay else 0), running.coming
    requests, state = replay.policy.transfers(running.state, (running.keys > 0) | (coming > 0))
    if not len(requests.layer):
        return running._replace(state=state)
    room = jnp.maximum(bulk - jnp.sum(coming > 0, dtype=jnp.int32), 0)
    valid, moves = _moving(requests, (running.keys > 0) | (coming > 0))
    if replay.policy.repeats_requests:
        done = valid & pairs_with_room(moves, room)
    else:
        done = valid & (jnp.cumsum(moves, dtype=jnp.int32) - moves.astype(jnp.int32) < room)
    place = tuple(
        jnp.where(done, index, size)
        for index, size in (
            (requests.layer, num_layers),
            (requests.tier, num_tiers),
            (requests.expert, num_experts),
        )
    )
    wanted = jnp.zeros(running.keys.shape, bool).at[place].set(True, mode="drop")
    is_full = (slots >= num_experts)[None, :, None]
    tier = jnp.arange(num_tiers, dtype=jnp.int32)[None, :, None]
    target = jnp.max(jnp.where(wanted, tier, -1), axis=1, keepdims=True)  # -1: stays where it is
    # Like in the engine, a copy of higher fidelity leaves when its expert is requested, a lower one
    # when the better one is resident: a demotion takes its own slot.
    keys = jnp.where((tier < target) & ~is_full, 0, running.keys)
    coming = jnp.where(coming > 0, coming + 1, (wanted & (keys == 0)).astype(jnp.int8))
    arrived = coming == replay.delay + 1
    new = arrived & (keys == 0)

    how = replay.search(num_experts, num_experts)

    def of_layer(key: jax.Array, coming: jax.Array) -> tuple[jax.Array, pools.Moved]:
        # Later than what the last step used, and before what the next one does.
        return admit_each(key, coming, coming, slots, 2 * running.clock - 1, how)

    keys, moved = jax.vmap(of_layer)(keys, new)
    come = (keys > 0) & (arrived | wanted)
    best = jnp.min(jnp.where(come, tier, num_tiers), axis=1, keepdims=True)
    keys = jnp.where((tier > best) & ~is_full, 0, keys)
    coming = jnp.where(coming > replay.delay + held, 0, coming)
    counts = {
        "bulk": moved.admitted,
        "evictions": moved.evictions,
        "prefetch_waste": moved.waste,
    }
    zero = jnp.zeros_like(moved.admitted)
    row = jnp.stack([jnp.sum(counts.get(name, zero), axis=0) for name in EVENTS])
    tally = running.tally._replace(events=running.tally.events.at[phase].add(row))
    return Running(state, keys, coming, running.clock, tally)


def _moving(requests: Requests, held: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Masks bool[R] of real requests, and of those that move bytes; held bool[M, T, E]."""
    valid = requests.layer >= 0
    there = held[requests.layer, requests.tier, requests.expert]
    return valid, valid & ~there
