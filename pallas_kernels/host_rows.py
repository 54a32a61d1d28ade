"""Rows of arrays that may lie in host memory, read in plain jnp."""

import jax

Operand = jax.Array | jax.ShapeDtypeStruct


def in_host_memory(array: Operand) -> bool:
    """Whether an array lies in host memory; of a shape alone, whether its sharding says so."""
    if isinstance(array, jax.ShapeDtypeStruct):
        kind = getattr(array.sharding, "memory_kind", None)
        return kind is not None and kind.endswith("host")
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def rows_on_device(array: jax.Array, rows: jax.Array) -> jax.Array:
    """array[rows], wherever the array lies: [..., *array.shape[1:]].

    In host memory a gather is refused and a slice is not: there rows are read one after another.

    Args:
      array: [R, ...], on the device or in host memory.
      rows: int32[...]; what is out of range is clipped.
    """
    if not in_host_memory(array):
        return array[rows]

    def take(row: jax.Array) -> jax.Array:
        found = jax.lax.dynamic_index_in_dim(array, row, keepdims=False)
        return jax.device_put(found, jax.memory.Space.Device)

    return jax.lax.map(take, rows.reshape(-1)).reshape(*rows.shape, *array.shape[1:])
