"""Timed decoding for `bench_policies.py`, and what the ledger says of it."""

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from moejax.experts.ledger import Ledger
from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner, Session
from scripts.studies.speed.model_profile import (
    held_gib,
    largest_memory,
    launches,
    programs_used,
    session_without_prefill,
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is run.

    Attributes:
      context: slots of the KV cache.
      prompt: tokens of the prompt.
      steps: decode steps of a measurement, after as many others.
      per_call: decode steps of a call.
    """

    context: int
    prompt: int
    steps: int
    per_call: int

    @property
    def num_replayed(self) -> int:
        """Steps of a workload: those of a measurement, of a prompt's chunks and of a profile."""
        return 2 * self.steps + 4 * self.per_call

    @property
    def position(self) -> int:
        """Where decoding begins if there was no prompt."""
        return max(1, min(self.prompt, self.context - self.num_replayed))


@dataclasses.dataclass(frozen=True)
class Measured:
    """Decoding on a workload; seconds, and facts of the ledger of the second half.

    Attributes:
      ttft: of a prompt; 0: not measured.
      tpot: a step, the mean: what promotions take is in some of the calls.
      median: likewise.
      slowest: the 99th percentile.
      dispatch: of the host.
      facts: by name, see `facts_of`; `memory_gib`, where XLA says it, is that of the device
        while the largest program runs, without what is replayed.
    """

    ttft: float
    tpot: float
    median: float
    slowest: float
    dispatch: float
    facts: dict[str, float]

    def beside(self) -> dict[str, float]:
        """Facts beside a TPOT, in ms where they are times."""
        times = {"median": self.median, "slowest": self.slowest, "dispatch": self.dispatch}
        return {f"{name}_ms": 1e3 * value for name, value in times.items()} | self.facts


def facts_of(ledger: Ledger, steps: int) -> dict[str, float]:
    """Hit rate and MB a step over the link; of tiers also the share of experts and of gate mass."""
    facts = {"hit_rate": ledger.hit_rate, "megabytes_a_step": ledger.link_bytes / steps / 1e6}
    for name in ("misses", "admitted", "streamed", "prefetched", "bulk"):
        facts[f"{name}_a_step"] = ledger.total(name) / steps
    if ledger.gate is not None:
        needed = ledger.total("needed")
        for name, share in ledger.shares.items():
            facts[f"gate_{name}"] = share
        for name, tier in ledger.tiers.items():
            facts[f"experts_{name}"] = tier.total("needed") / max(1, needed)
    return facts


PRIMING_CALLS = 2


class Loop:
    """Times of one runner and batch."""

    def __init__(self, runner: Runner, sizes: Sizes, batch: int):
        self._runner, self._sizes, self._batch = runner, sizes, batch
        self._pending: list[int] = []
        self._used: list[jax.stages.Compiled] = []

    def measured(self, *, ttft: bool, profile: bool) -> Measured:
        """Programs are compiled by a first prompt, and by the first of the steps before."""
        first = 0.0
        if ttft:
            with programs_used(self._runner) as used:
                self._prefill(1)  # compiles, while the device works: its time says nothing
            self._used = used
            first = min(self._prefill(seed)[1] for seed in (2, 3))
            session = self._prefill(4)[0]
        else:
            session = self._without_prefill()
        return self._decoded(session, first, profile)

    def _decoded(self, session: Session, ttft: float, profile: bool) -> Measured:
        runner, sizes = self._runner, self._sizes
        num_calls = sizes.steps // sizes.per_call
        with programs_used(runner) as used:
            for _ in range(num_calls):
                self._decode(session)
        self._settle(fresh=True)
        before, self._pending = self._counted(), []
        num_programs = runner.programs.num_traces
        calls = self._pipelined(session, num_calls) / sizes.per_call
        if runner.programs.num_traces != num_programs:  # attention's length passed a power of two
            raise RuntimeError(
                "a program was compiled in the timed steps: change --prompt or --steps"
            )
        self._settle()
        facts: dict[str, float] = {}
        if runner.memory is not None:
            steps = (num_calls + PRIMING_CALLS) * sizes.per_call
            facts = facts_of(runner.memory.ledger, steps) | self._transfers(steps, before)
        pool = runner.memory.pool if runner.memory is not None else None
        held = held_gib(runner.weights, session.state.cache, pool)
        if memory := largest_memory([*self._used, *used], held):
            facts["memory_gib"] = memory["total"]
        if profile:
            facts |= self._profile(session)
        return Measured(
            ttft, float(calls[:, 1].mean()), float(np.median(calls[:, 1])),
            float(np.quantile(calls[:, 1], 0.99)), float(np.median(calls[:, 0])), facts,
        )  # fmt: skip

    def _counted(self) -> dict[str, float]:
        memory = self._runner.memory
        if memory is None:
            return {}
        state = memory.pool.state
        state = getattr(state, "buddies", state)  # of `compose`
        found = getattr(state, "replaced", None)
        return {} if found is None else {"replaced": float(np.asarray(found).sum())}

    def _transfers(self, steps: int, before: dict[str, float]) -> dict[str, float]:
        memory, config = self._runner.memory, self._runner.config
        facts: dict[str, float] = {}
        for name, count in self._counted().items():
            pairs = steps * self._batch * config.experts_per_token * len(config.moe_layers)
            facts[f"{name}_share"] = (count - before[name]) / pairs
        tiers = memory.tiers if memory is not None else ()
        asked = [tier for tier in tiers if tier.transfers is not None]
        if asked and self._pending:
            facts["megabytes_in_flight"] = statistics.fmean(self._pending) / 1e6
        return facts

    def _settle(self, fresh: bool = False) -> None:
        memory = self._runner.memory
        if memory is None:
            return
        memory.settle()
        if not fresh:
            return
        memory.ledger.gate = None
        for tier in memory.tiers:
            tier.ledger.layers, tier.ledger.gate_mass = [], 0.0

    def _prefill(self, seed: int) -> tuple[Session, float]:
        rng = np.random.default_rng(seed)
        vocab = self._runner.config.vocab_size
        prompts = rng.integers(0, vocab, (self._batch, self._sizes.prompt)).tolist()
        settings = GenerationSettings.of(max_new_tokens=1)
        start, compiled = time.perf_counter(), self._runner.programs.seconds
        session = self._runner.prefill(prompts, self._sizes.context, settings, ())
        jax.block_until_ready((session.first_tokens, session.state))
        spent = time.perf_counter() - start
        return session, spent - (self._runner.programs.seconds - compiled)

    def _without_prefill(self) -> Session:
        settings = GenerationSettings.of(max_new_tokens=1)
        found = session_without_prefill(
            self._runner, self._batch, self._sizes.position, self._sizes.context, settings
        )
        jax.block_until_ready(found.state)
        return found

    def _decode(self, session: Session) -> None:
        per_call = self._sizes.per_call
        emitted = self._runner.decode(session, per_call, per_call)
        jax.block_until_ready((emitted, session.state))

    def _pipelined(self, session: Session, num_calls: int) -> np.ndarray:
        """float64[calls, 2]: seconds to dispatch a call, and between the ends of two.

        As the engine does it: a call is dispatched before the last one is waited for.
        `PRIMING_CALLS` more than are timed run before.
        """
        per_call, times = self._sizes.per_call, []
        waiting = self._runner.decode(session, per_call, per_call)
        jax.block_until_ready(waiting)
        ended = time.perf_counter()
        waiting = self._runner.decode(session, per_call, per_call)
        for _ in range(num_calls):
            start = time.perf_counter()
            following = self._runner.decode(session, per_call, per_call)
            dispatched = time.perf_counter() - start
            jax.block_until_ready(waiting)
            now = time.perf_counter()
            times.append((dispatched, now - ended))
            waiting, ended = following, now
            self._pending.append(self._in_flight())
        jax.block_until_ready((waiting, session.state))
        return np.asarray(times)

    def _in_flight(self) -> int:
        """Bytes on their way between steps."""
        memory = self._runner.memory
        tiers = memory.tiers if memory is not None else ()
        return sum(
            tier.ledger.expert_bytes * len(tier.transfers.pending)
            for tier in tiers
            if tier.transfers is not None
        )

    def _profile(self, session: Session) -> dict[str, float]:
        per_call = self._sizes.per_call
        with tempfile.TemporaryDirectory() as trace:
            with jax.profiler.trace(trace):
                emitted = self._runner.decode(session, per_call, per_call)
                jax.block_until_ready((emitted, session.state))
            counted = launches(Path(trace))
        per_layer = per_call * len(self._runner.config.moe_layers)
        return {"launches_a_layer": sum(count for count, _ in counted.values()) / per_layer}
