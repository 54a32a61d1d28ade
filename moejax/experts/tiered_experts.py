"""What runs the experts of a step's layers where they are stored in several tiers under a policy.

For each sparse layer: the policy sees the routing and what is in the slots of each tier's pool, and
decides which expert runs each pair, in which tier, with which weight. Each pool then finds and
fetches what its own pairs need, one grouped launch multiplies the pairs of all tiers where that is
their form (else each pool runs its own), and the products are combined once, in the order of the
router's choice. Where an expert is that is asked for in several tiers, DyMoE's rules say
(`pallas_kernels.cache_plan.serve`): a miss comes in the tier that was asked for, and its copies in
other pools leave, but for those of a pool that holds every expert.

Axes: N tokens, A experts a token, M sparse layers, E experts, T tiers of falling fidelity.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from moejax.experts.cache_plan import Placed, Placing
from moejax.experts.expert_pool import ExpertStore, in_place_of
from moejax.experts.fetch import from_host_together
from moejax.experts.pooled import PooledExperts
from moejax.experts.tiered import TieredPool, TieredSpec
from moejax.models.config import ModelConfig
from moejax.models.expert_products import Experts, Pairs, combine, products_of_tiers
from moejax.models.grouped_experts import choose_for_tiers
from moejax.models.moe import ExpertImpl
from moejax.models.routing import Routing, prefetch_scores
from moejax.policies.attention_importance import attention_received
from moejax.policies.base import (
    SKIPPED,
    Decision,
    Observation,
    moves_between_steps,
)
from moejax.policies.by_layer import vmap_decide
from moejax.weights import linear as ops
from moejax.weights.linear import Index
from pallas_kernels import cache_plan
from pallas_kernels.cache_plan import Asked, LayerPlan, Rule, Wishes


class TieredExperts:
    """Runs the experts of one step's layers; `finish` is the state after them."""

    def __init__(
        self,
        spec: TieredSpec,
        config: ModelConfig,
        pool: TieredPool,
        store: Sequence[ExpertStore],
        impl: Sequence[ExpertImpl],
        kernels: ops.Kernels,
        *,
        num_prefilled: int | None = None,
    ):
        """For one trace.

        Args:
          spec: static.
          config: of the model.
          pool: the slots of all tiers.
          store: the host's rows of each.
          impl: the form that runs the experts of each.
          kernels: which may serve packed experts.
          num_prefilled: tokens of a step of prompts, padding too; None in a step of decode.
        """
        self.spec, self.config = spec, config
        self._store, self._impl, self._kernels = tuple(store), tuple(impl), kernels
        self._is_prefill = num_prefilled is not None
        # float32[N], of the layer that comes next.
        self._importance: jax.Array | None = None
        weighs = num_prefilled is not None and spec.policy.needs.importance
        self._carries = weighs and config.delta_net is not None
        if self._carries:  # nobody has attended yet: all are alike
            self._importance = jnp.ones(num_prefilled, jnp.float32)
        of_tiers = zip(spec.pools, pool.pools, store, impl, strict=True)
        self._runs = [
            PooledExperts(s, config, p, rows, v, kernels, self._is_prefill)
            for s, p, rows, v in of_tiers
        ]
        self._policy_state, self._gate = pool.state, pool.gate
        self._seen: list[Observation] = []  # of layers that the policy has not been asked about
        dims = spec.cache.num_layers, len(spec.pools), spec.cache.num_experts
        moves = moves_between_steps(spec.policy, pool.state, dims)
        self._placing = Placing(spec.pools, kernels.target, moves)
        self._replays: jax.Array | None = None  # which entry of a replay is this step's, once asked

    def finish(self) -> TieredPool:
        """After the layers so far; of those that the policy was only shown it is told here."""
        self._tell()
        return TieredPool(tuple(run.pool for run in self._runs), self._policy_state, self._gate)

    @property
    def num_turns(self) -> int:
        """See `models.run_experts.LoopedExperts`; a layer's banks are static."""
        return math.lcm(*(run.num_turns for run in self._runs))

    @property
    def state(self) -> tuple[TieredPool, jax.Array | None]:
        """The pool; and the importance of tokens, where layers may have none of their own."""
        return self.finish(), self._importance if self._carries else None

    def resume(self, state: tuple[TieredPool, jax.Array | None]) -> None:
        """Likewise."""
        pools, self._importance = state
        for run, pool in zip(self._runs, pools.pools, strict=True):
            run.resume(pool)
        self._policy_state, self._gate = pools.state, pools.gate
        self._replays = None

    def kept(self) -> None:
        """Likewise: nothing."""

    def keep(self, kept: None) -> None:
        """Likewise."""

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
        if not (self._is_prefill and self.spec.policy.needs.importance):
            return
        c = self.config
        if not self._carries and isinstance(layer, int) and layer not in c.moe_layers:
            return
        received = attention_received(
            q, keys, positions, token_mask, aggregation=self.spec.policy.needs.aggregation,
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
        resident = cache_plan.serving(self._copies(layer), self.spec.full)
        seen = self._observed(layer, routing, token_mask, ahead, resident)
        rule = None
        if self.is_placed_at_once(routing.ids.size) and not self._is_prefill:
            rule = self.spec.policy.decode_rule(self._policy_state)
        if rule is not None and self._asks_later(layer):
            self._seen.append(dataclasses.replace(seen, predicted=None))
            asks = jnp.zeros(routing.ids.shape, jnp.int32)  # not looked at
            decision = Decision(routing.ids, asks, routing.weights, asks > 0)
        else:
            decision, self._policy_state = self.spec.policy.decide(self._policy_state, seen)
        return self._run(layer, x, routing, token_mask, decision, rule)

    def _copies(self, layer: Index) -> jax.Array:
        """bool[T, E], where experts are."""
        num_experts = self.config.num_experts
        rows = [run.pool.residency.table[layer, :num_experts] for run in self._runs]
        return jnp.stack(rows) >= 0

    def _asks_later(self, layer: Index) -> bool:
        """Whether a policy with a rule is told of all layers at the end of the step.

        That takes fewer launches than layer by layer. The rule says its tiers; what it would bring
        ahead is not known before the step's end.
        """
        looks_ahead = any(run.most_ahead for run in self._runs)
        policy = self.spec.policy
        may_wait = policy.layer_axes is not None and not policy.substitutes
        return isinstance(layer, int) and may_wait and not looks_ahead

    def _tell(self) -> None:
        """Asks the policy about the layers that it has only been shown."""
        seen, self._seen = self._seen, []
        if len(seen) == self.spec.cache.num_layers:
            policy, axes = self.spec.policy, self.spec.policy.layer_axes
            together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *seen)
            self._policy_state = vmap_decide(policy, axes, self._policy_state, together)[1]
            return
        for of_layer in seen:
            _, self._policy_state = self.spec.policy.decide(self._policy_state, of_layer)

    def _observed(
        self,
        layer: Index,
        routing: Routing,
        token_mask: jax.Array,
        ahead: Callable[[], Routing] | None,
        resident: jax.Array,
    ) -> Observation:
        looks = self.spec.policy.needs.predicted and ahead is not None
        observation = Observation(
            layer=jnp.asarray(layer, jnp.int32),
            probabilities=routing.probabilities,
            ids=routing.ids,
            weights=routing.weights,
            active=token_mask,
            resident=resident,
            importance=self._importance,
            predicted=prefetch_scores(ahead(), self.config) if looks and ahead else None,
            tables=self._runs[0].pool.residency.table if len(self._runs) == 1 else None,
            is_prefill=self._is_prefill,
        )
        if not self._carries:
            self._importance = None
        return observation

    def heard(self, layer: Index, logits: jax.Array, *, is_ahead: bool) -> jax.Array:
        """See `models.run_experts.HearsRouters`; by what the first tier's store replays."""
        store = self._store[0]
        replay = store.replay_predicted if is_ahead else store.replay
        if replay is None or self._is_prefill or logits.shape != replay.shape[2:]:
            return logits
        if self._replays is None:
            # A pool's clock counts its layers from 1 on, those of prompts too. Read once a step:
            # whoever reads it after a layer has it copied before the next one counts.
            step = (self._runs[0].pool.residency.clock - 1) // self.spec.cache.num_layers
            self._replays = step % len(replay)
        return in_place_of(replay[self._replays, layer], logits)

    def _following(self, layer: Index) -> Index:
        """The next layer; on the device the last one is its own, and asks for nothing."""
        return layer + 1 if isinstance(layer, int) else self._runs[0].following(layer)

    def _in_one(self, num_pairs: int) -> bool:
        """Whether one launch multiplies the pairs of all tiers."""
        has_form = all(impl == "grouped_kernel" for impl in self._impl)
        return has_form and not any(run.num_waves(num_pairs) for run in self._runs)

    def _of_tiers(
        self, x: jax.Array, tier: jax.Array, slot: jax.Array, tiers: Sequence[Experts]
    ) -> jax.Array:
        stacks = [(experts.gate_up, experts.down) for experts in tiers]
        chosen = choose_for_tiers(len(x), self.config, x.dtype, stacks, self._kernels)
        if chosen.implementation == ops.DEQUANTIZED:
            raise ValueError(f"the grouped kernel refuses the tiers: {chosen.describe()}")
        return products_of_tiers(x, tier, slot, tiers, chosen.implementation)

    def is_placed_at_once(self, num_pairs: int) -> bool:
        """Whether one launch finds a place for so many pairs."""
        return self._in_one(num_pairs) and self._placing.refusal(num_pairs) is None

    def _run(
        self,
        layer: Index,
        x: jax.Array,
        routing: Routing,
        token_mask: jax.Array,
        decision: Decision,
        rule: Rule | None,
    ) -> jax.Array:
        """Plans, fetches and multiplies as decided; [N, D].

        `rule` says the decision's tiers, which are then not looked at; None: they are.
        """
        weights = decision.weights
        if rule is not None and decision.ids is routing.ids:
            weights = routing.weights
        asked = Asked(
            decision.ids,
            routing.weights.astype(jnp.float32),
            rule or Wishes(decision.tier, decision.at_least),
            None if decision.ids is routing.ids else routing.ids,
        )
        rows_of, before = [store.row_of for store in self._store], [run.slots for run in self._runs]
        found, plans, gate, after = self._placing.plan(
            before, rows_of, self._gate, layer, asked, token_mask
        )
        assert gate is not None
        self._gate = gate
        for i, (run, slots) in enumerate(zip(self._runs, after, strict=True)):
            run.set_slots(slots)
            run.note_uses(layer, decision.ids, found.tier == i)
        self._bring(layer, plans)
        run_all = self._grouped if self._in_one(decision.ids.size) else self._one_by_one
        products = run_all(layer, x, token_mask, decision, found, plans)
        pairs = Pairs(decision.ids, found.tier != SKIPPED)
        return combine(products, pairs, weights, x.dtype)

    def _grouped(
        self, layer: Index, x: jax.Array, token_mask: jax.Array, decision: Decision,
        found: LayerPlan, plans: Sequence[Placed],
    ) -> jax.Array:  # fmt: skip
        """[P, N, A, D], one launch of gates and ups and one of downs for the pairs of all tiers."""
        slot, tiers = found.slot, []
        for i, (run, plan) in enumerate(zip(self._runs, plans, strict=True)):
            run.look_ahead(layer, token_mask, self._ahead(layer, i, decision.ahead))
            pairs, experts = run.placed(layer, decision.ids, found.tier == i, plan)
            tiers.append(experts)
            if run.spec.emulated:
                slot = jnp.where(found.tier == i, pairs.expert, slot)
        return self._of_tiers(x, found.tier, slot, tiers)

    def _one_by_one(
        self, layer: Index, x: jax.Array, token_mask: jax.Array, decision: Decision,
        found: LayerPlan, plans: Sequence[Placed],
    ) -> jax.Array:  # fmt: skip
        """Runs each tier by itself."""
        products = []
        for i, (run, plan) in enumerate(zip(self._runs, plans, strict=True)):
            ahead = self._ahead(layer, i, decision.ahead)
            if not run.num_waves(decision.ids.size):
                run.look_ahead(layer, token_mask, ahead)
            mine = found.tier == i
            products.append(run.products(layer, x, decision.ids, mine, plan, token_mask, ahead))
        return _selected(products, found.tier)

    def _bring(self, layer: Index, plans: Sequence[Placed]) -> None:
        """Copies what a layer needs into the slots of each tier, by one launch where it can be."""
        for run in self._runs:
            run.begin(layer)
        fetchings, banks = zip(*((run.fetching, run.bank()) for run in self._runs), strict=True)
        jobs = [plan.admitted for plan in plans]
        came = from_host_together(fetchings, banks, jobs)
        for run, slots, of_run in zip(self._runs, came, jobs, strict=True):
            run.came(layer, slots, of_run)

    def _ahead(
        self, layer: Index, tier: int, ahead: jax.Array | None
    ) -> Callable[[], jax.Array] | None:
        """What a pool should hold for the next layer, of which no better copy is there."""
        limit = self._runs[tier].most_ahead
        if ahead is None or not limit:
            return None
        following = self._following(layer)
        if isinstance(following, int) and following >= self.spec.cache.num_layers:
            return None

        def wanted() -> jax.Array:
            # Those that it holds already too: what comes takes no slot of theirs.
            better = jnp.any(self._copies(following)[:tier], axis=0)
            some, ids = jax.lax.top_k(((ahead == tier) & ~better).astype(jnp.int32), limit)
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
