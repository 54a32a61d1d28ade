"""The plan of a layer, of one tier or several: by one launch on a GPU, else in plain jnp.

`pallas_kernels.cache_plan` states the rule. Axes as in `moejax.experts.expert_pool`; T tiers.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.experts.expert_pool import PoolSpec
from moejax.experts.residency import COLUMNS, Counts, Residency
from moejax.weights.linear import Index
from moejax.weights.qtensor import Compensator
from pallas_kernels import cache_plan
from pallas_kernels.cache_plan import Asked, LayerPlan, Tables, Tier, TierShape
from pallas_kernels.target import Target

State = tuple[Residency, Counts]


class Jobs(NamedTuple):
    """Rows of the host store to copy into global slots; -1: none.

    `experts` are whose rows they are; None where no expert can be on the disk alone.
    """

    rows: jax.Array
    slots: jax.Array
    experts: jax.Array | None


class Placed(NamedTuple):
    """One tier's part of a plan, over all pairs; other tiers' pairs have no wave."""

    slot: jax.Array  # int32[N, A]
    wave: jax.Array  # int32[N, A]; -1 for pairs that do not run in this tier
    admitted: Jobs  # [J]
    streamed: Jobs  # [W, B]
    # int32[N A] each: experts, an expert maybe several times, with their slots and waves
    holders: tuple[jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Placing:
    """Plans slots of the tiers, from static facts.

    Attributes:
      target: device whose kernels may plan; None: no kernels.
      moves: whether transfers move experts between steps.
    """

    pools: tuple[PoolSpec, ...]
    target: Target | None
    moves: bool = True

    def refusal(self, num_asked: int) -> str | None:
        """Returns why one launch cannot plan so many pairs, or None."""
        if self.target is None:
            return "no kernels are wanted"
        if any(pool.read is not None for pool in self.pools):
            return "experts may be on the disk alone, and the step asks the host for them by id"
        if any(pool.emulated for pool in self.pools):
            return "a tier has no slots"
        if len(self.pools) > 1 and any(form.later_waves for form in self.forms(num_asked)):
            return "of several tiers one streams experts in waves"
        num_experts = self.pools[0].cache.num_experts
        sizes = num_experts, num_asked, len(self.pools)
        return cache_plan.PLAN.refusal("triton", *sizes, target=self.target)

    def forms(self, num_pairs: int) -> tuple[TierShape, ...]:
        """Returns each tier's static form, for a layer of so many pairs."""
        return tuple(
            TierShape(
                slots=pool.cache.slots,
                banks=pool.cache.banks,
                transient=pool.cache.transient,
                waves=self.num_waves(i, num_pairs),
                is_full=pool.cache.slots == pool.cache.num_experts,
                is_complete=pool.is_complete,
                static_in_step=i == 0
                and pool.between_steps
                and pool.cache.slots > 0
                and not pool.is_complete,
                may_be_promoted_elsewhere=self.moves
                or any(better.prefetch for better in self.pools[:i]),
            )
            for i, pool in enumerate(self.pools)
        )

    def num_waves(self, tier: int, num_pairs: int) -> int:
        """Number of waves through a tier's transient slots for so many pairs."""
        pool, cache = self.pools[tier], self.pools[tier].cache
        if cache.slots and (pool.is_complete or pool.between_steps):
            return 0
        most = min(num_pairs, cache.num_experts)
        return cache_plan.num_waves(most, cache.slots, cache.transient)

    def plan(
        self,
        states: Sequence[State],
        rows_of: Sequence[jax.Array],
        gate: jax.Array | None,
        layer: Index,
        asked: Asked,
        token_mask: jax.Array,
    ) -> tuple[LayerPlan, list[Placed], jax.Array | None, list[State]]:
        """Plans where a layer's pairs run, and which experts are fetched.

        Args:
          states: residency and counts of each tier; donate them.
          rows_of: int32[M, E] of each tier, rows of the host store; -1: none.
          gate: as in `ExpertCache`, donated; None: it is not counted.
          asked: routing of N tokens.
          token_mask: bool[N], False for padding.

        Returns:
          The plan, each tier's part of it, and `gate` and `states` after it.
        """
        tiers = tuple(Tier(tables_of(s), rows) for s, rows in zip(states, rows_of, strict=True))
        forms = self.forms(asked.ids.size)
        by_kernel = self.refusal(asked.ids.size) is None
        tables, gate, found = _planned(
            tiers, gate, jnp.int32(layer), asked, token_mask, forms=forms, by_kernel=by_kernel
        )
        ids, slot = asked.ids.reshape(-1), found.slot.reshape(-1)
        parts = []
        for i, form in enumerate(forms):
            wave = found.tier if found.wave is None else found.wave
            if len(forms) > 1:
                wave = jnp.where(found.tier == i, 0 if found.wave is None else wave, -1)
            admitted, streamed = _jobs(found.fetch[i]), _jobs(found.streamed[i])
            if not form.later_waves:
                streamed = jax.tree.map(lambda of: of.reshape(0, 1), _no_jobs())
            parts.append(
                Placed(found.slot, wave, admitted, streamed, (ids, slot, wave.reshape(-1)))
            )
        after = [_changed(state, new) for state, new in zip(states, tables, strict=True)]
        return found, parts, gate, after

    def expect(
        self,
        tier: int,
        state: State,
        row_of: jax.Array,
        layer: Index,
        ids: jax.Array,
        token_mask: jax.Array,
    ) -> tuple[Jobs, State]:
        """Plans the prefetch of experts of a coming layer.

        Args:
          tier: tier whose slots get the experts.
          state: as in `plan`.
          row_of: as in `plan`.
          layer: the coming one.
          ids: int32[L], experts that it will probably need; -1: none.
          token_mask: as in `plan`.
        """
        alone = Placing((self.pools[tier],), self.target)
        if self.pools[tier].read is not None:  # nobody waits for the disk on a guess
            ids = jnp.where(row_of[layer, jnp.maximum(ids, 0)] >= 0, ids, -1)
        tables, found = _predicted(
            Tier(tables_of(state), row_of), jnp.int32(layer), ids, token_mask,
            form=self.forms(1)[tier], by_kernel=alone.refusal(len(ids)) is None,
        )  # fmt: skip
        return _jobs(found), _changed(state, tables)


def terms_by_slot(
    term: Compensator, layer: Index, experts: jax.Array, places: jax.Array, num_slots: int
) -> Compensator:
    """Low-rank terms by slot, starts and ranks [1, S]; rank 0 in other slots."""

    def by_slot(of_expert: jax.Array) -> jax.Array:
        slots = jnp.zeros(num_slots, jnp.int32)
        return slots.at[places].set(of_expert[layer, experts], mode="drop")[None]

    return dataclasses.replace(term, start=by_slot(term.start), rank=by_slot(term.rank))


def tables_of(state: State) -> Tables:
    """The arrays that a plan changes."""
    residency, counts = state
    return Tables(residency.table, residency.clock, counts.events, counts.gate)


def _changed(state: State, found: Tables) -> State:
    residency, counts = state
    return (
        dataclasses.replace(residency, table=found.table, clock=found.clock),
        dataclasses.replace(counts, events=found.events, gate=found.gate),
    )


def _no_jobs() -> Jobs:
    none = jnp.full(0, -1, jnp.int32)
    return Jobs(none, none, none)


def _jobs(fetch: cache_plan.Fetch | None) -> Jobs:
    return _no_jobs() if fetch is None else Jobs(*fetch)


def _by(by_kernel: bool) -> str:
    return "triton" if by_kernel else "reference"


# Jitted, with the layer an operand: all layers share a trace and the kernel.
@functools.partial(jax.jit, static_argnames=("forms", "by_kernel"))
def _planned(
    *operands: Any, forms: tuple[TierShape, ...], by_kernel: bool
) -> tuple[tuple[Tables, ...], jax.Array | None, LayerPlan]:
    how = _by(by_kernel)
    return cache_plan.plan(*operands, forms=forms, columns=COLUMNS, implementation=how)


@functools.partial(jax.jit, static_argnames=("form", "by_kernel"))
def _predicted(*operands: Any, form: TierShape, by_kernel: bool) -> tuple[Tables, cache_plan.Fetch]:
    how = _by(by_kernel)
    return cache_plan.predict(*operands, form=form, columns=COLUMNS, implementation=how)
