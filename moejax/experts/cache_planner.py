"""The plan of slots inside the compiled step: which experts are where, and which are fetched.

Axes: N tokens, A experts a token; the rest as in `moejax.experts.state`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.experts.state import TierSlots, TierSpec
from moejax.weights.linear import Index
from pallas_kernels import cache_plan
from pallas_kernels.cache_plan import Asked, Fetch, LayerPlan, Tables, TierOperands, TierShape
from pallas_kernels.target import Target


class SlotPlan(NamedTuple):
    """One tier's part of a plan, over all pairs; other tiers' pairs have no wave."""

    ids: jax.Array  # int32[N, A], experts
    slot: jax.Array  # int32[N, A]
    wave: jax.Array  # int32[N, A]; -1 for pairs that do not run in this tier
    admitted: Fetch  # [J]
    streamed: Fetch  # [W, B]


@dataclasses.dataclass(frozen=True)
class CachePlanner:
    """Plans slots of the tiers, from static facts."""

    tiers: tuple[TierSpec, ...]
    target: Target | None  # device whose kernels may plan; None: no kernels
    moves: bool = True  # whether transfers move experts between steps
    is_prefill: bool = False  # whether it plans a chunk of prompts

    def refusal(self, num_asked: int) -> str | None:
        """Returns why one launch cannot plan so many pairs, or None."""
        if self.target is None:
            return "no kernels are wanted"
        if any(tier.read is not None for tier in self.tiers):
            return "experts may be on the disk alone, and the step asks the host for them by id"
        if any(tier.emulated for tier in self.tiers):
            return "a tier has no slots"
        apart = len(self.tiers) > 1 and not self.tiers[0].shares_slots
        if apart and any(form.later_waves for form in self.forms(num_asked)):
            return "of several tiers one streams experts in waves"
        num_experts = self.tiers[0].cache.num_experts
        sizes = num_experts, num_asked, len(self.tiers)
        return cache_plan.PLAN.refusal("triton", *sizes, target=self.target)

    def forms(self, num_pairs: int) -> tuple[TierShape, ...]:
        """Returns each tier's static form, for a layer of so many pairs."""
        return tuple(
            TierShape(
                slots=tier.cache.slots,
                banks=tier.cache.banks,
                longer_layers=tier.cache.longer_layers,
                transient=tier.cache.transient,
                waves=self._num_waves(i, num_pairs),
                beside=self._runs_beside(tier, num_pairs),
                is_full=tier.cache.slots == tier.cache.num_items,
                is_complete=tier.is_complete,
                static_in_step=i == 0
                and tier.between_steps
                and tier.cache.slots > 0
                and not tier.is_complete,
                refines=tier.refines > 0,
                shares_slots=tier.shares_slots,
                planes=tier.cache.planes,
                may_be_promoted_elsewhere=self.moves
                or any(better.prefetch for better in self.tiers[:i]),
            )
            for i, tier in enumerate(self.tiers)
        )

    def _num_waves(self, index: int, num_pairs: int) -> int:
        """Number of waves through a tier's transient slots for so many pairs."""
        tier, cache = self.tiers[index], self.tiers[index].cache
        if cache.slots and (tier.is_complete or tier.between_steps):
            return 0
        most = min(num_pairs, cache.num_experts)
        if cache.planes == 1:
            return cache_plan.num_waves(most, cache.num_experts, cache.slots, cache.transient)
        # A wave of the tier that refines the other one has both planes of its experts.
        experts = cache.transient // (2 if tier.shares_slots else 1)
        return 0 if 2 * most <= cache.slots else -(-most // experts)

    def _runs_beside(self, tier: TierSpec, num_pairs: int) -> bool:
        """Whether waves take turns between the transient slots of a bank and those apart.

        Of several tiers one does so only where it must: a launch cannot plan for them.
        """
        cache = tier.cache
        if not cache.apart or num_pairs <= cache.slots:
            return False
        passing = min(num_pairs, cache.num_experts, cache.num_experts - cache.slots)
        is_more = passing > cache.transient - cache.apart
        if is_more and not self.is_prefill:
            raise ValueError(f"a step of {num_pairs} pairs needs transient slots that lie apart")
        return self.is_prefill and (is_more or len(self.tiers) == 1)

    def plan_layer(
        self,
        tiers: Sequence[TierSlots],  # donated
        rows_of: Sequence[jax.Array],  # int32[M, E] of each tier, rows of the host store; -1: none
        gate: jax.Array | None,  # as in `ExpertCache`, donated; None: it is not counted
        layer: Index,
        asked: Asked,
        token_mask: jax.Array,
    ) -> tuple[LayerPlan, list[SlotPlan], jax.Array | None, list[TierSlots]]:
        """Plans where a layer's pairs run, and which experts are fetched.

        Returns:
          The plan, each tier's part of it, and `gate` and `tiers` after it.
        """
        operands = tuple(
            TierOperands(_tables(t), rows) for t, rows in zip(tiers, rows_of, strict=True)
        )
        forms, num_experts = self.forms(asked.ids.size), self.tiers[0].cache.num_experts
        # Without a policy an expert counts once, however many pairs of a chunk run it.
        is_routed = asked.by is None and asked.host is None and len(forms) == 1
        by_expert = is_routed and asked.ids.size > num_experts
        by_kernel = self.refusal(num_experts if by_expert else asked.ids.size) is None
        planned = _planned_by_expert if by_expert else functools.partial(_call, cache_plan.plan)
        tables, gate, found = planned(
            operands, gate, jnp.int32(layer), asked, token_mask, forms=forms, by_kernel=by_kernel
        )
        parts = []
        for i, form in enumerate(forms):
            wave = found.tier if found.wave is None else found.wave
            if len(forms) > 1:
                wave = jnp.where(found.tier == i, 0 if found.wave is None else wave, -1)
            admitted, streamed = _or_nothing(found.fetch[i]), _or_nothing(found.streamed[i])
            if not form.later_waves:
                streamed = jax.tree.map(lambda of: of.reshape(0, 1), _or_nothing(None))
            parts.append(SlotPlan(asked.ids, found.slot, wave, admitted, streamed))
        return found, parts, gate, [_with(t, new) for t, new in zip(tiers, tables, strict=True)]

    def plan_prefetch(
        self,
        tiers: Sequence[TierSlots],  # donated; of the only tier, or of two that share slots
        rows_of: Sequence[jax.Array],
        layer: Index,
        ids: jax.Array,  # int32[L], experts (or base planes) that it will probably need; -1: none
        token_mask: jax.Array,
        refined: jax.Array | None = None,  # bool[L], those that run in the first of two tiers
    ) -> tuple[tuple[Fetch, ...], list[TierSlots]]:
        """Plans the prefetch of experts of a coming layer: what to fetch of each tier."""
        operands = tuple(
            TierOperands(_tables(t), rows) for t, rows in zip(tiers, rows_of, strict=True)
        )
        ids = self._in_memory(-1, rows_of[-1], layer, ids)
        if refined is not None:
            refined &= self._in_memory(0, rows_of[0], layer, ids) >= 0
        tables, found = _call(
            cache_plan.predict, operands, jnp.int32(layer), ids, token_mask, refined=refined,
            forms=self.forms(1), by_kernel=self.refusal(len(ids)) is None,
        )  # fmt: skip
        return found, [_with(t, new) for t, new in zip(tiers, tables, strict=True)]

    def _in_memory(self, index: int, row_of: jax.Array, layer: Index, ids: jax.Array) -> jax.Array:
        """The experts to prefetch without those on the disk: nobody waits for it on a guess."""
        if self.tiers[index].read is None:
            return ids
        return jnp.where(row_of[layer, jnp.maximum(ids, 0)] >= 0, ids, -1)


def _tables(slots: TierSlots) -> Tables:
    """The arrays that a plan changes."""
    residency, counts = slots.residency, slots.counts
    return Tables(residency.table, residency.clock, counts.events, counts.gate)


def _with(slots: TierSlots, found: Tables) -> TierSlots:
    return dataclasses.replace(
        slots,
        residency=dataclasses.replace(slots.residency, table=found.table, clock=found.clock),
        counts=dataclasses.replace(slots.counts, events=found.events, gate=found.gate),
    )


def _or_nothing(fetch: Fetch | None) -> Fetch:
    return Fetch(*[jnp.full(0, -1, jnp.int32)] * 3) if fetch is None else fetch


# With the layer an operand, all layers share a trace and the kernel.
@functools.partial(jax.jit, static_argnums=0, static_argnames=("forms", "by_kernel"))
def _call(plan: Callable[..., Any], *operands: Any, by_kernel: bool, **more: Any) -> Any:
    """Calls one of `cache_plan`."""
    return plan(*operands, implementation="triton" if by_kernel else "reference", **more)


@functools.partial(jax.jit, static_argnames=("forms", "by_kernel"))
def _planned_by_expert(
    tiers: tuple[TierOperands, ...], gate: jax.Array | None, layer: jax.Array, asked: Asked,
    active: jax.Array, *, forms: tuple[TierShape, ...], by_kernel: bool,
) -> tuple[tuple[Tables, ...], jax.Array | None, LayerPlan]:  # fmt: skip
    """Plans as `cache_plan.plan` for the only tier, from its experts in place of the pairs."""
    ids, mask = asked.ids, active[:, None]
    experts = jnp.arange(tiers[0].row_of.shape[1], dtype=jnp.int32)
    places = jnp.where(mask, ids, len(experts))
    needed = jnp.zeros(len(experts), bool).at[places].set(True, mode="drop")
    mass = jnp.sum(jnp.where(mask, asked.weights, 0.0))
    weights = jnp.where(experts == jnp.argmax(needed), mass, 0.0)  # of all, at one of them
    each = Asked(experts[:, None], weights[:, None])
    tables, gate, found = _call(
        cache_plan.plan, tiers, gate, layer, each, needed, forms=forms, by_kernel=by_kernel
    )

    def of_pairs(of_experts: jax.Array) -> jax.Array:
        return jnp.where(mask, of_experts[:, 0][ids], -1)

    wave = None if found.wave is None else of_pairs(found.wave)
    found = found._replace(tier=of_pairs(found.tier), slot=of_pairs(found.slot), wave=wave)
    return tables, gate, found
