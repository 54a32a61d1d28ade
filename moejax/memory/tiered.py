"""Experts in several tiers under a policy, decided inside the compiled step.

For each sparse layer: the policy sees the routing and what is in the slots of each tier's pool, and
decides which expert runs each pair, in which tier, with which weight. Each pool then finds, fetches
and runs its own pairs (`moejax.memory.pooled`), and the products are combined once, in the order of
the router's choice. Where an expert is that is asked for in several tiers, DyMoE's rules say
(`moejax.policies.mixed_cache`): a miss comes in the tier that was asked for, and its copies in
other pools leave, but for those of a pool that holds every expert.

Between steps `ask` hands over what the policy wants moved in bulk.

Axes: N tokens, A experts a token, M sparse layers, E experts, T tiers of falling fidelity.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moejax import ops
from moejax.memory import residency as tables
from moejax.memory.expert_pool import ExpertPool, ExpertStore, PoolSpec
from moejax.memory.pooled import PooledExperts
from moejax.memory.residency import CacheSpec
from moejax.models.config import ModelConfig
from moejax.models.expert_products import Pairs, combine
from moejax.models.moe import ExpertsVia, Routing
from moejax.ops import Index
from moejax.policies import mixed_cache
from moejax.policies.attention_importance import attention_received
from moejax.policies.interface import SKIPPED, AnyPolicy, Decision, Observation, Requests

SKIPPED_MASS, SUBSTITUTED_MASS, ALL_MASS = 0, 1, 2  # columns of `TieredPool.gate` after the tiers'


@dataclasses.dataclass(frozen=True)
class TieredSpec:
    """Static facts.

    Attributes:
      policy: who decides.
      names: of the tiers, of falling fidelity.
      pools: one for each, of the same layers and experts.
    """

    policy: AnyPolicy
    names: tuple[str, ...]
    pools: tuple[PoolSpec, ...]

    @property
    def cache(self) -> CacheSpec:
        """Of the tier of highest fidelity."""
        return self.pools[0].cache

    @property
    def read(self) -> Any:
        """Whether experts of any tier may be on the disk alone: what reads them, or None."""
        return next((pool.read for pool in self.pools if pool.read is not None), None)

    @property
    def full(self) -> tuple[bool, ...]:
        """Which pools have a slot for every expert, which is never taken from it."""
        return tuple(pool.cache.slots >= pool.cache.num_experts for pool in self.pools)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TieredPool:
    """The pools of all tiers and the policy's state; donated through every step.

    Invariants: shapes never change; an expert is in at most one of the pools that are not `full`
    while a layer runs.

    Attributes:
      pools: of the tiers.
      state: of the policy.
      gate: float32[M, T + 3], the router's gate mass that each tier served, that was skipped, that
        another expert served (which is in its tier's too), and of all; since it was last taken.
    """

    pools: tuple[ExpertPool, ...]
    state: Any
    gate: jax.Array


def no_gate(num_layers: int, num_tiers: int) -> jax.Array:
    """`TieredPool.gate` before any token."""
    return jnp.zeros((num_layers, num_tiers + 3), jnp.float32)


class TieredExperts:
    """Runs the experts of one step's layers; `pool` is the state after the layers so far."""

    def __init__(
        self,
        spec: TieredSpec,
        config: ModelConfig,
        pool: TieredPool,
        store: Sequence[ExpertStore],
        via: Sequence[ExpertsVia],
        kernels: ops.Kernels,
        *,
        is_prefill: bool,
    ):
        """For one trace.

        Args:
          spec: static.
          config: of the model.
          pool: the slots of all tiers.
          store: the host's rows of each.
          via: the form that runs the experts of each.
          kernels: which may serve packed experts.
          is_prefill: whether the step is of prompts.
        """
        self.spec, self.config, self.pool = spec, config, pool
        self._store, self._via, self._kernels = tuple(store), tuple(via), kernels
        self._is_prefill = is_prefill
        self._importance: dict[int, jax.Array] = {}

    def watch(
        self,
        layer: int,
        q: jax.Array,
        keys: jax.Array,
        positions: jax.Array,
        token_mask: jax.Array,
    ) -> None:
        """See `models.attention.WatchAttention`; keeps the importance of the layer's tokens."""
        if not (self._is_prefill and self.spec.policy.needs.importance):
            return
        if layer not in self.config.moe_layers:
            return
        received = attention_received(
            q, keys, positions, token_mask, sliding_window=self.config.sliding_window
        )
        places = jnp.minimum(positions, received.shape[1] - 1)
        own = jnp.take_along_axis(received, places, axis=1).reshape(-1)
        self._importance[self.config.moe_layers.index(layer)] = own

    def __call__(
        self,
        layer: Index,
        x: jax.Array,
        routing: Routing,
        token_mask: jax.Array,
        ahead: Callable[[], Routing] | None,
    ) -> jax.Array:
        """See `models.run_experts.RunExperts`; of a layer whose number is static."""
        assert isinstance(layer, int)
        routing = self._replayed(layer, routing)
        resident = self._resident(layer)
        decision = self._decide(layer, routing, token_mask, ahead, resident)
        found = mixed_cache.served(resident, decision, token_mask)
        self._release(layer, resident, found.leaving)
        runs = token_mask[:, None] & (decision.tier != SKIPPED)
        tier = jnp.where(runs, found.tier[decision.ids], SKIPPED)
        self._count(layer, routing, token_mask, tier, decision.ids)
        chosen = Routing(routing.probabilities, decision.weights, decision.ids)
        products = self._products(layer, x, chosen, tier, decision)
        return combine(products, Pairs(decision.ids, runs), decision.weights, x.dtype)

    def _resident(self, layer: int) -> jax.Array:
        """bool[T, E]."""
        num_experts = self.config.num_experts
        rows = [pool.residency.table[layer, :num_experts] for pool in self.pool.pools]
        return jnp.stack(rows) >= 0

    def _decide(
        self,
        layer: int,
        routing: Routing,
        token_mask: jax.Array,
        ahead: Callable[[], Routing] | None,
        resident: jax.Array,
    ) -> Decision:
        looks = self.spec.policy.needs.predicted and ahead is not None
        observation = Observation(
            layer=jnp.int32(layer),
            probabilities=routing.probabilities,
            ids=routing.ids,
            weights=routing.weights,
            active=token_mask,
            resident=resident,
            importance=self._importance.pop(layer, None),
            predicted=self._predicted(layer, routing, ahead) if looks and ahead else None,
            is_prefill=self._is_prefill,
        )
        decision, state = self.spec.policy.decide(self.pool.state, observation)
        self.pool = dataclasses.replace(self.pool, state=state)
        return decision

    def _replayed(self, layer: int, routing: Routing) -> Routing:
        """Of the first tier's store, in decode steps of as many tokens; else what is given."""
        store, row = self._store[0], self._replay_row(routing)
        if store.replay is None or row is None:
            return routing
        routing = routing._replace(ids=store.replay[row, layer])
        if store.replay_probabilities is None:
            return routing
        probabilities = store.replay_probabilities[row, layer]
        weights = jnp.take_along_axis(probabilities, routing.ids, axis=1, mode="clip")
        if self.config.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=1, keepdims=True)
        return Routing(probabilities, weights, routing.ids)

    def _predicted(self, layer: int, routing: Routing, ahead: Callable[[], Routing]) -> jax.Array:
        """float32[N, E], of the next layer's router."""
        replay, row = self._store[0].replay_predicted, self._replay_row(routing)
        if replay is None or row is None:
            return ahead().probabilities
        return replay[row, layer + 1]

    def _replay_row(self, routing: Routing) -> jax.Array | None:
        """Which entry of a replay is that of this step, before the layer is planned; None: none."""
        replay = self._store[0].replay
        if replay is None or self._is_prefill or routing.ids.shape != replay.shape[2:]:
            return None
        # A pool's clock counts its layers from 1 on, those of prompts too.
        step = (self.pool.pools[0].residency.clock - 1) // self.spec.cache.num_layers
        return step % len(replay)

    def _release(self, layer: int, resident: jax.Array, leaving: jax.Array) -> None:
        """Copies leave whose expert comes in another tier, or is in a better one by now."""
        pools = list(self.pool.pools)
        for tier, is_full in enumerate(self.spec.full):
            if is_full or len(pools) == 1:
                continue
            gone = leaving[tier] | (resident[tier] & jnp.any(resident[:tier], axis=0))
            pools[tier] = _released(pools[tier], layer, gone)
        self.pool = dataclasses.replace(self.pool, pools=tuple(pools))

    def _count(
        self,
        layer: int,
        routing: Routing,
        token_mask: jax.Array,
        tier: jax.Array,
        ids: jax.Array,
    ) -> None:
        """Adds the router's gate mass by what became of it."""
        weights = jnp.where(token_mask[:, None], routing.weights, 0.0)
        index = jnp.arange(len(self.spec.pools), dtype=jnp.int32)[:, None, None]
        masks = jnp.concatenate(
            [
                tier[None] == index,
                (tier == SKIPPED)[None],
                ((tier != SKIPPED) & (ids != routing.ids))[None],
                jnp.ones((1, *tier.shape), bool),
            ]
        )
        mass = jnp.sum(jnp.where(masks, weights[None], 0.0), axis=(1, 2))
        gate = self.pool.gate
        gate = jax.lax.dynamic_update_index_in_dim(gate, gate[layer] + mass, layer, 0)
        self.pool = dataclasses.replace(self.pool, gate=gate)

    def _products(
        self, layer: int, x: jax.Array, routing: Routing, tier: jax.Array, decision: Decision
    ) -> jax.Array:
        """[P, N, A, D] of the pairs of all tiers, each in its own place."""
        pools, found = list(self.pool.pools), []
        for i, spec in enumerate(self.spec.pools):
            runs = PooledExperts(
                spec, self.config, pools[i], self._store[i], self._via[i], self._kernels
            )
            ahead = self._ahead(layer + 1, i, runs.most_ahead, decision.ahead)
            products = runs.products(layer, x, routing, tier == i, ahead, decision.keep)
            pools[i] = runs.pool
            found.append(products)
        self.pool = dataclasses.replace(self.pool, pools=tuple(pools))
        return _selected(found, tier)

    def _ahead(
        self, layer: int, tier: int, limit: int, ahead: jax.Array | None
    ) -> Callable[[], jax.Array] | None:
        """What a pool is to bring for the next layer, of which no copy as good is there."""
        if ahead is None or not limit or layer >= self.spec.cache.num_layers:
            return None

        def wanted() -> jax.Array:
            missing = ~jnp.any(self._resident(layer)[: tier + 1], axis=0)
            some, ids = jax.lax.top_k(((ahead == tier) & missing).astype(jnp.int32), limit)
            return jnp.where(some > 0, ids, -1)

        return wanted


def _selected(products: Sequence[jax.Array], tier: jax.Array) -> jax.Array:
    """Of each pair the product of its tier; [P, N, A, D], P the largest of the tiers'."""
    if len(products) == 1:
        return products[0]
    wide = jnp.result_type(*products)
    parts = max(len(one) for one in products)
    chosen = jnp.zeros((parts, *products[0].shape[1:]), wide)
    for i, one in enumerate(products):
        filled = jnp.pad(one.astype(wide), ((0, parts - len(one)), (0, 0), (0, 0), (0, 0)))
        chosen = jnp.where((tier == i)[None, :, :, None], filled, chosen)
    return chosen


def _released(pool: ExpertPool, layer: int | jax.Array, gone: jax.Array) -> ExpertPool:
    residency, counts = tables.release(pool.residency, layer, gone, pool.counts)
    return dataclasses.replace(pool, residency=residency, counts=counts)


def ask(spec: TieredSpec, pool: TieredPool, coming: jax.Array) -> tuple[TieredPool, Requests]:
    """What the policy wants moved before the next step; a program of its own between steps.

    A demotion frees the slot of the higher tier here; what is to come is fetched by
    `moejax.memory.transfers`. Where the pools are emulated it has come when this returns.

    Args:
      spec: static.
      pool: donated.
      coming: bool[M, T, E], on its way already.

    Returns:
      The pool, and the requests.
    """
    num_experts = spec.cache.num_experts
    held = [p.residency.table[:, :num_experts] >= 0 for p in pool.pools]
    resident = jnp.stack(held, axis=1) | coming
    requests, state = spec.policy.transfers(pool.state, resident)
    expert = jnp.arange(num_experts, dtype=jnp.int32)

    def one(index: jax.Array, pools: tuple[ExpertPool, ...]) -> tuple[ExpertPool, ...]:
        layer, tier = requests.layer[index], requests.tier[index]
        asked = (expert == requests.expert[index]) & (layer >= 0)
        layer, found = jnp.maximum(layer, 0), list(pools)
        for i, is_full in enumerate(spec.full):
            if not is_full and len(pools) > 1:
                found[i] = _released(found[i], layer, asked & (tier > i))
            if spec.pools[i].emulated:
                comes = jnp.where(jnp.any(asked) & (tier == i), requests.expert[index], -1)
                found[i] = _landed(spec.pools[i].cache, found[i], layer, comes[None])
        return tuple(found)

    pools, number = pool.pools, len(requests.layer)
    if number:
        pools = jax.lax.fori_loop(0, number, one, pools)
    return dataclasses.replace(pool, pools=pools, state=state), requests


def _landed(cache: CacheSpec, pool: ExpertPool, layer: jax.Array, experts: jax.Array) -> ExpertPool:
    """Experts get slots as by `moejax.memory.landing.land`, without bytes."""
    if not cache.slots:
        return pool
    sized = dataclasses.replace(cache, held=cache.slots)
    slots, residency, counts = tables.reserve(sized, pool.residency, layer, experts, pool.counts)
    residency, counts = tables.publish(sized, residency, layer, slots, counts)
    return dataclasses.replace(pool, residency=residency, counts=counts)
