"""What this machine has, as far as a plan wants to know."""

import os
from pathlib import Path

from moejax.memory.budget import GIB, PINNED_LIMIT, Machine

_DEFAULT_PINNED_GIB = 64  # XLA's own


def this_machine(platform: str) -> Machine:
    """What Linux says of the memory that is left, and XLA's environment of pinned memory.

    Args:
      platform: "gpu", or one whose host memory is not pinned.
    """
    if platform != "gpu":
        return Machine(host_nbytes=available_nbytes())
    return Machine(host_nbytes=available_nbytes(), pinned_nbytes=pinned_limit_nbytes())


def pinned_limit_nbytes() -> int:
    """Bytes that JAX may pin in this process, as it was when JAX started."""
    try:
        return int(float(os.environ.get(PINNED_LIMIT, "")) * GIB)
    except (ValueError, OverflowError):  # nothing, no number, or "inf"
        return _DEFAULT_PINNED_GIB * GIB


def available_nbytes(path: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that processes can still take; None where the system does not say."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
