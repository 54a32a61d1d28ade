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
from moejax.experts.budget.planned import (
    RING_BLOCKS,
    RunSizes,
    Tier,
    TierBudget,
    blocks_from_disk,
    bulk_nbytes,
    least_host_nbytes,
    table_nbytes,
)
from moejax.experts.budget.workspace import workspace_nbytes
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


def plan_tier(run: RunSizes, tier: Tier, limits: Limits, num_tiers: int = 1) -> TierBudget:
    """Plans every byte of a run with one tier of its `num_tiers`, and its slots.

    C = floor((limit - rest) / (M expert_nbytes)), at most E, where the rest holds B transient
    slots. If everything fits, experts are not pooled, unless `limits.slots` asks for it.

    Raises:
      BudgetError: it does not fit; the text names the smallest limit that would do.
    """
    plan = _TierPlan(run, tier, limits, num_tiers)
    plan.check()
    limit = limit_nbytes(limits.device_gib)
    whole = plan.unpooled()
    if not run.num_layers or (limits.slots < 0 and (limit is None or sum(whole.values()) <= limit)):
        plan.require(sum(whole.values()), limit, "the model, which has no experts to move")
        return plan.budget(pooled=False, slots=plan.num_experts, transient=0, device=whole)
    slots, transient = plan.choose_slots(limit)
    device = plan.pooled(slots, transient)
    return plan.budget(pooled=True, slots=slots, transient=transient, device=device)


@dataclasses.dataclass(frozen=True)
class _TierPlan:
    run: RunSizes
    tier: Tier
    limits: Limits
    num_tiers: int

    @property
    def num_layers(self) -> int:
        return self.run.num_layers

    @property
    def num_experts(self) -> int:
        return self.run.num_experts

    @property
    def is_packed(self) -> bool:
        """Whether the experts take less than plain ones."""
        config = self.run.config
        plain = 3 * config.model_dim * config.expert_dim * self.run.itemsize
        return self.tier.expert_nbytes < plain

    def check(self) -> None:
        """Raises BudgetError for settings that no memory size could satisfy."""
        limits, most = self.limits, self.num_experts
        slots, transient, prefetch, bulk = (
            limits.slots, limits.transient, limits.prefetch, limits.bulk
        )  # fmt: skip
        check_gib(limits.device_gib, limits.host_gib)
        if slots < -1 or min(transient, prefetch) < 0 or prefetch > most:
            raise BudgetError(
                f"memory.slots={slots}, transient={transient} and prefetch={prefetch} must be "
                f"numbers of experts, at most {most} (slots -1: as many as fit)"
            )
        check_phase(limits.prefetch_in)
        for name, count in (("slots", slots), ("transient", transient)):
            if count > most:
                raise BudgetError(
                    f"memory.{name}={count} is more than the {most} experts of a layer"
                )
        if bulk < 0 or (bulk and slots == 0):
            raise BudgetError(
                f"memory.bulk={bulk} must be 0 (none) or a number of experts, which need slots to "
                f"go to, but memory.slots={slots}"
            )
        if bulk > (every := self.num_layers * most):
            raise BudgetError(f"memory.bulk={bulk} is more than the {every} experts of the model")
        if slots >= 0 and prefetch > slots:
            raise BudgetError(
                f"memory.prefetch={prefetch} needs as many slots a layer, but memory.slots={slots}"
            )

    def dense(self) -> dict[str, int]:
        """Bytes by part, where experts' places make no difference."""
        run = self.run
        low_rank = {n: size for n, size in run.weights_nbytes.items() if n.endswith(LOW_RANK)}
        parts = {f"weights {n}": s for n, s in run.weights_nbytes.items() if n not in low_rank}
        if low_rank:
            parts["low-rank factors of experts"] = sum(low_rank.values())
        parts["KV cache"] = run.batch * run.context * run.config.cached_values * run.itemsize
        wide, plain = run.config.state_values
        if wide:  # of a sequence, however long it is
            parts[STATES] = run.batch * (4 * wide + plain * run.itemsize)
        parts["activations and workspace"] = workspace_nbytes(
            run, num_banks(self.limits), num_tiers=self.num_tiers, is_packed=self.is_packed
        )
        if reserve := RESERVE_BYTES[run.platform]:
            parts["reserve of the allocator"] = reserve
        return parts

    def unpooled(self) -> dict[str, int]:
        """Device bytes with all experts among the weights."""
        parts = self.dense()
        if not self.num_layers:
            return parts
        layer = self.num_experts * self.tier.expert_nbytes
        parts["experts"] = self.num_layers * layer
        if self.run.platform == "gpu":
            if not self.is_packed:
                parts["experts gathered in a prefill step"] = min(GATHERED_BYTES, parts["experts"])
            # A layer is staged on the device while it is loaded, before there is a cache.
            later = parts["KV cache"] + parts.get(STATES, 0) + parts["activations and workspace"]
            if layer > later:
                parts["staging of a layer while it is loaded"] = layer - later
        return parts

    def pooled(self, slots: int, transient: int) -> dict[str, int]:
        """Device bytes with experts in slots."""
        parts, own = self.dense(), self.tier.expert_nbytes
        banks = num_banks(self.limits)
        layers = banks * -(-self.num_layers // banks)
        parts["expert slots"] = layers * slots * own
        parts["transient slots"] = banks * transient * own
        parts["residency tables"] = table_nbytes(
            self.num_layers, self.num_experts, slots, last_uses=self.reads_disk
        )
        if self.limits.bulk:  # the program that writes them to slots has one as an array of its own
            parts["experts on their way between steps"] = self.bulk_nbytes + own
        # A kernel copies host rows to their slots. What the disk gives, and what XLA copies on a
        # CPU, is an array of the step first.
        if self.run.is_cpu or self.reads_disk:
            parts["experts on their way in a step"] = self.run.most_at_once(slots, transient) * own
        return parts

    @property
    def bulk_nbytes(self) -> int:
        """Bytes of transfers between steps, on the device and again in host memory."""
        return bulk_nbytes(self.tier.expert_nbytes, self.limits.bulk)

    @property
    def reads_disk(self) -> bool:
        """Whether host memory lacks some experts."""
        limit = limit_nbytes(self.limits.host_gib)
        experts = self.num_layers * self.num_experts * self.tier.expert_nbytes
        return limit is not None and experts + self.bulk_nbytes > limit

    def choose_slots(self, limit: int | None) -> tuple[int, int]:
        """Chooses C, the slots of a layer, and B, the transient slots."""
        least = max(0, self.limits.slots, self.limits.prefetch, min(1, self.limits.bulk))  # of C
        # By default one token's experts, of at least `TRANSIENT_BYTES`; 1 if none streams.
        enough = max(
            self.run.config.experts_per_token, -(-TRANSIENT_BYTES // self.tier.expert_nbytes)
        )
        if self.limits.slots == self.num_experts:
            enough = 1
        asked = self.limits.transient
        transient = asked or min(self.num_experts, enough)
        if limit is None:
            return least, transient
        smallest = sum(self.pooled(least, asked or 1).values())
        self.require(smallest, limit, f"{least} slots a layer and {asked or 1} transient ones")
        while sum(self.pooled(least, transient).values()) > limit:
            transient -= 1
        if self.limits.slots >= 0:
            return least, transient
        # Slots come with entries of tables and the like: the quotient may be too many by a few.
        room = limit - sum(self.pooled(least, transient).values())
        slots = min(self.num_experts, least + room // (self.num_layers * self.tier.expert_nbytes))
        while sum(self.pooled(slots, transient).values()) > limit:
            slots -= 1
        return slots, transient

    def require(self, nbytes: int, limit: int | None, what: str) -> None:
        """Raises BudgetError unless so many bytes are within the limit."""
        if limit is not None and nbytes > limit:
            raise BudgetError(
                f"memory.device_gib={self.limits.device_gib:g} is too little for {what}: the "
                f"smallest that would do is {gib_above(nbytes)} (batch {self.run.batch}, context "
                f"{self.run.context}); raise memory.device_gib to that, or lower batch or context"
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
                waited = blocks_from_disk(self.run.most_at_once(slots, transient)) - RING_BLOCKS
                host[WAITED] = waited * nbytes
                disk["experts"] = num_experts * nbytes
        return TierBudget(
            limits=self.limits,
            run=self.run,
            tier=self.tier,
            pooled=pooled,
            slots=slots,
            transient=transient,
            host_rows=rows,
            device=device,
            host=host,
            disk=disk,
        )

    def host_rows(self, slots: int, transient: int) -> int:
        """Host rows R: all experts, or those that fit beside the disk's blocks."""
        limit, nbytes = limit_nbytes(self.limits.host_gib), self.tier.expert_nbytes
        num_experts, at_once = (
            self.num_layers * self.num_experts,
            self.run.most_at_once(slots, transient),
        )
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
