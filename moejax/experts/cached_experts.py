"""Runs a step's experts from the slots of a cache, layer by layer.

Without a policy the router's choice is run as it is. Under one, it sees the routing and what is in
the slots of each tier, and decides which expert runs each pair, in which tier, with which weight.
The plan says which experts are in slots, and where the others go; one launch copies those from the
host rows; the pairs are multiplied by what lies in the slots (`moejax.experts.tier_step`), and the
products are combined once, in the order of the router's choice: residency is invisible in the
result. DyMoE's rules choose the tier of an expert that is needed in several
(`pallas_kernels.cache_plan.resolve_tiers`).

Axes: N tokens, P parts of a product; the rest as in `moejax.experts.state`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.devices import MESH_AXIS
from moejax.errors import MoejaxError
from moejax.experts.cache_planner import CachePlanner
from moejax.experts.state import CacheSpec, ExpertCache, HostJobs, HostRows, TierSlots
from moejax.experts.tier_step import (
    Base,
    TierStep,
    fetch_together,
    plane_slots_of,
    prefetch_planes,
)
from moejax.models.attention import Attended
from moejax.models.config import ModelConfig
from moejax.models.expert_products import (
    ExpertPairs,
    ExpertStacks,
    choose_grouped,
    combine,
    products_grouped,
)
from moejax.models.layer_index import LayerIndex
from moejax.models.moe import (
    ExpertImpl,
    Experts,
    MoeInputs,
    Routing,
    SparseMoe,
    prefetch_scores,
    record_experts,
)
from moejax.policies.base import (
    SKIPPED,
    AnyPolicy,
    Decision,
    Observation,
    moves_between_steps,
    vmap_decide,
)
from moejax.policies.dymoe import attention_received
from moejax.weights import linear as ops
from moejax.weights.handed_out import OwnExperts
from moejax.weights.linear import Index
from pallas_kernels import cache_plan, host_job
from pallas_kernels.cache_plan import Asked, Rule, Wishes


class _Partitions(NamedTuple):
    """Experts of all devices of a mesh that hands them out, as every one of them knows them."""

    resident: jax.Array  # bool[M, E], each device that has it has it in a slot
    device: jax.Array  # int32[M, E], the first device that has it


class _CacheCarry(NamedTuple):
    """Carry of `CachedExperts` from one sparse layer to the next.

    In a loop the tree never changes: policies are updated at the end of unrolled steps alone.
    """

    cache: ExpertCache
    importance: jax.Array | None  # float32[N], of tokens, where some layers have no attention
    deferred: tuple[Observation, ...]  # of the layers so far, if the last one updates the policy
    replayed: jax.Array | None  # int32[], which entry of a replay is this step's
    # int32[1, S] of each tier that refines the next one and is as it is all through the step, see
    # `Base.plane_slots`; None of others
    plane_slots: tuple[jax.Array | None, ...] = ()
    partitions: _Partitions | None = None  # at the step's start, for a policy; None of one device


class CachedExperts(Experts):
    """Runs the experts of one step's layers through the cache, which is the carry."""

    def __init__(
        self,
        spec: CacheSpec,
        config: ModelConfig,
        cache: ExpertCache,
        rows: Sequence[HostRows],
        impl: Sequence[ExpertImpl],
        kernels: ops.Kernels,
        *,
        num_prefilled: int | None = None,
        handed_out: OwnExperts | None = None,
    ):
        """Prepares one trace of a step.

        Args:
          cache: the slots of all tiers, before the first layer.
          impl: the form that runs the experts of each.
          num_prefilled: tokens of a step of prompts, padding too; None in a step of decode.
          handed_out: where the cache is of some experts alone, one device's.
        """
        self.spec, self.config, self._handed_out = spec, config, handed_out
        self.layers_per_iteration = math.lcm(*(pool.cache.banks for pool in spec.tiers))
        self._cache, self._rows, self._kernels = cache, tuple(rows), kernels
        self._num_prefilled, self._is_prefill = num_prefilled, num_prefilled is not None
        policy, moves = spec.policy, True
        if policy is not None:
            dims = spec.cache.num_layers, len(spec.tiers), spec.num_experts
            moves = moves_between_steps(policy, cache.state, dims)
        self.observes_attention = (
            policy is not None and self._is_prefill and policy.needs.importance
        )
        self._tiers = tuple(
            TierStep(tier, config, of_tier, form, kernels, self._is_prefill, number)
            for number, (tier, of_tier, form) in enumerate(zip(spec.tiers, rows, impl, strict=True))
        )
        self._planner = CachePlanner(spec.tiers, kernels.target, moves, self._is_prefill)
        # Of each tier the one in whose slots its experts are.
        self._slots_at = [i + tier.shares_slots for i, tier in enumerate(spec.tiers)]

    def init(self) -> _CacheCarry:
        """Makes the first carry, as `Experts.init`."""
        importance = replayed = None
        if self.observes_attention and self._num_prefilled is not None:
            importance = initial_importance(self.config, self._num_prefilled)
        if (replay := self._rows[0].replay) is not None and not self._is_prefill:
            # A pool's clock counts its layers from 1 on, those of prompts too. Read once a step:
            # whoever reads it after a layer has it copied before the next one counts.
            step = (self._cache.tiers[0].residency.clock - 1) // self.spec.cache.num_layers
            replayed = step % len(replay)
        partitions = None
        if self._handed_out is not None and self.spec.policy is not None:
            partitions = _partitions(self._handed_out.table, self._cache.tiers[0].residency.slot_of)
        return _CacheCarry(self._cache, importance, (), replayed, self._plane_slots(), partitions)

    def _plane_slots(self) -> tuple[jax.Array | None, ...]:
        found: list[jax.Array | None] = []
        for i, (step, slots) in enumerate(zip(self._tiers, self._cache.tiers, strict=True)):
            known = step.spec.refines and step.spec.is_still
            base = (self._tiers[i + 1], self._cache.tiers[i + 1]) if known else None
            found.append(None if base is None else plane_slots_of(step, slots, *base))
        return tuple(found)

    def _base(
        self, carry: _CacheCarry, number: int, tiers: Sequence[TierSlots], layer: LayerIndex,
        ids: jax.Array, shared: cache_plan.SharedBase | None,
    ) -> Base | None:  # fmt: skip
        """Returns what a tier refines in a layer, if it does."""
        if not self._tiers[number].spec.refines:
            return None
        step, slots = self._tiers[number + 1], tiers[number + 1]
        if shared is not None:
            return Base(None, shared.slot, None, step, shared.streamed)
        return step.base(slots, layer.turn, layer.mlp, ids, carry.plane_slots[number])

    def route(
        self, carry: _CacheCarry, moe: SparseMoe, layer: Index, x: jax.Array, *,
        is_ahead: bool = False,
    ) -> Routing:  # fmt: skip
        """Routes tokens, as `Experts.route`; routes by replayed logits if there are any."""
        rows = self._rows[0]
        replay = rows.replay_predicted if is_ahead else rows.replay
        if replay is None or not self._replays(carry, len(x)):
            return moe.route(x, layer)
        replayed = replay[carry.replayed, layer]
        return moe.route(x, layer, override=lambda logits: _replay_after(logits, replayed))

    def _replays(self, carry: _CacheCarry, num_tokens: int) -> bool:
        """Whether the store replays steps of so many tokens."""
        replay = self._rows[0].replay
        return replay is not None and carry.replayed is not None and num_tokens == replay.shape[2]

    def __call__(
        self, carry: _CacheCarry, inputs: MoeInputs
    ) -> tuple[jax.Array, _CacheCarry, None]:
        """Runs a layer's experts, as `Experts`."""
        layer, next_routing, decision, rule = inputs.layer, inputs.next_routing, None, None
        if self.spec.policy is not None:
            importance = carry.importance
            if self.observes_attention and inputs.attended is not None:
                aggregation = self._policy.needs.aggregation
                importance = token_importance(inputs.attended, self.config, aggregation)
            if carry.importance is not None:
                carry = carry._replace(importance=importance)
            decision, rule, carry = self._decide(carry, inputs, importance)

        def wanted(tier: int, tiers: Sequence[TierSlots]) -> jax.Array | None:
            if next_routing is None or not self._tiers[tier].most_ahead:
                return None
            if decision is not None:
                return self._candidates(layer, tier, decision.ahead, tiers)
            return self._predicted(carry, layer, next_routing(), inputs.token_mask)

        out, cache = self._run(carry, inputs, decision, rule, wanted)
        carry = carry._replace(cache=cache)
        return out, carry if layer.next_moe else self._with_deferred_updates(carry), None

    def _is_grouped(self, num_pairs: int) -> bool:
        """Whether one launch multiplies the pairs of all tiers."""
        has_form = all(tier.impl == "grouped_kernel" for tier in self._tiers)
        return has_form and not any(self._which_have_waves(num_pairs))

    def _which_have_waves(self, num_pairs: int) -> list[bool]:
        """Whether a tier's plan of so many pairs has waves after the first fetch, by tier."""
        return [
            form.later_waves > 0 and not (tier.spec.emulated or tier.spec.between_steps)
            for tier, form in zip(self._tiers, self._planner.forms(num_pairs), strict=True)
        ]

    def _has_fused_plan(self, num_pairs: int) -> bool:
        """Whether one launch plans slots for so many pairs."""
        return self._is_grouped(num_pairs) and self._planner.refusal(num_pairs) is None

    def _run(
        self,
        carry: _CacheCarry,
        inputs: MoeInputs,
        decision: Decision | None,
        rule: Rule | None,
        wanted: Callable[[int, Sequence[TierSlots]], jax.Array | None],
    ) -> tuple[jax.Array, ExpertCache]:
        """Plans, fetches and multiplies; [N, D] and the donated cache after it.

        Args:
          decision: a policy's; None: the router's choice is run as it is, and no gate mass counted.
          rule: gives the tiers in place of the decision's; None: the decision's are used.
          wanted: of a tier the experts of the next layer to prefetch, by what is in all slots then.
        """
        layer, x, routing, token_mask, *_ = inputs
        cache, gates = carry.cache, routing.weights.astype(jnp.float32)
        if self._handed_out is not None:
            decision, asked = self._own_part(layer.mlp, routing, token_mask, decision)
            ids, weights = decision.ids, decision.weights
        elif decision is None:
            ids, weights, asked = routing.ids, routing.weights, Asked(routing.ids, gates)
        else:
            ids, weights = decision.ids, decision.weights
            is_routed = ids is routing.ids
            if rule is not None and is_routed:
                weights = routing.weights
            wishes = rule or Wishes(decision.tier, decision.at_least)
            asked = Asked(ids, gates, wishes, None if is_routed else routing.ids)
        jobs, sent = self._jobs(x), ()
        if jobs is not None:
            asked = asked._replace(host=jobs.split)
        steps, at = self._tiers, (layer.turn, layer.mlp)
        found, plans, gate, tiers = self._planner.plan_layer(
            cache.tiers, [rows.row_of for rows in self._rows], cache.gate, layer.mlp, asked,
            token_mask,
        )  # fmt: skip
        biases = None if inputs.biases is None else inputs.biases.of_pairs(layer.mlp, ids)
        served = [found.tier == i for i in range(len(tiers))] if decision is not None else []
        if jobs is not None:
            sent = host_job.post(x, found.hosted, gates, tiers[0].jobs, jobs.address)
        tiers = fetch_together(steps, tiers, *at, [plan.admitted for plan in plans], sent)
        if decision is None:
            served = [jnp.broadcast_to(token_mask[:, None], ids.shape)]
        uses = [*served]
        if steps[0].spec.shares_slots:  # both read the base plane
            uses[1] |= served[0]
        for i, step in enumerate(steps):
            tiers[i] = step.note_uses(tiers[i], layer.mlp, ids, uses[i])
        if decision is not None and self._is_grouped(ids.size):
            slot, stacks = found.slot, []
            for i, step in enumerate(steps):
                tiers = self._prefetch(i, tiers, layer, token_mask, wanted)
                mine = found.tier == i
                base = self._base(carry, i, tiers, layer, ids, found.base)
                pairs, experts = step.pairs_and_stacks(
                    tiers[self._slots_at[i]], layer, ids, mine, plans[i], base
                )
                stacks.append(experts)
                if step.spec.emulated or base is not None:
                    slot = jnp.where(found.tier == i, pairs.expert, slot)
            pairs = ExpertPairs(slot, found.tier != SKIPPED, found.tier, biases)
            total = self._products_of_tiers(x, pairs, stacks)
        else:
            products, waves = [], self._which_have_waves(ids.size)
            for i, step in enumerate(steps):
                if not waves[i]:
                    tiers = self._prefetch(i, tiers, layer, token_mask, wanted)
                mine, where = served[0] if decision is None else found.tier == i, self._slots_at[i]
                own, tiers[where] = step.products(
                    tiers[where], layer, x, ids, mine, plans[i],
                    self._base(carry, i, tiers, layer, ids, found.base), biases,
                    has_waves=waves[i],
                )  # fmt: skip
                products.append(own)
                # Comes last: anything that waits for slots of a wave would be copied.
                if waves[i]:
                    tiers = self._prefetch(i, tiers, layer, token_mask, wanted)
            total = _selected(products, found.tier)
        alone = decision is None and jobs is None
        runs = served[0] if alone else found.tier != SKIPPED
        out_dtype = inputs.out_dtype or x.dtype
        pairs = ExpertPairs(ids, runs, None, biases)
        if jobs is None:
            out = combine(total, pairs, weights, out_dtype)
        else:
            out = combine(total, pairs, weights, jnp.dtype("float32"))
            out, state = host_job.add_reply(out, found.hosted, sent, jobs.address, out_dtype)
            tiers[0] = dataclasses.replace(tiers[0], jobs=state)
        return out, dataclasses.replace(cache, tiers=tuple(tiers), gate=gate)

    def _own_part(
        self, layer: Index, routing: Routing, token_mask: jax.Array, decision: Decision | None
    ) -> tuple[Decision, Asked]:
        """Returns the pairs that run on this device, of experts by its rows; others are skipped.

        Their gate mass is not asked for here: each pair counts on one device.
        """
        assert self._handed_out is not None
        if decision is None:
            tier = jnp.broadcast_to(jnp.where(token_mask, 0, SKIPPED)[:, None], routing.ids.shape)
            none = jnp.zeros(tier.shape, bool)
            decision = Decision(routing.ids, tier, routing.weights, none)
        rows, mine = self._handed_out.of_pairs(layer, decision.ids)
        gates = jnp.where(mine, routing.weights.astype(jnp.float32), 0.0)
        routed = jnp.where(decision.ids == routing.ids, rows, -1)
        own = decision._replace(ids=rows, tier=jnp.where(mine, decision.tier, SKIPPED))
        return own, Asked(rows, gates, Wishes(own.tier, own.at_least), routed)

    def _jobs(self, x: jax.Array) -> HostJobs | None:
        """Jobs of a step of one token for the host's cores, if there are any."""
        return None if self._is_prefill or len(x) != 1 else self._rows[0].jobs

    def _prefetch(
        self, number: int, tiers: Sequence[TierSlots], layer: LayerIndex, mask: jax.Array,
        wanted: Callable[[int, Sequence[TierSlots]], jax.Array | None],
    ) -> list[TierSlots]:  # fmt: skip
        """Prefetches the next layer's experts to a tier; to shared slots in the second's turn."""
        found, step = list(tiers), self._tiers[number]
        if step.spec.shares_slots:
            return found
        if number and self._tiers[number - 1].spec.shares_slots:
            planes = wanted(0, tiers), wanted(1, tiers)
            return prefetch_planes(self._planner, self._tiers, found, layer, mask, planes)
        if (ids := wanted(number, tiers)) is not None:
            found[number] = step.prefetch(found[number], layer, mask, ids)
        return found

    def _products_of_tiers(
        self, x: jax.Array, pairs: ExpertPairs, tiers: Sequence[ExpertStacks]
    ) -> jax.Array:
        """[P, N, A, D], one launch of gates and ups and one of downs for the pairs of all tiers."""
        stacks = [(experts.gate_up, experts.down) for experts in tiers]
        chosen = choose_grouped(len(x), self.config, x.dtype, stacks, self._kernels)
        if chosen.implementation == ops.DEQUANTIZED:
            raise MoejaxError(f"the grouped kernel refuses the tiers: {chosen.describe()}")
        for of, experts in zip(self._tiers, stacks, strict=True):
            record_experts(of.number, of.impl, experts, chosen)
        implementation, gating = chosen.implementation, self.config.gating
        return products_grouped(x, pairs, tiers, implementation, gating)

    @property
    def _policy(self) -> AnyPolicy:
        assert self.spec.policy is not None
        return self.spec.policy

    def _decide(
        self, carry: _CacheCarry, inputs: MoeInputs, importance: jax.Array | None
    ) -> tuple[Decision, Rule | None, _CacheCarry]:
        """Returns the policy's decision, and its tier rule where a kernel applies it."""
        layer, _, routing, token_mask, next_routing, *_ = inputs
        cache, policy, pools = carry.cache, self._policy, carry.cache.tiers
        predicted = None
        if policy.needs.predicted and next_routing is not None:
            predicted = prefetch_scores(next_routing(), self.config)
        resident, partition = self._known(carry, layer.mlp)
        seen = Observation(
            layer=jnp.asarray(layer.mlp, jnp.int32),
            probabilities=routing.probabilities,
            ids=routing.ids,
            weights=routing.weights,
            active=token_mask,
            resident=resident,
            importance=importance,
            predicted=predicted,
            tables=pools[0].residency.table if len(pools) == 1 and partition is None else None,
            is_prefill=self._is_prefill,
            is_complete=all(tier.is_complete for tier in self.spec.tiers),
            partition=partition,
        )
        rule = None
        is_fused = self._has_fused_plan(routing.ids.size) and partition is None
        if is_fused and not self._is_prefill:
            rule = policy.decode_rule(cache.state)
        if rule is not None and self._defers_update(layer.mlp):
            deferred = (*carry.deferred, dataclasses.replace(seen, predicted=None))
            tiers = jnp.zeros(routing.ids.shape, jnp.int32)  # not looked at
            decision = Decision(routing.ids, tiers, routing.weights, tiers > 0)
            return decision, rule, carry._replace(deferred=deferred)
        decision, state = policy.decide(cache.state, seen)
        return decision, rule, carry._replace(cache=dataclasses.replace(cache, state=state))

    def _known(self, carry: _CacheCarry, layer: Index) -> tuple[jax.Array, jax.Array | None]:
        """Residents bool[T, E] of a layer and partitions of its experts, for a policy."""
        pools, partitions = carry.cache.tiers, carry.partitions
        if partitions is None:
            return self._servable(pools, layer), None
        if self._tiers[0].most_ahead:  # experts came since the step's start
            assert self._handed_out is not None
            one = jnp.asarray(layer, jnp.int32)[None]
            slot_of = pools[0].residency.slot_of[one]
            now = _partitions(self._handed_out.table[:, one], slot_of)
            return now.resident, partitions.device[layer]
        return partitions.resident[layer][None], partitions.device[layer]

    def _resident(self, pools: Sequence[TierSlots], layer: Index) -> jax.Array:
        """Returns bool[T, E], whether an expert has a slot in each tier."""
        return self.spec.resident([pool.residency.table[layer] for pool in pools])

    def _servable(self, pools: Sequence[TierSlots], layer: Index) -> jax.Array:
        """Returns bool[T, E], whether an expert has a copy that serves in each tier."""
        resident = self._resident(pools, layer)
        if self.spec.tiers[0].shares_slots:  # both tiers read the base plane
            return resident
        return cache_plan.servable(resident, self.spec.full)

    def _defers_update(self, layer: Index) -> bool:
        """Whether the policy is updated for all layers after the last one.

        That takes fewer launches than layer by layer. The rule says its tiers; what it would
        prefetch is not known before the step's end.
        """
        looks_ahead = any(tier.most_ahead for tier in self._tiers)
        may_wait = self._policy.layer_axes is not None and not self._policy.substitutes
        return isinstance(layer, int) and may_wait and not looks_ahead

    def _with_deferred_updates(self, carry: _CacheCarry) -> _CacheCarry:
        """Updates the policy for the layers whose update was deferred, all at once."""
        if not carry.deferred:
            return carry
        cache, policy = carry.cache, self._policy
        together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *carry.deferred)
        _, state = vmap_decide(policy, cache.state, together)
        return carry._replace(cache=dataclasses.replace(cache, state=state), deferred=())

    def _by_row(self, layer: Index, values: jax.Array) -> jax.Array:
        """Values of a layer's experts [E], or of a device's own in the order of its rows."""
        if self._handed_out is None:
            return values
        return self._handed_out.by_row(layer, values, self.spec.cache.num_experts)

    def _predicted(
        self, carry: _CacheCarry, layer: LayerIndex, predicted: Routing, token_mask: jax.Array
    ) -> jax.Array:
        """Predicts the experts of the next layer's router (DyMoE eq. 6-8)."""
        rows, most_ahead = self._rows[0], self._tiers[0].most_ahead
        assert layer.next_moe is not None
        scores = jnp.where(token_mask[:, None], prefetch_scores(predicted, self.config), 0.0)
        mass = self._by_row(layer.next_moe.mlp, jnp.sum(scores, axis=0))
        ids = jax.lax.top_k(mass, most_ahead)[1]
        if rows.replay_ahead is None or not self._replays(carry, len(token_mask)):
            return ids
        row = rows.replay_ahead[carry.replayed, layer.next_moe.mlp, :most_ahead]
        if self._handed_out is not None:
            row = self._handed_out.rows(layer.next_moe.mlp, row)
        return _replay_after(ids[: len(row)], row)

    def _candidates(
        self, layer: LayerIndex, tier: int, ahead: jax.Array | None, pools: Sequence[TierSlots]
    ) -> jax.Array | None:
        """Returns the prefetch candidates of a tier without a better copy, if any."""
        if ahead is None or layer.next_moe is None:
            return None
        # Experts that the tier holds count too, so that a prefetch takes no slot of theirs.
        asked = self._by_row(layer.next_moe.mlp, ahead == tier)
        if not self.spec.tiers[0].shares_slots:
            asked &= ~jnp.any(self._resident(pools, layer.next_moe.mlp)[:tier], axis=0)
        some, ids = jax.lax.top_k(asked.astype(jnp.int32), self._tiers[tier].most_ahead)
        return jnp.where(some > 0, ids, -1)


def _partitions(table: jax.Array, slot_of: jax.Array) -> _Partitions:
    """Joins what all devices have of some layers, by one sum.

    Args:
      table: int32[K, M, E], of `OwnExperts`.
      slot_of: int32[M, R], local slots of a device's rows.
    """
    row = table[0]
    held = jnp.take_along_axis(slot_of, jnp.maximum(row, 0), axis=1) >= 0
    is_first = (row >= 0) & (table[1] == 0) if len(table) > 1 else row >= 0
    here = jnp.where(is_first, jax.lax.axis_index(MESH_AXIS), 0)
    count, device = jax.lax.psum(
        jnp.stack([(held & (row >= 0)).astype(jnp.int32), here]), MESH_AXIS
    )
    return _Partitions(count == (table[2] if len(table) > 1 else 1), device)


def token_importance(
    attended: Attended, config: ModelConfig, aggregation: str = "mean"
) -> jax.Array:
    """Attention that each token of a chunk receives of the chunk (DyMoE eq. 1), float32[N]."""
    received = attention_received(
        attended.q, attended.keys, attended.positions, attended.token_mask,
        aggregation=aggregation, sliding_window=attended.window, scale=config.score_scale,
        sinks=attended.sinks,
    )  # fmt: skip
    if attended.axis:
        received = jax.lax.pmean(received, attended.axis)
    places = jnp.minimum(attended.positions, received.shape[1] - 1)
    return jnp.take_along_axis(received, places, axis=1).reshape(-1)


def initial_importance(config: ModelConfig, num_tokens: int) -> jax.Array | None:
    """Importance carried into the first layer, all alike; None where every layer attends."""
    return None if config.delta_net is None else jnp.ones(num_tokens, jnp.float32)


def _replay_after(own: jax.Array, replayed: jax.Array) -> jax.Array:
    """Returns the replayed values, but not before the router's own exist.

    If they were known from the start, XLA would fetch for a layer before an earlier one has read
    the same slots, copy the slots for that, and leave the routers out. XLA cannot know that no
    value of a router's is NaN and no id negative.
    """
    never = jnp.isnan(own) if jnp.issubdtype(own.dtype, jnp.floating) else own < 0
    return jnp.where(never, own, replayed)


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
