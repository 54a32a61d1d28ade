"""Row gather in plain jnp; never optimised."""

import jax
import jax.numpy as jnp


def gather_rows_reference(array: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of an array that may lie in host memory: [..., *array.shape[1:]].

    In host memory a gather is refused and a slice is not: there rows are read one after another.

    Args:
      array: [R, ...], on the device or in host memory.
      rows: int32[...]; what is out of range is clipped.
    """
    rows = jnp.clip(rows, 0, array.shape[0] - 1)
    if jax.typeof(array).memory_space != jax.memory.Space.Host:
        return array[rows]

    def take(row: jax.Array) -> jax.Array:
        found = jax.lax.dynamic_index_in_dim(array, row, keepdims=False)
        return jax.device_put(found, jax.memory.Space.Device)

    return jax.lax.map(take, rows.reshape(-1)).reshape(*rows.shape, *array.shape[1:])
