"""Memories of random experts, timed for `bench_policies.py`."""

from collections.abc import Sequence
from typing import Any

import jax

from moejax.benchmarking.expected_kernels import require_kernels
from moejax.benchmarking.random_weights import Packing
from moejax.benchmarking.routing import Workload
from moejax.benchmarking.shape_memory import (
    ShapeMemories,
    replay,
    tier_name,
)
from moejax.experts.budget import (
    BOTH,
    Budget,
    BudgetError,
    Limits,
    PolicyDemands,
    RunSizes,
    Tier,
    make_budget,
)
from moejax.experts.cache import ExpertMemory
from moejax.inference.chunking import longest_chunk
from moejax.inference.runner import Runner
from moejax.models.config import ModelConfig
from scripts.studies.speed.timing import Loop, Measured, Sizes


class Lab(ShapeMemories):
    """A shape with random dense weights on the device, and experts in host memory.

    Attributes:
      expect: what must serve packed products: one of `expected_kernels.EXPECTATIONS`.
      shape: the shape's name, for that.
    """

    expect = "none"
    shape = ""

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
        super().__init__(config, Packing(bits=4, attention_bits=attention_bits), device, host_gib)
        self.sizes, self.attention_bits = sizes, attention_bits

    def budget(
        self, bits: Sequence[int], gib: float, *, batch: int = 1, prefetch: int = 0, bulk: int = 0,
        slots: Sequence[int] = (), prefetch_in: str = BOTH,
    ) -> Budget:  # fmt: skip
        """Plans so many GiB for tiers of these precisions, as `moejax.experts` does."""
        config, context = self.config, self.sizes.context
        tiers = [Tier(name=tier_name(b), expert_nbytes=self.expert_nbytes(b)) for b in bits]
        run = RunSizes(
            config=config, weights_nbytes={n: leaf.nbytes for n, leaf in self.dense.items()},
            batch=batch, context=context, chunk=longest_chunk(config, batch, context),
            platform=self.device.platform,
        )  # fmt: skip
        limits = Limits(device_gib=gib, prefetch_in=prefetch_in)
        policy = PolicyDemands(slots=slots, prefetch=prefetch, bulk=bulk)
        return make_budget(run, tiers, limits, policy)

    def split(self, bits: Sequence[int], gib: float, how: str, **more: Any) -> Budget:
        """The budget of two tiers whose slots are shared out by a rule, or as they say.

        Args:
          bits: of the tiers.
          gib: of device memory.
          how: "rule", as `make_budget` does it; "high": the first tier has as many slots as
            there is room for, the second one what is left; or the numbers, as "4,0".
          **more: as of `budget`.
        """
        if len(bits) == 1 or how == "rule":
            return self.budget(bits, gib, **more)
        if how != "high":
            given = [int(number) for number in how.split(",")]
            return self.budget(bits, gib, slots=given, **more)
        found, num_experts = None, self.config.num_experts
        for high in range(1, num_experts + 1):
            try:
                found = self.budget(bits, gib, slots=(high, 0), **more)
            except BudgetError:
                break
        if found is None:
            raise ValueError(f"{gib:g} GiB hold no expert of high precision")
        for low in range(1, num_experts + 1):
            slots = (found.tiers[0].slots, low)
            try:
                found = self.budget(bits, gib, slots=slots, **more)
            except BudgetError:
                break
        return found

    def measure(
        self, memory: ExpertMemory | None, workload: Workload, batch: int = 1, *,
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
        """Measures a runner that may have compiled its programs already; see `measure`.

        Raises:
          SystemExit: something serves packed products that is not expected to.
        """
        memory = runner.memory
        if memory is not None:
            replay(memory, workload, batch, self.device)
        require_kernels(
            runner, batch, self.expect, shape=self.shape, context=self.sizes.context,
            prompt=self.sizes.prompt if ttft else 0,
        )  # fmt: skip
        loop = Loop(runner, self.sizes, batch)
        return loop.measured(ttft=ttft, profile=profile)
