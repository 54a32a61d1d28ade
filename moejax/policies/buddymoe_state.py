"""What BuddyMoE carries from step to step.

Axes: M sparse layers, E experts of a layer, K places of a buddy list.
"""

import dataclasses
from typing import NamedTuple

import jax


class Settings(NamedTuple):
    """What a sweep may vary: leaves of the state.

    Attributes:
      tau: float32[M], of the TAE gate.
      margin: float32[], gamma.
      temperature: float32[], of p~.
      beta: float32[], of the distribution gate.
      eta: float32[], weight of the token's own logits in eq. 3.
      kappa: float32[], penalty of a hop in eq. 3.
      discount: float32[], of a buddy's second use.
      budget: int32[], rho.
      depth: int32[], H.
      background_bytes: float32[], of background transfers, a step.
      expert_bytes: float32[], of one expert.
      retention: float32[], of the counts of misses, a step.
      least_misses: float32[], from which on an expert is brought.
      seed: uint32[], of random choices.
    """

    tau: jax.Array
    margin: jax.Array
    temperature: jax.Array
    beta: jax.Array
    eta: jax.Array
    kappa: jax.Array
    discount: jax.Array
    budget: jax.Array
    depth: jax.Array
    background_bytes: jax.Array
    expert_bytes: jax.Array
    retention: jax.Array
    least_misses: jax.Array
    seed: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BuddyState:
    """Shapes and dtypes never change.

    Attributes:
      settings: of the policy.
      lists: int32[M, E, K].
      q: float32[M, E, K].
      gains: float32[M, E, E], or None.
      hops: float32[E], partitions between an expert and the tokens' device.
      replaced: int32[M, E], pairs of each expert that a buddy served, so far.
      dropped: int32[M, E], pairs of each expert that nobody served, so far.
      counted: int32[M, E], how many of both `missed` knows of.
      missed: float32[M, E], pairs replaced or dropped since the expert was last asked for, fading.
      requested: int32[], experts that background transfers were asked for.
      credit: float32[], bytes of background transfers that are saved up.
      draws: int32[], random choices so far.
    """

    settings: Settings
    lists: jax.Array
    q: jax.Array
    gains: jax.Array | None
    hops: jax.Array
    replaced: jax.Array
    dropped: jax.Array
    counted: jax.Array
    missed: jax.Array
    requested: jax.Array
    credit: jax.Array
    draws: jax.Array
