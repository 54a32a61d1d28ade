"""The plan: bytes of every part of a run, slots and rows of experts."""

import dataclasses
from collections.abc import Mapping

from moejax.experts.budget.limits import GIB, Limits, size_text
from moejax.models.config import PAGE, ModelConfig, Pages

NUM_EVENTS = 13  # that `moejax.experts.residency` counts in each layer
EMBEDDINGS = "embeddings"  # a part of the host's
EMBEDDINGS_LEAF, HEAD_LEAF = "embed", "head"
# Rows of a running batch have pages for this part of their slots at least, the mean of a mix of
# short and long ones; further pages are what a limit leaves.
MEAN_FILL = 4
RING_BLOCKS = 8  # each of an expert on its way from the disk
_BLOB_PADDING = 64  # more than the padding of an expert's arrays to full words


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSizes:
    """A run to be planned, whatever its tiers."""

    config: ModelConfig  # the model; on a mesh with the width of each device's share of an expert
    weights_nbytes: Mapping[str, int]  # bytes of every leaf but the experts
    batch: int  # sequences at once
    context: int  # slots of a sequence's KV cache
    chunk: int  # tokens of one sequence that a prefill step takes
    longer_chunks: tuple[int, ...] = ()  # that it may take instead, rising; see `make_budget`
    platform: str  # "gpu" or "cpu"
    itemsize: int = 2  # bytes of a number of the activations and of the KV cache
    stores_scores: bool = True  # whether attention of a prefill step takes memory for scores
    copies_cache: bool = True  # whether that of a decode step takes some for what it reads, too
    num_devices: int = 1  # of a mesh; bytes of the device are those of each, the host's of all
    is_running: bool = False  # whether rows come and go, in a cache of pages
    num_pages: int = 0  # pages of a running batch; 0 until they are planned
    handed_out: int = 0  # experts of a layer that each of them has whole; 0: all, or shares of all
    # bytes of the device that are free, where no limit is stated; None: not known
    room_nbytes: int | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether it runs on a CPU."""
        return self.platform == "cpu"

    @property
    def prefill_batch(self) -> int:
        """Sequences of a prefill step: prompts of a running batch come one by one."""
        return 1 if self.is_running else self.batch

    @property
    def least_pages(self) -> int:
        """Pages of rows that fill a `MEAN_FILL` of their slots, and of one whole row at least."""
        whole = Pages(0).of(self.context)
        return max(whole, -(-self.batch * whole // MEAN_FILL)) + 1

    @property
    def num_slots(self) -> int:
        """Slots of the KV cache.

        A page of a running batch stays zero, and a chunk of a prompt copies its row.
        """
        if not self.is_running:
            return self.batch * self.context
        return (1 + self.num_pages + Pages(0).of(self.context)) * PAGE

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot of the KV cache, in all layers."""
        return self.config.cached_values * self.itemsize

    @property
    def num_layers(self) -> int:
        """Number of sparse layers, M."""
        return len(self.config.moe_layers)

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer that a device has, E."""
        return self.handed_out or self.config.num_experts

    @property
    def embeddings_nbytes(self) -> int:
        """Bytes of embeddings that lie in host memory once experts do: plain, not the head's too.

        On a mesh none do.
        """
        nbytes = self.weights_nbytes.get(EMBEDDINGS_LEAF, 0)
        is_plain = nbytes == self.config.vocab_size * self.config.model_dim * self.itemsize
        moves = is_plain and not self.config.tied_embeddings and self.num_devices == 1
        return nbytes if moves else 0

    def apart(self, tier: "TierSize", slots: int, transient: int) -> int:
        """Transient slots in an array of their own, b of B: half, if decode steps need no more.

        A CPU copies nothing beside products.
        """
        if self.is_cpu or tier.planes > 1:
            return 0
        needed = min(self.num_experts, self.batch * self.config.experts_per_token)
        passing = min(needed, self.num_experts - slots) if needed > slots else 0
        return max(0, min(transient // 2, transient - passing))

    def most_at_once(self, tier: "TierSize", slots: int, transient: int, more: bool) -> int:
        """Experts that a step fetches at once for a layer, to slots, in a wave or to both.

        `more`: some layers have a slot more.
        """
        num_tokens = max(self.batch, self.prefill_batch * self.chunk)
        needed = min(self.num_experts, num_tokens * self.config.experts_per_token)
        is_both = self.num_experts - slots <= transient - self.apart(tier, slots, transient)
        return max(needed if is_both else min(needed, slots + more), transient)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierSize:
    """One stored form of the experts."""

    name: str  # "bf16", "int4", ...
    expert_nbytes: int  # of one expert: what a slot holds, and a row of the host store
    low_rank_nbytes: int = 0  # low-rank factors of all experts, which stay on the device
    planes: int = 1  # planes of an expert that compete for slots, by `CacheSizes.planes`
    shares_slots: bool = False  # experts lie in the slots of the next tier


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parts:
    """Bytes by place and part."""

    limits: Limits
    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int]

    @property
    def total_device(self) -> int:
        """Bytes on the accelerator at the peak."""
        return sum(self.device.values())

    @property
    def total_host(self) -> int:
        """Bytes of host memory for experts and embeddings; pinned on a GPU, but for the disk's."""
        return sum(self.host.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierBudget(_Parts):
    """Every byte of a run with one tier.

    Invariants: with `pooled`, experts lie in `banks` of ceil(M / banks) C + B - b slots, and one
    more for each longer layer, in b slots beside all banks, and in R rows; without, all are on the
    device as the other weights are, C is E, and B and R are 0.
    """

    run: RunSizes
    tier: TierSize
    pooled: bool
    slots: int  # C, of each layer
    banks: int  # that layers use in turn: two with prefetch, else one
    longer_layers: int  # the first layers of a bank, which have one slot more
    transient: int  # B
    host_rows: int  # R

    @property
    def num_layers(self) -> int:
        """Number of sparse layers, M."""
        return self.run.num_layers

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer, E."""
        return self.run.num_experts

    @property
    def has_all_slots(self) -> bool:
        """Whether every expert of a layer has a slot of its own."""
        return self.slots == self.num_experts and self.tier.planes == 1

    @property
    def total_slots(self) -> int:
        """Slots of all layers."""
        return self.num_layers * self.slots + self.banks * self.longer_layers

    @property
    def said_slots(self) -> str:
        """Slots of a layer in words, such as "3" or "3 or 4"."""
        return f"{self.slots} or {self.slots + 1}" if self.longer_layers else str(self.slots)

    @property
    def at_once(self) -> int:
        """Experts that a step fetches at once for a layer; most in a prefill chunk."""
        more = self.longer_layers > 0
        return self.run.most_at_once(self.tier, self.slots, self.transient, more)

    @property
    def apart(self) -> int:
        """Transient slots in an array of their own, b."""
        return self.run.apart(self.tier, self.slots, self.transient) if self.pooled else 0

    @property
    def host_share(self) -> float:
        """Share of the experts that a step finds without the disk."""
        if not self.pooled:
            return 1.0
        return min(1.0, self.host_rows / (self.num_layers * self.num_experts))

    def num_needed(self, num_tokens: int) -> int:
        """Experts of a layer that so many tokens can need."""
        return min(self.num_experts, num_tokens * self.run.config.experts_per_token)

    def link_nbytes(self, num_tokens: int) -> int:
        """Bytes that cross the link in a step of so many tokens, when every expert is a miss."""
        every = self.num_layers * self.num_experts
        misses = min(self.num_layers * self.num_needed(num_tokens), every - self.total_slots)
        return misses * self.tier.expert_nbytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget(_Parts):
    """Every byte of a run, over all tiers; of several, each one's parts end in its name."""

    run: RunSizes  # the sizes that were planned for
    # a budget of each as if it were alone, with its slots and host rows
    tiers: tuple[TierBudget, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tiers, of falling fidelity."""
        return tuple(tier.tier.name for tier in self.tiers)

    @property
    def pooled(self) -> bool:
        """Whether experts are in slots rather than among the weights."""
        return self.tiers[0].pooled

    def _table(self) -> list[tuple[str, str, int]]:
        """(place, part, bytes) of every part, each place's total last."""
        rows = []
        for place in ("device", "host", "disk"):
            parts: Mapping[str, int] = getattr(self, place)
            rows += [(place, part, nbytes) for part, nbytes in parts.items()]
            if parts:
                rows.append((place, "total", sum(parts.values())))
        return rows


def bulk_nbytes(expert_nbytes: int, bulk: int) -> int:
    """Bytes of `bulk` experts in flight between steps, padded to full words."""
    return bulk * (expert_nbytes + _BLOB_PADDING)


def blocks_from_disk(at_once: int) -> int:
    """Experts in host memory without a row, where some are on the disk alone.

    They are the ring's blocks, the rows that a callback returns to a step that waits, and the one
    that it reads to copy from.
    """
    return RING_BLOCKS + at_once + 1


def least_host_nbytes(expert_nbytes: int, num_experts: int, bulk: int, at_once: int) -> int:
    """Smallest host memory: room for blocks from the disk, or for all experts."""
    least = min(blocks_from_disk(at_once), num_experts)
    return least * expert_nbytes + bulk_nbytes(expert_nbytes, bulk)


def table_nbytes(
    num_layers: int, num_experts: int, slots: int, *, items: int | None = None,
    last_uses: bool = False,
) -> int:  # fmt: skip
    """Bytes of the residency tables, of the counters and of the table of rows on the device.

    Args:
      items: that may have a slot; None: the experts.
      last_uses: includes the table of last uses, by which host memory evicts.
    """
    # The slot of an item; owner, last use and flag of a slot. And the clock.
    items = num_experts if items is None else items
    residency = num_layers * 4 * (items + 3 * slots) + 4
    rows = num_layers * num_experts * 4
    counters = num_layers * 4 * (NUM_EVENTS + 2)
    return residency + rows + counters + (rows if last_uses else 0)


MIB = 2**20
LINK_GIB_PER_S = 50  # PCIe 5 x16 by DMA, measured on an H200 with jax 0.11.2, 2026-11-20


def describe(budget: Budget) -> list[str]:
    """Table of all parts, then slots; for one tier also shares and link bytes."""
    first, is_alone, run = budget.tiers[0], len(budget.tiers) == 1, budget.run
    head = f"batch {run.batch}, context {run.context}, prefill by {run.chunk} tokens"
    if run.is_running:
        head += f", {run.num_pages} pages of {PAGE} tokens"
    if run.num_devices > 1:
        head += f", each of {run.num_devices} devices"
        if run.handed_out:
            head += f" with {run.handed_out} of {run.config.num_experts} experts of a layer"
    lines = [f"{head}, experts of {size_text(first.tier.expert_nbytes)}" if is_alone else head]
    width = 40 if is_alone else 46  # a tier's name ends its parts
    limits = {"device": budget.limits.device_gib, "host": budget.limits.host_gib}
    for place, part, nbytes in budget._table():
        of = f" of {limit:g}" if (limit := limits.get(place)) else ""
        gib = f" = {nbytes / GIB:.3f} GiB{of}" if part == "total" else ""
        lines.append(f"  {place:<7}{part:<{width}}{nbytes / MIB:>12.2f} MiB{gib}")
    if is_alone:
        return lines + _speed(first)
    if first.tier.shares_slots:
        base = budget.tiers[1]
        said = (
            f"{first.tier.name}: refinements of {size_text(first.tier.expert_nbytes)}, "
            f"{base.tier.name}: base planes of {size_text(base.tier.expert_nbytes)}; {base.slots} "
            f"slots a layer, each of one plane of one of {base.num_experts} experts, "
            f"{base.transient} transient slots"
        )
        return [*lines, said]
    return lines + [
        f"{tier.tier.name}: experts of {size_text(tier.tier.expert_nbytes)}, "
        f"{tier.said_slots} of {tier.num_experts} cached a layer, {tier.transient} transient "
        "slots, "
        f"{tier.host_rows} of {tier.num_layers * tier.num_experts} in host memory"
        for tier in budget.tiers
    ]


def _speed(budget: TierBudget) -> list[str]:
    if not budget.num_layers:
        return ["the model has no sparse layer, so no experts"]
    if not budget.pooled:
        return [f"all {budget.num_layers} x {budget.num_experts} experts stay on the device"]
    share = 100 * budget.total_slots / (budget.num_layers * budget.num_experts)
    lines = [
        f"slots: {budget.said_slots} of {budget.num_experts} a layer "
        f"({share:.1f} % of the experts), and {budget.transient} transient",
        f"host memory: {budget.host_rows} of {budget.num_layers * budget.num_experts} experts "
        f"({100 * budget.host_share:.1f} %)",
    ]
    if threads := budget.limits.host_threads:
        count = "all cores but one" if threads < 0 else f"{threads} threads"
        lines.append(
            f"decode steps of one sequence: {count} of the host multiply some misses; how many of "
            "each number is measured and told when the experts are loaded"
        )
    batch = budget.run.batch
    for what, num_tokens, each in (
        ("a token of a decode step", batch, batch),
        ("a full prefill chunk", budget.run.prefill_batch * budget.run.chunk, 1),
    ):
        nbytes = budget.link_nbytes(num_tokens) / each
        lines.append(
            f"over the link at worst: {size_text(nbytes)} {what}, "
            f"{1e3 * nbytes / (LINK_GIB_PER_S * GIB):.2f} ms at {LINK_GIB_PER_S} GiB/s"
        )
    return lines
