"""Replays a trace through any policy: what runs in which tier, and bytes over the link.

The policy's own functions decide. Around them are pools of each tier under LRU, DyMoE's rules for
an expert that is in several tiers (`cache_plan.resolve_tiers`), prefetch one layer ahead, and bulk
transfers between calls, which arrive some calls after their request (`DELAY`) and of which a
limited number is in flight. Settings run side by side (`vmap`), and so do the layers of a step if
the policy's layers are independent (`moejax.policies.base`), with equal results; else one after
the other.

Pools hold T tiers, of falling fidelity, of E experts; a tier of E slots or more always holds every
expert. Ties of last use go by id. Two tiers of planes may share one pool, whose items are E
refinements and E base planes (`pallas_kernels.cache_plan.shared_slots`). The trace is cut into
calls of one shape (`segments`).
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.policies.base import (
    SKIPPED,
    AnyPolicy,
    Decision,
    Observation,
    Requests,
    moves_between_steps,
    pairs_with_room,
    vmap_decide,
)
from moejax.routing.trace import DECODE, Trace
from pallas_kernels import cache_plan
from pallas_kernels.cache_plan import Wishes
from pallas_kernels.cache_plan.reference import last_misses

CALL_STEPS = 16  # decode steps of a call, where the trace does not know: those of the engine
_LEAST_ROWS = 16  # tokens of a prompt's chunk are padded to a power of two from here on


class _LayerTokens(NamedTuple):
    """Routing of N tokens at one layer; arrays as in `moejax.routing.trace`, no layer axis."""

    ids: Any
    weights: Any
    probabilities: Any
    importance: Any
    predicted_ids: Any
    predicted_probabilities: Any

    def dense(self, num_experts: int) -> tuple[Any, ...]:
        """Observation's ids, weights, probabilities [N, E], importance and predicted [N, E].

        If the trace lacks probabilities, they are the weights, and 0 for experts that were not
        chosen.
        """
        ids, weights = self.ids.astype(jnp.int32), self.weights.astype(jnp.float32)
        probabilities = self.probabilities
        if probabilities is None:
            probabilities = _spread(ids, weights, num_experts)
        predicted = None
        if self.predicted_ids is not None:
            foreseen = self.predicted_ids.astype(jnp.int32)
            predicted = _spread(
                foreseen, self.predicted_probabilities.astype(jnp.float32), num_experts
            )
        importance = self.importance
        if importance is not None:
            importance = importance.astype(jnp.float32)
        return ids, weights, probabilities.astype(jnp.float32), importance, predicted


class _StepTokens(NamedTuple):
    """Tokens of a step: active bool[N], layers' arrays [N, M, ...]; calls stack more axes."""

    active: Any
    layers: _LayerTokens

    def by_layer(self) -> _LayerTokens:
        """Moves the layer axis to the front."""
        return jax.tree.map(lambda array: jnp.swapaxes(array, 0, 1), self.layers)


class TraceSegment(NamedTuple):
    """Calls of one shape: tokens [calls, steps, ...]."""

    tokens: _StepTokens
    is_prefill: bool


def segments(trace: Trace) -> Iterator[TraceSegment]:
    """Cuts the trace in order; padding of a call or a step is not active."""
    _, starts, sizes = np.unique(trace.step, return_index=True, return_counts=True)
    phases = trace.phase[starts]
    layers, per_call = _layers(trace), trace.steps_per_call or CALL_STEPS

    def kind(s: int) -> tuple[bool, int]:
        if phases[s] == DECODE:
            return False, int(sizes[s])
        return True, max(_LEAST_ROWS, 1 << (int(sizes[s]) - 1).bit_length())

    for (is_prefill, rows), group in itertools.groupby(range(len(starts)), kind):
        steps = list(group)
        length = 1 if is_prefill else per_call
        shape = (-(-len(steps) // length), length, rows)
        index = np.full((shape[0] * length, rows), -1, np.int64)
        for place, s in enumerate(steps):
            index[place, : sizes[s]] = starts[s] + np.arange(sizes[s])
        index = index.reshape(shape)
        taken = jax.tree.map(operator.itemgetter(index), layers)
        yield TraceSegment(_StepTokens(index >= 0, taken), is_prefill)


def _layers(trace: Trace) -> _LayerTokens:
    """Routing of all layers [N, M, ...]; the last layer predicts nothing."""

    def padded(array: np.ndarray | None) -> np.ndarray | None:
        if array is None:
            return None
        return np.pad(array, ((0, 0), (0, 1), (0, 0)))

    return _LayerTokens(
        trace.ids,
        trace.weights,
        trace.probabilities,
        trace.importance,
        padded(trace.predicted_ids),
        padded(trace.predicted_probabilities),
    )


def _spread(ids: jax.Array, values: jax.Array, num_experts: int) -> jax.Array:
    """Scatters values [N, n] at ids [N, n] to float32[N, E]."""
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    return jnp.sum(
        jnp.where(ids[:, :, None] == expert[None, None], values[:, :, None], 0.0), axis=1
    )


MAX_SEARCHED = 32  # above so many victims, sorting is cheaper than searching one after the other
_LAST = np.int32(2**31 - 1)


class _Moved(NamedTuple):
    """Experts admitted, without a slot, evicted, and evicted unused: masks, or their counts."""

    admitted: jax.Array
    streamed: jax.Array
    evictions: jax.Array
    waste: jax.Array


def _initial(slots: jax.Array, num_experts: int) -> jax.Array:
    """Keys int32[T, E] before any token, of slots int32[T].

    A key is 0 for an expert without a slot, else 4 x last use + (prefetched, not used yet), and 4 x
    step - 1 for one that came before that step. Tiers of E slots hold all, others are empty.
    """
    key = jnp.where(slots >= num_experts, 4, 0).astype(jnp.int32)
    return jnp.repeat(key[:, None], num_experts, axis=1)


def _admit(
    key: jax.Array,  # int32[E], after other evictions
    coming: jax.Array,  # bool[E], experts to admit, none resident
    protected: jax.Array,  # bool[E], experts that may not be evicted
    slots: jax.Array,
    stamp: jax.Array,  # int32[], key of the admitted
    most: int,  # static, the most experts that are admitted
    first: int = 0,  # static, whose turn is the first, in a circle
) -> tuple[jax.Array, _Moved]:
    """Admits experts to one tier's slots: free ones, then victims as in `cache_plan.plan`."""
    num_experts = len(key)
    there = key > 0
    victims = there & ~protected
    num_coming, free = _num(coming), slots - _num(there)
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    fits = num_coming <= free + _num(victims)
    room = jnp.where(fits, num_coming, free)
    ones = jnp.roll(coming.astype(jnp.int32), -first)
    before = jnp.roll(jnp.cumsum(ones) - ones, first)
    admitted = coming & (before < room)
    num_gone = jnp.maximum(room - free, 0)
    stride = 1 << (num_experts - 1).bit_length()
    order = (key >> 1) * stride + expert  # whether it was brought ahead is no reason to stay
    ranked = jnp.where(victims, order, _LAST)
    last = jnp.full((), -1, jnp.int32)  # rank of the last victim
    if most <= MAX_SEARCHED:
        below = last
        for i in range(most):
            below = jnp.min(jnp.where(ranked > below, ranked, _LAST))
            last = jnp.where(i < num_gone, below, last)
    else:
        place = jnp.clip(num_gone - 1, 0, num_experts - 1)
        last = jnp.where(num_gone > 0, jnp.sort(ranked)[place], last)
    gone = victims & (ranked <= last)
    moved = _Moved(
        admitted=admitted, streamed=coming & ~admitted, evictions=gone,
        waste=gone & (key & 1 == 1),
    )  # fmt: skip
    return jnp.where(admitted, stamp, jnp.where(gone, 0, key)), moved


def _counts_of(moved: _Moved, admitted: str) -> dict[str, jax.Array]:
    """Counts by the names of `EVENTS`; `admitted` is that of experts that came."""
    return {admitted: moved.admitted, "evictions": moved.evictions, "prefetch_waste": moved.waste}


def _resident(key: jax.Array, shares: bool) -> jax.Array:
    """bool[..., T, E], experts that are there in each tier, by keys of that shape."""
    there = key > 0
    if not shares:
        return there
    base = there[..., 1, :]
    return jnp.stack([there[..., 0, :] & base, base], axis=-2)


def _admit_tiers(
    key: jax.Array, coming: jax.Array, protected: jax.Array, slots: jax.Array, stamp: jax.Array,
    most: int, *, shares: bool = False,
) -> tuple[jax.Array, _Moved]:  # fmt: skip
    """Runs `_admit` for every tier, or for the planes of one pool, base planes first; counts [T].

    The first four operands have the tiers' axis.
    """
    if shares:
        of_pool, wanted, kept = (array.reshape(-1) for array in (key, coming, protected))
        keys, moved = _admit(of_pool, wanted, kept, slots[1], stamp, 2 * most, first=key.shape[1])
    else:
        one = functools.partial(_admit, stamp=stamp, most=most)
        keys, moved = jax.vmap(one)(key, coming, protected, slots)
    counts = (_num(mask.reshape(key.shape), axis=1) for mask in moved)
    return keys.reshape(key.shape), _Moved(*counts)


def _num(mask: jax.Array, axis: int | None = None) -> jax.Array:
    return jnp.sum(mask, axis=axis, dtype=jnp.int32)


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
# serves: the engine reads the answer and begins to copy the row, then sends it, then writes the
# slot, each before a call of its own. The block is then free for what is asked for next.
DELAY = 3


class _Tally(NamedTuple):
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
    tally: _Tally


@dataclasses.dataclass(frozen=True)
class Replay:
    """Static facts of a replay."""

    policy: AnyPolicy  # whose functions run
    foreseen: int  # P, experts whose probability the trace predicts for a token; 0: no prefetch
    delay: int = DELAY  # calls from a request to its arrival; 0: it serves the next call
    refines: tuple[bool, ...] = ()  # as in `runs.Run`
    shares_slots: bool = False  # likewise
    host: tuple[int, ...] = ()  # likewise


def begin(
    state: Any, slots: jax.Array, num_layers: int, num_experts: int, shares_slots: bool
) -> Running:
    """Replay state before any token: a policy's `init` state, and pools of `slots` int32[T]."""
    num_tiers = len(slots)
    keys = _initial(slots, num_experts)
    if shares_slots:
        keys = jnp.zeros_like(keys)
    tally = _Tally(
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
    tokens: _StepTokens,  # [calls, steps, ...]
    *,
    replay: Replay,
    is_prefill: bool,
) -> Running:
    """Runs calls of several steps each, of K settings; bulk transfers precede each call."""

    def call(running: Running, now: _StepTokens, slots: jax.Array, bulk: jax.Array) -> Running:
        def step(running: Running, step: _StepTokens) -> tuple[Running, None]:
            return _step(replay, is_prefill, slots, running, step), None

        running = _transfer(replay, slots, bulk, running, int(not is_prefill))
        return jax.lax.scan(step, running, now)[0]

    def calls(running: Running, now: _StepTokens) -> tuple[Running, None]:
        each = jax.vmap(call, in_axes=(0, None, 0, 0))
        return each(running, now, slots, bulk), None

    return jax.lax.scan(calls, running, tokens)[0]


class _Layer(NamedTuple):
    """Result of one layer's step, or stacked: keys int32[T, E], the rest as in `_Tally`."""

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
    tokens: _StepTokens

    def one_by_one(self, state: Any, keys: jax.Array) -> tuple[Any, _Layer]:
        """Runs all layers in turn; returns the policy's state and the layers' results."""
        num_layers, _, num_experts = keys.shape
        none = jnp.full(num_experts, -1, jnp.int32)  # tiers of what the next layer prefetches

        def layer(carry: tuple[Any, jax.Array], now: tuple[Any, ...]) -> tuple[Any, _Layer]:
            state, ahead = carry
            index, key, of_layer = now
            seen = self.observe(key, index, of_layer)
            key, prefetched = self.prefetch(key, ahead, seen)
            seen = dataclasses.replace(seen, resident=_resident(key, self.replay.shares_slots))
            decision, state = self.replay.policy.decide(state, seen)
            done = self.run(key, prefetched, decision, seen)
            return (state, none if decision.ahead is None else decision.ahead), done

        layers = jnp.arange(num_layers, dtype=jnp.int32), keys, self.tokens.by_layer()
        (state, _), done = jax.lax.scan(layer, (state, none), layers)
        return state, done

    def _side_by_side(self, state: Any, keys: jax.Array) -> tuple[Any, _Layer]:
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
        seen = dataclasses.replace(seen, resident=_resident(keys, self.replay.shares_slots))
        decision, state = decide(state, seen)
        return state, jax.vmap(self.run)(keys, prefetched, decision, seen)

    def observe(self, key: jax.Array, layer: jax.Array, of_layer: _LayerTokens) -> Observation:
        """Builds the observation of a layer."""
        ids, weights, probabilities, importance, predicted = of_layer.dense(key.shape[-1])
        return Observation(
            layer, probabilities, ids, weights, self.tokens.active,
            _resident(key, self.replay.shares_slots),
            importance=importance if self.is_prefill else None,
            predicted=predicted if self.replay.foreseen else None,
            is_prefill=self.is_prefill,
        )  # fmt: skip

    def prefetch(
        self, key: jax.Array, ahead: jax.Array, seen: Observation
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Prefetches the predicted experts: keys int32[T, E] and counts [T] by name."""
        num_tiers, num_experts = key.shape
        if not self.replay.foreseen:
            return key, {"prefetched": jnp.zeros(num_tiers, jnp.int32)}
        most = min(self.replay.foreseen * len(seen.ids), num_experts)
        stamp = 4 * self.clock + 1
        if self.replay.shares_slots:
            wanted = jnp.stack([ahead == 0, ahead >= 0])
            # A refinement comes over a base plane that is there.
            new = wanted & (key == 0) & jnp.stack([key[1] > 0, jnp.ones(num_experts, bool)])
            keys, moved = _admit_tiers(key, new, wanted, self.slots, stamp, most, shares=True)
            return keys, _counts_of(moved, "prefetched")
        wanted = ahead[None] == jnp.arange(num_tiers, dtype=jnp.int32)[:, None]
        # A copy as good or better serves.
        there = key > 0
        served = jnp.stack([jnp.any(there[: t + 1], axis=0) for t in range(num_tiers)])
        new = wanted & ~served
        keys, moved = _admit_tiers(key, new, wanted, self.slots, stamp, most)
        came = new & (keys > 0)
        leaving = jnp.any(came, axis=0)[None] & ~came & (self.slots[:, None] < num_experts)
        return jnp.where(leaving, 0, keys), _counts_of(moved, "prefetched")

    def run(
        self, key: jax.Array, prefetched: dict[str, jax.Array], decision: Decision,
        seen: Observation,
    ) -> _Layer:  # fmt: skip
        """Runs a layer as decided, and adds the counts of the prefetch."""
        num_tiers, num_experts = key.shape
        active, shares = seen.active, self.replay.shares_slots
        wishes = Wishes(decision.tier, decision.at_least)
        resident = _resident(key, shares)
        found = cache_plan.resolve_tiers(
            resident, decision.ids, wishes, active, self.replay.refines
        )
        tier = jnp.arange(num_tiers, dtype=jnp.int32)[:, None]
        runs = found.tier[None] == tier  # bool[T, E]
        if shares:  # the first tier needs both planes
            runs = runs.at[1].set(runs[0] | runs[1])
            hits, misses = runs & (key > 0), runs & (key == 0)
        else:
            misses, hits = runs & found.fetched[None], runs & ~found.fetched[None]
            key = jnp.where(found.leaving & (self.slots[:, None] < num_experts), 0, key)
        events = {
            "needed": _num(runs, axis=1),
            "hits": _num(hits, axis=1),
            "reused": _num(hits & found.reused[None], axis=1),
            "misses": _num(misses, axis=1),
            "prefetch_hits": _num(hits & (key & 1 == 1), axis=1),
        }
        key = jnp.where(hits, 4 * self.clock, key)
        if self.replay.host and not self.is_prefill and len(seen.ids) == 1:
            missed = misses[0][decision.ids] & active[:, None]
            at_host = last_misses(missed, jnp.asarray(self.replay.host, jnp.int32))
            gone = jnp.zeros(num_experts, bool).at[decision.ids].max(at_host)
            misses &= ~gone[None]  # their gate mass is the tier's all the same
        most = min(seen.ids.size, num_experts)
        key, moved = _admit_tiers(
            key, misses, runs, self.slots, 4 * self.clock, most, shares=shares
        )
        events |= {"streamed": moved.streamed, **_counts_of(moved, "admitted")}
        weights = jnp.where(active[:, None], seen.weights, 0.0)
        computed = decision.tier != SKIPPED
        at = jnp.where(computed, found.tier[decision.ids], -1)
        by_tier = jnp.sum(jnp.where(at[None] == tier[:, :, None], weights[None], 0.0), axis=(1, 2))
        skipped = jnp.sum(jnp.where(computed, 0.0, weights))
        other = computed & (decision.ids != seen.ids)
        replaced = jnp.sum(jnp.where(other, weights, 0.0))
        gate = jnp.concatenate([by_tier, jnp.stack([skipped, replaced, jnp.sum(weights)])])
        events |= {name: events.get(name, 0) + n for name, n in prefetched.items()}
        ahead = prefetched["prefetched"]
        return _Layer(key, _row(events, ahead), ahead, gate)


def _step(
    replay: Replay, is_prefill: bool, slots: jax.Array, running: Running, tokens: _StepTokens
) -> Running:
    phase = int(not is_prefill)
    num_experts = running.keys.shape[-1]
    step = _Step(replay, is_prefill, slots, running.clock, tokens)
    through = step.one_by_one if replay.policy.layer_axes is None else step._side_by_side
    state, done = through(running.state, running.keys)
    t = running.tally
    ran = jnp.any(tokens.active).astype(jnp.int32)
    many = jnp.arange(num_experts + 1, dtype=jnp.int32)[:, None, None]
    times = jnp.sum(done.ahead[None] == many, axis=1, dtype=jnp.int32)
    come = [EVENTS.index(name) for name in ("admitted", "streamed")]
    missed = jnp.sum(done.events[:, jnp.asarray(come)], axis=(1, 2)) > 0
    tally = _Tally(
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
    """Requests transfers of the policy; earlier requests arrive, before it is asked."""
    num_layers, num_tiers, num_experts = running.keys.shape
    dims = num_layers, num_tiers, num_experts
    if not moves_between_steps(replay.policy, running.state, dims):
        _, state = replay.policy.transfers(running.state, running.keys > 0)
        return running._replace(state=state)
    in_flight = running.coming > 0
    room = jnp.maximum(bulk - jnp.sum(in_flight, dtype=jnp.int32), 0)
    running = running._replace(coming=running.coming + in_flight.astype(jnp.int8))
    if replay.delay:
        running = _arrive(replay, slots, running, phase)
    held = (running.keys > 0) | (running.coming > 0)
    requests, state = replay.policy.transfers(running.state, held)
    valid, moves = _moving(requests, held)
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
    tier = jnp.arange(num_tiers, dtype=jnp.int32)[None, :, None]
    target = jnp.max(jnp.where(wanted, tier, -1), axis=1, keepdims=True)  # -1: stays where it is
    # Like in the engine, a copy of higher fidelity leaves when its expert is requested, a lower one
    # when the better one is resident: a demotion takes its own slot.
    is_full = (slots >= num_experts)[None, :, None]
    keys = jnp.where((tier < target) & ~is_full, 0, running.keys)
    begins = wanted & (keys == 0) & (running.coming == 0)
    coming = jnp.where(begins, jnp.int8(1), running.coming)
    running = Running(state, _without_lower(keys, wanted, slots), coming, *running[3:])
    return running if replay.delay else _arrive(replay, slots, running, phase)


def _arrive(replay: Replay, slots: jax.Array, running: Running, phase: int) -> Running:
    """Admits the experts whose transfers end now, and counts them."""
    arrived, num_experts = running.coming == replay.delay + 1, running.keys.shape[-1]

    def of_layer(key: jax.Array, coming: jax.Array) -> tuple[jax.Array, _Moved]:
        # Later than what the last step used, and before what the next one does.
        return _admit_tiers(key, coming, coming, slots, 4 * running.clock - 1, num_experts)

    keys, moved = jax.vmap(of_layer)(running.keys, arrived & (running.keys == 0))
    row = jnp.sum(_row(_counts_of(moved, "bulk"), moved.admitted), axis=1)
    tally = running.tally._replace(events=running.tally.events.at[phase].add(row))
    return running._replace(
        keys=_without_lower(keys, arrived, slots), tally=tally,
        coming=jnp.where(arrived, jnp.int8(0), running.coming),
    )  # fmt: skip


def _without_lower(keys: jax.Array, come: jax.Array, slots: jax.Array) -> jax.Array:
    """Keys without copies of lower fidelity than resident ones that `come`, bool[M, T, E]."""
    num_tiers = keys.shape[1]
    tier = jnp.arange(num_tiers, dtype=jnp.int32)[None, :, None]
    best = jnp.min(jnp.where((keys > 0) & come, tier, num_tiers), axis=1, keepdims=True)
    return jnp.where((tier > best) & (slots < keys.shape[2])[None, :, None], 0, keys)


def _moving(requests: Requests, held: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Masks bool[R] of real requests, and of those that move bytes; held bool[M, T, E]."""
    valid = requests.layer >= 0
    there = held[requests.layer, requests.tier, requests.expert]
    return valid, valid & ~there
