"""The expert cache in the place of a model's experts: the carry of its layers.

Without a policy the router's choice is run as it is. Under one, it sees the routing and what is in
the slots of each tier, and decides which expert runs each pair, in which tier, with which weight.
`moejax.experts.cache_step` runs the layer after that.

Axes: N tokens, M sparse layers, E experts, T tiers of falling fidelity.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.experts.cache_plan import Placing
from moejax.experts.cache_step import CacheStep, TierStep, Wanted, run_layer
from moejax.experts.expert_pool import ExpertPool, ExpertStore, in_place_of
from moejax.experts.tiered import ExpertCache, ExpertCacheSpec
from moejax.models.attention import Attended
from moejax.models.config import ModelConfig
from moejax.models.experts import Experts
from moejax.models.layer_index import LayerIndex
from moejax.models.moe import ExpertImpl, SparseMoe
from moejax.models.routing import Routing, prefetch_scores
from moejax.policies.attention_importance import attention_received
from moejax.policies.base import AnyPolicy, Decision, Observation, moves_between_steps
from moejax.policies.by_layer import vmap_decide
from moejax.weights import linear as ops
from moejax.weights.linear import Index
from pallas_kernels import cache_plan
from pallas_kernels.cache_plan import Rule


class CacheCarry(NamedTuple):
    """Carry of `CachedExperts` from one sparse layer to the next.

    In a loop the tree never changes: policies are updated at the end of unrolled steps alone.
    """

    cache: ExpertCache
    importance: jax.Array | None  # float32[N], of tokens, where some layers have no attention
    deferred: tuple[Observation, ...]  # of the layers so far, if the last one updates the policy
    replayed: jax.Array | None  # int32[], which entry of a replay is this step's


class CachedExperts(Experts):
    """Runs the experts of one step's layers through the cache, which is the carry."""

    def __init__(
        self,
        spec: ExpertCacheSpec,
        config: ModelConfig,
        cache: ExpertCache,
        store: Sequence[ExpertStore],
        impl: Sequence[ExpertImpl],
        kernels: ops.Kernels,
        *,
        num_prefilled: int | None = None,
    ):
        """Prepares one trace of a step.

        Args:
          spec: static.
          cache: the slots of all tiers, before the first layer.
          store: the host's rows of each.
          impl: the form that runs the experts of each.
          kernels: those that may run packed experts.
          num_prefilled: tokens of a step of prompts, padding too; None in a step of decode.
        """
        self.spec, self.config = spec, config
        self.layers_per_iteration = math.lcm(*(pool.cache.banks for pool in spec.pools))
        self._cache, self._store = cache, tuple(store)
        self._num_prefilled, self._is_prefill = num_prefilled, num_prefilled is not None
        policy, moves = spec.policy, True
        if policy is not None:
            dims = spec.cache.num_layers, len(spec.pools), spec.cache.num_experts
            moves = moves_between_steps(policy, cache.state, dims)
        self.observes_attention = (
            policy is not None and self._is_prefill and policy.needs.importance
        )
        tiers = tuple(
            TierStep(pool, config, rows, form, kernels, self._is_prefill, number)
            for number, (pool, rows, form) in enumerate(zip(spec.pools, store, impl, strict=True))
        )
        placing = Placing(spec.pools, kernels.target, moves)
        self.step = CacheStep(spec, config, tiers, placing, kernels)

    def init(self) -> CacheCarry:
        """See `Experts`."""
        importance = replayed = None
        if self.observes_attention and self._num_prefilled is not None:
            importance = initial_importance(self.config, self._num_prefilled)
        if (replay := self._store[0].replay) is not None and not self._is_prefill:
            # A pool's clock counts its layers from 1 on, those of prompts too. Read once a step:
            # whoever reads it after a layer has it copied before the next one counts.
            step = (self._cache.pools[0].residency.clock - 1) // self.spec.cache.num_layers
            replayed = step % len(replay)
        return CacheCarry(self._cache, importance, (), replayed)

    def route(
        self, carry: CacheCarry, moe: SparseMoe, layer: Index, x: jax.Array, *,
        is_ahead: bool = False,
    ) -> Routing:  # fmt: skip
        """See `Experts`; routes by replayed logits if there are any."""
        store = self._store[0]
        replay = store.replay_predicted if is_ahead else store.replay
        if replay is None or not self._replays(carry, len(x)):
            return moe.route(x, layer)
        replayed = replay[carry.replayed, layer]
        return moe.route(x, layer, override=lambda logits: in_place_of(replayed, logits))

    def _replays(self, carry: CacheCarry, num_tokens: int) -> bool:
        """Whether the store replays steps of so many tokens."""
        replay = self._store[0].replay
        return replay is not None and carry.replayed is not None and num_tokens == replay.shape[2]

    def __call__(
        self,
        carry: CacheCarry,
        layer: LayerIndex,
        x: jax.Array,
        routing: Routing,
        token_mask: jax.Array,
        next_routing: Callable[[], Routing] | None,
        attended: Attended | None,
    ) -> tuple[jax.Array, CacheCarry, None]:
        """See `Experts`."""
        decision = rule = None
        if self.spec.policy is not None:
            importance = carry.importance
            if self.observes_attention and attended is not None:
                aggregation = self._policy.needs.aggregation
                importance = token_importance(attended, self.config, aggregation)
            if carry.importance is not None:
                carry = carry._replace(importance=importance)
            decision, rule, carry = self._decide(
                carry, layer, routing, token_mask, next_routing, importance
            )

        def wanted(tier: int, pools: Sequence[ExpertPool]) -> Wanted | None:
            if next_routing is None:
                return None
            if decision is not None:
                return self._candidates(layer, tier, decision.ahead, pools)
            return lambda: self._predicted(carry, layer, next_routing(), token_mask)

        out, cache = run_layer(
            self.step, carry.cache, layer, x, routing, token_mask, decision, rule, wanted
        )
        carry = carry._replace(cache=cache)
        return out, carry if layer.next_moe else self._with_deferred_updates(carry), None

    @property
    def _policy(self) -> AnyPolicy:
        assert self.spec.policy is not None
        return self.spec.policy

    def _decide(
        self, carry: CacheCarry, layer: LayerIndex, routing: Routing, token_mask: jax.Array,
        next_routing: Callable[[], Routing] | None, importance: jax.Array | None,
    ) -> tuple[Decision, Rule | None, CacheCarry]:  # fmt: skip
        """Returns the policy's decision, and its tier rule where a kernel applies it."""
        cache, policy, pools = carry.cache, self._policy, carry.cache.pools
        predicted = None
        if policy.needs.predicted and next_routing is not None:
            predicted = prefetch_scores(next_routing(), self.config)
        seen = Observation(
            layer=jnp.asarray(layer.mlp, jnp.int32),
            probabilities=routing.probabilities,
            ids=routing.ids,
            weights=routing.weights,
            active=token_mask,
            resident=cache_plan.servable(self._resident(pools, layer.mlp), self.spec.full),
            importance=importance,
            predicted=predicted,
            tables=pools[0].residency.table if len(pools) == 1 else None,
            is_prefill=self._is_prefill,
        )
        rule = None
        if self.step.has_fused_plan(routing.ids.size) and not self._is_prefill:
            rule = policy.decode_rule(cache.state)
        if rule is not None and self._defers_update(layer.mlp):
            deferred = (*carry.deferred, dataclasses.replace(seen, predicted=None))
            tiers = jnp.zeros(routing.ids.shape, jnp.int32)  # not looked at
            decision = Decision(routing.ids, tiers, routing.weights, tiers > 0)
            return decision, rule, carry._replace(deferred=deferred)
        decision, state = policy.decide(cache.state, seen)
        return decision, rule, carry._replace(cache=dataclasses.replace(cache, state=state))

    def _resident(self, pools: Sequence[ExpertPool], layer: Index) -> jax.Array:
        """Returns bool[T, E], whether an expert has a slot in each tier."""
        num_experts = self.config.num_experts
        rows = [pool.residency.table[layer, :num_experts] for pool in pools]
        return jnp.stack(rows) >= 0

    def _defers_update(self, layer: Index) -> bool:
        """Whether the policy is updated for all layers after the last one.

        That takes fewer launches than layer by layer. The rule says its tiers; what it would
        prefetch is not known before the step's end.
        """
        looks_ahead = any(tier.most_ahead for tier in self.step.tiers)
        may_wait = self._policy.layer_axes is not None and not self._policy.substitutes
        return isinstance(layer, int) and may_wait and not looks_ahead

    def _with_deferred_updates(self, carry: CacheCarry) -> CacheCarry:
        """Updates the policy for the layers whose update was deferred, all at once."""
        if not carry.deferred:
            return carry
        cache, policy = carry.cache, self._policy
        together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *carry.deferred)
        _, state = vmap_decide(policy, policy.layer_axes, cache.state, together)
        return carry._replace(cache=dataclasses.replace(cache, state=state), deferred=())

    def _predicted(
        self, carry: CacheCarry, layer: LayerIndex, predicted: Routing, token_mask: jax.Array
    ) -> jax.Array:
        """Predicts the experts of the next layer's router (DyMoE eq. 6-8)."""
        store, most_ahead = self._store[0], self.step.tiers[0].most_ahead
        scores = jnp.where(token_mask[:, None], prefetch_scores(predicted, self.config), 0.0)
        ids = jax.lax.top_k(jnp.sum(scores, axis=0), most_ahead)[1]
        if store.replay_ahead is None or not self._replays(carry, len(token_mask)):
            return ids
        assert layer.next_moe is not None
        row = store.replay_ahead[carry.replayed, layer.next_moe.mlp, :most_ahead]
        return in_place_of(row, ids[: len(row)])

    def _candidates(
        self, layer: LayerIndex, tier: int, ahead: jax.Array | None, pools: Sequence[ExpertPool]
    ) -> Wanted | None:
        """Returns the prefetch candidates of a tier without a better copy, if any."""
        limit = self.step.tiers[tier].most_ahead
        if ahead is None or not limit or layer.next_moe is None:
            return None
        following = layer.next_moe.mlp

        def wanted() -> jax.Array:
            # Experts that the tier holds count too, so that a prefetch takes no slot of theirs.
            better = jnp.any(self._resident(pools, following)[:tier], axis=0)
            some, ids = jax.lax.top_k(((ahead == tier) & ~better).astype(jnp.int32), limit)
            return jnp.where(some > 0, ids, -1)

        return wanted


def token_importance(
    attended: Attended, config: ModelConfig, aggregation: str = "mean"
) -> jax.Array:
    """Attention that each token of a chunk receives of the chunk (DyMoE eq. 1), float32[N]."""
    received = attention_received(
        *attended, aggregation=aggregation, sliding_window=config.sliding_window,
        scale=config.score_scale,
    )  # fmt: skip
    places = jnp.minimum(attended.positions, received.shape[1] - 1)
    return jnp.take_along_axis(received, places, axis=1).reshape(-1)


def initial_importance(config: ModelConfig, num_tokens: int) -> jax.Array | None:
    """Importance carried into the first layer, all alike; None where every layer attends."""
    return None if config.delta_net is None else jnp.ones(num_tokens, jnp.float32)
