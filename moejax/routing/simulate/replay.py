"""Replays a trace through any policy: what runs in which tier, and bytes over the link.

The policy's own functions decide. Around them are pools of each tier under LRU, DyMoE's rules for
an expert that is in several tiers (`cache_plan.resolve_tiers`), prefetch one layer ahead, and bulk
transfers between calls, which arrive some calls after their request (`DELAY`) and of which a
limited number is in flight. Settings run side by side (`vmap`), and so do the layers of a step if
the policy's layers are independent (`moejax.policies.base`), with equal results; else one after
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
    vmap_decide,
)
from moejax.routing.simulate.pools import Moved, admit_each, initial, prefetch_experts, serve
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
    """Static facts of a replay."""

    policy: AnyPolicy  # whose functions run
    foreseen: int  # P, experts whose probability the trace predicts for a token; 0: no prefetch
    delay: int = DELAY  # calls from a request to its arrival; 0: it serves the next call
    # runs the layers of a step in turn, even if the policy's are independent
    one_by_one: bool = False


def begin(state: Any, slots: jax.Array, num_layers: int, num_experts: int) -> Running:
    """Replay state before any token: a policy's `init` state, and pools of `slots` int32[T]."""
    num_tiers = len(slots)
    keys = initial(slots, num_experts)
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
    running: Running,  # stacked, [K, ...]; donated
    slots: jax.Array,  # int32[K, T]
    bulk: jax.Array,  # int32[K], most experts in flight
    tokens: Tokens,  # [calls, steps, ...]
    *,
    replay: Replay,
    is_prefill: bool,
) -> Running:
    """Runs calls of several steps each, of K settings; bulk transfers precede each call."""

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
    ahead: jax.Array
    gate: jax.Array


@dataclasses.dataclass(frozen=True)
class _Step:
    """One step of one setting."""

    replay: Replay
    is_prefill: bool
    slots: jax.Array  # int32[T], of a layer
    clock: jax.Array
    tokens: Tokens

    def one_by_one(self, state: Any, keys: jax.Array) -> tuple[Any, _Layer]:
        """Runs all layers in turn; returns the policy's state and the layers' results."""
        num_layers, _, num_experts = keys.shape
        none = jnp.full(num_experts, -1, jnp.int32)  # tiers of what the next layer prefetches

        def layer(carry: tuple[Any, jax.Array], now: tuple[Any, ...]) -> tuple[Any, _Layer]:
            state, ahead = carry
            index, key, of_layer = now
            seen = self.observe(key, index, of_layer)
            key, prefetched = self.prefetch(key, ahead, seen)
            seen = dataclasses.replace(seen, resident=key > 0)
            decision, state = self.replay.policy.decide(state, seen)
            done = self.run(key, prefetched, decision, seen)
            return (state, none if decision.ahead is None else decision.ahead), done

        layers = jnp.arange(num_layers, dtype=jnp.int32), keys, self.tokens.by_layer()
        (state, _), done = jax.lax.scan(layer, (state, none), layers)
        return state, done

    def side_by_side(self, state: Any, keys: jax.Array) -> tuple[Any, _Layer]:
        """Runs `one_by_one` with all layers vmapped."""
        num_layers, _, num_experts = keys.shape
        decide = functools.partial(vmap_decide, self.replay.policy)
        layers = jnp.arange(num_layers, dtype=jnp.int32)
        seen = jax.vmap(self.observe)(keys, layers, self.tokens.by_layer())
        ahead = jnp.full((num_layers, num_experts), -1, jnp.int32)
        if self.replay.foreseen:  # what is prefetched does not depend on what is there
            decision, _ = decide(state, seen)
            if decision.ahead is not None:
                ahead = jnp.concatenate([ahead[:1], decision.ahead[:-1]])
        keys, prefetched = jax.vmap(self.prefetch)(keys, ahead, seen)
        seen = dataclasses.replace(seen, resident=keys > 0)
        decision, state = decide(state, seen)
        return state, jax.vmap(self.run)(keys, prefetched, decision, seen)

    def observe(self, key: jax.Array, layer: jax.Array, of_layer: LayerTokens) -> Observation:
        """Builds the observation of a layer."""
        ids, weights, probabilities, importance, predicted = of_layer.dense(key.shape[-1])
        return Observation(
            layer, probabilities, ids, weights, self.tokens.active, key > 0,
            importance=importance if self.is_prefill else None,
            predicted=predicted if self.replay.foreseen else None,
            is_prefill=self.is_prefill,
        )  # fmt: skip

    def prefetch(
        self, key: jax.Array, ahead: jax.Array, seen: Observation
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Runs `prefetch_experts` if the replay prefetches."""
        if not self.replay.foreseen:
            return key, {"prefetched": jnp.zeros(len(self.slots), jnp.int32)}
        most = min(self.replay.foreseen * len(seen.ids), key.shape[-1])
        return prefetch_experts(self.slots, key, ahead, self.clock, most)

    def run(
        self, key: jax.Array, prefetched: dict[str, jax.Array], decision: Decision,
        seen: Observation,
    ) -> _Layer:  # fmt: skip
        """Runs `serve` and adds the counts of the prefetch."""
        most = min(seen.ids.size, key.shape[-1])
        key, events, gate = serve(self.slots, key, decision, seen, self.clock, most)
        events = events | {name: events.get(name, 0) + n for name, n in prefetched.items()}
        ahead = prefetched["prefetched"]
        return _Layer(key, _row(events, ahead), ahead, gate)


def _step(
    replay: Replay, is_prefill: bool, slots: jax.Array, running: Running, tokens: Tokens
) -> Running:
    phase = int(not is_prefill)
    num_experts = running.keys.shape[-1]
    step = _Step(replay, is_prefill, slots, running.clock, tokens)
    in_turn = replay.one_by_one or replay.policy.layer_axes is None
    through = step.one_by_one if in_turn else step.side_by_side
    state, done = through(running.state, running.keys)
    t = running.tally
    ran = jnp.any(tokens.active).astype(jnp.int32)
    many = jnp.arange(num_experts + 1, dtype=jnp.int32)[:, None, None]
    times = jnp.sum(done.ahead[None] == many, axis=1, dtype=jnp.int32)
    missed = jnp.sum(done.events[:, EVENTS.index("misses")], axis=1) > 0
    tally = Tally(
        events=t.events.at[phase].add(jnp.sum(done.events, axis=0)),
        steps=t.steps.at[phase].add(ran),
        fetches=t.fetches.at[phase].add(jnp.sum(missed, dtype=jnp.int32)),
        ahead=t.ahead.at[phase].add(times * ran),
        gate=t.gate.at[phase].add(jnp.sum(done.gate, axis=0)),
    )
    return Running(state, done.keys, running.coming, running.clock + 1, tally)


def _row(events: dict[str, jax.Array], like: jax.Array) -> jax.Array:
    """Stacks counts in the order of `EVENTS`; those that are missing are 0."""
    return jnp.stack([events.get(name, jnp.zeros_like(like)) for name in EVENTS])


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

    def of_layer(key: jax.Array, coming: jax.Array) -> tuple[jax.Array, Moved]:
        # Later than what the last step used, and before what the next one does.
        return admit_each(key, coming, coming, slots, 2 * running.clock - 1, num_experts)

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
    row = jnp.sum(_row(counts, moved.admitted), axis=1)
    tally = running.tally._replace(events=running.tally.events.at[phase].add(row))
    return Running(state, keys, coming, running.clock, tally)


def _moving(requests: Requests, held: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Masks bool[R] of real requests, and of those that move bytes; held bool[M, T, E]."""
    valid = requests.layer >= 0
    there = held[requests.layer, requests.tier, requests.expert]
    return valid, valid & ~there
