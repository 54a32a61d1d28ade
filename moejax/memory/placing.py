"""Where a layer's experts are computed, by pairs of a token and an expert: tables to copies.

One launch on a GPU (`pallas_kernels.residency_plan`), else `moejax.memory.residency`, whose rules
these are. Axes as in `moejax.memory.expert_pool`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.ledger import EVENTS, Counts
from moejax.memory import residency as rules
from moejax.memory.residency import CacheSpec, Residency
from moejax.models.routing import Routing
from moejax.ops import Index
from moejax.qtensor import Compensator
from pallas_kernels import residency_plan
from pallas_kernels.target import Target

COLUMNS = {name: column for column, name in enumerate(EVENTS)}
State = tuple[Residency, Counts]


class Jobs(NamedTuple):
    """Rows of the host store to copy into global slots; -1: none.

    `experts` are whose rows they are; None where no expert can be on the disk alone.
    """

    rows: jax.Array
    slots: jax.Array
    experts: jax.Array | None


class Placed(NamedTuple):
    """A plan of a layer, by pairs of a token and an expert."""

    slot: jax.Array  # int32[N, A]
    wave: jax.Array  # int32[N, A]
    admitted: Jobs  # [J]
    streamed: Jobs  # [W, B]
    # int32[n] each: experts that are among these, an expert maybe twice, with their slots and waves
    holders: tuple[jax.Array, jax.Array, jax.Array]
    is_by_kernel: bool = False  # which says of pairs that are not active that they are in wave -1


@dataclasses.dataclass(frozen=True)
class Placing:
    """Static facts.

    Attributes:
      cache: layers, experts and slots.
      reads_disk: whether experts may be on the disk alone, so that their ids are needed.
      target: whose kernels may plan; None: none.
    """

    cache: CacheSpec
    reads_disk: bool
    target: Target | None

    def plan(
        self,
        state: State,
        row_of: jax.Array,
        layer: Index,
        routing: Routing,
        token_mask: jax.Array,
    ) -> tuple[Placed, State]:
        """Of a layer in one step.

        Args:
          state: what is in the slots, and the counts; donate them.
          row_of: int32[M, E], rows of the host store; -1: none.
          layer: which.
          routing: of N tokens.
          token_mask: bool[N], False for padding.
        """
        cache, num_pairs = self.cache, routing.ids.size
        max_needed = min(num_pairs, cache.num_experts)
        waves = self.waves(num_pairs)
        transient = cache.first_transient + jnp.arange(cache.transient, dtype=jnp.int32)
        transient = jnp.broadcast_to(transient, tuple(waves))
        if self.by_kernel(num_pairs):
            found, made = _planned(
                tables_of(state), row_of, jnp.int32(layer), routing.ids, token_mask,
                routing.weights.astype(jnp.float32), waves=waves, banks=cache.banks,
            )  # fmt: skip
            flat = (routing.ids.reshape(-1), made.slot.reshape(-1), made.wave.reshape(-1))
            admitted = Jobs(made.rows, made.slots, None)
            streamed = Jobs(made.streamed, transient, None)
            placed = Placed(made.slot, made.wave, admitted, streamed, flat, True)
            return self._at_once(placed, num_pairs), changed(state, found)
        active = jnp.broadcast_to(token_mask[:, None], routing.ids.shape)
        needed = _marked(routing.ids, active, cache.num_experts)
        plan, residency, counts = rules.plan(cache, state[0], layer, needed, max_needed, state[1])
        mass = jnp.sum(jnp.where(active, routing.weights, 0.0)).reshape(1)
        counts = counts.add_gate_mass(layer, mass)
        experts = jnp.arange(cache.num_experts, dtype=jnp.int32)
        placed = Placed(
            plan.slot[routing.ids],
            plan.wave[routing.ids],
            _jobs(row_of[layer], plan.admitted, plan.admitted_slots),
            _jobs(row_of[layer], plan.streamed, transient),
            (experts, plan.slot, plan.wave),
        )
        return self._at_once(placed, num_pairs), (residency, counts)

    def _at_once(self, placed: Placed, num_pairs: int) -> Placed:
        """With what streams as what is admitted, where that is all in one wave."""
        if not self.streams_at_once(num_pairs):
            return placed
        experts, slot, wave = placed.holders
        first = jax.tree.map(lambda jobs: jobs[0], placed.streamed)
        wave_of = jnp.where(placed.wave == 1, 0, placed.wave)
        holders = (experts, slot, jnp.where(wave == 1, 0, wave))
        return placed._replace(wave=wave_of, admitted=first, holders=holders)

    def streams_at_once(self, num_pairs: int) -> bool:
        """Whether a layer has no slots, and the transient ones hold all that it may need."""
        return not self.cache.slots and self.waves(num_pairs).num == 1

    def expect(
        self,
        state: State,
        row_of: jax.Array,
        layer: Index,
        ids: jax.Array,
        token_mask: jax.Array,
    ) -> tuple[Jobs, State]:
        """What to bring for a layer to come.

        Args:
          state: as in `plan`.
          row_of: likewise.
          layer: the one to come.
          ids: int32[L], experts that it will probably need; -1: none.
          token_mask: as in `plan`.
        """
        cache, limit = self.cache, len(ids)
        if self.by_kernel(limit):
            found, made = _predicted(
                tables_of(state), row_of, jnp.int32(layer), ids, token_mask, banks=cache.banks,
            )  # fmt: skip
            return Jobs(made.rows, made.slots, None), changed(state, found)
        wanted = _marked(ids, jnp.any(token_mask) & (ids >= 0), cache.num_experts)
        if self.reads_disk:  # nobody waits for the disk on a guess
            wanted &= row_of[layer] >= 0
        made, residency, counts = rules.predict(cache, state[0], layer, wanted, limit, state[1])
        return _jobs(row_of[layer], made.experts, made.slots), (residency, counts)

    def waves(self, num_pairs: int) -> residency_plan.Waves:
        """Through the transient slots, of a layer that so many pairs may need."""
        most = min(num_pairs, self.cache.num_experts)
        return residency_plan.Waves(rules.num_waves(self.cache, most), self.cache.transient)

    def by_kernel(self, num_asked: int) -> bool:
        """Whether one launch plans for so many pairs."""
        return self.refusal(num_asked) is None

    def refusal(self, num_asked: int) -> str | None:
        """Why one launch does not plan for so many pairs, or None."""
        if self.target is None:
            return "no kernels are wanted"
        if self.reads_disk:
            return "experts may be on the disk alone, and the step asks the host for them by id"
        return residency_plan.refusal("triton", self.cache.num_experts, num_asked, self.target)


def terms_by_slot(
    term: Compensator, layer: Index, experts: jax.Array, places: jax.Array, num_slots: int
) -> Compensator:
    """Terms of experts by slot, starts and ranks [1, S]; rank 0 where a slot is none of theirs."""

    def by_slot(of_expert: jax.Array) -> jax.Array:
        slots = jnp.zeros(num_slots, jnp.int32)
        return slots.at[places].set(of_expert[layer, experts], mode="drop")[None]

    return dataclasses.replace(term, start=by_slot(term.start), rank=by_slot(term.rank))


def tables_of(state: State) -> residency_plan.Tables:
    """What a kernel changes."""
    residency, counts = state
    return residency_plan.Tables(residency.table, residency.clock, counts.events, counts.gate)


def changed(state: State, found: residency_plan.Tables) -> State:
    """With what a kernel changed."""
    residency, counts = state
    return (
        dataclasses.replace(residency, table=found.table, clock=found.clock),
        dataclasses.replace(counts, events=found.events, gate=found.gate),
    )


def _jobs(row_of: jax.Array, experts: jax.Array, slots: jax.Array) -> Jobs:
    """For experts of a layer, -1: none."""
    if not experts.size:
        return Jobs(experts, experts, experts)
    rows = row_of[jnp.maximum(experts, 0)]
    return Jobs(jnp.where(experts >= 0, rows, -1), slots, experts)


# Jitted, with the layer an operand: all layers share a trace and the kernels.
@functools.partial(jax.jit, static_argnames=("waves", "banks"))
def _planned(
    *operands: Any, waves: residency_plan.Waves, banks: int
) -> tuple[residency_plan.Tables, residency_plan.Placed]:
    return residency_plan.plan(
        *operands, waves=waves, banks=banks, columns=COLUMNS, implementation="triton"
    )


@functools.partial(jax.jit, static_argnames="banks")
def _predicted(*operands: Any, banks: int) -> tuple[residency_plan.Tables, residency_plan.Fetch]:
    return residency_plan.predict(*operands, banks=banks, columns=COLUMNS, implementation="triton")


@functools.partial(jax.jit, static_argnums=2)
def _marked(ids: jax.Array, active: jax.Array, num_experts: int) -> jax.Array:
    """bool[E]: those among the ids that are active."""
    places = jnp.where(active, ids, num_experts).reshape(-1)
    return jnp.zeros(num_experts, bool).at[places].set(True, mode="drop")
