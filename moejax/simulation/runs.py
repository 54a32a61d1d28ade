"""Many settings of policies over one trace: those of one formula run side by side."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import MoejaxError
from moejax.policies.interface import AnyPolicy, Needs, Observation, PolicySpec
from moejax.simulation.replay import Replay, Running, begin, run_calls
from moejax.simulation.segments import Segment, segments
from moejax.traces import PREFILL, Trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One setting.

    Attributes:
      policy: with its own settings.
      tiers: their names, of falling fidelity.
      expert_bytes: of one expert in each.
      slots: of a layer in each tier's pool.
      bulk: experts that transfers bring between two calls at most.
    """

    policy: AnyPolicy
    tiers: tuple[str, ...]
    expert_bytes: tuple[int, ...]
    slots: tuple[int, ...]
    bulk: int = 64


class Tallied(NamedTuple):
    """What a run did; `moejax.simulation.replay.Tally` of numpy arrays, and its tiers."""

    run: Run
    events: np.ndarray
    steps: np.ndarray
    fetches: np.ndarray
    ahead: np.ndarray
    gate: np.ndarray


def run_policies(trace: Trace, runs: Sequence[Run]) -> list[Tallied]:
    """Replays the trace under every run.

    Runs whose policies compute by one formula, which is compared as JAX sees it, are stacked.

    Raises:
      MoejaxError: a policy looks at what the trace does not hold, or does not suit its tiers.
    """
    groups: dict[Any, list[int]] = {}
    states = {}
    for i, run in enumerate(runs):
        _check_needs(trace, run)
        spec = spec_of(trace, run)
        states[i] = run.policy.init(spec)
        groups.setdefault(formula(run.policy, states[i], spec), []).append(i)
    cut = list(segments(trace))
    found: dict[int, Tallied] = {}
    for members in groups.values():
        chosen = [runs[i] for i in members]
        tally = _run_group(trace, cut, chosen, [states[i] for i in members])
        for k, i in enumerate(members):
            found[i] = Tallied(runs[i], *(np.asarray(part)[k] for part in tally))
    return [found[i] for i in range(len(runs))]


def spec_of(trace: Trace, run: Run) -> PolicySpec:
    """What a policy may know of the trace's model."""
    return PolicySpec(
        num_layers=trace.num_layers,
        num_experts=trace.num_experts,
        width=trace.width,
        tiers=run.tiers,
        expert_bytes=run.expert_bytes,
        slots=run.slots,
    )


def formula(policy: AnyPolicy, state: Any, spec: PolicySpec) -> tuple[str, ...]:
    """What a policy computes, its state aside: equal for policies that may share a program."""
    zero = jnp.zeros
    observation = Observation(
        layer=zero((), jnp.int32),
        probabilities=zero((1, spec.num_experts)),
        ids=zero((1, spec.width), jnp.int32),
        weights=zero((1, spec.width)),
        active=zero(1, bool),
        resident=zero((len(spec.tiers), spec.num_experts), bool),
        importance=zero(1),
        predicted=zero((1, spec.num_experts)),
    )
    resident = zero((spec.num_layers, len(spec.tiers), spec.num_experts), bool)
    prefill = dataclasses.replace(observation, is_prefill=True)
    said = []
    for traced in (
        jax.make_jaxpr(policy.decide)(state, observation),
        jax.make_jaxpr(policy.decide)(state, prefill),
        jax.make_jaxpr(policy.transfers)(state, resident),
    ):
        consts = [(np.asarray(c).shape, np.asarray(c).tobytes()) for c in traced.consts]
        said.append(f"{traced.jaxpr} {consts}")
    return (type(policy).__name__, str(jax.tree.structure(state)), *spec.tiers, *said)


def _check_needs(trace: Trace, run: Run) -> None:
    needs = getattr(run.policy, "needs", Needs())
    if needs.predicted and trace.predicted_ids is None:
        raise MoejaxError(
            f"{run.policy.name} looks ahead, and the trace foresees nothing: record it with "
            "--config.record_foreseen, or set prefetch=0"
        )
    if needs.importance and trace.importance is None and (trace.phase == PREFILL).any():
        raise MoejaxError(
            f"{run.policy.name} weighs a prompt's tokens by the attention that they receive, which "
            "the trace lacks: set selection='load'"
        )


def _run_group(
    trace: Trace, cut: Sequence[Segment], runs: Sequence[Run], states: Sequence[Any]
) -> Any:
    """`Tally` of arrays [K, ...]."""
    policy = runs[0].policy
    # Those of a group that do not look ahead have a limit of 0 in their state.
    looks = any(getattr(run.policy, "needs", Needs()).predicted for run in runs)
    predicted = trace.predicted_ids
    foreseen = predicted.shape[2] if looks and predicted is not None else 0
    slots = jnp.asarray([run.slots for run in runs], jnp.int32)
    bulk = jnp.asarray([run.bulk for run in runs], jnp.int32)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    start = jax.vmap(begin, in_axes=(0, 0, None, None))
    running: Running = start(stacked, slots, trace.num_layers, trace.num_experts)
    replay = Replay(policy, foreseen, by_pairs=jax.default_backend() == "gpu")
    for segment in cut:
        tokens = jax.tree.map(jnp.asarray, segment.tokens)
        running = run_calls(
            running, slots, bulk, tokens, replay=replay, is_prefill=segment.is_prefill
        )
    return running.tally


def by_name(tallied: Tallied, phase: int, events: Sequence[str]) -> Mapping[str, np.ndarray]:
    """int[T] of each event of a phase."""
    return {name: tallied.events[phase, i] for i, name in enumerate(events)}
