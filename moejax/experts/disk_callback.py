"""Fetches experts from the disk inside the step, which waits for the host."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

from moejax.weights.linear import Index

Pools = TypeVar("Pools")  # a pytree of arrays [S, ...]


def with_disk_rows(
    pools: Pools,
    read_rows: Callable[[Any, Any], tuple[Any, ...]],
    layer: Index,
    experts: jax.Array,
    slots: jax.Array,
    absent: jax.Array,
) -> Pools:
    """Returns the pools with absent experts in slots; waits only for those.

    Args:
      pools: donate them.
      read_rows: see `PoolSpec.read`.
      experts: int32[J], as are their slots.
      absent: bool[J], which of them are read.
    """
    leaves, tree = jax.tree.flatten(pools)
    shapes = [jax.ShapeDtypeStruct((len(experts), *p.shape[1:]), p.dtype) for p in leaves]

    def read() -> list[jax.Array]:
        asked = jnp.where(absent, experts, -1)
        return list(io_callback(read_rows, tuple(shapes), jnp.int32(layer), asked))

    def nothing() -> list[jax.Array]:
        return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]

    found = jax.lax.cond(jnp.any(absent), read, nothing)
    places = jnp.where(absent, slots, len(leaves[0]))
    filled = [p.at[places].set(new, mode="drop") for p, new in zip(leaves, found, strict=True)]
    return jax.tree.unflatten(tree, filled)
