"""Memory limits of a run, and errors where they are too small."""

import dataclasses
import math

from moejax.errors import MoejaxError

GIB = 2**30
BOTH, PREFILL, DECODE = PHASES = ("both", "prefill", "decode")
_MOST_GIB = 1e9  # far beyond any machine, and of bytes that a float still counts
# more than 128 in flight change little: DynaExq asks for 32 a call, whose copies take four
_LEAST_BULK, _MOST_BULK, _BULK_BYTES, _SLOTS_EACH = 8, 128, 128 * 2**20, 12


def size_text(num_bytes: float) -> str:
    """Formats bytes such as "1.25 GiB", in a unit with digits before the point."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def default_bulk(expert_nbytes: int, num_slots: int) -> int:
    """Default of experts in flight between steps, at most one for twelve slots.

    A copy takes some calls from asking to serving, so that few at once follow a shift slowly; but
    each takes the bytes of a slot.

    Args:
      expert_nbytes: of an expert of the first tier, the largest that moves.
      num_slots: of that tier, in all layers.
    """
    most = min(_MOST_BULK, _BULK_BYTES // max(1, expert_nbytes), num_slots // _SLOTS_EACH)
    return max(_LEAST_BULK, most)


class BudgetError(MoejaxError):
    """A model cannot run under its limits; the text names the smallest that work."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Memory limits of a run; 1 GiB is 2^30 bytes."""

    device_gib: float = 0.0  # of what JAX allocates on the accelerator; 0: no limit
    host_gib: float = 0.0  # of host memory for experts; 0: no limit
    disk_path: str = ""  # a copy of the checkpoint to read experts from; "": the checkpoint
    slots: int = -1  # C; -1: as many as fit
    transient: int = 0  # B; 0: the default
    prefetch: int = 0  # experts of the next layer that are fetched ahead
    prefetch_in: str = BOTH  # the steps that do so, one of `PHASES`
    bulk: int = 0  # experts that are on their way between steps at once; 0: none ever
    host_threads: int = 0  # threads that multiply some misses; 0: none, -1: all cores but one


def check_gib(device_gib: float, host_gib: float, group: str = "memory.") -> None:
    """Raises BudgetError for an invalid size in GiB; `group` prefixes option names."""
    for name, gib in (("device_gib", device_gib), ("host_gib", host_gib)):
        if not 0 <= gib <= _MOST_GIB:
            most = f"at most {_MOST_GIB:g}"
            raise BudgetError(
                f"{group}{name}={gib} must be 0 (no limit) or a number of GiB, {most}"
            )


def check_phase(phase: str, group: str = "memory.") -> None:
    """Raises BudgetError for a name that is none of `PHASES`."""
    if phase not in PHASES:
        raise BudgetError(f"{group}prefetch_in={phase!r} is none of {', '.join(PHASES)}")


def num_banks(limits: Limits) -> int:
    """Number of banks that layers use in turn; two with prefetch, else one."""
    return 2 if limits.prefetch else 1


def limit_nbytes(gib: float) -> int | None:
    """Bytes of a limit in GiB; None for 0, which means no limit."""
    return int(gib * GIB) if gib else None


def gib_above(nbytes: int) -> str:
    """Bytes in GiB for people, rounded up to three digits or more: "11.94 GiB"."""
    gib = nbytes / GIB
    digits = 2 if gib >= 1 else 2 - math.floor(math.log10(max(gib, 1e-9)))
    return f"{math.ceil(gib * 10**digits) / 10**digits:.{digits}f} GiB"
