"""Turns limits into slots of each tier: bytes of a run's parts, and the room they leave."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from moejax.experts.budget.limits import (
    BudgetError,
    Limits,
    check_gib,
    check_phase,
    default_bulk,
    gib_above,
    limit_nbytes,
    num_banks,
)
from moejax.experts.budget.planned import (
    EMBEDDINGS,
    EMBEDDINGS_LEAF,
    RING_BLOCKS,
    Budget,
    RunSizes,
    TierBudget,
    TierSize,
    blocks_from_disk,
    bulk_nbytes,
    least_host_nbytes,
    table_nbytes,
)
from moejax.experts.budget.workspace import workspace_nbytes
from moejax.models.config import PAGE, Pages
from pallas_kernels.host_mailbox import Mailbox
from pallas_kernels.sum_mailbox import mailbox_nbytes

# A fetch launch of so many bytes runs at 31-37 GiB/s or more, of one job of 5 MB at 20 (H200, PCIe
# 5 x16, jax 0.11.2, 2026-11-20).
TRANSIENT_BYTES = 64 * 2**20
# cuBLAS' workspace, sums that thread blocks share (17 MB), programs and the allocator's gaps.
RESERVE_BYTES = {"gpu": 128 * 2**20, "cpu": 0}
# Bytes of plain experts where no kernel reads them in place, as in `moejax.models.moe`.
GATHERED_BYTES = 512 * 2**20
# By how much a longer chunk of prompts may raise the bytes of experts without a slot.
LONGER_CHUNK_COST = 1.052
# Of the memory that a device without a limit has free, what a plan with a longer chunk may take: a
# call may have a longer context than the planned one.
ROOM_SHARE = 0.9
STATES = "states of layers without attention"  # a part of the device's
WAITED = "experts that a step waits for"  # a part of the host's
MAILBOX = "mailbox of the host's cores"  # likewise
BIASES = "biases for the host's cores"  # likewise


def _plan_tier(
    run: RunSizes, tier: TierSize, limits: Limits, num_tiers: int = 1, longer_layers: int = 0
) -> TierBudget:
    """Plans every byte of a run with one tier of its `num_tiers`, and its slots.

    C = floor((limit - rest) / (M expert_nbytes)), at most E, where the rest holds B transient
    slots; of what is left the first layers get a slot more, but for a running batch, which gets
    pages of it. If everything fits, experts are not pooled, unless `limits.slots` asks for it.

    Args:
      longer_layers: with `limits.slots`, as `TierBudget.longer_layers`.

    Raises:
      BudgetError: it does not fit; the text names the smallest limit that would do.
    """
    plan = _TierPlan(run, tier, limits, num_tiers, longer_layers)
    plan.check()
    limit = limit_nbytes(limits.device_gib)
    whole = plan._unpooled()
    if not run.num_layers or (limits.slots < 0 and (limit is None or sum(whole.values()) <= limit)):
        plan._require(sum(whole.values()), limit, "the model, which has no experts to move")
        return plan.budget(pooled=False, slots=run.num_experts, transient=0, device=whole)
    slots, transient = plan._choose_slots(limit)
    if limit is not None and limits.slots < 0:
        for longer in _most_longer_first(run, tier, slots, num_banks(limits)):
            more = dataclasses.replace(plan, longer_layers=longer)
            if sum(more.pooled(slots, transient).values()) <= limit:
                plan = more
                break
    device = plan.pooled(slots, transient)
    return plan.budget(pooled=True, slots=slots, transient=transient, device=device)


def _most_longer_first(run: RunSizes, tier: TierSize, slots: int, banks: int) -> range:
    """How many layers of a bank may have one slot more than all have."""
    if slots >= run.num_experts or tier.planes > 1 or run.is_running:
        return range(0)
    return range(-(-run.num_layers // banks) - 1, 0, -1)


@dataclasses.dataclass(frozen=True)
class _TierPlan:
    run: RunSizes
    tier: TierSize
    limits: Limits
    num_tiers: int
    longer_layers: int = 0

    @property
    def is_packed(self) -> bool:
        """Whether the experts take less than plain ones."""
        config = self.run.config
        plain = 3 * config.model_dim * config.expert_dim * self.run.itemsize
        return self.tier.expert_nbytes < plain

    def check(self) -> None:
        """Raises BudgetError for settings that no memory size could satisfy."""
        limits, most = self.limits, self.run.num_experts
        places = self.tier.planes * most
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
            if count > places:
                raise BudgetError(
                    f"memory.{name}={count} is more than the {places} experts of a layer"
                )
        if bulk < 0 or (bulk and slots == 0):
            raise BudgetError(
                f"memory.bulk={bulk} must be 0 (none) or a number of experts, which need slots to "
                f"go to, but memory.slots={slots}"
            )
        if bulk > (every := self.run.num_layers * most):
            raise BudgetError(f"memory.bulk={bulk} is more than the {every} experts of the model")
        if slots >= 0 and prefetch > slots:
            raise BudgetError(
                f"memory.prefetch={prefetch} needs as many slots a layer, but memory.slots={slots}"
            )

    def check_host_threads(self) -> None:
        """Raises BudgetError where the host's cores cannot multiply misses."""
        reasons = {
            "the run is on a CPU": self.run.is_cpu,
            "a mesh fetches every miss": self.run.num_devices > 1,
            "memory.prefetch looks ahead": self.limits.prefetch > 0,
            "some experts are on the disk alone": self._reads_disk,
            "the experts are not packed": not self.is_packed,
            "the experts have low-rank compensators": self.tier.low_rank_nbytes > 0,
        }
        if said := next((reason for reason, holds in reasons.items() if holds), ""):
            raise BudgetError(
                f"memory.host_threads={self.limits.host_threads} needs experts in INT2, INT3, "
                f"INT4, INT8 or MXFP4, all in host memory, on one GPU, but {said}: set it to 0"
            )

    def dense(self) -> dict[str, int]:
        """Bytes by part, where experts' places make no difference."""
        run = self.run
        parts = {f"weights {name}": nbytes for name, nbytes in run.weights_nbytes.items()}
        if self.tier.low_rank_nbytes:
            parts["low-rank factors of experts"] = self.tier.low_rank_nbytes
        parts["KV cache"] = run.num_slots * run.slot_nbytes
        wide, plain = run.config.state_values
        if wide:  # of a sequence, however long it is; a chunk of a running batch copies one
            parts[STATES] = (run.batch + run.is_running) * (4 * wide + plain * run.itemsize)
        parts["activations and workspace"] = workspace_nbytes(
            run, num_banks(self.limits), num_tiers=self.num_tiers, is_packed=self.is_packed,
            has_terms=self.tier.low_rank_nbytes > 0,
        )  # fmt: skip
        if run.num_devices > 1 and run.platform == "gpu":
            parts["mailboxes of sums"] = mailbox_nbytes(run.num_devices)
        if reserve := RESERVE_BYTES[run.platform]:
            parts["reserve of the allocator"] = reserve
        return parts

    def _unpooled(self) -> dict[str, int]:
        """Device bytes with all experts among the weights."""
        parts = self.dense()
        if not self.run.num_layers:
            return parts
        layer = self.run.num_experts * self.tier.expert_nbytes
        parts["experts"] = self.run.num_layers * layer
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
        if self.moves_embeddings:
            parts.pop(f"weights {EMBEDDINGS_LEAF}")
        banks, apart = num_banks(self.limits), self.run.apart(self.tier, slots, transient)
        layers = banks * -(-self.run.num_layers // banks)
        items = self.tier.planes * self.run.num_experts
        if self.tier.shares_slots:
            items = table_slots = 0
        else:
            table_slots = slots
            parts["expert slots"] = (layers * slots + banks * self.longer_layers) * own
            parts["transient slots"] = (banks * (transient - apart) + apart) * own
        parts["residency tables"] = table_nbytes(
            self.run.num_layers, self.run.num_experts, table_slots, items=items,
            last_uses=self._reads_disk,
        )  # fmt: skip
        if self.limits.host_threads:  # state of jobs, table by misses and address of the mailbox
            parts["residency tables"] += 4 * (2 + self.run.config.experts_per_token + 1 + 2)
        if self.limits.bulk:  # the program that writes them to slots has one as an array of its own
            parts["experts on their way between steps"] = self.bulk_nbytes + own
        # A kernel copies host rows to their slots. What the disk gives, and what XLA copies on a
        # CPU, is an array of the step first.
        if self.run.is_cpu or self._reads_disk:
            at_once = self._at_once(slots, transient)
            parts["experts on their way in a step"] = at_once * own
        return parts

    def _at_once(self, slots: int, transient: int) -> int:
        return self.run.most_at_once(self.tier, slots, transient, self.longer_layers > 0)

    @property
    def moves_embeddings(self) -> bool:
        """Whether embeddings lie in host memory beside the experts; not where that has a limit."""
        return self.run.embeddings_nbytes > 0 and not self.limits.host_gib

    @property
    def bulk_nbytes(self) -> int:
        """Bytes of transfers between steps, on the device and again in host memory."""
        return bulk_nbytes(self.tier.expert_nbytes, self.limits.bulk)

    @property
    def _reads_disk(self) -> bool:
        """Whether host memory lacks some experts."""
        limit = limit_nbytes(self.limits.host_gib)
        experts = self.run.num_layers * self.run.num_experts * self.tier.expert_nbytes
        needed = self.run.num_devices * (experts + self.bulk_nbytes)
        if limit is None or needed <= limit:
            return False
        if self.run.num_devices > 1:
            raise BudgetError(
                f"memory.host_gib={self.limits.host_gib:g} is too little for all experts, and a "
                f"mesh does not serve experts from disk yet: raise it to {gib_above(needed)}"
            )
        return True

    def _choose_slots(self, limit: int | None) -> tuple[int, int]:
        """Chooses C, the slots of a layer, and B, the transient slots."""
        least = max(0, self.limits.slots, self.limits.prefetch, min(1, self.limits.bulk))  # of C
        # By default one token's experts, of at least `TRANSIENT_BYTES`; 1 if none streams.
        enough = max(
            self.run.config.experts_per_token, -(-TRANSIENT_BYTES // self.tier.expert_nbytes)
        )
        places = self.tier.planes * self.run.num_experts
        enough = 1 if self.limits.slots == places else self.tier.planes * enough
        asked = self.limits.transient
        transient = asked or min(places, enough)
        if limit is None:
            return least, transient
        smallest = sum(self.pooled(least, asked or 1).values())
        what = f"{least} slots a layer and {asked or 1} transient ones"
        if self.limits.slots < 0 and (whole := sum(self._unpooled().values())) < smallest:
            smallest, what = whole, "all experts"
        self._require(smallest, limit, what)
        while sum(self.pooled(least, transient).values()) > limit:
            transient -= 1
        if self.limits.slots >= 0:
            return least, transient
        counts = range(self.run.num_experts, -1, -1)
        slots = next(n for n in counts if sum(self.pooled(n, transient).values()) <= limit)
        return slots, transient

    def _require(self, nbytes: int, limit: int | None, what: str) -> None:
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
        num_experts = self.run.num_layers * self.run.num_experts
        nbytes = self.tier.expert_nbytes
        host: dict[str, int] = {}
        disk: dict[str, int] = {}
        rows = 0
        if pooled:
            rows = self.host_rows(slots, transient)
            host["experts"] = self.run.num_devices * rows * nbytes
            if self.moves_embeddings:
                host[EMBEDDINGS] = self.run.embeddings_nbytes
            if self.limits.host_threads:
                self.check_host_threads()
                c = self.run.config
                host[MAILBOX] = Mailbox(c.model_dim).nbytes
                if c.expert_bias:
                    host[BIASES] = 4 * rows * (2 * c.expert_dim + c.model_dim)
            if self.limits.bulk:
                host["blocks of transfers between steps"] = self.run.num_devices * self.bulk_nbytes
            if rows < num_experts:
                host["ring of blocks from the disk"] = RING_BLOCKS * nbytes
                at_once = self._at_once(slots, transient)
                host[WAITED] = (blocks_from_disk(at_once) - RING_BLOCKS) * nbytes
                disk["experts"] = num_experts * nbytes
        return TierBudget(
            limits=self.limits,
            run=self.run,
            tier=self.tier,
            pooled=pooled,
            slots=slots,
            banks=num_banks(self.limits),
            longer_layers=self.longer_layers,
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
            self.run.num_layers * self.run.num_experts,
            self._at_once(slots, transient),
        )
        if limit is None or not self._reads_disk:
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


# Parts of a budget that each tier has of its own.
OWN_PARTS = ("expert", "transient", "residency", "low-rank", "blocks", "ring")  # how they begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyDemands:
    """Memory that a policy asks for."""

    slots: Sequence[int] = ()  # of a layer in each tier; () for the rule of `make_budget`
    # experts of the next layer that each tier which lacks some brings ahead at most
    prefetch: int = 0
    # experts of such a tier in flight between steps at once; None: `default_bulk`
    bulk: int | None = 0
    # indices of tiers of which no step fetches an expert, so that their transient slots are never
    # used; `limits.transient` does not hold for them
    between_steps: Sequence[int] = ()
    # bytes by part that the steps of a run take on the device for the policy's sake
    device: Callable[[RunSizes], Mapping[str, int]] = lambda run: {}
    # copies of the first tier serve all pairs, at least half of which ask for it, and nothing is
    # brought to lower tiers between steps. By experts drawn evenly n slots of it then fetch fewer
    # bytes than fewer slots of it and lower tiers with room for all
    first_alone: bool = False


def make_budget(
    run: RunSizes, tiers: Sequence[TierSize], limits: Limits, policy: PolicyDemands | None = None
) -> Budget:
    """Plans every byte of a run, and the slots of each tier.

    Without a policy `_plan_tier` says it, of one tier. Under one, unless it asks for `slots`:
    without a limit every tier has room for all experts (the first one for `limits.slots`, if that
    is given). Under a limit the first one has all slots where that is best (`first_alone`); else
    the lower tiers have room for all experts, if that leaves the first one as many slots as a token
    needs experts, and it gets what is left; else all tiers have the same number. Then the first
    layers get a slot more, as in `_plan_tier`, of the first tier to which steps fetch. Of two tiers
    that share slots both have as many as fit, or the sum of what the policy asks for. Experts have
    slots before a running batch has more than its least pages; it gets those that the limit then
    leaves, or without a limit all that it can use.

    A prompt brings the experts without a slot once a chunk. So the chunk is the longest of the
    run's for which their bytes, which every decode step draws from, are at most
    `LONGER_CHUNK_COST` of what they are with the usual one. Where all experts are among the weights
    a chunk reads and unpacks each of them once, so it is the longest that fits. A running batch
    keeps the usual one there, since all rows wait for a chunk.

    Args:
      tiers: in order of falling fidelity.
      limits: of all tiers together; host memory is shared by their bytes.
      policy: memory that the policy asks for; None: no policy decides.

    Raises:
      BudgetError: it does not fit, or slots are not possible; the text names what would do.
    """
    found = _with_pages(run, tiers, limits, policy)
    most = LONGER_CHUNK_COST * _missing_nbytes(found, policy)
    if not most and (found.pooled or run.is_running):
        return found
    for chunk in reversed(run.longer_chunks):
        with contextlib.suppress(BudgetError):
            longer = _with_pages(dataclasses.replace(run, chunk=chunk), tiers, limits, policy)
            is_alike = longer.pooled == found.pooled and _missing_nbytes(longer, policy) <= most
            room = math.inf if run.room_nbytes is None else ROOM_SHARE * run.room_nbytes
            if is_alike and longer.total_device <= room:
                return longer
    return found


def _with_pages(
    run: RunSizes, tiers: Sequence[TierSize], limits: Limits, policy: PolicyDemands | None
) -> Budget:
    """Plans a run, and the pages of a running batch."""
    if not run.is_running:
        return _planned(run, tiers, limits, policy)
    least = dataclasses.replace(run, num_pages=run.least_pages)
    found, limit = _planned(least, tiers, limits, policy), limit_nbytes(limits.device_gib)
    pages = run.batch * Pages(0).of(run.context) + 1  # all rows have every slot
    if limit is not None:
        more = (limit - found.total_device) // (PAGE * run.slot_nbytes)
        pages = min(pages, least.num_pages + more)
    return _planned(dataclasses.replace(run, num_pages=pages), tiers, limits, policy)


def _missing_nbytes(budget: Budget, policy: PolicyDemands | None) -> int:
    """Bytes of the experts that have no slot, in the tiers from which steps fetch."""
    unfetched: Sequence[int] = policy.between_steps if policy else ()
    if policy and policy.first_alone:  # what the others fetch goes with what it lacks
        unfetched = range(1, len(budget.tiers))
    return sum(
        (tier.num_layers * tier.tier.planes * tier.num_experts - tier.total_slots)
        * tier.tier.expert_nbytes
        for i, tier in enumerate(budget.tiers)
        if i not in unfetched
    )


def _planned(
    run: RunSizes, tiers: Sequence[TierSize], limits: Limits, policy: PolicyDemands | None
) -> Budget:
    """Plans a run whose pages are known."""
    num_experts, names = run.num_experts, tuple(tier.name for tier in tiers)

    def joined(budgets: Sequence[TierBudget], of_policy: Mapping[str, int]) -> Budget:
        device, host, disk = (
            _together(names, [getattr(budget, place) for budget in budgets])
            for place in ("device", "host", "disk")
        )
        return Budget(
            run=run, tiers=tuple(budgets), limits=limits, device=device | dict(of_policy),
            host=host, disk=disk,
        )  # fmt: skip

    if policy is None:
        (tier,) = tiers
        return joined([_plan_tier(run, tier, limits)], {})
    if limits.host_threads:
        raise BudgetError(
            f"memory.host_threads={limits.host_threads} is for experts without a policy: set it "
            "to 0, or leave the policy out"
        )
    shares = tiers[0].shares_slots
    total_nbytes = sum(tier.expert_nbytes for tier in tiers)

    def alone(chosen: Sequence[int], longer: Sequence[int], host_gib: float) -> list[TierBudget]:
        budgets, bulk = [], policy.bulk
        if bulk is None:
            bulk = default_bulk(tiers[0].expert_nbytes, run.num_layers * chosen[0])
            bulk = min(bulk, run.num_layers * num_experts)
        for i, (tier, count) in enumerate(zip(tiers, chosen, strict=True)):
            cached = 0 < count < tier.planes * num_experts
            streams = count < tier.planes * num_experts and not (
                count and i in policy.between_steps
            )
            transient = limits.transient if streams else 1
            if shares and transient:  # a wave of the first tier has both planes of an expert
                transient = max(2, transient)
            own = dataclasses.replace(
                limits, device_gib=0.0, host_gib=host_gib * tier.expert_nbytes / total_nbytes,
                slots=count, transient=transient,
                prefetch=min(policy.prefetch, count) if cached else 0,
                bulk=bulk if cached else 0,
            )  # fmt: skip
            if shares and i == 0:  # as many transient slots as the next one has by its bytes
                next_own = dataclasses.replace(own, host_gib=0.0)
                transient = _plan_tier(run, tiers[1], next_own, len(tiers)).transient
                own = dataclasses.replace(own, transient=transient)
            budgets.append(_plan_tier(run, tier, own, len(tiers), longer[i]))
        return budgets

    def made(chosen: Sequence[int], longer: Sequence[int]) -> Budget:
        budgets = alone(chosen, longer, 0.0)
        if limits.host_gib:
            _check_host(budgets, limits)
            budgets = alone(chosen, longer, limits.host_gib)
        return joined(budgets, policy.device(run))

    check_gib(limits.device_gib, limits.host_gib)
    limit, num_lower = limit_nbytes(limits.device_gib), len(tiers) - 1
    choices: list[Sequence[int]]  # slots of each tier, the best first
    if slots := policy.slots:
        _check(slots, names, num_experts)
        if limits.slots >= 0:
            raise BudgetError(
                f"memory.slots={limits.slots} and policy.slots={tuple(slots)} both say how many "
                "experts are cached: leave memory.slots out"
            )
        choices = [(sum(slots),) * 2 if shares else slots]
    elif limit is None:
        first = num_experts if limits.slots < 0 else limits.slots
        choices = [(first, *[num_experts] * num_lower)]
        if shares:
            choices = [(min(first + num_experts, 2 * num_experts - 1),) * 2]
    elif shares:
        choices = [(count, count) for count in range(2 * num_experts - 1, 1, -1)]
    else:
        counts = range(num_experts, -1, -1)
        pairs = [(n, 0) for n in counts]
        if not policy.first_alone:
            pairs = [(n, num_experts) for n in counts if n >= run.config.experts_per_token]
            pairs += [(n, n) for n in counts]
        choices = [(first, *[lower] * num_lower) for first, lower in pairs]
    none = [0] * len(tiers)
    for chosen in choices:
        found = made(chosen, none)
        if limit is None or found.total_device <= limit:
            break
    else:
        raise _too_large(found, policy.device(run))
    if limit is None or policy.slots or shares:
        return found
    i = next(i for i in range(len(tiers)) if i not in policy.between_steps)
    for longer in _most_longer_first(run, tiers[i], chosen[i], found.tiers[i].banks):
        more = made(chosen, [*none[:i], longer, *none[i + 1 :]])
        if more.total_device <= limit:
            return more
    return found


def _check(slots: Sequence[int], names: Sequence[str], num_experts: int) -> None:
    if len(slots) != len(names):
        raise BudgetError(
            f"policy.slots has {len(slots)} numbers, but there are {len(names)} tiers: "
            f"{', '.join(names)}"
        )
    if not all(0 <= count <= num_experts for count in slots):
        said = ", ".join(map(str, slots))
        raise BudgetError(f"policy.slots={said} must be from 0 to the {num_experts} of a layer")


def _check_host(budgets: Sequence[TierBudget], limits: Limits) -> None:
    """Raises BudgetError where a tier's share of host memory is too small."""
    tiers = [budget.tier for budget in budgets]
    total = sum(tier.expert_nbytes for tier in tiers)
    least = 0
    for budget, tier in zip(budgets, tiers, strict=True):
        needed = least_host_nbytes(
            tier.expert_nbytes, budget.num_layers * budget.num_experts, budget.limits.bulk,
            budget.at_once,
        )  # fmt: skip
        # Shares are rounded down.
        least = max(least, -(-(needed + 1) * total // tier.expert_nbytes))
    limit = limit_nbytes(limits.host_gib)
    if limit is not None and limit < least:
        raise BudgetError(
            f"memory.host_gib={limits.host_gib:g} is too little for experts of "
            f"{', '.join(tier.name for tier in tiers)} on their way from the disk: the smallest "
            f"that would do is {gib_above(least)}"
        )


def _too_large(budget: Budget, of_policy: Mapping[str, int]) -> BudgetError:
    """Makes the error of a budget above its limit, which names what suffices."""
    slots, names = [tier.slots for tier in budget.tiers], ", ".join(budget.names)
    what = f"{', '.join(map(str, slots))} slots a layer of {names}"
    if not any(slots):  # there is nothing to spare
        what = f"experts in {names}, even with no slots to cache them"
    parts = (f", of which {part} {gib_above(n)}" for part, n in of_policy.items())
    return BudgetError(
        f"memory.device_gib={budget.limits.device_gib:g} is too little for {what}: the smallest "
        f"that would do is {gib_above(budget.total_device)} (batch {budget.run.batch}, context "
        f"{budget.run.context}){''.join(parts)}; raise memory.device_gib to that, or lower batch "
        "or context"
    )


def _together(names: Sequence[str], parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Merges the tiers' parts: own parts by tier, shared ones by the largest."""
    found: dict[str, int] = {}
    for name, own in zip(names, parts, strict=True):
        for part, nbytes in own.items():
            said = f"{part}, {name}" if len(names) > 1 and part.startswith(OWN_PARTS) else part
            found[said] = max(nbytes, found.get(said, 0))
    return found
