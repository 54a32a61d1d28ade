"""Prefetch of the next layer's experts (DyMoE, section 4.4.1)."""

import jax
import jax.numpy as jnp

from moejax.policies.base import Observation
from moejax.policies.ordering import chosen_by, ranks


def experts_ahead(observation: Observation, limit: jax.Array) -> jax.Array | None:
    """Chooses the next layer's experts, bool[E], that its predicted routing wants most.

    Prefill: the top t by c_e, the number of tokens among whose predicted top A an expert is (eq.
    7). Decode: the top t by predicted probability (eq. 8), summed over the sequences of a batch, of
    which the paper has one. Ties go to the smaller id; an expert that no token is predicted to
    choose is not prefetched. None without a prediction (`Observation.predicted`, eq. 6); `limit` is
    int32[], t.
    """
    predicted = observation.predicted
    if predicted is None:
        return None
    active = observation.active
    width, num_experts = observation.ids.shape[1], predicted.shape[1]
    if observation.is_prefill:
        _, ids = jax.lax.top_k(predicted, width)
        demand = chosen_by(ids, jnp.broadcast_to(active[:, None], ids.shape), num_experts)
        return (ranks(demand) < limit) & (demand > 0)
    mass = jnp.sum(jnp.where(active[:, None], predicted, 0.0), axis=0)
    return (ranks(mass) < limit) & (mass > 0)
