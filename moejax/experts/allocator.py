"""Checks a plan against the memory that a device's allocator has left."""

from collections.abc import Mapping

import jax
from absl import logging

from moejax.experts.budget import Limits, narrowed, require_room


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


def limits_on(device: jax.Device, limits: Limits, planned_nbytes: int = 0) -> Limits:
    """Returns the limits on a device; logs where its allocator is tighter.

    Args:
      planned_nbytes: as in `room_nbytes`.
    """
    found = narrowed(limits, room_nbytes(device, planned_nbytes))
    if found.device_gib != limits.device_gib:
        logging.warning(
            "memory.device_gib=%g, but the allocator of %s has %.3f GiB left "
            "(XLA_CLIENT_MEM_FRACTION, what is in use): planning for that",
            limits.device_gib, device, found.device_gib,
        )  # fmt: skip
    return found


def check_room(device: jax.Device, limits: Limits, parts: Mapping[str, int]) -> None:
    """Raises, before loading, if a device without a stated limit lacks room.

    Args:
      limits: under a limit of the device the plan holds what `limits_on` gave.
      parts: bytes on the device by part.

    Raises:
      BudgetError: see `budget.require_room`.
    """
    if not limits.device_gib:
        require_room(parts, room_nbytes(device))
