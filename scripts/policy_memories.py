"""What `scripts/bench_policies_gpu.py` measures with: memories of random experts.

Rows of the host are made once for each precision. A tier that holds every expert on the device
never fetches one, and what a bulk transfer reads no step waits for: where a plan says so, experts
share rows of `FEW_GIB`, which is more than a processor's cache holds.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from moejax import ops
from moejax.chunks import longest_chunk
from moejax.memory.budget import Budget, BudgetError, Limits, Tier, TieredBudget, make_tiered_budget
from moejax.memory.expert_memory import ExpertMemory
from moejax.memory.expert_pool import PoolSpec
from moejax.memory.host_store import HeldRows
from moejax.memory.residency import CacheSpec
from moejax.memory.tiered_memory import TieredMemory, warmed
from moejax.memory.transfers import Transfers
from moejax.models.config import ModelConfig, weight_shapes
from moejax.policies.interface import AnyPolicy
from moejax.runner import Runner
from moejax.served import EXPERT_LEAVES
from pallas_kernels import layout
from pallas_kernels.target import target_of
from scripts.model_weights import Packing, random_weights
from scripts.policy_timing import Loop, Measured, Sizes
from scripts.policy_workloads import Workload
from scripts.synthetic_rows import SyntheticRows

FEW_GIB = 4.0
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


class Lab:
    """A shape with random dense weights on the device, and experts in host memory."""

    def __init__(
        self, config: ModelConfig, attention_bits: int, device: jax.Device, sizes: Sizes,
        host_gib: float = 0.0,
    ):  # fmt: skip
        """Makes the dense weights.

        Args:
          config: of the model.
          attention_bits: of the projections; 16: bf16.
          device: where it runs.
          sizes: how much is run; may be changed between sections.
          host_gib: of a precision's rows, which experts share where they are more; 0: no limit.
        """
        self.config, self.device, self.sizes = config, device, sizes
        self.attention_bits, self._host_gib = attention_bits, host_gib
        self.dense = random_weights(config, self._packing(4), device, experts=False)
        jax.block_until_ready(self.dense)
        self._rows: dict[tuple[int, int], SyntheticRows] = {}

    def _packing(self, bits: int) -> Packing:
        return Packing(bits=bits, attention_bits=self.attention_bits)

    @property
    def num_layers(self) -> int:
        """M."""
        return len(self.config.moe_layers)

    def expert_nbytes(self, bits: int) -> int:
        """Of one expert: codes, and float16 scales and zeros of groups of 64."""
        shapes = weight_shapes(self.config)
        sizes = [shapes[name][-2:] for name in EXPERT_LEAVES]
        if bits == 16:
            return sum(2 * math.prod(size) for size in sizes)
        group = self._packing(bits).group_size
        return sum(
            outputs * (4 * layout.num_words(inputs, bits) + 4 * layout.num_groups(inputs, group))
            for outputs, inputs in sizes
        )

    def rows(self, bits: int, few: bool = False) -> SyntheticRows:
        """Of a precision; made once."""
        nbytes, total = self.expert_nbytes(bits), self.num_layers * self.config.num_experts
        gib = min([limit for limit in (self._host_gib, FEW_GIB if few else 0) if limit], default=0)
        num_rows = min(total, max(1, int(gib * 2**30) // nbytes)) if gib else total
        held = [count for of, count in self._rows if of == bits and count >= num_rows]
        if held:
            return self._rows[bits, max(held)]
        start = time.perf_counter()
        made = SyntheticRows(self.config, self._packing(bits), self.device, num_rows)
        assert made.row_nbytes == nbytes, (made.row_nbytes, nbytes)
        self._rows[bits, num_rows] = made
        spent = time.perf_counter() - start
        print(f"{tier_name(bits)}: {num_rows} rows of {total} experts, {made.nbytes / 2**30:.1f} "
              f"GiB, in {spent:.1f} s", flush=True)  # fmt: skip
        return made

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
        tiers = [Tier(name=tier_name(b), expert_nbytes=self.expert_nbytes(b)) for b in bits]
        return make_tiered_budget(
            config, {name: leaf.nbytes for name, leaf in self.dense.items()}, tiers, slots=slots,
            prefetch=prefetch, bulk=bulk, batch=batch, context=context,
            chunk=longest_chunk(config, batch, context), limits=Limits(device_gib=gib),
            platform=self.device.platform,
        )  # fmt: skip

    def split(
        self, bits: Sequence[int], gib: float, how: str, *, prefetch: int = 0, bulk: int = 0
    ) -> TieredBudget:
        """The budget of two tiers whose slots are shared out by a rule, or as they say.

        Args:
          bits: of the tiers.
          gib: of device memory.
          how: "rule", as `make_tiered_budget` does it; "high": the first tier has as many slots as
            leave the second one what a token needs, which gets the rest; or the numbers, as "4,0".
          prefetch: as in `budget`.
          bulk: likewise.
        """
        if len(bits) == 1 or how == "rule":
            return self.budget(bits, gib, prefetch=prefetch, bulk=bulk)
        if how != "high":
            given = [int(number) for number in how.split(",")]
            return self.budget(bits, gib, prefetch=prefetch, bulk=bulk, slots=given)
        found, num_experts = None, self.config.num_experts
        least = min(num_experts, self.config.experts_per_token)
        for high in range(1, num_experts + 1):
            try:
                found = self.budget(bits, gib, prefetch=prefetch, bulk=bulk, slots=(high, least))
            except BudgetError:
                break
        if found is None:
            raise ValueError(f"{gib:g} GiB hold no expert of high precision and {least} of low")
        for low in range(least + 1, num_experts + 1):
            slots = (found.tiers[0].slots, low)
            try:
                found = self.budget(bits, gib, prefetch=prefetch, bulk=bulk, slots=slots)
            except BudgetError:
                break
        return found

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
        loop = Loop(runner, self.sizes, batch)
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
