"""The expert cache inside the compiled step: planned, filled and multiplied, a layer at a time.

For each sparse layer: the router says which experts are needed and, under a policy, that decides
which expert runs each pair, in which tier, with which weight. The plan says which experts are in
slots, and where the others go; one launch copies those from the host store; the pairs are
multiplied by what lies in the slots, and the products are combined once, in the order of the
router's choice: residency is invisible in the result. Where an expert is that is asked for in
several tiers, DyMoE's rules say (`pallas_kernels.cache_plan.resolve_tiers`). The host is never
asked, except for experts that are on the disk alone (`PoolSpec.read`).

`run_layer` takes the cache and returns it: that is the carry of `moejax.experts.cached_experts`.

With prefetch, layers take turns between two banks of slots: what is copied for the next layer
writes one array while this layer's products read the other, and where XLA runs the step as a CUDA
graph whose order is that of its buffers (`expert_pool.compiler_options`), the two overlap. Where a
layer can need more experts than it has slots, the rest passes through the transient slots in
waves; the waves of a chunk take turns between the transient slots of both banks for the same end.

Axes: N tokens, A experts a token, P parts of a product, M sparse layers, E experts, T tiers of
falling fidelity; the rest as in `moejax.experts.expert_pool`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moejax.experts.cache_plan import Jobs, Placed, Placing, State, terms_by_slot
from moejax.experts.expert_pool import ExpertPool, ExpertStore, PoolSpec
from moejax.experts.fetch import Fetching, Slots, from_host_together
from moejax.experts.tiered import ExpertCache, ExpertCacheSpec
from moejax.models.config import ModelConfig
from moejax.models.expert_products import (
    ExpertStacks,
    Pairs,
    choose_for_tiers,
    choose_grouped,
    combine,
    products_by_block,
    products_by_row,
    products_grouped,
    products_of_tiers,
)
from moejax.models.layer_index import LayerIndex
from moejax.models.moe import STEP_BYTES, ExpertImpl, record_experts
from moejax.models.routing import Routing
from moejax.policies.base import (
    SKIPPED,
    Decision,
)
from moejax.weights import linear as ops
from moejax.weights.linear import Index
from moejax.weights.qtensor import Compensator, QTensor, Weight
from pallas_kernels.cache_plan import Asked, Rule, Wishes

Wanted = Callable[[], jax.Array]  # int32[L], experts to prefetch for the next layer; -1: none


@dataclasses.dataclass(frozen=True, eq=False)
class TierStep:
    """One tier's part of a step: functions from its slots to its slots, in one trace.

    `turn` is `LayerIndex.turn` of the layer that runs; its bank is that of `after` 0, the next
    layer's that of 1.

    Attributes:
      spec: static.
      store: the host's rows.
      impl: "row", "block", "block_in_cache" or "grouped_kernel".
      kernels: those that may run packed experts.
      is_prefill: whether the step is one of prompts.
      number: in the order of the tiers.
    """

    spec: PoolSpec
    config: ModelConfig
    store: ExpertStore
    impl: ExpertImpl
    kernels: ops.Kernels
    is_prefill: bool = False
    number: int = 0

    @property
    def fetching(self) -> Fetching:
        """Returns the `Fetching` that copies this tier's experts."""
        return Fetching(self.spec, self.store, self.kernels)

    @property
    def placing(self) -> Placing:
        """Returns the `Placing` that plans this tier's slots alone."""
        return Placing((self.spec,), self.kernels.target)

    @property
    def most_ahead(self) -> int:
        """Experts of the next layer that a layer prefetches at most."""
        if not self.spec.looks_ahead(self.is_prefill):
            return 0
        cache = self.spec.cache
        return min(self.spec.prefetch, cache.slots, cache.num_experts)

    def num_waves(self, num_pairs: int) -> int:
        """Number of waves after the first fetch."""
        still = self.spec.emulated or self.spec.between_steps
        return 0 if still else self.placing.forms(num_pairs)[0].later_waves

    def bank(self, pool: ExpertPool, turn: int, after: int = 0) -> Slots:
        """Returns the slots of a layer's bank."""
        return pool.banks[(turn + after) % len(pool.banks)]

    def with_bank(self, pool: ExpertPool, turn: int, bank: Slots, after: int = 0) -> ExpertPool:
        """Returns the pool with other slots in a layer's bank."""
        banks = list(pool.banks)
        banks[(turn + after) % len(banks)] = bank
        return dataclasses.replace(pool, banks=tuple(banks))

    def copy_rows(
        self, pool: ExpertPool, turn: int, layer: Index, jobs: Jobs, after: int = 0,
        beside: bool = False,
    ) -> ExpertPool:  # fmt: skip
        """Copies experts of a layer into slots, from host memory or from the disk.

        Args:
          pool: donated.
          layer: layer of the experts.
          after: bank to fill, counted from the layer's own.
          beside: whether products read the other bank meanwhile.
        """
        other = self.bank(pool, turn, 1 - after) if beside else None
        slots = self.fetching.from_host(self.bank(pool, turn, after), jobs, other)
        return self.finish_fetch(pool, turn, layer, slots, jobs, after)

    def finish_fetch(
        self, pool: ExpertPool, turn: int, layer: Index, slots: Slots, jobs: Jobs, after: int = 0
    ) -> ExpertPool:
        """Puts fetched slots into their bank, and fetches the rest from the disk."""
        slots, waits = self.fetching.from_disk(slots, layer, jobs)
        if waits is not None:
            pool = dataclasses.replace(pool, counts=pool.counts.add(layer, waits=waits))
        return self.with_bank(pool, turn, slots, after)

    def note_uses(
        self, pool: ExpertPool, layer: Index, ids: jax.Array, active: jax.Array
    ) -> ExpertPool:
        """Notes the clock of experts that a layer used, by which host memory evicts."""
        if (used := pool.used) is None:
            return pool
        places = jnp.where(active, ids, self.spec.cache.num_experts)
        clock = pool.residency.clock - 1  # which the plan has advanced
        return dataclasses.replace(pool, used=used.at[layer, places].set(clock, mode="drop"))

    def prefetch(
        self, pool: ExpertPool, layer: LayerIndex, mask: jax.Array, wanted: Wanted | None
    ) -> ExpertPool:
        """Prefetches the next layer's predicted experts beside this layer's products."""
        if not (wanted and self.most_ahead):
            return pool
        assert layer.next_moe is not None
        ids, following = wanted(), layer.next_moe.mlp
        mask = mask.reshape(-1)
        if not isinstance(layer.mlp, int):
            mask &= layer.mlp + 1 < self.spec.cache.num_layers
        state: State = (pool.residency, pool.counts)
        jobs, state = self.placing.expect(0, state, self.store.row_of, following, ids, mask)
        pool = dataclasses.replace(pool, residency=state[0], counts=state[1])
        return self.copy_rows(pool, layer.turn, following, jobs, 1, beside=True)

    def products(
        self, pool: ExpertPool, layer: LayerIndex, x: jax.Array, ids: jax.Array,
        active: jax.Array, plan: Placed, mask: jax.Array, wanted: Wanted | None,
    ) -> tuple[jax.Array, ExpertPool]:  # fmt: skip
        """Computes each expert's output per token, [P, N, A, D]; waves fetch theirs.

        Args:
          pool: donated.
          x: [N, D], normed.
          ids: int32[N, A], experts.
          active: bool[N, A], pairs that run here.
          plan: of the layer; the experts of wave 0 are fetched.
          mask: bool[N], tokens that are no padding.
          wanted: gives the experts to prefetch after the waves.
        """
        if not self.num_waves(active.size):
            return self._multiply(x, *self.pairs_and_slots(pool, layer, ids, active, plan)), pool
        # Only chunks run in a loop, with a traced layer.
        double = self.spec.cache.banks > 1 and not isinstance(layer.mlp, int)
        run = self._stream_waves_double_buffered if double else self._stream_waves
        products, pool = run(pool, layer.turn, layer.mlp, x, plan, active)
        # Comes last: anything that waits for slots of a wave would be copied.
        return products, self.prefetch(pool, layer, mask, wanted)

    def pairs_and_slots(
        self, pool: ExpertPool, layer: LayerIndex, ids: jax.Array, active: jax.Array,
        plan: Placed,
    ) -> tuple[Pairs, ExpertStacks]:  # fmt: skip
        """The pairs and their experts where there are no waves."""
        pairs = Pairs(plan.slot, active & (plan.wave == 0), plan.wave)
        if self.spec.emulated:
            pairs = Pairs(self.store.row_of[layer.mlp][ids], active)
        return pairs, self._experts(pool, layer.turn, layer.mlp, plan, 0)

    def _stream_waves(
        self, pool: ExpertPool, turn: int, layer: Index, x: jax.Array, plan: Placed,
        active: jax.Array,
    ) -> tuple[jax.Array, ExpertPool]:  # fmt: skip
        """Computes [P, N, A, D] of all waves, each fetched after the one before."""
        now = active & (plan.wave == 0)
        products = self._multiply(
            x, Pairs(plan.slot, now), self._experts(pool, turn, layer, plan, 0)
        )
        outside = pool

        def one(number: jax.Array, carried: Any) -> Any:
            # Carries this layer's bank alone: a loop that carries both makes XLA copy them, unless
            # each copy is ordered behind what reads its array (`_stream_waves_double_buffered`).
            bank, counts, products = carried
            pool = self.with_bank(dataclasses.replace(outside, counts=counts), turn, bank)
            products, pool = self._after(pool, turn, products)
            jobs = jax.tree.map(lambda jobs: jobs[number], plan.streamed)
            pool = self.copy_rows(pool, turn, layer, jobs)
            mine = active & (plan.wave == number + 1)
            experts = self._experts(pool, turn, layer, plan, number + 1)
            found = self._multiply(x, Pairs(plan.slot, mine), experts)
            products = jnp.where(mine[None, :, :, None], found, products)
            return self.bank(pool, turn), pool.counts, products

        carried = (self.bank(pool, turn), outside.counts, products)
        num_waves = len(plan.streamed.rows)
        bank, counts, products = jax.lax.fori_loop(0, num_waves, one, carried)
        pool = dataclasses.replace(outside, counts=counts)
        return products, self.with_bank(pool, turn, bank)

    def _stream_waves_double_buffered(
        self, pool: ExpertPool, turn: int, layer: Index, x: jax.Array, plan: Placed,
        active: jax.Array,
    ) -> tuple[jax.Array, ExpertPool]:  # fmt: skip
        """Computes [P, N, A, D] of all waves, each fetched beside the one before.

        Waves take turns between the transient slots of this layer's bank, in which those of wave 0
        are, and of the other one. In a CUDA graph a copy waits for the products that read the array
        which it overwrites, and for the copy before it, but not for those that read the other one.
        """
        num_waves = len(plan.streamed.rows)
        beyond = (0, 1 + num_waves % 2), (0, 0)
        streamed = jax.tree.map(lambda a: jnp.pad(a, beyond, constant_values=-1), plan.streamed)

        def stage(
            pool: ExpertPool, wave: Index, bank: int, products: jax.Array | None
        ) -> tuple[jax.Array, ExpertPool]:
            jobs = jax.tree.map(lambda jobs: jobs[wave], streamed)
            pool = self.copy_rows(pool, turn, layer, jobs, 1 - bank, True)
            mine, inputs = active & (plan.wave == wave), x
            if products is not None:  # one after another, or XLA gathers the inputs of two waves
                inputs, products = jax.lax.optimization_barrier((x, products))
            experts = self._experts(pool, turn, layer, plan, wave, bank)
            found = self._multiply(inputs, Pairs(plan.slot, mine), experts)
            if products is not None:
                found = jnp.where(mine[None, :, :, None], found, products)
            return self._after(pool, turn, found, bank)

        products, pool = stage(pool, 0, 0, None)
        outside = pool

        def two(number: jax.Array, carried: Any) -> Any:
            banks, counts, products = carried
            pool = dataclasses.replace(outside, banks=banks, counts=counts)
            products, pool = stage(pool, 2 * number + 1, 1, products)
            products, pool = stage(pool, 2 * number + 2, 0, products)
            return pool.banks, pool.counts, products

        carried = (outside.banks, outside.counts, products)
        banks, counts, products = jax.lax.fori_loop(0, (num_waves + 1) // 2, two, carried)
        return products, dataclasses.replace(outside, banks=banks, counts=counts)

    def _after(
        self, pool: ExpertPool, turn: int, products: jax.Array, bank: int = 0
    ) -> tuple[jax.Array, ExpertPool]:
        """Returns the products; later copies wait for them.

        They read the slots that the copy may overwrite, and XLA would copy the pool instead.
        """
        products, read = jax.lax.optimization_barrier((products, self.bank(pool, turn, bank)))
        return products, self.with_bank(pool, turn, read, bank)

    def _multiply(self, x: jax.Array, pairs: Pairs, experts: ExpertStacks) -> jax.Array:
        """Multiplies the active pairs: [P, N, A, D]."""
        stacks = (experts.gate_up, experts.down)
        chosen = choose_grouped(len(x), self.config, x.dtype, stacks, self.kernels)
        record_experts(self.number, self.impl, stacks, chosen)
        match self.impl:
            case "row":
                return products_by_row(x, pairs, experts)
            case "block" | "block_in_cache":
                size = STEP_BYTES[self.impl]
                return products_by_block(x, pairs, experts, self.spec.cache.num_experts, size)
            case "grouped_kernel":
                return products_grouped(x, pairs, experts, chosen.implementation)
        raise ValueError(f"experts of a cache cannot run by {self.impl!r}")

    def _experts(
        self, pool: ExpertPool, turn: int, layer: Index, plan: Placed, wave: Index, bank: int = 0
    ) -> ExpertStacks:
        """Returns slots as stacks, with the low-rank terms of their experts."""
        experts, slot, wave_of = plan.holders
        held, num_slots = self.bank(pool, turn, bank), self.spec.cache.num_slots
        if self.spec.emulated:
            held, num_slots = (self.store.gate_up, self.store.down), self.store.gate_up.shape[0]
            slot, wave_of = self.store.row_of[layer][experts], jnp.zeros_like(wave_of)
        places = jnp.where(wave_of == wave, slot, num_slots)

        def stack(weight: Weight, terms: tuple[Compensator, ...]) -> Weight:
            stacked: Weight = jax.tree.map(lambda leaf: leaf[None], weight)
            if not isinstance(stacked, QTensor) or not terms:
                return stacked
            placed = tuple(terms_by_slot(term, layer, experts, places, num_slots) for term in terms)
            return dataclasses.replace(stacked, compensators=placed)

        (gate_up, down), (of_gate_up, of_down) = held, self.store.terms
        return ExpertStacks(stack(gate_up, of_gate_up), stack(down, of_down), 0)


@dataclasses.dataclass(frozen=True, eq=False)
class CacheStep:
    """Facts of one trace that all layers share.

    Attributes:
      spec: static.
      placing: plans the slots of all tiers.
      kernels: those that may run packed experts.
    """

    spec: ExpertCacheSpec
    config: ModelConfig
    tiers: tuple[TierStep, ...]
    placing: Placing
    kernels: ops.Kernels

    def is_grouped(self, num_pairs: int) -> bool:
        """Whether one launch multiplies the pairs of all tiers."""
        has_form = all(tier.impl == "grouped_kernel" for tier in self.tiers)
        return has_form and not any(tier.num_waves(num_pairs) for tier in self.tiers)

    def has_fused_plan(self, num_pairs: int) -> bool:
        """Whether one launch plans slots for so many pairs."""
        return self.is_grouped(num_pairs) and self.placing.refusal(num_pairs) is None


def run_layer(
    step: CacheStep,
    cache: ExpertCache,
    layer: LayerIndex,
    x: jax.Array,
    routing: Routing,
    token_mask: jax.Array,
    decision: Decision | None,
    rule: Rule | None,
    wanted: Callable[[int, Sequence[ExpertPool]], Wanted | None],
) -> tuple[jax.Array, ExpertCache]:
    """Plans, fetches and multiplies; [N, D] and the cache after it.

    Args:
      cache: donated.
      x: [N, D], normed.
      token_mask: bool[N], False for padding.
      decision: a policy's; None: the router's choice is run as it is, and no gate mass is counted.
      rule: gives the tiers in place of the decision's; None: the decision's are used.
      wanted: of a tier the experts of the next layer to prefetch, by what is in all pools then.
    """
    gates = routing.weights.astype(jnp.float32)
    if decision is None:
        ids, weights, asked = routing.ids, routing.weights, Asked(routing.ids, gates)
    else:
        ids, weights = decision.ids, decision.weights
        is_routed = ids is routing.ids
        if rule is not None and is_routed:
            weights = routing.weights
        wishes = rule or Wishes(decision.tier, decision.at_least)
        asked = Asked(ids, gates, wishes, None if is_routed else routing.ids)
    tiers, pools = step.tiers, list(cache.pools)
    found, plans, gate, states = step.placing.plan(
        [(pool.residency, pool.counts) for pool in pools],
        [tier.store.row_of for tier in tiers], cache.gate, layer.mlp, asked, token_mask,
    )  # fmt: skip
    for i, (residency, counts) in enumerate(states):
        pools[i] = dataclasses.replace(pools[i], residency=residency, counts=counts)
    served = [found.tier == i for i in range(len(tiers))] if decision is not None else []
    banks = [tier.bank(pool, layer.turn) for tier, pool in zip(tiers, pools, strict=True)]
    jobs = [plan.admitted for plan in plans]
    fetched = from_host_together([tier.fetching for tier in tiers], banks, jobs)
    for i, tier in enumerate(tiers):
        pools[i] = tier.finish_fetch(pools[i], layer.turn, layer.mlp, fetched[i], jobs[i])
    if decision is None:
        served = [jnp.broadcast_to(token_mask[:, None], ids.shape)]
    for i, tier in enumerate(tiers):
        pools[i] = tier.note_uses(pools[i], layer.mlp, ids, served[i])
    num_pairs, products = ids.size, []
    if decision is not None and step.is_grouped(num_pairs):
        slot, stacks = found.slot, []
        for i, tier in enumerate(tiers):
            pools[i] = tier.prefetch(pools[i], layer, token_mask, wanted(i, pools))
            pairs, experts = tier.pairs_and_slots(pools[i], layer, ids, found.tier == i, plans[i])
            stacks.append(experts)
            if tier.spec.emulated:
                slot = jnp.where(found.tier == i, pairs.expert, slot)
        total = _products_of_tiers(step, x, found.tier, slot, stacks)
    else:
        for i, tier in enumerate(tiers):
            ahead = wanted(i, pools)
            if not tier.num_waves(num_pairs):
                pools[i] = tier.prefetch(pools[i], layer, token_mask, ahead)
            mine = served[0] if decision is None else found.tier == i
            own, pools[i] = tier.products(
                pools[i], layer, x, ids, mine, plans[i], token_mask, ahead
            )
            products.append(own)
        total = _selected(products, found.tier)
    runs = served[0] if decision is None else found.tier != SKIPPED
    out = combine(total, Pairs(ids, runs), weights, x.dtype)
    return out, dataclasses.replace(cache, pools=tuple(pools), gate=gate)


def _products_of_tiers(
    step: CacheStep, x: jax.Array, tier: jax.Array, slot: jax.Array, tiers: Sequence[ExpertStacks]
) -> jax.Array:
    """[P, N, A, D], one launch of gates and ups and one of downs for the pairs of all tiers."""
    stacks = [(experts.gate_up, experts.down) for experts in tiers]
    chosen = choose_for_tiers(len(x), step.config, x.dtype, stacks, step.kernels)
    if chosen.implementation == ops.DEQUANTIZED:
        raise ValueError(f"the grouped kernel refuses the tiers: {chosen.describe()}")
    for of, experts in zip(step.tiers, stacks, strict=True):
        record_experts(of.number, of.impl, experts, chosen)
    return products_of_tiers(x, tier, slot, tiers, chosen.implementation)


def _selected(products: Sequence[jax.Array], tier: jax.Array) -> jax.Array:
    """Selects each pair's product by tier: [P, N, A, D], with the largest P."""
    if len(products) == 1:
        return products[0]
    wide = jnp.result_type(*products)
    parts = max(len(one) for one in products)
    chosen = jnp.zeros((parts, *products[0].shape[1:]), wide)
    for i, one in enumerate(products):
        filled = jnp.pad(one.astype(wide), ((0, parts - len(one)), (0, 0), (0, 0), (0, 0)))
        chosen = jnp.where((tier == i)[None, :, :, None], filled, chosen)
    return chosen
