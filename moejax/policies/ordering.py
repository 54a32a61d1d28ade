"""Orders without sorting: comparisons of all pairs, which XLA fuses into one reduction on a GPU."""

import jax
import jax.numpy as jnp


def places(*keys: jax.Array) -> jax.Array:
    """Each element's place in the order by falling first key, then the next, then rising index.

    Args:
      *keys: [..., n] of one shape each, numbers or bool, no NaN.

    Returns:
      int32[..., n], a permutation of 0..n - 1 along the last axis.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, keys[0].shape, keys[0].ndim - 1)
    before = index[..., None, :] < index[..., :, None]
    for key in reversed(keys):
        other, own = key[..., None, :], key[..., :, None]
        before = (other > own) | ((other == own) & before)
    return jnp.sum(before, axis=-1, dtype=jnp.int32)


def chosen_by(ids: jax.Array, mask: jax.Array, num_experts: int) -> jax.Array:
    """int32[E], how many of the masked pairs are of each expert.

    Args:
      ids: int32[N, A].
      mask: bool[N, A].
      num_experts: E.
    """
    expert = jax.lax.iota(jnp.int32, num_experts)
    pairs = (ids[None] == expert[:, None, None]) & mask[None]
    return jnp.sum(pairs, axis=(1, 2), dtype=jnp.int32)
