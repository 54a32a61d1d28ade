"""The three rules of DyMoE's mixed-precision cache (section 4.4.2), as maths on what is resident.

  * No duplication: an expert is stored in one format only.
  * Precision promotion: low precision is there, high is asked for: a miss; the high copy is loaded
    and the low one leaves.
  * Conservative reuse: high precision is there, low is asked for: a hit, the high copy serves.

Who leaves when slots run out is the residency's affair (`moejax.memory.residency`); this says what
serves, what is fetched, and which copies leave since their expert comes in another format.

Axes: N tokens, A experts a token, T tiers of falling fidelity, E experts of a layer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.policies.base import SKIPPED, Decision


class Served(NamedTuple):
    """What becomes of a layer's experts in a step.

    Attributes:
      tier: int32[E], in which an expert runs; -1 where nobody asks for it.
      fetched: bool[E], it is a miss, and comes in that tier.
      reused: bool[E], a hit in a tier of higher fidelity than was asked for.
      leaving: bool[T, E], copies that go because their expert comes in another tier.
    """

    tier: jax.Array
    fetched: jax.Array
    reused: jax.Array
    leaving: jax.Array


def asked_tier(decision: Decision, active: jax.Array, num_experts: int) -> jax.Array:
    """int32[E], the tier of highest fidelity in which an active pair asks for an expert, or -1.

    Args:
      decision: of a layer.
      active: bool[N].
      num_experts: E.
    """
    expert = jax.lax.iota(jnp.int32, num_experts)
    asks = active[:, None] & (decision.tier != SKIPPED)
    pairs = (decision.ids[None] == expert[:, None, None]) & asks[None]
    none = jnp.iinfo(jnp.int32).max
    best = jnp.min(jnp.where(pairs, decision.tier[None], none), axis=(1, 2))
    return jnp.where(best == none, -1, best)


def serving(copies: jax.Array, full: Sequence[bool]) -> jax.Array:
    """bool[T, E], copies that may serve: none that leaves because a better one has come.

    Look-ahead and transfers bring an expert while it is still in a tier of lower fidelity; that
    copy leaves when its layer runs next.

    Args:
      copies: bool[T, E], where experts are.
      full: static, of each tier whether it holds every expert for ever.
    """
    rows = [
        row if is_full else row & ~jnp.any(copies[:tier], axis=0)
        for tier, (row, is_full) in enumerate(zip(copies, full, strict=True))
    ]
    return jnp.stack(rows)


def served(resident: jax.Array, decision: Decision, active: jax.Array) -> Served:
    """Which format of each expert serves, by the three rules.

    Args:
      resident: bool[T, E], at most one tier of each expert.
      decision: of a layer. A copy of higher fidelity serves where all active pairs of the tier
        that an expert is asked for in allow it (`at_least`).
      active: bool[N].

    Returns:
      See `Served`; no expert is both reused and fetched.
    """
    num_tiers, num_experts = resident.shape
    asked = asked_tier(decision, active, num_experts)
    expert = jax.lax.iota(jnp.int32, num_experts)
    strict = active[:, None] & (decision.tier != SKIPPED) & ~decision.at_least
    is_strict = jnp.any(
        (decision.ids[None] == expert[:, None, None])
        & (decision.tier[None] == asked[:, None, None])
        & strict[None],
        axis=(1, 2),
    )
    tier = jax.lax.iota(jnp.int32, num_tiers)[:, None]
    exact = jnp.any(resident & (tier == asked[None]), axis=0)
    better = resident & (tier < asked[None]) & ~is_strict[None]
    reused = jnp.any(better, axis=0) & ~exact
    there = jnp.max(jnp.where(better, tier, -1), axis=0)
    fetched = (asked >= 0) & ~exact & ~reused
    return Served(
        tier=jnp.where(reused, there, asked),
        fetched=fetched,
        reused=reused,
        leaving=resident & fetched[None],
    )
