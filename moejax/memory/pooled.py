"""Experts that are not all on the device: found, fetched and run inside the compiled step.

For each sparse layer: the router says which experts are needed; `residency.plan` says which of them
are in slots, and where the others go; one launch copies those from the host store; the pairs are
multiplied by what lies in the slots. Where a layer can need more experts than it has slots, the
rest passes through the transient slots in waves, and the products of all waves are combined in the
order of the router's choice: residency is invisible in the result. The host is never asked, except
for experts that are on the disk alone (`PoolSpec.read`).

With look-ahead, layers take turns between two banks of slots: what is copied for the next layer
writes one array while this layer's products read the other, and where XLA runs the step as a CUDA
graph whose order is that of its buffers (`COMPILER_OPTIONS`), the copy and the products overlap.

Axes: M sparse layers, E experts, C slots of a layer, B transient slots, S = ceil(M / banks) C + B
slots of a bank, R rows of the host store.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

from moejax import ops
from moejax.ledger import Counts
from moejax.memory.placing import Jobs, Placed, Placing
from moejax.memory.residency import CacheSpec, Residency
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
from moejax.models.moe import STEP_BYTES, ExpertsVia, Routing
from moejax.qtensor import Compensator, QTensor, Weight
from pallas_kernels import expert_fetch

Arrays = tuple[Any, ...]

# Of steps that look ahead on a GPU. By XLA's default the kernels of a graph run one after another,
# whatever their buffers are.
COMPILER_OPTIONS = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


@dataclasses.dataclass(frozen=True)
class PoolSpec:
    """Static facts of a pool.

    Attributes:
      cache: layers, experts and slots.
      prefetch: experts of the next layer that a layer brings ahead at most; 0: none.
      read: where experts may be on the disk alone: (layer, int32[J] experts or -1) to the arrays of
        a slot, stacked [J, ...], called by the running step; None where the host store has all.
      emulated: nothing is copied: tables and counts are those of slots that there are not, the
        products read the store's rows, which are on the device.
    """

    cache: CacheSpec
    prefetch: int = 0
    read: Callable[[Any, Any], Arrays] | None = None
    emulated: bool = False

    def __post_init__(self) -> None:
        if self.prefetch and self.cache.slots and self.cache.banks < 2:
            raise ValueError(
                "experts of the next layer are brought ahead into a bank of its own: 2"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertPool:
    """Slots on the device and what is known of them; donated through every step.

    Invariants: shapes never change; `residency` says what a slot of a layer holds, the transient
    ones hold nothing between layers.

    Attributes:
      banks: of each bank its slots [S, 2F, D] of gates and ups and [S, D, F] of downs, without
        low-rank terms.
      residency: of all layers.
      counts: since the ledger was settled.
    """

    banks: tuple[tuple[Weight, Weight], ...]
    residency: Residency
    counts: Counts
    used: jax.Array | None = None  # int32[M, E], clock of the last use; with `PoolSpec.read` alone


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertStore:
    """What a step reads: host rows, and what of the experts does not move.

    Attributes:
      gate_up: [R, 2F, D], in pinned host memory on a GPU, without low-rank terms.
      down: [R, D, F].
      row_of: int32[M, E], rows; -1 for what is on the disk alone.
      terms: low-rank terms of gate and up, and of down, on the device, starts and ranks [M, E].
      replay: int32[steps, M, A], experts that steps of one token take in place of the router's, for
        measurements; step s of the pool's life takes entry s modulo their number.
      replay_ahead: int32[steps, M, t], what the layers before are to have expected of a layer in
        such a step, -1 for less than t; None for their routers' guesses.
    """

    gate_up: Weight
    down: Weight
    row_of: jax.Array
    terms: tuple[tuple[Compensator, ...], tuple[Compensator, ...]] = ((), ())
    replay: jax.Array | None = None
    replay_ahead: jax.Array | None = None


class PooledExperts:
    """Runs the experts of one step's layers; `pool` is the state after the layers so far."""

    def __init__(
        self,
        spec: PoolSpec,
        config: ModelConfig,
        pool: ExpertPool,
        store: ExpertStore,
        via: ExpertsVia,
        kernels: ops.Kernels,
    ):
        """For one trace.

        Args:
          spec: of the pool.
          config: of the model.
          pool: the slots.
          store: the host's rows.
          via: "row", "block", "block_in_cache" or "grouped_kernel".
          kernels: which may serve packed experts.
        """
        self.spec, self.config, self.pool, self.store = spec, config, pool, store
        self._via, self._kernels = via, kernels
        self._placing = Placing(spec.cache, spec.read is not None, kernels.target)

    def __call__(
        self,
        layer: int,
        x: jax.Array,
        routing: Routing,
        token_mask: jax.Array,
        ahead: Callable[[], Routing] | None,
    ) -> jax.Array:
        """See `models.transformer.RunExperts`."""
        routing = self._replayed(layer, routing)

        def wanted() -> jax.Array:
            assert ahead is not None
            return self._expected(layer + 1, ahead(), token_mask)

        products = self.products(layer, x, routing, token_mask, wanted if ahead else None)
        active = jnp.broadcast_to(token_mask[:, None], routing.ids.shape)
        return combine(products, Pairs(routing.ids, active), routing.weights, x.dtype)

    def products(
        self,
        layer: int,
        x: jax.Array,
        routing: Routing,
        mask: jax.Array,
        ahead: Callable[[], jax.Array] | None,
        keep: jax.Array | None = None,
    ) -> jax.Array:
        """What each expert gives for each token, [P, N, A, D]; fetches what is missing.

        Args:
          layer: index among the sparse layers.
          x: [N, D], normed.
          routing: which experts run; its weights are counted.
          mask: bool[N], tokens that are no padding; or bool[N, A], pairs.
          ahead: int32[L], experts that are to be brought for the next layer, -1 for none.
          keep: float32[E], experts of least value leave first; None for the least recent use.
        """
        cache, shape = self.spec.cache, routing.ids.shape
        active = mask if mask.ndim == 2 else jnp.broadcast_to(mask[:, None], shape)
        plan = self._plan(layer, routing, mask, keep)
        ahead = ahead if self.spec.prefetch and cache.slots else None
        if self.spec.emulated:
            if ahead:
                self._prefetch(layer + 1, ahead(), mask)
            rows = self.store.row_of[layer]
            return self._products(x, Pairs(rows[routing.ids], active), layer, plan, 0)
        slot, wave = plan.slot, plan.wave
        self.bring(layer, plan.admitted)
        num_waves = len(plan.streamed.rows)
        if ahead and not num_waves:  # beside the products
            self._prefetch(layer + 1, ahead(), mask)
        products = self._products(x, Pairs(slot, active & (wave == 0)), layer, plan, 0)
        if num_waves:
            outside = self.pool

            def one(number: jax.Array, carried: Any) -> Any:
                # Of the banks this layer's alone: a loop that carries both makes XLA copy them.
                bank, counts, products = carried
                self.pool = dataclasses.replace(outside, counts=counts)
                self._set_bank(layer, bank)
                products = self._after(layer, products)
                self.bring(layer, jax.tree.map(lambda jobs: jobs[number], plan.streamed))
                mine = active & (wave == number + 1)
                found = self._products(x, Pairs(slot, mine), layer, plan, number + 1)
                products = jnp.where(mine[None, :, :, None], found, products)
                return self._bank(layer), self.pool.counts, products

            carried = (self._bank(layer), outside.counts, products)
            bank, counts, products = jax.lax.fori_loop(0, num_waves, one, carried)
            self.pool = dataclasses.replace(outside, counts=counts)
            self._set_bank(layer, bank)
            if ahead:  # what waits for slots that a wave overwrites would make XLA copy them
                self._prefetch(layer + 1, ahead(), mask)
        return products

    def _plan(
        self, layer: int, routing: Routing, mask: jax.Array, keep: jax.Array | None
    ) -> Placed:
        """Where the pairs run."""
        store, shape = self.store, routing.ids.shape
        if mask.ndim == 2:  # pairs of their own, as tokens of one expert each
            ids, weights = routing.ids.reshape(-1, 1), routing.weights.reshape(-1, 1)
            routing, mask = routing._replace(ids=ids, weights=weights), mask.reshape(-1)
        plan, state = self._placing.plan(self._state, store.row_of, layer, routing, mask, keep)
        if (used := self.pool.used) is not None:  # the host evicts by it
            needed, clock = plan.holders[1] >= 0, self.pool.residency.clock
            used = used.at[layer].set(jnp.where(needed, clock, used[layer]))
            self.pool = dataclasses.replace(self.pool, used=used)
        self._set_state(state)
        return plan._replace(slot=plan.slot.reshape(shape), wave=plan.wave.reshape(shape))

    def _replayed(self, layer: int, routing: Routing) -> Routing:
        replay = self.store.replay
        if replay is None or routing.ids.shape[0] > 1:
            return routing
        return routing._replace(ids=replay[self._step() % len(replay), layer][None])

    def _step(self) -> jax.Array:
        """int32[], steps of the pool's life; the clock counts layers from 1 on."""
        return (self.pool.residency.clock - 1) // self.spec.cache.num_layers

    @property
    def most_ahead(self) -> int:
        """Experts of a layer that are brought ahead at most."""
        return min(self.spec.prefetch, self.spec.cache.slots)

    @property
    def _state(self) -> tuple[Residency, Counts]:
        return self.pool.residency, self.pool.counts

    def _set_state(self, state: tuple[Residency, Counts]) -> None:
        self.pool = dataclasses.replace(self.pool, residency=state[0], counts=state[1])

    def _bank(self, layer: int) -> tuple[Weight, Weight]:
        return self.pool.banks[layer % self.spec.cache.banks]

    def _set_bank(self, layer: int, bank: tuple[Weight, Weight]) -> None:
        banks = list(self.pool.banks)
        banks[layer % len(banks)] = bank
        self.pool = dataclasses.replace(self.pool, banks=tuple(banks))

    def _after(self, layer: int, products: jax.Array) -> jax.Array:
        """The products; what is copied from here on waits for them, or XLA would copy the pool."""
        products, bank = jax.lax.optimization_barrier((products, self._bank(layer)))
        self._set_bank(layer, bank)
        return products

    def _expected(self, layer: int, predicted: Routing, token_mask: jax.Array) -> jax.Array:
        """What the next layer's router is expected to choose (DyMoE eq. 6-8)."""
        limit, replay = self.most_ahead, self.store.replay_ahead
        if replay is None or len(token_mask) > 1:
            mass = jnp.sum(jnp.where(token_mask[:, None], predicted.probabilities, 0.0), axis=0)
            return jax.lax.top_k(mass, limit)[1]
        # The clock has counted the layer before.
        step = (self.pool.residency.clock - 2) // self.spec.cache.num_layers
        return replay[step % len(replay), layer, :limit]

    def _prefetch(self, layer: int, wanted: jax.Array, mask: jax.Array) -> None:
        """Brings experts of the next layer ahead."""
        jobs, state = self._placing.expect(
            self._state, self.store.row_of, layer, wanted, mask.reshape(-1)
        )
        self._set_state(state)
        if not self.spec.emulated:
            self.bring(layer, jobs, ahead=True)

    def bring(self, layer: int, jobs: Jobs, ahead: bool = False) -> None:
        """Copies experts of a layer into slots; `ahead`: beside products, after what they await."""
        store, pool = self.store, self.pool
        rows, slots, experts = jobs
        if not rows.size:
            return
        pools = self._bank(layer)
        if store.gate_up.shape[0]:
            hosts = (store.gate_up, store.down)
            how = "reference"
            if self._kernels.target is not None:
                chosen = expert_fetch.choose(pools, hosts, self._kernels.target)
                how = chosen.implementation
                if self._kernels.target.platform == "gpu" and how == "reference":
                    raise ValueError(f"experts cannot be fetched: {chosen.describe()}")
            beside = ahead and how == "triton"
            pools = expert_fetch.fetch(
                pools,
                hosts,
                rows,
                slots,
                implementation=how,
                tiles=expert_fetch.default_tiles_beside() if beside else None,
                after=self._bank(layer - 1) if beside else (),
            )
        counts = pool.counts
        if self.spec.read is not None:
            assert experts is not None
            absent = (experts >= 0) & (rows < 0)
            pools = self._from_disk(self.spec.read, layer, pools, experts, slots, absent)
            counts = counts.add(layer, waits=jnp.sum(absent))
        self.pool = dataclasses.replace(pool, counts=counts)
        self._set_bank(layer, pools)

    def _from_disk(
        self,
        read_rows: Callable[[Any, Any], Arrays],
        layer: int,
        pools: tuple[Weight, Weight],
        experts: jax.Array,
        slots: jax.Array,
        absent: jax.Array,
    ) -> tuple[Weight, Weight]:
        """The pools with what is on the disk alone; the step waits for the host where there is."""
        leaves, tree = jax.tree.flatten(pools)
        shapes = [jax.ShapeDtypeStruct((len(experts), *p.shape[1:]), p.dtype) for p in leaves]

        def read() -> list[jax.Array]:
            asked = jnp.where(absent, experts, -1)
            return list(io_callback(read_rows, tuple(shapes), jnp.int32(layer), asked))

        def nothing() -> list[jax.Array]:
            return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]

        found = jax.lax.cond(jnp.any(absent), read, nothing)
        places = jnp.where(absent, slots, self.spec.cache.num_slots)
        filled = [p.at[places].set(new, mode="drop") for p, new in zip(leaves, found, strict=True)]
        return jax.tree.unflatten(tree, filled)

    def _products(
        self, x: jax.Array, pairs: Pairs, layer: int, plan: Placed, wave: int | jax.Array
    ) -> jax.Array:
        """[P, N, A, D] of the active pairs."""
        experts = self._experts(layer, plan, wave)
        match self._via:
            case "row":
                return products_by_row(x, pairs, experts)
            case "block" | "block_in_cache":
                size = STEP_BYTES[self._via]
                return products_by_block(x, pairs, experts, self.spec.cache.num_experts, size)
            case "grouped_kernel":
                stacks = (experts.gate_up, experts.down)
                chosen = choose_grouped(len(x), self.config, x.dtype, stacks, self._kernels)
                return products_grouped(x, pairs, experts, chosen.implementation)
        raise ValueError(f"experts of a pool do not run via {self._via!r}")

    def _experts(self, layer: int, plan: Placed, wave: int | jax.Array) -> Experts:
        """The slots as stacks, with the low-rank terms of the experts that are in them."""
        experts, slot, wave_of = plan.holders
        held, num_slots = self._bank(layer), self.spec.cache.num_slots
        if self.spec.emulated:
            held, num_slots = (self.store.gate_up, self.store.down), self.store.gate_up.shape[0]
            slot, wave_of = self.store.row_of[layer][experts], jnp.zeros_like(wave_of)
        places = jnp.where(wave_of == wave, slot, num_slots)

        def stack(weight: Weight, terms: tuple[Compensator, ...]) -> Weight:
            stacked: Weight = jax.tree.map(lambda leaf: leaf[None], weight)
            if not isinstance(stacked, QTensor) or not terms:
                return stacked
            placed = tuple(_placed(term, layer, experts, places, num_slots) for term in terms)
            return dataclasses.replace(stacked, compensators=placed)

        (gate_up, down), (of_gate_up, of_down) = held, self.store.terms
        return Experts(stack(gate_up, of_gate_up), stack(down, of_down), 0)


def _placed(
    term: Compensator, layer: int, experts: jax.Array, places: jax.Array, num_slots: int
) -> Compensator:
    """Terms of experts by slot, starts and ranks [1, S]; rank 0 where a slot is none of theirs."""

    def by_slot(of_expert: jax.Array) -> jax.Array:
        slots = jnp.zeros(num_slots, jnp.int32)
        return slots.at[places].set(of_expert[layer, experts], mode="drop")[None]

    return dataclasses.replace(term, start=by_slot(term.start), rank=by_slot(term.rank))
