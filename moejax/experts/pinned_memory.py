"""Host memory that a device reads from: allocated once by JAX, written to through numpy.

`jax.lax.empty` lets XLA allocate the array in its final place. For `jnp.zeros` with the same output
sharding XLA makes a temporary of that size on the device first and copies it (1 GiB for 1 GiB,
compiled for an H100, jax 0.11.2, 2026-11-21), and numpy memory would be held twice.
"""

import contextlib
import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.errors import MoejaxError
from moejax.experts.budget import PINNED_LIMIT
from moejax.experts.machine import pinned_limit_nbytes

_PINNED = "pinned_host"
_GIB = 2**30


class Place(NamedTuple):
    """An array and numpy's view of its memory.

    Changes are seen through the view and by programs that take the array. `np.asarray` of the array
    may be a copy that JAX made once and keeps.

    Where the platform gives no pointer there is only one of them: a view that is to be filled and
    put there by `filled_place`, or an array that was.
    """

    array: jax.Array | None
    view: np.ndarray | None


def is_pinned(device: jax.Device) -> bool:
    """Whether the host memory of a device is pinned memory of its own; on a CPU it is ordinary."""
    return device.platform == "gpu"


def allocate_place(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> Place:
    """Allocates an array in a device's host memory; its content is undefined."""
    array = jax.block_until_ready(_allocator(shape, np.dtype(dtype), _sharding(device))())
    view = _view(array)
    return Place(None, np.empty(shape, dtype)) if view is None else Place(array, view)


def allocate_blocks(
    row: Sequence[Any], num_blocks: int, device: jax.Device, advice: str
) -> list[list[Place]]:
    """Allocates host blocks for experts in flight, each part writable.

    Args:
      row: the parts of one expert, shapes and dtypes.
      device: reads the blocks.
      advice: what to do where the platform gives no pointer to them.

    Raises:
      MoejaxError: they cannot be had, or not be written to.
    """
    nbytes = num_blocks * sum(math.prod(p.shape) * np.dtype(p.dtype).itemsize for p in row)
    check_pinned_limit(nbytes, device)
    with plain_memory_errors(nbytes, device):
        blocks = [
            [allocate_place(p.shape, p.dtype, device) for p in row] for _ in range(num_blocks)
        ]
    if any(place.array is None for block in blocks for place in block):
        raise MoejaxError(
            f"{device} gives no pointer to its host memory, through which experts would go: "
            f"{advice}"
        )
    return blocks


def filled_place(view: np.ndarray, device: jax.Device) -> Place:
    """Copies numpy memory into a device's host memory, read-only."""
    return Place(jax.block_until_ready(jax.device_put(view, _sharding(device))), None)


def check_pinned_limit(nbytes: int, device: jax.Device) -> None:
    """Raises MoejaxError where a device cannot be given `nbytes` of pinned memory."""
    limit = pinned_limit_nbytes()
    if is_pinned(device) and nbytes > limit:
        raise MoejaxError(
            f"{nbytes / _GIB:.1f} GiB of experts are more than the {limit / _GIB:.0f} GiB of host "
            f"memory that JAX may pin; set {PINNED_LIMIT}={_enough_gib(nbytes)} before it "
            "starts, or a lower host_gib"
        )


@contextlib.contextmanager
def plain_memory_errors(nbytes: int, device: jax.Device) -> Iterator[None]:
    """Turns a failed allocation of host memory into one line.

    Raises:
      MoejaxError: memory could not be had inside the block.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        kind = "pinned host memory" if is_pinned(device) else "host memory"
        raise MoejaxError(
            f"{nbytes / _GIB:.2f} GiB of {kind} for experts cannot be had ({reason}): set a lower "
            "host_gib, or stop what else holds the memory of this machine"
        ) from error


def _enough_gib(nbytes: int) -> int:
    """GiB for so many bytes, and an eighth for what else is pinned."""
    return math.ceil(nbytes * 1.125 / _GIB)


def _sharding(device: jax.Device) -> jax.sharding.SingleDeviceSharding:
    kind = _PINNED if is_pinned(device) else None
    return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)


@functools.cache
def _allocator(
    shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.SingleDeviceSharding
) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jax.lax.empty(shape, dtype), out_shardings=sharding)


def _view(array: jax.Array) -> np.ndarray | None:
    """The memory of an array, writable; None where the platform gives no pointer to it.

    The view keeps the array alive.
    """
    try:
        address = array.unsafe_buffer_pointer()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        return None
    memory = (ctypes.c_uint8 * array.nbytes).from_address(address)
    memory.owner = array  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(memory), np.uint8).view(array.dtype).reshape(array.shape)
