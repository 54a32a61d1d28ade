"""Orders without sorting, by comparing all pairs, which XLA fuses on a GPU; prefetch by them."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from moejax.policies.base import Observation, PolicySpec

UNROLLED = 16  # of an axis up to which places are counted without a reduction


def ranks(*keys: jax.Array) -> jax.Array:
    """Rank of each element by falling first key, then the next, then rising index.

    A permutation int32[..., n] of 0..n - 1 along the last axis, of keys of that shape each, numbers
    or bool, no NaN.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, keys[0].shape, keys[0].ndim - 1)
    if keys[0].shape[-1] <= UNROLLED:
        return _ranks_one_by_one(keys, index)
    before = index[..., None, :] < index[..., :, None]
    for key in reversed(keys):
        other, own = key[..., None, :], key[..., :, None]
        before = (other > own) | ((other == own) & before)
    return jnp.sum(before, axis=-1, dtype=jnp.int32)


def _ranks_one_by_one(keys: tuple[jax.Array, ...], index: jax.Array) -> jax.Array:
    """Ranks like `ranks`, without a reduction."""
    place = jnp.zeros_like(index)
    for i in range(index.shape[-1]):
        before = index > i
        for key in reversed(keys):
            other = key[..., i : i + 1]
            before = (other > key) | ((other == key) & before)
        place += before.astype(jnp.int32)
    return place


def of_few(operation: Callable[[jax.Array, jax.Array], jax.Array], values: jax.Array) -> jax.Array:
    """Reduces a short last axis in order to [..., 1], without a reduction op."""
    parts = [values[..., i : i + 1] for i in range(values.shape[-1])]
    return functools.reduce(operation, parts)


def chosen_by(ids: jax.Array, mask: jax.Array, num_experts: int) -> jax.Array:
    """Counts the masked pairs of each expert, int32[E], of ids and mask [N, A]."""
    expert = jax.lax.iota(jnp.int32, num_experts)
    pairs = (ids[None] == expert[:, None, None]) & mask[None]
    return jnp.sum(pairs, axis=(1, 2), dtype=jnp.int32)


def prefetch_limits(spec: PolicySpec, tier: int, count: int) -> jax.Array:
    """Limits t of `experts_ahead`, int32[M]: `count` or `PolicySpec.most_ahead`; 0 in the last."""
    limit = min(count, spec.most_ahead(tier))
    return jnp.full(spec.num_layers, limit, jnp.int32).at[-1].set(0)


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
