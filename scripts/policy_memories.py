"""What `scripts/bench_policies_gpu.py` measures with: memories of random experts, timed decoding.

Rows of the host are made once for each precision. A tier that holds every expert on the device
never fetches one, nor does a step wait for what a bulk transfer reads: where it says so, experts
share `FEW_ROWS` rows.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax import ops
from moejax.chunks import longest_chunk
from moejax.fidelity import TieredLedger
from moejax.generation import GenerationSettings
from moejax.ledger import Ledger
from moejax.memory.budget import Budget, Limits, Tier, TieredBudget, make_tiered_budget
from moejax.memory.expert_memory import ExpertMemory
from moejax.memory.expert_pool import PoolSpec
from moejax.memory.host_store import HeldRows
from moejax.memory.residency import CacheSpec
from moejax.memory.tiered_memory import TieredMemory, warmed
from moejax.memory.transfers import Transfers
from moejax.models.config import ModelConfig
from moejax.policies.interface import AnyPolicy
from moejax.runner import Runner
from moejax.session import Session
from pallas_kernels.target import target_of
from scripts.model_profile import launches, session_without_prefill
from scripts.model_weights import Packing, random_weights
from scripts.policy_workloads import Workload
from scripts.synthetic_rows import SyntheticRows

FEW_ROWS = 512  # more than a processor's cache holds
Memory = ExpertMemory | TieredMemory


def tier_name(bits: int) -> str:
    """Such as "int4"."""
    return "bf16" if bits == 16 else f"int{bits}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierPlan:
    """One tier of a memory.

    Attributes:
      bits: of the experts.
      slots: of a layer; E: all experts are there from the start.
      transient: slots for what passes.
      prefetch: experts of the next layer that are brought ahead at most.
      bulk: experts on their way between steps at most; 0: none ever.
      first: int32[M, n], what the slots hold before any step; None: nothing, or all.
      few_rows: the experts share a few rows of host memory.
    """

    bits: int
    slots: int
    transient: int = 0
    prefetch: int = 0
    bulk: int = 0
    first: np.ndarray | None = None
    few_rows: bool = False


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
      facts: by name, see `facts_of`.
    """

    ttft: float
    tpot: float
    median: float
    slowest: float
    dispatch: float
    facts: dict[str, float]

    def beside(self) -> dict[str, float]:
        """What stands beside a TPOT, in ms where it is a time."""
        times = {"median": self.median, "slowest": self.slowest, "dispatch": self.dispatch}
        return {f"{name}_ms": 1e3 * value for name, value in times.items()} | self.facts


class Lab:
    """A shape with random dense weights on the device, and experts in host memory."""

    def __init__(self, config: ModelConfig, attention_bits: int, device: jax.Device, sizes: Sizes):
        """Makes the dense weights."""
        self.config, self.device, self.sizes = config, device, sizes
        self.attention_bits = attention_bits
        self.dense = random_weights(config, self._packing(4), device, experts=False)
        jax.block_until_ready(self.dense)
        self._rows: dict[tuple[int, bool], SyntheticRows] = {}

    def _packing(self, bits: int) -> Packing:
        return Packing(bits=bits, attention_bits=self.attention_bits)

    @property
    def num_layers(self) -> int:
        """M."""
        return len(self.config.moe_layers)

    def rows(self, bits: int, few: bool = False) -> SyntheticRows:
        """Of a precision; made once."""
        few = few and (bits, False) not in self._rows
        if (bits, few) not in self._rows:
            start = time.perf_counter()
            made = SyntheticRows(
                self.config, self._packing(bits), self.device, FEW_ROWS if few else 0
            )
            self._rows[bits, few] = made
            spent = time.perf_counter() - start
            print(f"{tier_name(bits)} rows, {made.nbytes / 2**30:.1f} GiB, in {spent:.1f} s",
                  flush=True)  # fmt: skip
        return self._rows[bits, few]

    def tier_memory(self, plan: TierPlan) -> ExpertMemory:
        """A pool of one precision."""
        num_experts, rows = self.config.num_experts, self.rows(plan.bits, plan.few_rows)
        is_full = plan.slots == num_experts
        transient = plan.transient or (1 if is_full else self.config.experts_per_token)
        cache = CacheSpec(
            num_layers=self.num_layers, num_experts=num_experts, slots=plan.slots,
            transient=transient, banks=2 if plan.prefetch else 1,
        )  # fmt: skip
        spec = PoolSpec(cache, plan.prefetch)
        memory = ExpertMemory.of_rows(spec, *rows.stacks, rows.row_of, self.device)
        first = plan.first
        if is_full:
            first = np.tile(np.arange(num_experts, dtype=np.int32), (self.num_layers, 1))
        if first is not None and first.shape[1]:
            memory.pool = warmed(memory, self.config, ops.Kernels(target_of(self.device)), first)
        if plan.bulk:
            supply = HeldRows(rows.row_of, rows.store.rows)
            memory.transfers = Transfers(
                cache, memory.pool, supply, self.device, in_flight=plan.bulk
            )
        return memory

    def tiered(
        self, policy: AnyPolicy, plans: Sequence[TierPlan | ExpertMemory], names: Sequence[str] = ()
    ) -> TieredMemory:
        """A memory under a policy, of tiers of falling fidelity.

        Args:
          policy: who decides.
          plans: of the tiers, or memories that are there, which are taken over.
          names: of the tiers; () for those of plans.
        """
        tiers, said = [], []
        for plan in plans:
            if isinstance(plan, TierPlan):
                said.append(tier_name(plan.bits))
                tiers.append(self.tier_memory(plan))
            else:
                tiers.append(plan)
        return TieredMemory(policy, names or said, tiers, width=self.config.experts_per_token)

    def budget(
        self, bits: Sequence[int], gib: float, *, batch: int = 1, prefetch: int = 0, bulk: int = 0,
        slots: Sequence[int] = (),
    ) -> TieredBudget:  # fmt: skip
        """What `moejax.memory` makes of so many GiB, for tiers of these precisions."""
        config, context = self.config, self.sizes.context
        tiers = [
            Tier(name=tier_name(b), expert_nbytes=self.rows(b, few=True).row_nbytes) for b in bits
        ]
        return make_tiered_budget(
            config, {name: leaf.nbytes for name, leaf in self.dense.items()}, tiers, slots=slots,
            prefetch=prefetch, bulk=bulk, batch=batch, context=context,
            chunk=longest_chunk(config, batch, context), limits=Limits(device_gib=gib),
            platform=self.device.platform,
        )  # fmt: skip

    def plan_of(self, bits: int, budget: Budget, **more: Any) -> TierPlan:
        """What a budget says of a tier."""
        limits = budget.limits
        return TierPlan(
            bits=bits, slots=budget.slots, transient=budget.transient, prefetch=limits.prefetch,
            bulk=limits.bulk, **more,
        )  # fmt: skip

    def measure(
        self, memory: Memory | None, workload: Workload, batch: int = 1, *,
        weights: Any = None, ttft: bool = False, profile: bool = False,
    ) -> Measured:  # fmt: skip
        """Compiles, and times decoding on a workload, from its first step on if there is no prompt.

        Args:
          memory: of the experts; None where `weights` hold them.
          workload: replayed; nothing without a memory.
          batch: B.
          weights: in place of the dense ones.
          ttft: prompts are run too, before.
          profile: kernels that a step launches are counted too.
        """
        weights = self.dense if weights is None else weights
        runner = Runner(self.config, weights, self.device, memory=memory)
        return self.remeasure(runner, workload, batch, ttft=ttft, profile=profile)

    def remeasure(
        self, runner: Runner, workload: Workload, batch: int = 1, *,
        ttft: bool = False, profile: bool = False,
    ) -> Measured:  # fmt: skip
        """As `measure`; of a runner that may have compiled its programs already."""
        memory = runner.memory
        if memory is not None:
            replay(memory, workload, batch, self.device)
        loop = _Loop(runner, self.sizes, batch)
        return loop.measured(ttft=ttft, profile=profile)


def replay(memory: Memory, workload: Workload, batch: int, device: jax.Device) -> None:
    """From now on decode steps of so many sequences take what the workload says."""
    if workload.ids.shape[2] != batch:
        raise ValueError(f"a workload of {workload.ids.shape[2]} sequences, not {batch}")

    def kept(array: np.ndarray) -> jax.Array:
        return jax.device_put(array, device)

    ids = kept(workload.ids)
    if isinstance(memory, TieredMemory):
        looks = memory.spec.policy.needs.predicted
        first, *others = memory.tiers
        first.store = dataclasses.replace(
            first.store, replay=ids, replay_ahead=None,
            replay_probabilities=kept(workload.probabilities),
            replay_predicted=kept(workload.predicted) if looks else None,
        )  # fmt: skip
        for tier in others:
            tier.store = dataclasses.replace(tier.store, replay=None, replay_ahead=None)
        return
    ahead = None
    if memory.spec.prefetch:
        ahead = kept(workload.expected(memory.spec.prefetch))
    memory.store = dataclasses.replace(memory.store, replay=ids, replay_ahead=ahead)


def release(memory: Memory | None) -> None:
    """Gives back what a memory has on the device, but not the host's rows."""
    if memory is None:
        return
    memory.close()
    for leaf in jax.tree.leaves(memory.pool):
        if not leaf.is_deleted():
            leaf.delete()


def facts_of(ledger: Ledger | TieredLedger, steps: int) -> dict[str, float]:
    """Hit rate and MB a step over the link; of tiers also the share of experts and of gate mass."""
    facts = {"hit_rate": ledger.hit_rate, "megabytes_a_step": ledger.link_bytes / steps / 1e6}
    for name in ("misses", "admitted", "streamed", "prefetched", "bulk"):
        facts[f"{name}_a_step"] = ledger.total(name) / steps
    if isinstance(ledger, TieredLedger):
        needed = ledger.total("needed")
        for name, share in ledger.shares.items():
            facts[f"gate_{name}"] = share
        for name, tier in ledger.tiers.items():
            facts[f"experts_{name}"] = tier.total("needed") / max(1, needed)
    return facts


class _Loop:
    """Times of one runner and batch."""

    def __init__(self, runner: Runner, sizes: Sizes, batch: int):
        self._runner, self._sizes, self._batch = runner, sizes, batch
        self._pending: list[int] = []

    def measured(self, *, ttft: bool, profile: bool) -> Measured:
        """Programs are compiled by a first prompt, and by the first of the steps before."""
        first = self._prefill(1)[1] if ttft else 0.0  # compiles
        if ttft:
            session, again = self._prefill(2)
            first = min(first, again)
        else:
            session = self._without_prefill()
        return self._decoded(session, first, profile)

    def _decoded(self, session: Session, ttft: float, profile: bool) -> Measured:
        runner, sizes = self._runner, self._sizes
        num_calls = sizes.steps // sizes.per_call
        for _ in range(num_calls):
            self._decode(session)
        self._settle(fresh=True)
        before, self._pending = self._counted(), []
        calls = np.asarray([self._decode(session) for _ in range(num_calls)]) / sizes.per_call
        self._settle()
        facts: dict[str, float] = {}
        if runner.memory is not None:
            steps = num_calls * sizes.per_call
            facts = facts_of(runner.memory.ledger, steps) | self._transfers(steps, before)
        if profile:
            facts |= self._profile(session)
        return Measured(
            ttft, float(calls[:, 1].mean()), float(np.median(calls[:, 1])),
            float(np.quantile(calls[:, 1], 0.99)), float(np.median(calls[:, 0])), facts,
        )  # fmt: skip

    def _counted(self) -> dict[str, float]:
        memory = self._runner.memory
        if not isinstance(memory, TieredMemory):
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
        if isinstance(memory, TieredMemory):
            memory.ledger.gate = None
            for tier in memory.tiers:
                tier.ledger.layers, tier.ledger.gate_mass = [], {}
        else:
            memory.ledger.layers, memory.ledger.gate_mass = [], {}

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

    def _decode(self, session: Session) -> tuple[float, float]:
        per_call = self._sizes.per_call
        start = time.perf_counter()
        emitted = self._runner.decode(session, per_call, per_call)
        dispatched = time.perf_counter()
        jax.block_until_ready((emitted, session.state))
        done = time.perf_counter()
        memory = self._runner.memory
        if memory is not None:
            self._pending.append(
                sum(
                    tier.ledger.expert_bytes * len(tier.transfers.pending)
                    for tier in memory.tiers
                    if tier.transfers is not None
                )
            )
        return dispatched - start, done - start

    def _profile(self, session: Session) -> dict[str, float]:
        per_call = self._sizes.per_call
        with tempfile.TemporaryDirectory() as trace:
            with jax.profiler.trace(trace):
                emitted = self._runner.decode(session, per_call, per_call)
                jax.block_until_ready((emitted, session.state))
            counted = launches(Path(trace))
        per_layer = per_call * len(self._runner.config.moe_layers)
        return {"launches_a_layer": sum(count for count, _ in counted.values()) / per_layer}
