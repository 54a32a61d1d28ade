"""Where a layer's experts run that are stored in several tiers: one launch on a GPU.

`pallas_kernels.tiered_plan` does in it what `moejax.memory.tiered_experts` else asks of
`moejax.policies.mixed_cache` and of each tier's `moejax.memory.placing`. Axes as there.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.memory.expert_pool import PoolSpec
from moejax.memory.placing import COLUMNS, Jobs, Placed, State, changed, tables_of
from moejax.models.routing import Routing
from moejax.ops import Index
from moejax.policies.base import Decision
from pallas_kernels import residency_plan, tiered_plan
from pallas_kernels.target import Target
from pallas_kernels.tiered_plan import Rule


class Together(NamedTuple):
    """Of all tiers.

    Attributes:
      tier: int32[N, A], in which each pair runs; -1 where it does not.
      slot: int32[N, A], global, in that tier; -1.
      plans: of each tier, by all pairs: those of other tiers are in no wave of it.
      gate: as of `TieredPool`.
    """

    tier: jax.Array
    slot: jax.Array
    plans: list[Placed]
    gate: jax.Array


@dataclasses.dataclass(frozen=True)
class TieredPlacing:
    """Static facts.

    Attributes:
      pools: of the tiers.
      target: whose kernels may plan; None: none.
      moves: whether the policy has experts moved between steps.
    """

    pools: tuple[PoolSpec, ...]
    target: Target | None
    moves: bool = True

    def refusal(self, num_pairs: int) -> str | None:
        """Why one launch does not plan for so many pairs, or None."""
        if self.target is None:
            return "no kernels are wanted"
        if any(pool.read is not None for pool in self.pools):
            return "experts may be on the disk alone, and the step asks the host for them by id"
        if any(pool.emulated for pool in self.pools):
            return "a tier has no slots"
        cache = self.pools[0].cache
        if any(0 < of < min(num_pairs, cache.num_experts) for of in map(_streams, self.pools)):
            return "a tier has no slots of layers, and too few transient ones"
        return tiered_plan.refusal(
            "triton", cache.num_experts, num_pairs, len(self.pools), self.target
        )

    def place(
        self,
        states: Sequence[State],
        rows_of: Sequence[jax.Array],
        gate: jax.Array,
        layer: Index,
        routing: Routing,
        decision: Decision,
        rule: Rule | None,
        token_mask: jax.Array,
    ) -> tuple[Together, list[State]]:
        """Of a layer in one step, without waves.

        Args:
          states: of each tier what is in its slots, and the counts; donate them.
          rows_of: of each int32[M, E], rows of the host store.
          gate: as of `TieredPool`; donate it.
          layer: which.
          routing: of N tokens, the router's.
          decision: the policy's.
          rule: what says its tiers, which are then not looked at; None: they are.
          token_mask: bool[N], False for padding.
        """
        tiers = tuple(
            tiered_plan.Tier(tables_of(state), rows)
            for state, rows in zip(states, rows_of, strict=True)
        )
        asked = tiered_plan.Asked(
            decision.ids,
            rule or tiered_plan.Wishes(decision.tier, decision.at_least),
            routing.weights.astype(jnp.float32),
            None if decision.ids is routing.ids else routing.ids,
        )
        forms = tuple(
            tiered_plan.Form(
                pool.cache.banks,
                pool.cache.slots == pool.cache.num_experts,
                pool.is_complete,
                streams=_streams(pool),
                is_fixed=i == 0
                and pool.between_steps
                and pool.cache.slots > 0
                and not pool.is_complete,
                is_fed=self.moves or any(better.prefetch for better in self.pools[:i]),
            )
            for i, pool in enumerate(self.pools)
        )
        tables, gate, found = _placed(tiers, gate, jnp.int32(layer), asked, token_mask, forms=forms)
        ids, slot = decision.ids.reshape(-1), found.slot.reshape(-1)
        none = jnp.full(0, -1, jnp.int32)
        plans = []
        for i, fetch in enumerate(found.fetch):
            wave = jnp.where(found.tier == i, 0, -1)
            admitted = (
                Jobs(none, none, None) if fetch is None else Jobs(fetch.rows, fetch.slots, None)
            )
            streamed = Jobs(none.reshape(0, 1), none.reshape(0, 1), None)
            holders = (ids, slot, wave.reshape(-1))
            plans.append(Placed(found.slot, wave, admitted, streamed, holders))
        after = [changed(state, new) for state, new in zip(states, tables, strict=True)]
        return Together(found.tier, found.slot, plans, gate), after


def _streams(pool: PoolSpec) -> int:
    """See `tiered_plan.Form`."""
    return 0 if pool.cache.slots else pool.cache.transient


# Jitted, with the layer an operand: all layers share a trace and the kernel.
@functools.partial(jax.jit, static_argnames="forms")
def _placed(
    *operands: Any, forms: tuple[tiered_plan.Form, ...]
) -> tuple[tuple[residency_plan.Tables, ...], jax.Array, tiered_plan.Placed]:
    return tiered_plan.place(*operands, forms=forms, columns=COLUMNS, implementation="triton")
