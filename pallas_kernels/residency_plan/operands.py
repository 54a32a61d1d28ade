"""The arrays of a plan, and the sizes that their shapes say."""

from collections.abc import Mapping
from typing import NamedTuple

import jax

Columns = Mapping[str, int]  # of the counts that a call adds to, where each is in `events`

PLAN_EVENTS = (
    "steps", "needed", "hits", "misses", "admitted", "streamed", "unserved", "evictions",
    "prefetch_hits", "prefetch_waste",
)  # fmt: skip
PREDICT_EVENTS = ("prefetched", "evictions", "prefetch_waste")


class Tables(NamedTuple):
    """What a call changes in place, of one layer; donate them, or XLA copies them.

    Axes: M layers, E experts of a layer, C cache slots of a layer; -1 stands for none.

    Attributes:
      table: int32[M, E + 3 C], columns of a layer: the local slot of each expert, [E]; of each slot
        its owner, the clock of its last use, and whether it was brought ahead and not used yet,
        each [C]. Slots of experts and owners are inverse to each other.
      clock: int32[], may wrap.
      events: int32[M, K], counts.
      gate: float32[M, 1 + T], gate mass of all, then of T tiers.
    """

    table: jax.Array
    clock: jax.Array
    events: jax.Array
    gate: jax.Array


class Waves(NamedTuple):
    """How what finds no slot of the cache passes through the B transient slots of a bank.

    With `num` of 0 the caller knows that the cache serves whatever a layer needs.
    """

    num: int  # W
    transient: int  # B


class Placed(NamedTuple):
    """A plan; J = min(N A, E, C).

    Attributes:
      slot: int32[N, A], the global slot of each pair's expert, (l // banks) C + c or a transient
        one; -1 where the token is not active.
      wave: int32[N, A], 0 resident or admitted, 1 + w in wave w, -1 not active.
      rows: int32[J], rows of the host store to copy before wave 0, padded with -1.
      slots: int32[J], global slots for them, padded with -1.
      streamed: int32[W, B], rows of each wave, padded with -1.
    """

    slot: jax.Array
    wave: jax.Array
    rows: jax.Array
    slots: jax.Array
    streamed: jax.Array


class Fetch(NamedTuple):
    """rows int32[L] of the host store to copy into global slots int32[L], both padded with -1."""

    rows: jax.Array
    slots: jax.Array


def first_transient(num_layers: int, slots: int, banks: int) -> int:
    """ceil(M / banks) C, the global slot at which a bank's transient ones begin."""
    return -(-num_layers // banks) * slots


def num_slots(table: jax.Array | jax.ShapeDtypeStruct, num_experts: int) -> int:
    """C."""
    return (table.shape[1] - num_experts) // 3


def num_jobs(num_pairs: int, num_experts: int, slots: int) -> int:
    """J."""
    return min(num_pairs, num_experts, slots)
