"""A tier of the expert cache inside the compiled step: its slots are filled and multiplied.

With prefetch, layers take turns between two banks of slots: what is copied for the next layer
writes one array while this layer's products read the other, and where XLA runs the step as a CUDA
graph whose order is that of its buffers (`state.compiler_options`), the two overlap. Where a layer
can need more experts than it has slots, the rest passes through the transient slots in waves; those
of a chunk take turns between the bank's and some that lie apart, for the same end.

The host is never asked, except for experts that are on the disk alone (`TierSpec.read`).

Axes: N tokens, A experts a token, P parts of a product; the rest as in `moejax.experts.state`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

from moejax.experts.cache_planner import CachePlanner, SlotPlan
from moejax.experts.state import HostRows, TierSlots, TierSpec
from moejax.models.config import ModelConfig
from moejax.models.expert_products import (
    ExpertPairs,
    ExpertStacks,
    PairBiases,
    choose_grouped,
)
from moejax.models.layer_index import LayerIndex
from moejax.models.moe import ExpertImpl, products_in_pairs, record_experts
from moejax.weights import linear as ops
from moejax.weights.linear import Index
from moejax.weights.qtensor import Compensator, QTensor, Weight
from pallas_kernels import expert_fetch
from pallas_kernels.cache_plan import Fetch
from pallas_kernels.grouped_dequant_matmul import Turn

# Arrays of slots: this layer's bank, the next layer's, and transient ones that lie apart.
OWN, NEXT, APART = range(3)
MOST_UNROLLED = 8  # waves; more run in a loop


def _terms_by_slot(
    term: Compensator, layer: Index, experts: jax.Array, places: jax.Array, num_slots: int
) -> Compensator:
    """Low-rank terms by slot, starts and ranks [1, S]; rank 0 in other slots."""

    def by_slot(of_expert: jax.Array) -> jax.Array:
        slots = jnp.zeros(num_slots, jnp.int32)
        return slots.at[places].set(of_expert[layer, experts], mode="drop")[None]

    return dataclasses.replace(term, start=by_slot(term.start), rank=by_slot(term.rank))


Bank = tuple[Weight, Weight]  # of `TierSlots`


class Base(NamedTuple):
    """The tier that another one refines, in a layer: its leading planes."""

    # every expert of all layers; None: they are in the slots that both tiers share
    experts: ExpertStacks | None
    slot: jax.Array  # int32[N, A], where those of the layer's pairs are in `experts`
    # int32[1, S], slots in the refining tier of what lies in `experts`; None: they are those of the
    # layer's plan
    plane_slots: jax.Array | None
    step: "TierStep | None" = None  # of the tier whose slots are shared
    # leading planes of the waves of the refining tier, which shares slots
    streamed: Fetch | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class TierStep:
    """One tier's part of a step: functions from its slots to its slots, in one trace.

    A tier that shares slots (`TierSpec.shares_slots`) takes and gives those of the next one, of
    which it fills the words.

    `turn` is `LayerIndex.turn` of the layer that runs; arrays are `OWN`, `NEXT` and `APART`.
    """

    spec: TierSpec
    config: ModelConfig
    rows: HostRows
    impl: ExpertImpl  # "row", "block", "block_in_cache" or "grouped_kernel"
    kernels: ops.Kernels  # those that may copy, and run packed experts
    is_prefill: bool = False
    number: int = 0  # in the order of the tiers

    @property
    def most_ahead(self) -> int:
        """Most experts of the next layer that a layer prefetches."""
        if not self.spec.looks_ahead(self.is_prefill):
            return 0
        cache = self.spec.cache
        return min(self.spec.prefetch, cache.slots, cache.num_experts)

    def _bank(self, slots: TierSlots, turn: int, array: int = OWN) -> Bank:
        """Returns a layer's array of slots; of a tier that shares slots their words."""
        if array == APART:
            assert slots.apart is not None
            return slots.apart
        held = slots.banks[(turn + array) % len(slots.banks)]
        return _words(held) if self.spec.shares_slots else held

    def _with_bank(self, slots: TierSlots, turn: int, bank: Bank, array: int = OWN) -> TierSlots:
        """Replaces a layer's array of slots."""
        if array == APART:
            return dataclasses.replace(slots, apart=bank)
        banks = list(slots.banks)
        index = (turn + array) % len(banks)
        banks[index] = _with_words(banks[index], bank) if self.spec.shares_slots else bank
        return dataclasses.replace(slots, banks=tuple(banks))

    def copy_rows(
        self, slots: TierSlots, turn: int, layer: Index, jobs: Fetch, array: int = OWN,
        beside: int | None = None,
    ) -> TierSlots:  # fmt: skip
        """Copies experts of a layer into donated slots, from host memory or from the disk.

        Args:
          layer: layer of the experts.
          array: to fill.
          beside: the array that products read meanwhile.
        """
        other = None if beside is None else self._bank(slots, turn, beside)
        return _filled([self], [slots], turn, layer, [jobs], array, beside=other)[0]

    def _copy_job(self, bank: Bank, jobs: Fetch) -> expert_fetch.CopyJob | None:
        """Returns the copy from host memory; None where there is nothing to copy."""
        if not jobs.rows.size or self.spec.is_still or not self.rows.gate_up.shape[0]:
            return None
        rows = (self.rows.gate_up, self.rows.down)
        return expert_fetch.CopyJob(bank, rows, jobs.rows, jobs.slots)

    def _fetch_implementation(self, job: expert_fetch.CopyJob) -> str:
        """Name of the implementation that copies; ValueError if a GPU's kernel refuses."""
        if self.kernels.target is None:
            return "reference"
        chosen = expert_fetch.choose(job.pools, job.hosts, self.kernels.target)
        if self.kernels.target.platform == "gpu" and chosen.implementation == "reference":
            raise ValueError(f"experts cannot be fetched: {chosen.describe()}")
        return chosen.implementation

    def _from_disk(self, bank: Bank, layer: Index, jobs: Fetch) -> tuple[Bank, jax.Array | None]:
        """Copies experts from the disk, if any; returns their int32[] count."""
        rows, slots, experts = jobs
        if (read_rows := self.spec.read) is None or not rows.size or self.spec.is_still:
            return bank, None
        assert experts is not None
        absent = (experts >= 0) & (rows < 0)
        leaves, tree = jax.tree.flatten(bank)
        shapes = [jax.ShapeDtypeStruct((len(experts), *p.shape[1:]), p.dtype) for p in leaves]

        def read() -> list[jax.Array]:
            asked = jnp.where(absent, experts, -1)
            return list(io_callback(read_rows, tuple(shapes), jnp.int32(layer), asked))

        def nothing() -> list[jax.Array]:
            return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]

        found = jax.lax.cond(jnp.any(absent), read, nothing)
        places = jnp.where(absent, slots, len(leaves[0]))
        filled = [p.at[places].set(new, mode="drop") for p, new in zip(leaves, found, strict=True)]
        return jax.tree.unflatten(tree, filled), jnp.sum(absent)

    def note_uses(
        self, slots: TierSlots, layer: Index, ids: jax.Array, active: jax.Array
    ) -> TierSlots:
        """Notes the clock of experts that a layer used, by which host memory evicts."""
        if (used := slots.used) is None:
            return slots
        places = jnp.where(active, ids, self.spec.cache.num_experts)
        clock = slots.residency.clock - 1  # which the plan has advanced
        return dataclasses.replace(slots, used=used.at[layer, places].set(clock, mode="drop"))

    def prefetch(
        self, slots: TierSlots, layer: LayerIndex, mask: jax.Array, wanted: jax.Array
    ) -> TierSlots:
        """Prefetches the next layer's experts int32[L], -1: none, beside this layer's products."""
        assert layer.next_moe is not None
        following, mask = layer.next_moe.mlp, mask.reshape(-1)
        if not isinstance(layer.mlp, int):
            mask &= layer.mlp + 1 < self.spec.cache.num_layers
        planner = CachePlanner((self.spec,), self.kernels.target, is_prefill=self.is_prefill)
        (jobs,), (slots,) = planner.plan_prefetch(
            [slots], [self.rows.row_of], following, wanted, mask
        )
        return self.copy_rows(slots, layer.turn, following, jobs, NEXT, OWN)

    def products(
        self, slots: TierSlots, layer: LayerIndex, x: jax.Array, ids: jax.Array,
        active: jax.Array, plan: SlotPlan, base: Base | None = None,
        biases: PairBiases | None = None, *, has_waves: bool,
    ) -> tuple[jax.Array, TierSlots]:  # fmt: skip
        """Computes each expert's output per token, [P, N, A, D]; waves fetch theirs.

        Args:
          slots: donated.
          active: bool[N, A], pairs that run here.
          plan: of the layer; the experts of wave 0 are fetched.
          base: what this tier refines.
          has_waves: whether the plan has waves after the first fetch.
        """
        if not has_waves:
            pairs, stacks = self.pairs_and_stacks(slots, layer, ids, active, plan, base)
            return self._multiply(x, pairs._replace(biases=biases), stacks), slots
        return _Waves.of(self, slots, layer, x, plan, active, base, biases).run(slots)

    def pairs_and_stacks(
        self, slots: TierSlots, layer: LayerIndex, ids: jax.Array, active: jax.Array,
        plan: SlotPlan, base: Base | None = None,
    ) -> tuple[ExpertPairs, ExpertStacks]:  # fmt: skip
        """The pairs and their experts where there are no waves."""
        pairs = ExpertPairs(_places(plan, base), active & (plan.wave == 0), plan.wave)
        if self.spec.emulated:
            places = self.rows.row_of[layer.mlp][ids] if base is None else base.slot
            pairs = ExpertPairs(places, active)
        return pairs, self._stacks(slots, layer.turn, layer.mlp, plan, 0, base=base)

    def _after(
        self, slots: TierSlots, turn: int, products: jax.Array, array: int
    ) -> tuple[jax.Array, TierSlots]:
        """Returns the products; later copies wait for them.

        They read the slots that the copy may overwrite, and XLA would copy the slots instead.
        """
        products, read = jax.lax.optimization_barrier((products, self._bank(slots, turn, array)))
        return products, self._with_bank(slots, turn, read, array)

    def _multiply(
        self, x: jax.Array, pairs: ExpertPairs, experts: ExpertStacks, turn: Turn | None = None
    ) -> jax.Array:
        """Multiplies the active pairs: [P, N, A, D]."""
        stacks = (experts.gate_up, experts.down)
        chosen = choose_grouped(len(x), self.config, x.dtype, [stacks], self.kernels)
        record_experts(self.number, self.impl, stacks, chosen)
        num_experts, gating = self.spec.cache.num_experts, self.config.gating
        return products_in_pairs(
            x, pairs, experts, num_experts, self.impl, chosen.implementation, gating, turn
        )

    def _stacks(
        self, slots: TierSlots, turn: int, layer: Index, plan: SlotPlan, wave: Index,
        array: int = OWN, base: Base | None = None,
    ) -> ExpertStacks:  # fmt: skip
        """Returns slots as stacks, with the low-rank terms of their experts."""
        experts, slot, wave_of = (of.reshape(-1) for of in (plan.ids, plan.slot, plan.wave))
        held = self._bank(slots, turn, array)
        num_slots = len(jax.tree.leaves(held)[0])
        if self.spec.emulated:
            held, num_slots = (self.rows.gate_up, self.rows.down), self.rows.gate_up.shape[0]
            slot, wave_of = self.rows.row_of[layer][experts], jnp.zeros_like(wave_of)
        plane_slots, leading = None, None
        if base is not None:
            leading = base.experts
            if leading is None:
                assert base.step is not None
                own = base.step._bank(slots, turn, array)
                gate_up, down = (jax.tree.map(lambda leaf: leaf[None], weight) for weight in own)
                leading = ExpertStacks(gate_up, down, 0)
            num_slots = leading.gate_up.shape[1]
            places = jnp.where(wave_of == wave, base.slot.reshape(-1), num_slots)
            plane_slots = base.plane_slots
            if plane_slots is None:
                plane_slots = (
                    jnp.zeros(num_slots, jnp.int32).at[places].set(slot, mode="drop")[None]
                )
        else:
            places = jnp.where(wave_of == wave, slot, num_slots)

        def stack(weight: Weight, terms: tuple[Compensator, ...], leading: Weight | None) -> Weight:
            if leading is None:
                stacked: Weight = jax.tree.map(lambda leaf: leaf[None], weight)
            else:
                stacked = self.spec.refined(leading, weight, plane_slots)
            if not isinstance(stacked, QTensor) or not terms:
                return stacked
            placed = tuple(
                _terms_by_slot(term, layer, experts, places, num_slots) for term in terms
            )
            return dataclasses.replace(stacked, compensators=placed)

        (gate_up, down), (of_gate_up, of_down) = held, self.rows.terms
        first, second = (None, None) if leading is None else leading[:2]
        return ExpertStacks(stack(gate_up, of_gate_up, first), stack(down, of_down, second), 0)

    def base(
        self, slots: TierSlots, turn: int, layer: Index, ids: jax.Array,
        plane_slots: jax.Array | None,
    ) -> Base:  # fmt: skip
        """Returns this tier, which has every expert, as the base of the one before."""
        held = (
            (self.rows.gate_up, self.rows.down) if self.spec.emulated else self._bank(slots, turn)
        )
        gate_up, down = (jax.tree.map(lambda leaf: leaf[None], weight) for weight in held)
        return Base(
            ExpertStacks(gate_up, down, 0), self._slots_of_all(slots)[layer][ids], plane_slots
        )

    def _slots_of_all(self, slots: TierSlots) -> jax.Array:
        """int32[M, E], where each expert is in its bank, or in the rows of an emulated tier."""
        if self.spec.emulated:
            return self.rows.row_of
        cache = self.spec.cache
        layers = jnp.arange(cache.num_layers, dtype=jnp.int32)
        first = cache.first_slot(layers // cache.banks)[:, None]
        if self.spec.is_complete:  # in order, `cache.preload`
            return first + jnp.arange(cache.num_experts, dtype=jnp.int32)[None]
        return first + slots.residency.slot_of


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Waves:
    """Waves of a layer, each fetched after the products of the one before.

    Where transient slots lie apart, a wave passes in two stages: its experts come to these and to
    the bank's in turn, each part beside the products of the stage before. In a CUDA graph a copy
    waits for the products that read the array which it overwrites, and for the copy before it, but
    not for those that read the other one. Stage 0 is what is there before any wave.

    Attributes:
      plan: its waves are stages, its slots those of the stage's array.
      arrays: that stages 1, 2, ... read, in turn.
      streamed: the jobs of each array, [W, j].
    """

    step: TierStep
    layer: LayerIndex
    x: jax.Array
    plan: SlotPlan
    arrays: tuple[int, ...]
    streamed: tuple[Fetch, ...]
    active: jax.Array
    base: Base | None
    biases: PairBiases | None
    num_slots: int  # of the largest array

    @classmethod
    def of(
        cls, step: TierStep, slots: TierSlots, layer: LayerIndex, x: jax.Array, plan: SlotPlan,
        active: jax.Array, base: Base | None, biases: PairBiases | None,
    ) -> "_Waves":  # fmt: skip
        """Prepares a layer's waves; fields are as in `TierStep.products`."""
        arrays: tuple[int, ...] = (OWN,)
        streamed: tuple[Fetch, ...] = (plan.streamed,)
        if apart := step.spec.num_apart(step.is_prefill):
            cache = step.spec.cache
            plan, streamed = _in_stages(plan, cache.first_transient(cache.num_layers), apart)
            arrays = (APART, OWN)
        stack, _, _ = step._stacks(slots, layer.turn, layer.mlp, plan, 0, base=base)
        return cls(
            step=step, layer=layer, x=x, plan=plan, arrays=arrays, streamed=streamed,
            active=active, base=base, biases=biases, num_slots=stack.shape[1],
        )  # fmt: skip

    @property
    def owner(self) -> TierStep:
        """Tier in whose slots the experts are."""
        return self.step if self.base is None or self.base.step is None else self.base.step

    def run(self, slots: TierSlots) -> tuple[jax.Array, TierSlots]:
        """Computes [P, N, A, D] of all waves; `slots` are donated."""
        num_waves, stages, turn = len(self.streamed[0].rows), len(self.arrays), self.layer.turn
        num_loops = -(-num_waves // MOST_UNROLLED)
        at_once = -(-num_waves // num_loops)
        # A loop fetches beyond the last wave, too: nothing.
        waves = self._padded(num_loops * at_once + 1) if num_loops > 1 else self
        number = 1 + stages * num_loops * at_once
        if stages > 1:
            slots = waves.fetch(slots, 0, 0)
        products, slots = waves.multiply(slots, OWN, 0, None, number, is_beside=stages > 1)
        outside = slots

        def some(loop: Index, carried: Any) -> Any:
            # Carries what this layer writes alone; each copy is ordered behind what reads its
            # array, or XLA copies the slots.
            bank, apart, counts, products = carried
            slots = dataclasses.replace(outside, apart=apart, counts=counts)
            slots = self.owner._with_bank(slots, turn, bank)
            for i in range(stages * at_once):
                wave, part = loop * at_once + i // stages, i % stages
                ahead = part + stages - 1  # parts of waves from this wave's first to what comes
                is_fetched = num_loops > 1 or i // stages + ahead // stages < at_once
                if is_fetched:
                    slots = waves.fetch(slots, wave + ahead // stages, ahead % stages)
                products, slots = waves.multiply(
                    slots, self.arrays[part], 1 + stages * wave + part, products, number,
                    is_beside=is_fetched and stages > 1,
                )  # fmt: skip
            return self.owner._bank(slots, turn), slots.apart, slots.counts, products

        carried = (self.owner._bank(slots, turn), slots.apart, slots.counts, products)
        if num_loops > 1:
            carried = jax.lax.fori_loop(0, num_loops, some, carried)
        else:
            carried = some(0, carried)
        bank, apart, counts, products = carried
        slots = dataclasses.replace(outside, apart=apart, counts=counts)
        return products, self.owner._with_bank(slots, turn, bank)

    def _padded(self, num_waves: int) -> "_Waves":
        """Returns the same with waves of nothing up to so many."""

        def padded(jobs: Any) -> Any:
            more = (0, num_waves - len(self.streamed[0].rows)), (0, 0)
            return jax.tree.map(lambda of: jnp.pad(of, more, constant_values=-1), jobs)

        base = self.base
        if base is not None:
            base = base._replace(streamed=padded(base.streamed))
        return dataclasses.replace(self, streamed=padded(self.streamed), base=base)

    def fetch(self, slots: TierSlots, wave: Index, part: int) -> TierSlots:
        """Copies the experts of a wave that come to one of the arrays."""
        turn, layer = self.layer.turn, self.layer.mlp
        if self.base is not None and self.base.streamed is not None:
            jobs = jax.tree.map(lambda jobs: jobs[wave], self.base.streamed)
            slots = self.owner.copy_rows(slots, turn, layer, jobs)
        jobs = jax.tree.map(lambda jobs: jobs[wave], self.streamed[part])
        beside = self.arrays[1 - part] if len(self.arrays) > 1 else None
        return self.step.copy_rows(slots, turn, layer, jobs, self.arrays[part], beside)

    def multiply(
        self, slots: TierSlots, array: int, stage: Index, before: jax.Array | None, number: int,
        *, is_beside: bool,
    ) -> tuple[jax.Array, TierSlots]:  # fmt: skip
        """Adds a stage's products to those of the stages before.

        Args:
          number: of stages.
          is_beside: whether a copy runs meanwhile.
        """
        step, plan = self.step, self.plan
        pairs = ExpertPairs(
            _places(plan, self.base), self.active & (plan.wave == stage),
            jnp.where(self.active, plan.wave, -1), self.biases,
        )  # fmt: skip
        experts = step._stacks(
            slots, self.layer.turn, self.layer.mlp, plan, stage, array, self.base
        )
        spared = expert_fetch.BESIDE.num_programs if is_beside else 0
        turn = Turn(jnp.int32(stage), before, number, self.num_slots, spared)
        products = step._multiply(self.x, pairs, experts, turn)
        return self.owner._after(slots, self.layer.turn, products, array)


def _in_stages(plan: SlotPlan, first: int, apart: int) -> tuple[SlotPlan, tuple[Fetch, Fetch]]:
    """Splits waves into two stages each: those of transient slots apart, and of a bank's.

    The first slots of a wave are those apart.

    Args:
      first: slot of a bank at which its transient ones begin.
    """
    passing, is_later = plan.slot - first, plan.wave > 0
    is_apart = passing < apart
    place = jnp.where(is_apart, passing, plan.slot - apart)
    stage = jnp.where(is_apart, 2 * plan.wave - 1, 2 * plan.wave)
    rows, slots, ids = plan.streamed

    def part(of: slice, before: int) -> Fetch:
        return Fetch(rows[:, of], slots[:, of] - before, None if ids is None else ids[:, of])

    plan = plan._replace(
        slot=jnp.where(is_later, place, plan.slot), wave=jnp.where(is_later, stage, plan.wave)
    )
    return plan, (part(slice(apart), first), part(slice(apart, None), apart))


def _places(plan: SlotPlan, base: Base | None) -> jax.Array:
    """int32[N, A], where pairs' experts are: in slots of the plan, or those of the base."""
    return plan.slot if base is None else base.slot


def plane_slots_of(
    refining: TierStep, slots: TierSlots, base: TierStep, of_base: TierSlots
) -> jax.Array:
    """int32[1, S], by slot of the base tier the slot of its refinement, anything for none."""
    planes, places = refining._slots_of_all(slots), base._slots_of_all(of_base)
    stored = base.rows.gate_up if base.spec.emulated else base._bank(of_base, 0)[0]
    found = jnp.zeros(stored.shape[0], jnp.int32)
    return found.at[places.reshape(-1)].set(jnp.maximum(planes, 0).reshape(-1))[None]


def _words(bank: Bank) -> Bank:
    """The arrays of a bank in which refinements lie too."""
    gate_up, down = bank
    assert isinstance(gate_up, QTensor) and isinstance(down, QTensor)
    return gate_up.words, down.words


def _with_words(bank: Bank, words: Bank) -> Bank:
    """Replaces the arrays that `_words` gives."""
    gate_up, down = bank
    assert isinstance(gate_up, QTensor) and isinstance(down, QTensor)
    first, second = jax.tree.leaves(words)
    return dataclasses.replace(gate_up, words=first), dataclasses.replace(down, words=second)


def fetch_together(
    steps: Sequence[TierStep], tiers: Sequence[TierSlots], turn: int, layer: Index,
    jobs: Sequence[Fetch], after: Any = (),
) -> list[TierSlots]:  # fmt: skip
    """Copies a layer's experts to the slots of all tiers, in one launch where the kernel can.

    `after`: arrays that are written first; for one tier.
    """
    found = list(tiers)
    if steps[0].spec.shares_slots:  # the arrays of one tier: one copy after the other
        for step, of in zip(reversed(steps), reversed(jobs), strict=True):
            found[1] = step.copy_rows(found[1], turn, layer, of)
        return found
    return _filled(steps, tiers, turn, layer, jobs, after=after)


def _filled(
    steps: Sequence[TierStep], tiers: Sequence[TierSlots], turn: int, layer: Index,
    jobs: Sequence[Fetch], array: int = OWN, *, beside: Bank | None = None, after: Any = (),
) -> list[TierSlots]:  # fmt: skip
    """Copies host rows to an array of each tier, then what is on the disk alone.

    One launch copies them all where the kernel takes them. Waits count with the slots: those for
    refinements in shared ones with the base planes'.

    Args:
      beside: read by products meanwhile; of one tier.
      after: as in `fetch_together`, where a kernel copies.
    """
    banks = [step._bank(slots, turn, array) for step, slots in zip(steps, tiers, strict=True)]
    made = [step._copy_job(banks[i], jobs[i]) for i, step in enumerate(steps)]
    copies = {i: job for i, job in enumerate(made) if job is not None}
    how = {i: steps[i]._fetch_implementation(job) for i, job in copies.items()}
    by_kernel, tiles = set(how.values()) == {"triton"}, None
    if by_kernel and beside is not None:
        tiles, after = expert_fetch.BESIDE, beside
    for launch in [[*copies]] if by_kernel else [[i] for i in copies]:
        filled = expert_fetch.fetch(
            [copies[i] for i in launch], implementation=how[launch[0]], tiles=tiles, after=after
        )
        for i, bank in zip(launch, filled, strict=True):
            banks[i] = bank
    found = []
    for step, slots, bank, of in zip(steps, tiers, banks, jobs, strict=True):
        bank, waits = step._from_disk(bank, layer, of)
        if waits is not None:
            slots = dataclasses.replace(slots, counts=slots.counts.add(layer, waits=waits))
        found.append(step._with_bank(slots, turn, bank, array))
    return found


def prefetch_planes(
    planner: CachePlanner, steps: Sequence[TierStep], tiers: Sequence[TierSlots],
    layer: LayerIndex, mask: jax.Array, wanted: Sequence[jax.Array | None],
) -> list[TierSlots]:  # fmt: skip
    """Prefetches planes of the next layer's predicted experts to slots that two tiers share.

    Args:
      wanted: of each tier, experts that will probably run in it, as in `TierStep.prefetch`.
    """
    found = list(tiers)
    some = [(i, ids) for i, ids in enumerate(wanted) if ids is not None]
    if not some or not steps[1].most_ahead:
        return found
    assert layer.next_moe is not None
    following, mask = layer.next_moe.mlp, mask.reshape(-1)
    if not isinstance(layer.mlp, int):
        mask &= layer.mlp + 1 < steps[1].spec.cache.num_layers
    ids = jnp.concatenate([ids for _, ids in some])
    refined = jnp.concatenate([jnp.full(len(ids), i == 0) for i, ids in some])
    rows_of = [step.rows.row_of for step in steps]
    jobs, found = planner.plan_prefetch(found, rows_of, following, ids, mask, refined)
    for step, of in zip(reversed(steps), reversed(jobs), strict=True):
        found[1] = step.copy_rows(found[1], layer.turn, following, of, NEXT, OWN)
    return found
