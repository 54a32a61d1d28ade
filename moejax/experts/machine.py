"""Memory of this machine, and what the device's allocator has left, as a plan needs them."""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from absl import logging

from moejax.experts.budget import GIB, PINNED_LIMIT, BudgetError, Limits, MachineMemory, gib_above

if TYPE_CHECKING:  # help and mistakes do not wait for it
    import jax

_DEFAULT_PINNED_GIB = 64  # XLA's own


def this_machine(platform: str) -> MachineMemory:
    """Reads the memory that is left, and how much a run on the platform could pin."""
    available = _available_nbytes()
    if platform != "gpu":
        return MachineMemory(host_nbytes=available)
    limit = pinned_limit_nbytes()
    if PINNED_LIMIT not in os.environ:  # `raise_pinned_limit` would set it
        limit = max(limit, available or 0)
    return MachineMemory(host_nbytes=available, pinned_nbytes=limit)


def raise_pinned_limit(platform: str) -> str | None:
    """Lets JAX pin the memory left, unless a limit is set; before it finds devices.

    Returns:
      A line that says what was set; None where XLA's own limit does.
    """
    available = _available_nbytes()
    no_gpu = platform == "cpu" or (platform == "auto" and not _has_gpu())
    is_set = PINNED_LIMIT in os.environ
    if no_gpu or is_set or available is None or available <= pinned_limit_nbytes():
        return None
    os.environ[PINNED_LIMIT] = str(available // GIB)
    return f"{PINNED_LIMIT}={available // GIB} is set: what memory is left may be pinned"


def _has_gpu() -> bool:
    """Whether Linux shows an NVIDIA GPU, under WSL too; works before JAX starts."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def pinned_limit_nbytes() -> int:
    """Bytes that JAX may pin in this process, as it was when JAX started."""
    try:
        return int(float(os.environ.get(PINNED_LIMIT, "")) * GIB)
    except (ValueError, OverflowError):  # nothing, no number, or "inf"
        return _DEFAULT_PINNED_GIB * GIB


def _available_nbytes(path: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that processes can still take; None where the system does not say."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


# Parts of a budget that a run may get by with less of: estimates, and the cache and the states of
# contexts and sequences that the prompts may not need.
_AT_MOST = ("activations", "KV cache", "states", "reserve", "staging", "importance",
            "experts gathered", "experts on their way")  # how they begin  # fmt: skip


def room_nbytes(device: "jax.Device", planned_nbytes: int = 0) -> int | None:
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


def device_limits(device: "jax.Device", limits: Limits, planned_nbytes: int = 0) -> Limits:
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
