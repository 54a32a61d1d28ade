"""Outputs of compiled calls that lie where NaN was, so that what a kernel leaves unwritten shows.

The interpreter fills outputs with NaN; on a device nobody presets those of a jitted call. But the
allocator hands a block out again that was freed a moment ago: the call runs once, its results are
deleted, arrays of their sizes are filled with NaN and deleted too, and the call runs again.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

COPIES = 8  # of NaN arrays an output, for a program's temporary arrays take blocks as well


def after_nan(call: Callable[[], Any]) -> tuple[Any, bool]:
    """A call's results, and whether they all lie where NaN was.

    Args:
      call: runs a compiled program whose outputs are arrays of one device; runs twice.

    Returns:
      The second results on the device. False is no fault of the call: memory may be laid out
      otherwise, and integers are not poisoned.
    """
    first = jax.block_until_ready(call())
    outputs = [leaf for leaf in jax.tree.leaves(first) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    shapes = [(leaf.shape, leaf.dtype) for leaf in outputs for _ in range(COPIES)]
    for leaf in jax.tree.leaves(first):
        leaf.delete()
    filled = [jax.device_put(np.full(shape, np.nan, dtype)) for shape, dtype in shapes]
    places = [(_place(one), one.nbytes) for one in jax.block_until_ready(filled)]
    for one in filled:
        one.delete()
    found = jax.block_until_ready(call())
    again = [leaf for leaf in jax.tree.leaves(found) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return found, all(_covered(_place(leaf), leaf.nbytes, places) for leaf in again)


def _place(array: jax.Array) -> int:
    return int(array.unsafe_buffer_pointer())


def _covered(start: int, nbytes: int, places: list[tuple[int, int]]) -> bool:
    """Whether a block begins and ends in blocks of these places and sizes."""
    return all(
        any(place <= byte < place + size for place, size in places)
        for byte in (start, start + nbytes - 1)
    )
