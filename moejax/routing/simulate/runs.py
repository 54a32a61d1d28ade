"""Runs of many policy settings over one trace; those of one formula side by side.

Formulas are compared as JAX traces them (`_ProgramKeys`). Tracing takes tens of milliseconds; so
the fields of a policy that its functions read while they are traced are noted, and a policy that is
equal in these has the same formula without another trace.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import MoejaxError
from moejax.experts.budget import default_bulk
from moejax.policies.base import (
    AnyPolicy,
    Observation,
    PolicySpec,
    default_prefetch,
    moves_between_steps,
)
from moejax.routing.simulate.replay import (
    DELAY,
    Replay,
    Running,
    TraceSegment,
    begin,
    run_calls,
    segments,
)
from moejax.routing.trace import PREFILL, Trace

BLOCK_BYTES = 4 * 2**30  # of settings that run side by side, on a CPU
_BLOCK_SHARE = 1 / 8  # of the memory that JAX may take of an accelerator: the same
_TEMPORARIES = 16  # arrays int32[M, T, E] of a setting that a step may hold at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One policy setting and its pools."""

    policy: AnyPolicy  # with its own settings
    tiers: tuple[str, ...]  # their names, of falling fidelity
    expert_bytes: tuple[int, ...]  # bytes of one expert in each
    slots: tuple[int, ...]  # slots per layer in each tier's pool
    # most experts in flight between calls, like the engine's `memory.bulk`; None: the engine's
    # default
    bulk: int | None = None
    # whether each tier is bit planes over the next one, which then has every expert; (): none is
    refines: tuple[bool, ...] = ()
    # whether two tiers, of which the first refines the second, share one pool, of `slots[1]` slots
    # of a layer for one plane each; then the second needs not have every expert
    shares_slots: bool = False
    # by the number of misses how many the host's cores multiply, as an engine tells when it loads,
    # of one tier under `OnDemand`; (): every miss is fetched
    host: tuple[int, ...] = ()


class RunResult(NamedTuple):
    """Result of a run: `replay._Tally` in numpy, and the run."""

    run: Run
    events: np.ndarray
    steps: np.ndarray
    fetches: np.ndarray
    ahead: np.ndarray
    gate: np.ndarray


def run_policies(trace: Trace, runs: Sequence[Run], *, delay: int = DELAY) -> list[RunResult]:
    """Replays the trace under every run.

    Runs whose policies compute by one formula (`_ProgramKeys`) are stacked, as many at a time as
    `_block_bytes` holds.

    Args:
      delay: calls from a request to its arrival; 0 like emulated slots.

    Raises:
      MoejaxError: a policy needs something that the trace lacks, or does not suit its tiers.
    """
    groups: dict[Any, list[int]] = {}
    states, keys = {}, _ProgramKeys()
    for i, run in enumerate(runs):
        _check_needs(trace, run)
        spec = _spec_of(trace, run)
        states[i] = run.policy.init(spec)
        dims = spec.num_layers, len(run.tiers), spec.num_experts
        if run.shares_slots and moves_between_steps(run.policy, states[i], dims):
            raise MoejaxError(
                f"{run.policy.name} moves experts between steps, which shared slots lack"
            )
        _check_foreseen(trace, run, run.policy.max_prefetch(states[i]))
        formula = keys.key_of(run.policy, states[i], spec), run.refines, run.host
        groups.setdefault(formula, []).append(i)
    cut = list(segments(trace))
    found: dict[int, RunResult] = {}
    for members in groups.values():
        many = _block_size(len(members), states[members[0]], trace, len(runs[members[0]].tiers))
        for first in range(0, len(members), many):
            block = members[first : first + many]
            # All blocks are of one size, so that they share a program: the last setting fills up.
            full = block + block[-1:] * (many - len(block))
            tally = _run_block(
                trace, cut, [runs[i] for i in full], [states[i] for i in full], delay
            )
            for k, i in enumerate(block):
                found[i] = RunResult(runs[i], *(part[k] for part in tally))
    return [found[i] for i in range(len(runs))]


def _spec_of(trace: Trace, run: Run) -> PolicySpec:
    """Facts of the trace's model that a policy may use, in an engine by its defaults."""
    return PolicySpec(
        num_layers=trace.num_layers,
        num_experts=trace.num_experts,
        width=trace.width,
        tiers=run.tiers,
        expert_bytes=run.expert_bytes,
        slots=run.slots,
        prefetch=(default_prefetch(run.policy, trace.width),) * len(run.tiers),
    )


def _check_needs(trace: Trace, run: Run) -> None:
    needs = run.policy.needs
    if needs.predicted and trace.predicted_ids is None:
        raise MoejaxError(
            f"{run.policy.name} looks ahead, and the trace foresees nothing: record it with "
            "--config.record_foreseen, or set prefetch=0"
        )
    if needs.importance and trace.importance is not None and needs.aggregation != "mean":
        raise MoejaxError(
            f"aggregation={needs.aggregation}, but a trace holds the mean of the attention"
        )
    if needs.importance and trace.importance is None and (trace.phase == PREFILL).any():
        raise MoejaxError(
            f"{run.policy.name} weighs a prompt's tokens by the attention that they receive, which "
            "the trace lacks: record it with --config.record_importance, or set selection='load'"
        )


def _check_foreseen(trace: Trace, run: Run, ahead: int) -> None:
    """Raises MoejaxError if the trace predicts fewer than `ahead` experts.

    A prompt's tokens count the experts among their predicted top A (DyMoE eq. 7).
    """
    has = trace.num_experts if trace.predicted_ids is None else trace.predicted_ids.shape[2]
    asked = max(ahead, trace.width) if ahead and (trace.phase == PREFILL).any() else ahead
    if has < (asked := min(asked, trace.num_experts)):
        raise MoejaxError(
            f"{run.policy.name} looks at {asked} experts ahead, the trace foresees {has}: record "
            f"it with --config.record_foreseen={asked}, or set a smaller prefetch, 0 for none"
        )


def _block_bytes() -> int:
    """Bytes of JAX's default device for settings that run side by side."""
    (device,) = jnp.zeros(()).devices()
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    return int(limit * _BLOCK_SHARE) if limit else BLOCK_BYTES


def _block_size(count: int, state: Any, trace: Trace, num_tiers: int) -> int:
    """Number of settings that run side by side, in equal blocks within `_block_bytes`."""
    own = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    each = _TEMPORARIES * 4 * trace.num_layers * num_tiers * trace.num_experts + 4 * own
    num_blocks = -(-count * each // _block_bytes())
    return -(-count // min(count, num_blocks))


def _run_block(
    trace: Trace,
    cut: Sequence[TraceSegment],
    runs: Sequence[Run],
    states: Sequence[Any],
    delay: int,
) -> Any:
    """Runs a block; a `_Tally` of arrays [K, ...], on the host."""
    policy = runs[0].policy
    # Policies of a group that do not prefetch have a limit of 0 in their state.
    looks = any(run.policy.needs.predicted for run in runs)
    predicted = trace.predicted_ids
    foreseen = predicted.shape[2] if looks and predicted is not None else 0
    slots = jnp.asarray([run.slots for run in runs], jnp.int32)
    limits = [
        default_bulk(run.expert_bytes[0], trace.num_layers * run.slots[0])
        if run.bulk is None else run.bulk
        for run in runs
    ]  # fmt: skip
    bulk = jnp.asarray(limits, jnp.int32)
    # On the host: a program of a thousand operands takes long to compile.
    stacked = jax.tree.map(
        lambda *leaves: jnp.asarray(np.stack(leaves)), *(jax.device_get(s) for s in states)
    )
    shares = runs[0].shares_slots
    start = jax.vmap(begin, in_axes=(0, 0, None, None, None))
    running: Running = start(stacked, slots, trace.num_layers, trace.num_experts, shares)
    replay = Replay(policy, foreseen, delay, runs[0].refines, shares, runs[0].host)
    for segment in cut:
        tokens = jax.tree.map(jnp.asarray, segment.tokens)
        running = run_calls(
            running, slots, bulk, tokens, replay=replay, is_prefill=segment.is_prefill
        )
    return jax.device_get(running.tally)


_PLAIN = (bool, int, float, str, type(None), type)  # compared by value; other things by identity
Path = tuple[str, ...]


class _ProgramKeys:
    """Formulas traced so far."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[dict[Path, Any], tuple[str, ...]]]] = {}

    def key_of(self, policy: AnyPolicy, state: Any, spec: PolicySpec) -> tuple[str, ...]:
        """Key of a policy's computation, state aside: equal keys may share a program."""
        leaves = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(state))
        key = (type(policy), jax.tree.structure(state), leaves, spec.tiers)
        for read, formula in self._known.setdefault(key, []):
            if all(_same(_field(policy, path), value) for path, value in read.items()):
                return formula
        read = {}
        formula = _traced(_watched(policy, read, ()), state, spec)
        formula = (type(policy).__name__, str(key[1]), *spec.tiers, *formula)
        self._known[key].append((read, formula))
        return formula


def _traced(policy: AnyPolicy, state: Any, spec: PolicySpec) -> tuple[str, ...]:
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
    for function, argument in (
        (policy.decide, observation),
        (policy.decide, prefill),
        (policy.transfers, resident),
    ):
        # Not the method itself, which would be hashed with all fields of its policy.
        traced = jax.make_jaxpr(lambda *given, of=function: of(*given))(state, argument)
        consts = [(np.asarray(c).shape, np.asarray(c).tobytes()) for c in traced.consts]
        said.append(f"{traced.jaxpr} {consts}")
    return tuple(said)


def _watched(policy: Any, read: dict[Path, Any], path: Path) -> Any:
    """Copies a policy so that reads of its fields, and of policies within it, are noted."""
    kind = type(policy)
    names = {field.name for field in dataclasses.fields(policy)}

    def get(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name not in names:
            return value
        read[(*path, name)] = _noted(value)
        return _watched(value, read, (*path, name)) if _is_policy(value) else value

    copy: Any = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": get}))
    copy.__dict__.update(vars(policy))
    return copy


def _field(policy: Any, path: Path) -> Any:
    for name in path:
        policy = getattr(policy, name, None)
    return _noted(policy)


def _noted(value: Any) -> Any:
    """Returns a value to note; for a nested policy its class, since its reads are noted apart."""
    return type(value) if _is_policy(value) else value


def _is_policy(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and hasattr(value, "decide")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and bool(a == b))
