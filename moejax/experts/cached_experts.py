"""The expert cache in the place of a model's experts: carried from layer to layer of a step.

Without a policy the router's choice is run as it is. Under one, it sees the routing and what is in
the slots of each tier, and decides which expert runs each pair, in which tier, with which weight.
`moejax.experts.cache_step` runs the layer after that.

Axes: N tokens, M sparse layers, E experts, T tiers of falling fidelity.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from moejax.experts.cache_plan import Placing
from moejax.experts.cache_step import CacheStep, TierStep, Wanted, run_layer
from moejax.experts.expert_pool import ExpertPool, ExpertStore, in_place_of
from moejax.experts.tiered import ExpertCache, ExpertCacheSpec
from moejax.models.config import ModelConfig
from moejax.models.moe import ExpertImpl
from moejax.models.routing import Routing, prefetch_scores
from moejax.policies.attention_importance import attention_received
from moejax.policies.base import AnyPolicy, Decision, Observation, moves_between_steps
from moejax.policies.by_layer import vmap_decide
from moejax.weights import linear as ops
from moejax.weights.linear import Index
from pallas_kernels import cache_plan
from pallas_kernels.cache_plan import Rule


class CachedExperts:
    """Runs the experts of one step's layers; carries the cache from one to the next."""

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
        """Starts one trace of a step.

        Args:
          spec: static.
          cache: the slots of all tiers.
          store: the host's rows of each.
          impl: the form that runs the experts of each.
          kernels: those that may run packed experts.
          num_prefilled: tokens of a step of prompts, padding too; None in a step of decode.
        """
        self.spec, self.config, self.cache = spec, config, cache
        self._store, self._is_prefill = tuple(store), num_prefilled is not None
        self._turn = -1  # of the layer that runs, see `TierStep`
        self._importance: jax.Array | None = None  # float32[N], of the layer that comes next
        self._seen: list[Observation] = []  # of layers that the policy has not been asked about
        self._replays: jax.Array | None = None  # which entry of a replay is this step's, once asked
        policy, moves = spec.policy, True
        if policy is not None:
            dims = spec.cache.num_layers, len(spec.pools), spec.cache.num_experts
            moves = moves_between_steps(policy, cache.state, dims)
        self._weighs = policy is not None and self._is_prefill and policy.needs.importance
        self._carries = self._weighs and config.delta_net is not None
        if self._carries:  # nobody has attended yet: all are alike
            self._importance = jnp.ones(num_prefilled, jnp.float32)
        tiers = tuple(
            TierStep(pool, config, rows, form, kernels, self._is_prefill)
            for pool, rows, form in zip(spec.pools, store, impl, strict=True)
        )
        placing = Placing(spec.pools, kernels.target, moves)
        self.step = CacheStep(spec, config, tiers, placing, kernels)

    def finish(self) -> ExpertCache:
        """The cache after the layers so far, with the policy's deferred updates."""
        self._apply_deferred_updates()
        return self.cache

    @property
    def num_turns(self) -> int:
        """See `models.run_experts.LoopedExperts`; a layer's banks are static."""
        return math.lcm(*(pool.cache.banks for pool in self.spec.pools))

    @property
    def state(self) -> tuple[ExpertCache, jax.Array | None]:
        """The carry: the cache, and token importance where layers do not all have it."""
        return self.finish(), self._importance if self._carries else None

    def resume(self, state: tuple[ExpertCache, jax.Array | None]) -> None:
        """See `models.run_experts.LoopedExperts`."""
        self.cache, self._importance = state
        self._turn, self._replays = -1, None

    def kept(self) -> None:
        """Nothing; see `models.run_experts.LoopedExperts`."""

    def keep(self, kept: None) -> None:
        """Takes nothing; see `models.run_experts.LoopedExperts`."""

    def watch(
        self,
        layer: Index,
        q: jax.Array,
        keys: jax.Array,
        positions: jax.Array,
        token_mask: jax.Array,
    ) -> None:
        """See `models.attention.AttentionObserver`; keeps the importance of the layer's tokens.

        Layers without attention have that of the last one before them that attends.
        """
        if not self._weighs:
            return
        c, needs = self.config, self._policy.needs
        if not self._carries and isinstance(layer, int) and layer not in c.moe_layers:
            return
        received = attention_received(
            q, keys, positions, token_mask, aggregation=needs.aggregation,
            sliding_window=c.sliding_window, scale=c.score_scale,
        )  # fmt: skip
        places = jnp.minimum(positions, received.shape[1] - 1)
        self._importance = jnp.take_along_axis(received, places, axis=1).reshape(-1)

    def __call__(
        self,
        layer: Index,
        x: jax.Array,
        routing: Routing,
        token_mask: jax.Array,
        ahead: Callable[[], Routing] | None,
    ) -> jax.Array:
        """See `models.run_experts.RunExperts`."""
        self._turn = layer if isinstance(layer, int) else self._turn + 1
        if self.spec.policy is None:
            decision = rule = None
        else:
            decision, rule = self._decide(layer, routing, token_mask, ahead)

        def wanted(tier: int, pools: Sequence[ExpertPool]) -> Wanted | None:
            if decision is not None:
                return self._candidates(layer, tier, decision.ahead, pools)
            return (lambda: self._predicted(layer, ahead(), token_mask)) if ahead else None

        out, self.cache = run_layer(
            self.step, self.cache, self._turn, layer, x, routing, token_mask, decision, rule, wanted
        )
        return out

    @property
    def _policy(self) -> AnyPolicy:
        assert self.spec.policy is not None
        return self.spec.policy

    def _decide(
        self, layer: Index, routing: Routing, token_mask: jax.Array,
        ahead: Callable[[], Routing] | None,
    ) -> tuple[Decision, Rule | None]:  # fmt: skip
        """Returns the policy's decision, and its tier rule where a kernel applies it."""
        resident = cache_plan.serving(self._resident(self.cache.pools, layer), self.spec.full)
        seen = self._observed(layer, routing, token_mask, ahead, resident)
        rule = None
        if self.step.has_fused_plan(routing.ids.size) and not self._is_prefill:
            rule = self._policy.decode_rule(self.cache.state)
        if rule is not None and self._defers_update(layer):
            self._seen.append(dataclasses.replace(seen, predicted=None))
            tiers = jnp.zeros(routing.ids.shape, jnp.int32)  # not looked at
            return Decision(routing.ids, tiers, routing.weights, tiers > 0), rule
        decision, state = self._policy.decide(self.cache.state, seen)
        self.cache = dataclasses.replace(self.cache, state=state)
        return decision, rule

    def _resident(self, pools: Sequence[ExpertPool], layer: Index) -> jax.Array:
        """Returns bool[T, E], whether an expert has a slot in each tier."""
        num_experts = self.config.num_experts
        rows = [pool.residency.table[layer, :num_experts] for pool in pools]
        return jnp.stack(rows) >= 0

    def _defers_update(self, layer: Index) -> bool:
        """Whether the policy is updated for all layers at the end of the step.

        That takes fewer launches than layer by layer. The rule says its tiers; what it would
        prefetch is not known before the step's end.
        """
        looks_ahead = any(tier.most_ahead for tier in self.step.tiers)
        may_wait = self._policy.layer_axes is not None and not self._policy.substitutes
        return isinstance(layer, int) and may_wait and not looks_ahead

    def _apply_deferred_updates(self) -> None:
        """Updates the policy for the layers whose update was deferred."""
        seen, self._seen, state = self._seen, [], self.cache.state
        if not seen:
            return
        if len(seen) == self.spec.cache.num_layers:
            together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *seen)
            _, state = vmap_decide(self._policy, self._policy.layer_axes, state, together)
        else:
            for of_layer in seen:
                _, state = self._policy.decide(state, of_layer)
        self.cache = dataclasses.replace(self.cache, state=state)

    def _observed(
        self,
        layer: Index,
        routing: Routing,
        token_mask: jax.Array,
        ahead: Callable[[], Routing] | None,
        resident: jax.Array,
    ) -> Observation:
        looks = self._policy.needs.predicted and ahead is not None
        pools = self.cache.pools
        observation = Observation(
            layer=jnp.asarray(layer, jnp.int32),
            probabilities=routing.probabilities,
            ids=routing.ids,
            weights=routing.weights,
            active=token_mask,
            resident=resident,
            importance=self._importance,
            predicted=prefetch_scores(ahead(), self.config) if looks and ahead else None,
            tables=pools[0].residency.table if len(pools) == 1 else None,
            is_prefill=self._is_prefill,
        )
        if not self._carries:
            self._importance = None
        return observation

    def heard(self, layer: Index, logits: jax.Array, *, is_ahead: bool) -> jax.Array:
        """See `models.run_experts.HearsRouters`; returns replayed logits if there are any."""
        store = self._store[0]
        replay = store.replay_predicted if is_ahead else store.replay
        if replay is None or self._is_prefill or logits.shape != replay.shape[2:]:
            return logits
        if self._replays is None:
            # A pool's clock counts its layers from 1 on, those of prompts too. Read once a step:
            # whoever reads it after a layer has it copied before the next one counts.
            step = (self.cache.pools[0].residency.clock - 1) // self.spec.cache.num_layers
            self._replays = step % len(replay)
        return in_place_of(replay[self._replays, layer], logits)

    def _predicted(self, layer: Index, predicted: Routing, token_mask: jax.Array) -> jax.Array:
        """Predicts the experts of the next layer's router (DyMoE eq. 6-8)."""
        store, tier = self._store[0], self.step.tiers[0]
        scores = jnp.where(token_mask[:, None], prefetch_scores(predicted, self.config), 0.0)
        said = jax.lax.top_k(jnp.sum(scores, axis=0), tier.most_ahead)[1]
        if store.replay_ahead is None or self._replays is None:
            return said
        row = store.replay_ahead[self._replays, tier.next_layer(layer), : tier.most_ahead]
        return in_place_of(row, said[: len(row)])

    def _candidates(
        self, layer: Index, tier: int, ahead: jax.Array | None, pools: Sequence[ExpertPool]
    ) -> Wanted | None:
        """Returns the prefetch candidates of a tier without a better copy, if any."""
        limit = self.step.tiers[tier].most_ahead
        if ahead is None or not limit:
            return None
        following = self.step.tiers[0].next_layer(layer)
        if isinstance(following, int) and following >= self.spec.cache.num_layers:
            return None

        def wanted() -> jax.Array:
            # Experts that the tier holds count too, so that a prefetch takes no slot of theirs.
            better = jnp.any(self._resident(pools, following)[:tier], axis=0)
            some, ids = jax.lax.top_k(((ahead == tier) & ~better).astype(jnp.int32), limit)
            return jnp.where(some > 0, ids, -1)

        return wanted
