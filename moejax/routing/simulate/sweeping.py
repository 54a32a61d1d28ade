"""Sweeps a grid of settings over one trace: traffic, costs, and Belady's bound on hits."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config.grid import described
from moejax.config.sweep import LRU as LRU
from moejax.errors import MoejaxError
from moejax.policies.base import AnyPolicy
from moejax.policies.make import make_policy
from moejax.routing.simulate import replay
from moejax.routing.simulate.costs import GIB, Machine, Traffic, bandwidth_bound_ms, step_ms
from moejax.routing.simulate.runs import Run, RunResult, run_policies
from moejax.routing.trace import DECODE, Trace

HOST = "host"  # an axis of a grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiers:
    """Stored forms: names, of falling fidelity, and bytes per expert.

    With `planes` the first of two tiers is the last bit plane over the second, and its bytes are
    that plane's. Where the second has slots for fewer experts than there are, the planes of both
    share the sum of the slots, each as large as one of the second.
    """

    names: tuple[str, ...]
    expert_bytes: tuple[int, ...]
    planes: bool = False

    @classmethod
    def by_planes(cls, names: tuple[str, ...], expert_bytes: tuple[int, ...]) -> "Tiers":
        """Makes two tiers of planes; of a first one of more bytes these are a whole copy's.

        Raises:
          MoejaxError: there are not two.
        """
        if len(names) != 2:
            raise MoejaxError(f"planes are of two tiers, such as int4,int2, not {', '.join(names)}")
        first, second = expert_bytes
        plane = first - second if first > second else first
        return cls(names=names, expert_bytes=(plane, second), planes=True)

    def _shares_slots(self, slots: tuple[int, ...], num_experts: int) -> bool:
        """Whether planes of both tiers share their slots."""
        return self.planes and slots[1] < num_experts

    def _pool_bytes(self, slots: tuple[int, ...], num_experts: int) -> int:
        """Bytes of a layer's slots."""
        if self._shares_slots(slots, num_experts):
            return sum(slots) * self.expert_bytes[1]
        return sum(map(operator.mul, slots, self.expert_bytes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """Decode results of one setting; shares are of needed experts or of gate mass."""

    setting: Mapping[str, Any]  # its entry in the grid
    slots: tuple[int, ...]  # slots per layer in each tier
    traffic: Traffic  # bytes and experts moved
    hit_rate: float  # experts found in a slot; planes count apart, as in `Ledger.hit_rate`
    gate: Mapping[str, float]  # share of gate mass by tier, "skipped" and "substituted"
    device_bytes: int  # bytes of the pools
    # of Belady's cache, if all these bytes hold experts of the cheapest tier, without prefetch. nan
    # if pairs were skipped or replaced, which needs fewer experts than the trace.
    best_hit_rate: float
    least_bytes: float  # bytes per step over the link, of such a cache; nan likewise

    def figures(self, machine: Machine) -> dict[str, float]:
        """Numbers for a table and a file, at a machine's speeds; ceilings only if not nan."""
        moved = self.traffic.bytes_by_cause
        ceilings = {
            "bound_ms": bandwidth_bound_ms(machine, self.least_bytes),
            "best_hit_rate": self.best_hit_rate,
        }
        return {
            "tpot_ms": step_ms(machine, self.traffic),
            "hit_rate": self.hit_rate,
            **({} if math.isnan(self.least_bytes) else ceilings),
            "device_gib": self.device_bytes / GIB,
            **{f"{cause}_mb": amount / 1e6 for cause, amount in moved.items()},
            **{f"gate_{name}": share for name, share in self.gate.items()},
        }


def sweep(
    trace: Trace,
    policy: str | Callable[..., AnyPolicy],
    grid: Sequence[Mapping[str, Any]],
    tiers: Tiers,
    bulk: int | None = None,
) -> list[SweepPoint]:
    """Runs every setting of a grid over the trace and returns its decode results.

    Args:
      policy: `LRU`, the policy "on_demand" in one tier; a name of `policies.make`; or a callable
        that makes a policy from its settings, such as the class of a policy of your own.
      grid: settings: `slots` of a layer, a number or one of each tier, and those of the policy.
      bulk: most experts in flight between calls, like the engine's `memory.bulk`; None: the
        engine's default.

    Raises:
      MoejaxError: a setting is unknown or not allowed, or the trace lacks what it needs.
    """
    if not (trace.phase == DECODE).any():
        raise MoejaxError(
            "the trace holds no decoded token, so there is nothing to sweep over: it is of prompts "
            "alone, as moejax.evaluate scores them; record one with moejax.generate"
        )
    slots = [_slots(setting, trace.num_experts, tiers) for setting in grid]
    if policy == LRU:
        _check_lru(grid, tiers)
        policy = "on_demand"
    found = _sweep_policy(trace, policy, grid, slots, tiers, bulk)
    cheapest = tiers.expert_bytes[1] if tiers.planes else min(tiers.expert_bytes)
    sizes = [tiers._pool_bytes(row, trace.num_experts) for row in slots]
    best = _belady(trace, [size // cheapest for size in sizes])
    # Pools that hold all experts do so from the start.
    all_there = [sum(row) >= trace.num_experts for row in slots]
    best = [(n, n if whole else h) for (n, h), whole in zip(best, all_there, strict=True)]
    steps = int(found[0][0].steps)
    return [
        SweepPoint(
            setting=setting,
            slots=row,
            traffic=traffic,
            hit_rate=hit_rate,
            gate=gate,
            device_bytes=size * trace.num_layers,
            best_hit_rate=hits / needed if _needs_all(gate) else math.nan,
            least_bytes=(needed - hits) * cheapest / steps if _needs_all(gate) else math.nan,
        )
        for setting, row, (traffic, hit_rate, gate), size, (needed, hits) in zip(
            grid, slots, found, sizes, best, strict=True
        )
    ]


def _needs_all(gate: Mapping[str, float]) -> bool:
    """Whether every expert that the router chose ran."""
    return not gate["skipped"] and not gate["substituted"]


Found = tuple[Traffic, float, Mapping[str, float]]


def _check_lru(grid: Sequence[Mapping[str, Any]], tiers: Tiers) -> None:
    """Raises MoejaxError for settings that the engine's own cache lacks."""
    for setting in grid:
        if unknown := sorted(set(setting) - {"slots", "prefetch", HOST}):
            raise MoejaxError(
                f"lru has no setting {', '.join(unknown)}; known: slots, prefetch, {HOST}"
            )
    if len(tiers.names) != 1:
        raise MoejaxError(
            f"lru has one tier, not {', '.join(tiers.names)}: give --config.tiers=NAME=BYTES of "
            "one, or another policy"
        )


def _sweep_policy(
    trace: Trace,
    policy: str | Callable[..., AnyPolicy],
    grid: Sequence[Mapping[str, Any]],
    slots: Sequence[tuple[int, ...]],
    tiers: Tiers,
    bulk: int | None,
) -> list[Found]:
    make = functools.partial(make_policy, policy) if isinstance(policy, str) else policy
    runs = []
    for setting, row in zip(grid, slots, strict=True):
        given = {key: value for key, value in setting.items() if key not in ("slots", HOST)}
        try:
            made = make(**given)
        except MoejaxError as error:
            raise MoejaxError(f"{described(setting) or policy}: {error}") from error
        shares = tiers._shares_slots(row, trace.num_experts)
        runs.append(
            Run(
                policy=made, tiers=tiers.names, expert_bytes=tiers.expert_bytes,
                slots=(sum(row),) * 2 if shares else row, bulk=bulk,
                refines=(True, False) if tiers.planes else (), shares_slots=shares,
                host=_host(setting, policy, trace),
            )
        )  # fmt: skip
    return [_decode_result(trace, result) for result in run_policies(trace, runs)]


def _host(setting: Mapping[str, Any], policy: Any, trace: Trace) -> tuple[int, ...]:
    """Misses that the host's cores multiply, by their number (`Run.host`)."""
    given = setting.get(HOST)
    if given is None:
        return ()
    fits = isinstance(given, tuple) and len(given) == trace.width + 1
    if not fits or not all(type(n) is int and 0 <= n <= i for i, n in enumerate(given)):
        raise MoejaxError(
            f"grid: {described({HOST: given})} must say of 0, 1, ... {trace.width} misses how many "
            "the host multiplies, such as 0/0/1/2, as the engine tells when it loads"
        )
    if policy != "on_demand":
        raise MoejaxError(f"grid: {HOST} is of the engine's cache without a policy: leave it out")
    return given


def _decode_result(trace: Trace, result: RunResult) -> Found:
    event = dict(zip(replay.EVENTS, result.events[DECODE], strict=True))
    gate = result.gate[DECODE]
    names = (*result.run.tiers, "skipped", "substituted")
    traffic = Traffic(
        num_layers=trace.num_layers,
        steps=int(result.steps[DECODE]),
        fetches=int(result.fetches[DECODE]),
        misses=event["admitted"] + event["streamed"],
        ahead=result.ahead[DECODE],
        bulk=event["bulk"],
        expert_bytes=np.asarray(result.run.expert_bytes),
    )
    shares = {name: float(mass / gate[-1]) for name, mass in zip(names, gate[:-1], strict=True)}
    hits, needed = int(event["hits"].sum()), int(event["needed"].sum())
    if result.run.refines and not result.run.shares_slots:  # their base planes are all there
        bases = int(event["needed"][np.asarray(result.run.refines)].sum())
        hits, needed = hits + bases, needed + bases
    return traffic, hits / max(1, needed), shares


def _belady(trace: Trace, slots: Sequence[int]) -> list[tuple[int, int]]:
    """Counts (needed, hits) in decode of the best cache with so many slots a layer."""
    sizes = sorted({min(size, trace.num_experts) for size in slots})
    found = _most_hits(*_needed_experts(trace), jnp.asarray(sizes, jnp.int32))
    needed, hits = (np.asarray(part)[DECODE].sum(axis=0) for part in found)
    places = [sizes.index(min(size, trace.num_experts)) for size in slots]
    return [(int(needed[k]), int(hits[k])) for k in places]


def _slots(setting: Mapping[str, Any], num_experts: int, tiers: Tiers) -> tuple[int, ...]:
    given = setting.get("slots")
    row = given if isinstance(given, tuple) else (given,)
    if len(row) != len(tiers.names) or not all(type(size) is int for size in row):
        said = described({"slots": given}) if given is not None else "no slots"
        form = "/".join([str(num_experts // 4)] * len(tiers.names))
        raise MoejaxError(
            f"grid: {said}, but slots is a whole number for each tier ({', '.join(tiers.names)}), "
            f"such as slots={form}"
        )
    if not all(0 <= size <= num_experts for size in row):
        raise MoejaxError(
            f"grid: {described({'slots': given})} must be from 0 to {num_experts}, the experts of "
            f"a layer of this trace, such as slots=1:{num_experts}"
        )
    return row


NEVER = np.int32(2**31 - 1)
_BLOCK_BYTES = 2**26  # of the next uses of the layers that run side by side


class _Needed(NamedTuple):
    """Experts needed and those resident, int32[2, M, K], by phase."""

    needed: jax.Array
    hits: jax.Array


def _needed_experts(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Mask bool[S, M, E] of the experts that each step needs, and bool[S], whether it decodes."""
    _, starts, step = np.unique(trace.step, return_index=True, return_inverse=True)
    masks = np.zeros((len(starts), trace.num_layers, trace.num_experts), bool)
    layers = np.arange(trace.num_layers)[None, :, None]
    masks[step[:, None, None], layers, trace.ids] = True
    return masks, trace.phase[starts] == DECODE


def _next_uses(masks: np.ndarray) -> np.ndarray:
    """Next step, int32[S, M, E], that needs each expert after a step; `NEVER` for none."""
    found = np.full(masks.shape, NEVER)
    for s in range(len(masks) - 2, -1, -1):
        found[s] = np.where(masks[s + 1], np.int32(s + 1), found[s + 1])
    return found


def _most_hits(masks: np.ndarray, is_decode: np.ndarray, slots: jax.Array) -> _Needed:
    """Counts the most hits that any cache can have, prefetch aside (Belady, 1966).

    After each step, of the resident and the needed experts, those of the nearest next use stay; an
    expert needed now may pass through without a slot, like in the engine's transient slots.
    Prefetch moves a miss to an earlier time, not away: the bytes are a bound for it too. Masks are
    those of `_needed_experts`, of fewer than 2^31 / E steps; slots are int32[K].
    """
    num_steps, num_layers, num_experts = masks.shape
    block, parts = max(1, _BLOCK_BYTES // (4 * num_steps * num_experts)), []
    for first in range(0, num_layers, block):
        some = masks[:, first : first + block]
        steps = jax.tree.map(jnp.asarray, (some, _next_uses(some), is_decode))
        parts.append(_scan(steps, slots))
    return jax.tree.map(lambda *of: jnp.concatenate(of, axis=1), *parts)


@jax.jit
def _scan(steps: tuple[jax.Array, ...], slots: jax.Array) -> _Needed:
    """Runs Belady's cache."""
    _, num_layers, num_experts = steps[0].shape
    stride = 1 << (num_experts - 1).bit_length()
    last = NEVER // stride - 1
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    shape = (num_layers, num_experts, len(slots))

    def step(
        carry: tuple[jax.Array, _Needed], now: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, _Needed], None]:
        held, so_far = carry  # bool[M, E, K]
        mask, uses, decodes = now
        # Unequal for each expert, so that a bound tells those who stay; NEVER goes first.
        order = (jnp.minimum(uses, last) * stride + expert[None])[:, :, None]
        hits = (held & mask[:, :, None]).sum(axis=1, dtype=jnp.int32)
        candidates = held | mask[:, :, None]
        excess = candidates.sum(axis=1, dtype=jnp.int32) - slots[None]
        ranked = jnp.where(candidates, order, -1)
        bound = _bound(ranked, excess)
        held = candidates & (order < bound[:, None])
        phase = decodes.astype(jnp.int32)
        count = jnp.broadcast_to(mask.sum(axis=1, dtype=jnp.int32)[:, None], hits.shape)
        so_far = _Needed(so_far.needed.at[phase].add(count), so_far.hits.at[phase].add(hits))
        return (held, so_far), None

    zeros = jnp.zeros((2, num_layers, len(slots)), jnp.int32)
    start = (jnp.zeros(shape, bool), _Needed(zeros, zeros))
    return jax.lax.scan(step, start, steps)[0][1]


def _bound(ranked: jax.Array, excess: jax.Array) -> jax.Array:
    """Finds the excess-th largest of axis 1, int32[M, K]; NEVER for none."""

    def below(i: jax.Array, bound: jax.Array) -> jax.Array:
        next_one = jnp.where(ranked < bound[:, None], ranked, -1).max(axis=1)
        return jnp.where(i < excess, next_one, bound)

    return jax.lax.fori_loop(0, excess.max(), below, jnp.full(excess.shape, NEVER))
