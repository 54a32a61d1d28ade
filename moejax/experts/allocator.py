"""Checks a plan against the memory that a device's allocator has left."""

import dataclasses
import math
from collections.abc import Mapping

import jax
from absl import logging

from moejax.experts.budget import GIB, BudgetError, Limits, gib_above

# Parts of a budget that a run may get by with less of: estimates, and the cache and the states of
# contexts and sequences that the prompts may not need.
_AT_MOST = ("activations", "KV cache", "states", "reserve", "staging", "importance",
            "experts gathered", "experts on their way")  # how they begin  # fmt: skip


def room_nbytes(device: jax.Device, planned_nbytes: int = 0) -> int | None:
    """Bytes that JAX can still allocate on a device; None where it does not say (CPU).

    Less than what XLA_CLIENT_MEM_FRACTION seems to give: the fraction is of what CUDA's own context
    leaves, and rounded down.

    Args:
      planned_nbytes: bytes in use that the plan counts itself.
    """
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is None:
        return None
    return limit - max(0, stats.get("bytes_in_use", 0) - planned_nbytes)


def device_limits(device: jax.Device, limits: Limits, planned_nbytes: int = 0) -> Limits:
    """Lowers a stated limit of the device to `room_nbytes`; logs where it does."""
    room = room_nbytes(device, planned_nbytes)
    if room is None or not limits.device_gib or int(limits.device_gib * GIB) <= room:
        return limits
    found = dataclasses.replace(limits, device_gib=max(1, room) / GIB)
    logging.warning(
        "memory.device_gib=%g, but the allocator of %s has %.3f GiB left "
        "(XLA_CLIENT_MEM_FRACTION, what is in use): planning for that",
        limits.device_gib, device, found.device_gib,
    )  # fmt: skip
    return found


def check_room(parts: Mapping[str, int], room_nbytes: int | None) -> None:
    """Raises BudgetError if weights and experts exceed the room of a device without a limit."""
    least = sum(n for part, n in parts.items() if not part.startswith(_AT_MOST))
    if room_nbytes is not None and least > room_nbytes:
        left = math.floor(max(0, room_nbytes) / GIB * 1000) / 1000
        raise BudgetError(
            f"the weights take {gib_above(least)}, but the device's allocator has {left:g} GiB "
            "left: state memory.device_gib, up to which experts stay on the device while the "
            "others move, or let JAX have more (XLA_CLIENT_MEM_FRACTION)"
        )
