"""Experts that are not all on the device: found, fetched and run inside the compiled step.

For each sparse layer: the router says which experts are needed; the plan says which of them are in
slots, and where the others go; one launch copies those from the host store; the pairs are
multiplied by what lies in the slots. Where a layer can need more experts than it has slots, the
rest passes through the transient slots in waves, and the products of all waves are combined in the
order of the router's choice: residency is invisible in the result. The host is never asked, except
for experts that are on the disk alone (`PoolSpec.read`).

With look-ahead, layers take turns between two banks of slots: what is copied for the next layer
writes one array while this layer's products read the other, and where XLA runs the step as a CUDA
graph whose order is that of its buffers (`expert_pool.compiler_options`), the two overlap.
The waves of a chunk take turns between the transient slots of both banks for the same end.

Axes: N tokens, A experts a token, P parts of a product; the rest as in
`moejax.experts.expert_pool`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moejax.experts.cache_plan import Jobs, Placed, Placing, State, terms_by_slot
from moejax.experts.expert_pool import ExpertPool, ExpertStore, PoolSpec, in_place_of
from moejax.experts.fetch import Fetching, Slots
from moejax.models.config import ModelConfig
from moejax.models.expert_products import (
    Experts,
    Pairs,
    combine,
    products_by_block,
    products_by_row,
    products_grouped,
)
from moejax.models.grouped_experts import choose_grouped
from moejax.models.moe import STEP_BYTES, ExpertImpl
from moejax.models.routing import Routing, prefetch_scores
from moejax.weights import linear as ops
from moejax.weights.linear import Index
from moejax.weights.qtensor import Compensator, QTensor, Weight
from pallas_kernels.cache_plan import Asked


class PooledExperts:
    """Runs the experts of one step's layers; `pool` is the state after the layers so far."""

    def __init__(
        self,
        spec: PoolSpec,
        config: ModelConfig,
        pool: ExpertPool,
        store: ExpertStore,
        impl: ExpertImpl,
        kernels: ops.Kernels,
        is_prefill: bool = False,
    ):
        """For one trace.

        Args:
          spec: of the pool.
          config: of the model.
          pool: the slots.
          store: the host's rows.
          impl: "row", "block", "block_in_cache" or "grouped_kernel".
          kernels: which may serve packed experts.
          is_prefill: whether the step is one of prompts.
        """
        self._looks_ahead = spec.looks_ahead(is_prefill)
        self.fetching = Fetching(spec, store, kernels)
        self.spec, self.config, self.pool, self.store = spec, config, pool, store
        self._impl, self._kernels = impl, kernels
        self._turn = -1  # of the layer that runs: its number, but for a multiple of the banks
        self._placing = Placing((spec,), kernels.target)

    @property
    def num_turns(self) -> int:
        """See `models.run_experts.LoopedExperts`; a layer's bank is static."""
        return self.spec.cache.banks

    def finish(self) -> ExpertPool:
        """The pool, after the layers so far."""
        return self.pool

    @property
    def state(self) -> ExpertPool:
        """The pool."""
        return self.pool

    def resume(self, state: ExpertPool) -> None:
        """Likewise."""
        self.pool, self._turn = state, -1

    def kept(self) -> None:
        """Likewise: nothing."""

    def keep(self, kept: None) -> None:
        """Likewise."""

    def __call__(
        self,
        layer: Index,
        x: jax.Array,
        routing: Routing,
        token_mask: jax.Array,
        ahead: Callable[[], Routing] | None,
    ) -> jax.Array:
        """See `models.run_experts.RunExperts`."""

        def expected() -> jax.Array:
            assert ahead is not None
            return self._expected(layer, ahead(), token_mask)

        asked = Asked(routing.ids, routing.weights.astype(jnp.float32))
        _, [plan], _, [state] = self._placing.plan(
            [self.slots], [self.store.row_of], None, layer, asked, token_mask
        )
        self.set_slots(state)
        self.fill(layer, plan.admitted)
        active = jnp.broadcast_to(token_mask[:, None], routing.ids.shape)
        self.note_uses(layer, routing.ids, active)
        wanted = expected if ahead else None
        if not self.num_waves(active.size):
            self.look_ahead(layer, token_mask, wanted)
        products = self.products(layer, x, routing.ids, active, plan, token_mask, wanted)
        return combine(products, Pairs(routing.ids, active), routing.weights, x.dtype)

    def products(
        self,
        layer: Index,
        x: jax.Array,
        ids: jax.Array,
        active: jax.Array,
        plan: Placed,
        mask: jax.Array,
        ahead: Callable[[], jax.Array] | None,
    ) -> jax.Array:
        """The outputs of each expert for each token, [P, N, A, D]; waves fetch what they need.

        Args:
          layer: index among the sparse layers; int32[] inside a loop.
          x: [N, D], normed.
          ids: int32[N, A], experts.
          active: bool[N, A], pairs that run here.
          plan: of the layer; the experts of wave 0 are fetched.
          mask: bool[N], tokens that are no padding.
          ahead: int32[L], experts to bring for the next layer after waves; -1 for none.
        """
        if not self.num_waves(active.size):
            return self._run(x, *self.placed(layer, ids, active, plan))
        in_turns = self.spec.cache.banks > 1 and not isinstance(layer, int)  # as only chunks are
        products = (self._in_turns if in_turns else self._in_waves)(layer, x, plan, active)
        self.look_ahead(layer, mask, ahead)  # what waits for slots of a wave would be copied
        return products

    def begin(self, layer: Index) -> None:
        """What is brought from here on is of this layer and those after it."""
        self._turn = layer if isinstance(layer, int) else self._turn + 1

    def look_ahead(
        self, layer: Index, mask: jax.Array, ahead: Callable[[], jax.Array] | None
    ) -> None:
        """Brings what the next layer is expected to need, beside the products of this one."""
        if ahead and self.most_ahead:
            self._prefetch(layer, ahead(), mask)

    def num_waves(self, num_pairs: int) -> int:
        """How many follow what `bring` copies."""
        still = self.spec.emulated or self.spec.between_steps
        return 0 if still else self._placing.forms(num_pairs)[0].later_waves

    def placed(
        self, layer: Index, ids: jax.Array, active: jax.Array, plan: Placed
    ) -> tuple[Pairs, Experts]:
        """The pairs and their experts where there are no waves."""
        pairs = Pairs(plan.slot, active & (plan.wave == 0), plan.wave)
        if self.spec.emulated:
            pairs = Pairs(self.store.row_of[layer][ids], active)
        return pairs, self._experts(layer, plan, 0)

    def note_uses(self, layer: Index, ids: jax.Array, active: jax.Array) -> None:
        """Notes the clock of experts that a layer used, by which host memory evicts."""
        if (used := self.pool.used) is not None:
            places = jnp.where(active, ids, self.spec.cache.num_experts)
            clock = self.pool.residency.clock - 1  # which the plan has advanced
            self.pool = dataclasses.replace(
                self.pool, used=used.at[layer, places].set(clock, mode="drop")
            )

    def _in_waves(self, layer: Index, x: jax.Array, plan: Placed, active: jax.Array) -> jax.Array:
        """[P, N, A, D] of all waves; what a wave needs is copied when the one before is through."""
        now = active & (plan.wave == 0)
        products = self._run(x, Pairs(plan.slot, now), self._experts(layer, plan, 0))
        outside = self.pool

        def one(number: jax.Array, carried: Any) -> Any:
            # Of the banks this layer's alone: a loop that carries both makes XLA copy them, unless
            # each copy is ordered behind what reads its array (`_in_turns`).
            bank, counts, products = carried
            self.pool = dataclasses.replace(outside, counts=counts)
            self._set_bank(bank)
            products = self._after(products)
            self._bring(layer, jax.tree.map(lambda jobs: jobs[number], plan.streamed))
            mine = active & (plan.wave == number + 1)
            found = self._run(x, Pairs(plan.slot, mine), self._experts(layer, plan, number + 1))
            products = jnp.where(mine[None, :, :, None], found, products)
            return self.bank(), self.pool.counts, products

        carried = (self.bank(), outside.counts, products)
        num_waves = len(plan.streamed.rows)
        bank, counts, products = jax.lax.fori_loop(0, num_waves, one, carried)
        self.pool = dataclasses.replace(outside, counts=counts)
        self._set_bank(bank)
        return products

    def _in_turns(self, layer: Index, x: jax.Array, plan: Placed, active: jax.Array) -> jax.Array:
        """[P, N, A, D] of all waves; experts of a wave are copied beside the products of the last.

        Waves take turns between the transient slots of this layer's bank, in which those of wave 0
        are, and of the other one. In a CUDA graph a copy waits for the products that read the array
        which it overwrites, and for the copy before it, but not for those that read the other one.
        """
        num_waves = len(plan.streamed.rows)
        beyond = (0, 1 + num_waves % 2), (0, 0)
        streamed = jax.tree.map(lambda a: jnp.pad(a, beyond, constant_values=-1), plan.streamed)

        def stage(wave: Index, bank: int, products: jax.Array | None) -> jax.Array:
            self._bring(layer, jax.tree.map(lambda jobs: jobs[wave], streamed), 1 - bank, True)
            mine, inputs = active & (plan.wave == wave), x
            if products is not None:  # one after another, or XLA gathers the inputs of two waves
                inputs, products = jax.lax.optimization_barrier((x, products))
            found = self._run(
                inputs, Pairs(plan.slot, mine), self._experts(layer, plan, wave, bank)
            )
            if products is not None:
                found = jnp.where(mine[None, :, :, None], found, products)
            return self._after(found, bank)

        products, outside = stage(0, 0, None), self.pool

        def two(number: jax.Array, carried: Any) -> Any:
            banks, counts, products = carried
            self.pool = dataclasses.replace(outside, banks=banks, counts=counts)
            products = stage(2 * number + 1, 1, products)
            products = stage(2 * number + 2, 0, products)
            return self.pool.banks, self.pool.counts, products

        carried = (outside.banks, outside.counts, products)
        banks, counts, products = jax.lax.fori_loop(0, (num_waves + 1) // 2, two, carried)
        self.pool = dataclasses.replace(outside, banks=banks, counts=counts)
        return products

    def heard(self, layer: Index, logits: jax.Array, *, is_ahead: bool) -> jax.Array:
        """See `models.run_experts.HearsRouters`; of what is ahead `_expected` knows."""
        replay = self.store.replay
        if replay is None or is_ahead or logits.shape != replay.shape[2:]:
            return logits
        # The clock counts layers from 1 on: this is the number of the pool's step.
        step = (self.pool.residency.clock - 1) // self.spec.cache.num_layers
        return in_place_of(replay[step % len(replay), layer], logits)

    @property
    def most_ahead(self) -> int:
        """Experts of a layer that are brought ahead at most."""
        if not self._looks_ahead:
            return 0
        cache = self.spec.cache
        return min(self.spec.prefetch, cache.slots, cache.num_experts)

    @property
    def slots(self) -> State:
        """What is in them, and the counts."""
        return self.pool.residency, self.pool.counts

    def set_slots(self, state: State) -> None:
        """They are so from now on."""
        self.pool = dataclasses.replace(self.pool, residency=state[0], counts=state[1])

    def bank(self, after: int = 0) -> tuple[Weight, Weight]:
        """That of the layer which runs, or of one of those after it."""
        return self.pool.banks[(self._turn + after) % len(self.pool.banks)]

    def _set_bank(self, bank: tuple[Weight, Weight], after: int = 0) -> None:
        banks = list(self.pool.banks)
        banks[(self._turn + after) % len(banks)] = bank
        self.pool = dataclasses.replace(self.pool, banks=tuple(banks))

    def _after(self, products: jax.Array, bank: int = 0) -> jax.Array:
        """The products; what is copied from here on waits for them.

        They read the slots that the copy may overwrite, and XLA would copy the pool instead.
        """
        products, read = jax.lax.optimization_barrier((products, self.bank(bank)))
        self._set_bank(read, bank)
        return products

    def following(self, layer: Index) -> Index:
        """The next layer; in a loop the last one asks too, for nothing, and is its own."""
        last = self.spec.cache.num_layers - 1
        return layer + 1 if isinstance(layer, int) else jnp.minimum(layer + 1, last)

    def _expected(self, layer: Index, predicted: Routing, token_mask: jax.Array) -> jax.Array:
        """What the next layer's router is expected to choose (DyMoE eq. 6-8); after this layer."""
        replay, replayed = self.store.replay_ahead, self.store.replay
        scores = jnp.where(token_mask[:, None], prefetch_scores(predicted, self.config), 0.0)
        said = jax.lax.top_k(jnp.sum(scores, axis=0), self.most_ahead)[1]
        if replay is None or replayed is None or len(token_mask) != replayed.shape[2]:
            return said
        step = (self.pool.residency.clock - 2) // self.spec.cache.num_layers
        row = replay[step % len(replay), self.following(layer), : self.most_ahead]
        return in_place_of(row, said[: len(row)])

    def _prefetch(self, layer: Index, wanted: jax.Array, mask: jax.Array) -> None:
        """Brings experts of the next layer ahead, beside the products of this one."""
        mask, following = mask.reshape(-1), self.following(layer)
        if not isinstance(layer, int):
            mask &= layer + 1 < self.spec.cache.num_layers
        jobs, state = self._placing.expect(
            0, self.slots, self.store.row_of, following, wanted, mask
        )
        self.set_slots(state)
        self._bring(following, jobs, 1, beside=True)

    def fill(self, layer: Index, jobs: Jobs) -> None:
        """Copies experts into slots of the bank of a layer, of which all is from here on."""
        self.begin(layer)
        self._bring(layer, jobs)

    def _bring(self, layer: Index, jobs: Jobs, bank: int = 0, beside: bool = False) -> None:
        """Copies experts of a layer into slots, from host memory or from the disk.

        Args:
          layer: whose they are.
          jobs: which.
          bank: to that of the layer which runs (0), or the next one (1).
          beside: products that read the other bank, once what these wait for is there.
        """
        other = self.bank(1 - bank) if beside else None
        pools = self.fetching.from_host(self.bank(bank), jobs, other)
        self.came(layer, pools, jobs, bank)

    def came(self, layer: Index, pools: Slots, jobs: Jobs, bank: int = 0) -> None:
        """Takes what came from host memory, and brings the rest from the disk."""
        pools, waits = self.fetching.from_disk(pools, layer, jobs)
        if waits is not None:
            counts = self.pool.counts.add(layer, waits=waits)
            self.pool = dataclasses.replace(self.pool, counts=counts)
        self._set_bank(pools, bank)

    def _run(self, x: jax.Array, pairs: Pairs, experts: Experts) -> jax.Array:
        """[P, N, A, D] of the active pairs."""
        match self._impl:
            case "row":
                return products_by_row(x, pairs, experts)
            case "block" | "block_in_cache":
                size = STEP_BYTES[self._impl]
                return products_by_block(x, pairs, experts, self.spec.cache.num_experts, size)
            case "grouped_kernel":
                stacks = (experts.gate_up, experts.down)
                chosen = choose_grouped(len(x), self.config, x.dtype, stacks, self._kernels)
                return products_grouped(x, pairs, experts, chosen.implementation)
        raise ValueError(f"experts of a pool cannot run by {self._impl!r}")

    def _experts(self, layer: Index, plan: Placed, wave: Index, bank: int = 0) -> Experts:
        """The slots as stacks, with the low-rank terms of the experts that are in them."""
        experts, slot, wave_of = plan.holders
        held, num_slots = self.bank(bank), self.spec.cache.num_slots
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
        return Experts(stack(gate_up, of_gate_up), stack(down, of_down), 0)
