"""Memory of this machine, as a plan needs it."""

import os
from pathlib import Path

from moejax.experts.budget import GIB, PINNED_LIMIT, Machine

_DEFAULT_PINNED_GIB = 64  # XLA's own


def this_machine(platform: str) -> Machine:
    """Reads the memory that is left, and how much a run on the platform could pin."""
    available = available_nbytes()
    if platform != "gpu":
        return Machine(host_nbytes=available)
    limit = pinned_limit_nbytes()
    if PINNED_LIMIT not in os.environ:  # `raise_pinned_limit` would set it
        limit = max(limit, available or 0)
    return Machine(host_nbytes=available, pinned_nbytes=limit)


def raise_pinned_limit(platform: str) -> str | None:
    """Lets JAX pin the memory left, unless a limit is set; before it finds devices.

    Returns:
      A line that says what was set; None where XLA's own limit does.
    """
    available = available_nbytes()
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


def available_nbytes(path: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that processes can still take; None where the system does not say."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
