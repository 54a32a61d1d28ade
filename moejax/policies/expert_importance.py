"""Critical experts (DyMoE, section 4.2): by heavy hitters in prefill, by gate in decode.

Axes: N tokens, A experts a token, E experts of a layer.
"""

import jax
import jax.numpy as jnp

from moejax.policies.base import Observation
from moejax.policies.ordering import chosen_by, ranks


def num_heavy(
    active: jax.Array,  # bool[N]
    share: jax.Array,  # float32[], 0 to 1
    count: jax.Array,  # int32[]
) -> jax.Array:
    """Number k of eq. 2, int32[]: `count`, or if 0 a share of the active tokens, rounded up."""
    # A share such as 0.1 of 30 tokens is 3, whatever float32 makes of it.
    of_all = jnp.ceil(share * jnp.sum(active, dtype=jnp.float32) - 1e-4).astype(jnp.int32)
    return jnp.where(count > 0, count, of_all)


def heavy_hitters(
    importance: jax.Array,  # float32[N]
    active: jax.Array,  # bool[N]
    num: jax.Array,  # int32[]
) -> jax.Array:
    """Mask bool[N] of T_imp: the top `num` active tokens (eq. 1); ties to the earlier one."""
    return (ranks(jnp.where(active, importance, -jnp.inf)) < num) & active


def critical_by_tokens(
    observation: Observation, tokens: jax.Array, num_critical: jax.Array
) -> jax.Array:
    """Mask bool[E] of the top t_l experts by assignments from `tokens`, bool[N], T_imp (eq. 2).

    Ties, which the paper does not mention, go to the expert with more tokens in all, since section
    3.3 finds the two loads correlated; then to the smaller id.
    """
    ids, num_experts = observation.ids, observation.probabilities.shape[1]
    load = chosen_by(ids, _of_pairs(tokens, ids), num_experts)
    tie = chosen_by(ids, _of_pairs(observation.active, ids), num_experts)
    return ranks(load, tie) < num_critical


def critical_pairs(
    observation: Observation,
    importance: jax.Array,  # float32[N, A]
    num_critical: jax.Array,  # int32[], t_l
) -> jax.Array:
    """Mask bool[N, A] of pairs whose expert is in some active token's top t_l (eq. 3).

    The paper decodes one sequence. Where several tokens ask for one expert in different precision,
    it is critical for all of them: an expert has one format (section 4.4.2). `importance` is of a
    token's experts to one another; their gate weights in eq. 3.
    """
    own = (ranks(importance) < num_critical) & observation.active[:, None]
    ids = observation.ids
    if len(ids) == 1:
        return own
    flat, chosen = ids.reshape(-1), own.reshape(-1)
    shared = (flat[None] == flat[:, None]) & chosen[None]
    return jnp.any(shared, axis=1).reshape(ids.shape)


def _of_pairs(tokens: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.broadcast_to(tokens[:, None], ids.shape)
