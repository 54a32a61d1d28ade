"""Turns limits into slots: bytes of a run's parts, and the room they leave."""

import dataclasses
from collections.abc import Mapping

from moejax.experts.budget.limits import (
    BudgetError,
    Limits,
    check_gib,
    check_phase,
    gib_above,
    limit_nbytes,
    num_banks,
)
from moejax.experts.budget.planned import Tier, TierBudget
from moejax.experts.budget.tables import (
    RING_BLOCKS,
    blocks_from_disk,
    bulk_nbytes,
    least_host_nbytes,
    most_at_once,
    table_nbytes,
)
from moejax.experts.budget.workspace import Model, workspace_nbytes
from moejax.weights import LOW_RANK

# A fetch launch of so many bytes runs at 31-37 GiB/s or more, of one job of 5 MB at 20 (H200, PCIe
# 5 x16, jax 0.11.2, 2026-11-20).
TRANSIENT_BYTES = 64 * 2**20
# cuBLAS' workspace, programs and what an allocator loses by rounding and gaps.
RESERVE_BYTES = {"gpu": 128 * 2**20, "cpu": 0}
# Bytes of plain experts where no kernel reads them in place, as in `moejax.models.moe`.
GATHERED_BYTES = 512 * 2**20
STATES = "states of layers without attention"  # a part of the device's
WAITED = "experts that a step waits for"  # a part of the host's


def plan_tier(
    config: Model,
    weights_nbytes: Mapping[str, int],
    tier: Tier,
    *,
    batch: int,
    context: int,
    chunk: int,
    limits: Limits,
    platform: str,
    itemsize: int = 2,
    num_tiers: int = 1,
) -> TierBudget:
    """Plans every byte of a run with one tier, and its slots.

    C = floor((limit - rest) / (M expert_nbytes)), at most E, where the rest holds B transient
    slots. If everything fits, experts are not pooled, unless `limits.slots` asks for it.

    Args:
      weights_nbytes: bytes of every leaf on the device but the experts; of the experts' low-rank
        factors under names that end in `LOW_RANK`.
      context: slots of a sequence's KV cache.
      chunk: tokens of one sequence that a prefill step takes.
      platform: "gpu" or "cpu".
      itemsize: bytes of a number of the activations and of the KV cache.
      num_tiers: tiers of the run, of which this is one.

    Raises:
      BudgetError: it does not fit; the text names the smallest limit that would do.
    """
    run = _Run(
        config, weights_nbytes, tier, batch, context, chunk, limits, platform, itemsize, num_tiers
    )
    run.check()
    limit = limit_nbytes(limits.device_gib)
    whole = run.unpooled()
    if not run.num_layers or (limits.slots < 0 and (limit is None or sum(whole.values()) <= limit)):
        run.require(sum(whole.values()), limit, "the model, which has no experts to move")
        return run.budget(pooled=False, slots=run.num_experts, transient=0, device=whole)
    slots, transient = run.choose_slots(limit)
    return run.budget(
        pooled=True, slots=slots, transient=transient, device=run.pooled(slots, transient)
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """The arguments of `plan_tier`."""

    config: Model
    weights_nbytes: Mapping[str, int]
    tier: Tier
    batch: int
    context: int
    chunk: int
    limits: Limits
    platform: str
    itemsize: int
    num_tiers: int

    @property
    def num_layers(self) -> int:
        return len(self.config.moe_layers)

    @property
    def num_experts(self) -> int:
        return self.config.num_experts

    @property
    def is_packed(self) -> bool:
        """Whether the experts take less than plain ones."""
        plain = 3 * self.config.model_dim * self.config.expert_dim * self.itemsize
        return self.tier.expert_nbytes < plain

    def check(self) -> None:
        """Raises BudgetError for settings that no memory size could satisfy."""
        slots, prefetch = self.limits.slots, self.limits.prefetch
        check_gib(self.limits.device_gib, self.limits.host_gib)
        if slots < -1 or min(self.limits.transient, prefetch) < 0 or prefetch > self.num_experts:
            raise BudgetError(
                f"memory.slots={slots}, transient={self.limits.transient} and prefetch={prefetch} "
                f"must be numbers of experts, at most {self.num_experts} (slots -1: as many as fit)"
            )
        check_phase(self.limits.prefetch_in)
        if slots > self.num_experts:
            raise BudgetError(
                f"memory.slots={slots} is more than the {self.num_experts} experts of a layer"
            )
        if self.limits.transient > self.num_experts:
            raise BudgetError(
                f"memory.transient={self.limits.transient} is more than the {self.num_experts} "
                "experts of a layer"
            )
        if self.limits.bulk < 0 or (self.limits.bulk and slots == 0):
            raise BudgetError(
                f"memory.bulk={self.limits.bulk} must be 0 (none) or a number of experts, which "
                f"need slots to go to, but memory.slots={slots}"
            )
        if self.limits.bulk > (most := self.num_layers * self.num_experts):
            said = f"memory.bulk={self.limits.bulk}"
            raise BudgetError(f"{said} is more than the {most} experts of the model")
        if slots >= 0 and prefetch > slots:
            raise BudgetError(
                f"memory.prefetch={prefetch} needs as many slots a layer, but memory.slots={slots}"
            )

    def dense(self) -> dict[str, int]:
        """Bytes by part, where experts' places make no difference."""
        low_rank = {n: size for n, size in self.weights_nbytes.items() if n.endswith(LOW_RANK)}
        parts = {f"weights {n}": s for n, s in self.weights_nbytes.items() if n not in low_rank}
        if low_rank:
            parts["low-rank factors of experts"] = sum(low_rank.values())
        cached = self.batch * self.context * self.config.cached_values
        parts["KV cache"] = cached * self.itemsize
        wide, plain = self.config.state_values
        if wide:  # of a sequence, however long it is
            parts[STATES] = self.batch * (4 * wide + plain * self.itemsize)
        parts["activations and workspace"] = self.workspace()
        if reserve := RESERVE_BYTES[self.platform]:
            parts["reserve of the allocator"] = reserve
        return parts

    def workspace(self) -> int:
        return workspace_nbytes(
            self.config,
            batch=self.batch,
            context=self.context,
            chunk=self.chunk,
            itemsize=self.itemsize,
            platform=self.platform,
            num_turns=num_banks(self.limits),
            num_tiers=self.num_tiers,
            is_packed=self.is_packed,
        )

    def unpooled(self) -> dict[str, int]:
        """Device bytes with all experts among the weights."""
        parts = self.dense()
        layer = self.num_experts * self.tier.expert_nbytes
        if self.num_layers:
            parts["experts"] = self.num_layers * layer
        if self.platform == "gpu" and self.num_layers and not self.is_packed:
            parts["experts gathered in a prefill step"] = min(GATHERED_BYTES, parts["experts"])
        # A layer is staged on the device while it is loaded, before there is a cache.
        later = parts["KV cache"] + parts.get(STATES, 0) + parts["activations and workspace"]
        if self.platform == "gpu" and self.num_layers and layer > later:
            parts["staging of a layer while it is loaded"] = layer - later
        return parts

    def pooled(self, slots: int, transient: int) -> dict[str, int]:
        """Device bytes with experts in slots."""
        parts = self.dense()
        banks = num_banks(self.limits)
        layers = banks * -(-self.num_layers // banks)
        parts["expert slots"] = layers * slots * self.tier.expert_nbytes
        parts["transient slots"] = banks * transient * self.tier.expert_nbytes
        parts["residency tables"] = table_nbytes(
            self.num_layers, self.num_experts, slots, last_uses=self.reads_disk
        )
        if self.limits.bulk:  # the program that writes them to slots has one as an array of its own
            own = self.tier.expert_nbytes
            parts["experts on their way between steps"] = self.bulk_nbytes + own
        # A kernel copies host rows to their slots. What the disk gives, and what XLA copies on a
        # CPU, is an array of the step first.
        if self.platform == "cpu" or self.reads_disk:
            at_once = self.at_once(slots, transient)
            parts["experts on their way in a step"] = at_once * self.tier.expert_nbytes
        return parts

    @property
    def bulk_nbytes(self) -> int:
        """Bytes of transfers between steps, on the device and again in host memory."""
        return bulk_nbytes(self.tier.expert_nbytes, self.limits.bulk)

    def at_once(self, slots: int, transient: int) -> int:
        """Experts that a step fetches at once for a layer, at most (`TierBudget.at_once`)."""
        num_pairs = self.batch * self.chunk * self.config.experts_per_token
        return most_at_once(self.num_experts, num_pairs, slots, transient)

    @property
    def reads_disk(self) -> bool:
        """Whether host memory lacks some experts."""
        limit = limit_nbytes(self.limits.host_gib)
        experts = self.num_layers * self.num_experts * self.tier.expert_nbytes
        return limit is not None and experts + self.bulk_nbytes > limit

    def default_transient(self) -> int:
        """Default of B: one token's experts, at least `TRANSIENT_BYTES`; 1 if none streams."""
        if self.limits.slots == self.num_experts:
            return 1
        enough = -(-TRANSIENT_BYTES // self.tier.expert_nbytes)
        return min(self.num_experts, max(self.config.experts_per_token, enough))

    def choose_slots(self, limit: int | None) -> tuple[int, int]:
        """Chooses C, the slots of a layer, and B, the transient slots.

        Raises:
          BudgetError: the limit is too small.
        """
        least = max(0, self.limits.slots, self.limits.prefetch, min(1, self.limits.bulk))  # of C
        asked = self.limits.transient
        transient = asked or self.default_transient()
        if limit is None:
            return least, transient
        smallest = sum(self.pooled(least, asked or 1).values())
        said = f"{least} slots a layer and {asked or 1} transient ones"
        self.require(smallest, limit, said)
        while sum(self.pooled(least, transient).values()) > limit:
            transient -= 1
        if self.limits.slots >= 0:
            return least, transient
        slots = least
        # Slots come with entries of tables and the like: the quotient may be too many by a few.
        room = limit - sum(self.pooled(least, transient).values())
        slots = min(self.num_experts, slots + room // (self.num_layers * self.tier.expert_nbytes))
        while sum(self.pooled(slots, transient).values()) > limit:
            slots -= 1
        return slots, transient

    def require(self, nbytes: int, limit: int | None, what: str) -> None:
        """Raises BudgetError unless so many bytes are within the limit."""
        if limit is not None and nbytes > limit:
            raise BudgetError(
                f"memory.device_gib={self.limits.device_gib:g} is too little for {what}: the "
                f"smallest that would do is {gib_above(nbytes)} (batch {self.batch}, context "
                f"{self.context})"
            )

    def budget(
        self, *, pooled: bool, slots: int, transient: int, device: Mapping[str, int]
    ) -> TierBudget:
        """Adds the host's and the disk's parts to a given plan of the device."""
        num_experts = self.num_layers * self.num_experts
        nbytes = self.tier.expert_nbytes
        host: dict[str, int] = {}
        disk: dict[str, int] = {}
        rows = 0
        if pooled:
            rows = self.host_rows(slots, transient)
            host["experts"] = rows * nbytes
            if self.limits.bulk:
                host["blocks of transfers between steps"] = self.bulk_nbytes
            if rows < num_experts:
                host["ring of blocks from the disk"] = RING_BLOCKS * nbytes
                waited = blocks_from_disk(self.at_once(slots, transient)) - RING_BLOCKS
                host[WAITED] = waited * nbytes
                disk["experts"] = num_experts * nbytes
        return TierBudget(
            limits=self.limits,
            tier=self.tier,
            batch=self.batch,
            context=self.context,
            chunk=self.chunk,
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            experts_per_token=self.config.experts_per_token,
            pooled=pooled,
            slots=slots,
            transient=transient,
            host_rows=rows,
            device=device,
            host=host,
            disk=disk,
        )

    def host_rows(self, slots: int, transient: int) -> int:
        """Host rows R: all experts, or those that fit beside the disk's blocks.

        Raises:
          BudgetError: not even that fits.
        """
        limit, nbytes = limit_nbytes(self.limits.host_gib), self.tier.expert_nbytes
        num_experts, at_once = self.num_layers * self.num_experts, self.at_once(slots, transient)
        if limit is None or not self.reads_disk:
            return num_experts
        rows = (limit - self.bulk_nbytes) // nbytes - blocks_from_disk(at_once)
        if rows < 0:
            least = least_host_nbytes(nbytes, num_experts, self.limits.bulk, at_once)
            raise BudgetError(
                f"memory.host_gib={self.limits.host_gib:g} is too little for the ring of "
                f"{RING_BLOCKS} experts on their way from the disk and {at_once + 1} that a step "
                f"waits for: the smallest that would do is {gib_above(least)}"
            )
        return rows
