"""Orders computed without sorting: comparisons of all pairs, which XLA fuses on a GPU."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

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
