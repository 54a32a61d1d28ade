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
from typing import NamedTuple

import jax
import numpy as np

from moejax.devices import DeviceMesh, Place
from moejax.errors import MoejaxError
from moejax.experts.budget import GIB, PINNED_LIMIT
from moejax.experts.machine import pinned_limit_nbytes

_PINNED = "pinned_host"


class _HostArray(NamedTuple):
    """An array in host memory, and numpy's writable views of what each device has of it.

    Changes are seen through the views and by programs that take the array. `np.asarray` of the
    array may be a copy that JAX made once and keeps.
    """

    array: jax.Array
    views: tuple[np.ndarray, ...]


def _is_pinned(device: jax.Device) -> bool:
    """Whether the host memory of a device is pinned memory of its own; on a CPU it is ordinary."""
    return device.platform == "gpu"


def allocate_host_arrays(
    shapes: Sequence[jax.ShapeDtypeStruct], device: jax.Device, mesh: DeviceMesh | None = None
) -> list[_HostArray]:
    """Allocates arrays in a device's host memory; MoejaxError where it cannot be had.

    Their content is undefined. On a mesh each device has an array of each shape, joined to one.
    """
    devices = [device] if mesh is None else list(mesh.local.values())
    nbytes = len(devices) * sum(part.size * np.dtype(part.dtype).itemsize for part in shapes)
    check_pinned_limit(nbytes, device)
    kind = "pinned host memory" if _is_pinned(device) else "host memory"
    with plain_memory_errors(nbytes, kind):
        found = []
        for part in shapes:
            own = [_allocate(part.shape, np.dtype(part.dtype), each) for each in devices]
            views = tuple(_view(array) for array in jax.block_until_ready(own))
            found.append(_HostArray(own[0] if mesh is None else mesh.join(own), views))
        return found


def host_place(device: jax.Device) -> Place:
    """Where `jax.device_put` puts what programs read from host memory; on a CPU the device.

    The types of such arrays tell where they are, those of `allocate_host_arrays` do not.
    """
    if not _is_pinned(device):
        return device
    return jax.sharding.SingleDeviceSharding(device, memory_kind=_PINNED)


def check_pinned_limit(nbytes: int, device: jax.Device) -> None:
    """Raises MoejaxError where a device cannot be given `nbytes` of pinned memory."""
    limit = pinned_limit_nbytes()
    if _is_pinned(device) and nbytes > limit:
        enough = math.ceil(nbytes * 1.125 / GIB)  # an eighth for what else is pinned
        raise MoejaxError(
            f"{nbytes / GIB:.1f} GiB of weights are more than the {limit / GIB:.0f} GiB of host "
            f"memory that JAX may pin; set {PINNED_LIMIT}={enough} before it "
            "starts, or a lower host_gib"
        )


@contextlib.contextmanager
def plain_memory_errors(nbytes: int, kind: str) -> Iterator[None]:
    """Turns a failed allocation of host memory, of such a kind, into a MoejaxError of one line."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise MoejaxError(
            f"{nbytes / GIB:.2f} GiB of {kind} for experts cannot be had ({reason}): set a lower "
            "host_gib, or stop what else holds the memory of this machine"
        ) from error


def _allocate(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> jax.Array:
    kind = _PINNED if _is_pinned(device) else None
    return _allocator(shape, dtype, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))()


@functools.cache
def _allocator(
    shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.SingleDeviceSharding
) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jax.lax.empty(shape, dtype), out_shardings=sharding)


def _view(array: jax.Array) -> np.ndarray:
    """The memory of an array, writable; the view keeps the array alive."""
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    memory.owner = array  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(memory), np.uint8).view(array.dtype).reshape(array.shape)
