"""Experts that are not all on the device: found, fetched and run inside the compiled step.

For each sparse layer: the router says which experts are needed; `residency.plan` says which of them
are in slots, and where the others go; one launch copies those from the host store; the pairs are
multiplied by what lies in the slots. Where a layer can need more experts than it has slots, the
rest passes through the transient slots in waves, and the products of all waves are combined in the
order of the router's choice: residency is invisible in the result. The host is never asked, except
for experts that are on the disk alone (`PoolSpec.read`).

Axes: M sparse layers, E experts, C slots of a layer, B transient slots, S = M C + B slots, R rows
of the host store.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

from moejax import ops
from moejax.ledger import Counts
from moejax.memory import residency as tables
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


@dataclasses.dataclass(frozen=True)
class PoolSpec:
    """Static facts of a pool.

    Attributes:
      cache: layers, experts and slots.
      prefetch: experts of the next layer that a layer brings ahead at most; 0: none.
      read: where experts may be on the disk alone: (layer, int32[J] experts or -1) to the arrays of
        a slot, stacked [J, ...], called by the running step; None where the host store has all.
    """

    cache: CacheSpec
    prefetch: int = 0
    read: Callable[[Any, Any], Arrays] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertPool:
    """Slots on the device and what is known of them; donated through every step.

    Invariants: shapes never change; `residency` says what a slot of a layer holds, the transient
    ones hold nothing between layers.
    """

    gate_up: Weight  # [S, 2F, D], without low-rank terms
    down: Weight  # [S, D, F]
    residency: Residency
    counts: Counts
    used: jax.Array | None = None  # int32[M, E], clock of the last use; with `PoolSpec.read` alone

    @property
    def slots(self) -> tuple[Weight, Weight]:
        """Gate and up, then down."""
        return self.gate_up, self.down


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
    """

    gate_up: Weight
    down: Weight
    row_of: jax.Array
    terms: tuple[tuple[Compensator, ...], tuple[Compensator, ...]] = ((), ())
    replay: jax.Array | None = None


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

    def __call__(
        self,
        layer: int,
        x: jax.Array,
        routing: Routing,
        token_mask: jax.Array,
        ahead: Callable[[], Routing] | None,
    ) -> jax.Array:
        """See `models.transformer.RunExperts`."""
        cache, pool = self.spec.cache, self.pool
        routing = self._replayed(layer, routing)
        active = jnp.broadcast_to(token_mask[:, None], routing.ids.shape)
        needed = _marked(routing.ids, active, cache.num_experts)
        max_needed = min(routing.ids.size, cache.num_experts)
        plan, residency, counts = tables.plan(
            cache, pool.residency, layer, needed, max_needed, pool.counts
        )
        weights = jnp.where(active, routing.weights, 0.0)
        counts = counts.add_gate_mass(layer, jnp.sum(weights).reshape(1))
        used = pool.used
        if used is not None:  # the host evicts by it
            clock = pool.residency.clock
            used = used.at[layer].set(jnp.where(needed, clock, used[layer]))
        self.pool = dataclasses.replace(pool, residency=residency, counts=counts, used=used)
        slot, wave = plan.slot[routing.ids], plan.wave[routing.ids]
        self._bring(layer, plan.admitted, plan.admitted_slots)
        products = self._products(x, Pairs(slot, active & (wave == 0)), layer, plan, 0)
        if num_waves := len(plan.streamed):
            transient = cache.first_transient + jnp.arange(cache.transient, dtype=jnp.int32)

            def one(number: jax.Array, carried: tuple[ExpertPool, jax.Array]) -> Any:
                self.pool, products = carried
                products = self._after(products)
                self._bring(layer, plan.streamed[number], transient)
                mine = active & (wave == number + 1)
                found = self._products(x, Pairs(slot, mine), layer, plan, number + 1)
                return self.pool, jnp.where(mine[None, :, :, None], found, products)

            self.pool, products = jax.lax.fori_loop(0, num_waves, one, (self.pool, products))
        if self.spec.prefetch and cache.slots and ahead is not None:
            products = self._after(products)
            self._prefetch(layer + 1, ahead(), token_mask)
        return combine(products, Pairs(slot, active), routing.weights, x.dtype)

    def _replayed(self, layer: int, routing: Routing) -> Routing:
        replay = self.store.replay
        if replay is None or routing.ids.shape[0] > 1:
            return routing
        step = (self.pool.residency.clock - 1) // self.spec.cache.num_layers
        return routing._replace(ids=replay[step % len(replay), layer][None])

    def _after(self, products: jax.Array) -> jax.Array:
        """The products; what is copied from here on waits for them.

        They read the slots that the copy may overwrite, and XLA would copy the pool instead.
        """
        pools = (self.pool.gate_up, self.pool.down)
        products, (gate_up, down) = jax.lax.optimization_barrier((products, pools))
        self.pool = dataclasses.replace(self.pool, gate_up=gate_up, down=down)
        return products

    def _prefetch(self, layer: int, predicted: Routing, token_mask: jax.Array) -> None:
        """Brings ahead what the next layer's router is expected to choose (DyMoE eq. 6-8)."""
        cache, pool = self.spec.cache, self.pool
        limit = min(self.spec.prefetch, cache.slots, cache.num_experts)
        mass = jnp.sum(jnp.where(token_mask[:, None], predicted.probabilities, 0.0), axis=0)
        _, wanted = jax.lax.top_k(mass, limit)
        wanted = _marked(wanted, jnp.any(token_mask) & (wanted >= 0), cache.num_experts)
        if self.spec.read is not None:  # nobody waits for the disk on a guess
            wanted &= self.store.row_of[layer] >= 0
        found, residency, counts = tables.predict(
            cache, pool.residency, layer, wanted, limit, pool.counts
        )
        self.pool = dataclasses.replace(pool, residency=residency, counts=counts)
        self._bring(layer, found.experts, found.slots)

    def _bring(self, layer: int, experts: jax.Array, slots: jax.Array) -> None:
        """Copies experts of a layer (-1: none) into slots, from host memory or from the disk."""
        store, pool = self.store, self.pool
        if not experts.size:
            return
        some = experts >= 0
        rows = jnp.where(some, store.row_of[layer, jnp.maximum(experts, 0)], -1)
        gate_up, down = pool.gate_up, pool.down
        if store.gate_up.shape[0]:
            pools, hosts = (gate_up, down), (store.gate_up, store.down)
            how = "reference"
            if self._kernels.target is not None:
                chosen = expert_fetch.choose(pools, hosts, self._kernels.target)
                how = chosen.implementation
                if self._kernels.target.platform == "gpu" and how == "reference":
                    raise ValueError(f"experts cannot be fetched: {chosen.describe()}")
            gate_up, down = expert_fetch.fetch(pools, hosts, rows, slots, implementation=how)
        counts = pool.counts
        if self.spec.read is not None:
            absent = some & (rows < 0)
            pools = (gate_up, down)
            gate_up, down = self._from_disk(self.spec.read, layer, pools, experts, slots, absent)
            counts = counts.add(layer, waits=jnp.sum(absent))
        self.pool = dataclasses.replace(pool, gate_up=gate_up, down=down, counts=counts)

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
        self, x: jax.Array, pairs: Pairs, layer: int, plan: tables.Plan, wave: int | jax.Array
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

    def _experts(self, layer: int, plan: tables.Plan, wave: int | jax.Array) -> Experts:
        """The slots as stacks, with the low-rank terms of the experts that are in them."""
        num_slots = self.spec.cache.num_slots
        places = jnp.where(plan.wave == wave, plan.slot, num_slots)

        def stack(weight: Weight, terms: tuple[Compensator, ...]) -> Weight:
            stacked: Weight = jax.tree.map(lambda leaf: leaf[None], weight)
            if not isinstance(stacked, QTensor) or not terms:
                return stacked
            placed = tuple(_placed(term, layer, places, num_slots) for term in terms)
            return dataclasses.replace(stacked, compensators=placed)

        of_gate_up, of_down = self.store.terms
        return Experts(stack(self.pool.gate_up, of_gate_up), stack(self.pool.down, of_down), 0)


@functools.partial(jax.jit, static_argnums=2)
def _marked(ids: jax.Array, active: jax.Array, num_experts: int) -> jax.Array:
    """bool[E]: those among the ids that are active."""
    places = jnp.where(active, ids, num_experts).reshape(-1)
    return jnp.zeros(num_experts, bool).at[places].set(True, mode="drop")


def _placed(term: Compensator, layer: int, places: jax.Array, num_slots: int) -> Compensator:
    """Terms of experts by slot, starts and ranks [1, S]; rank 0 where a slot is none of theirs."""

    def by_slot(of_expert: jax.Array) -> jax.Array:
        slots = jnp.zeros(num_slots, jnp.int32)
        return slots.at[places].set(of_expert[layer], mode="drop")[None]

    return dataclasses.replace(term, start=by_slot(term.start), rank=by_slot(term.rank))
