"""Which matrices the tokens of a MoE layer run, and in which of several calls."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Assignments(NamedTuple):
    """Matrices that each of T tokens runs, A of them; device data.

    A pair (token, a) uses matrix `slot` of tier `tier`. A tier outside 0 .. number of tiers - 1
    (-1 by custom) skips the pair: it yields zero and costs nothing.
    """

    tier: jax.Array  # int32[T, A]
    slot: jax.Array  # int32[T, A]
    weight: jax.Array  # float32[T, A], of the weighted combine


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Turn:
    """One of several calls for a layer's pairs, given in all of them alike.

    Tiers of the pairs are then numbers of calls: this one has the tiers' matrices for its own.
    """

    number: jax.Array  # int32[], of this call
    before: jax.Array | None  # what earlier calls gave; None: there was none
    count: int = dataclasses.field(metadata={"static": True})  # number of calls
    # most that the matrices of a call have; those of all calls are sorted at once
    slots: int = dataclasses.field(metadata={"static": True})
    # multiprocessors that are left to what runs beside this call
    spared: int = dataclasses.field(default=0, metadata={"static": True})

    def pairs(self, assignments: Assignments) -> Assignments:
        """Returns the pairs with those of other calls skipped."""
        return assignments._replace(tier=jnp.where(assignments.tier == self.number, 0, -1))

    def joined(self, found: jax.Array, tier: jax.Array) -> jax.Array:
        """Joins this call's products [P, T, A, N] to those of earlier calls."""
        if self.before is None:
            return found
        return jnp.where((tier == self.number)[None, :, :, None], found, self.before)
