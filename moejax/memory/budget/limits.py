"""What a run may take, and what is said where that is too little."""

import dataclasses
import math

from moejax.errors import MoejaxError

GIB = 2**30


class BudgetError(MoejaxError):
    """Limits under which a model cannot run; the text names the smallest that would do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a run may take; 1 GiB is 2^30 bytes."""

    device_gib: float = 0.0  # of what JAX allocates on the accelerator; 0: no limit
    host_gib: float = 0.0  # of host memory for experts; 0: no limit
    disk_path: str = ""  # a copy of the checkpoint to read experts from; "": the checkpoint
    slots: int = -1  # C; -1: as many as fit
    transient: int = 0  # B; 0: the default
    prefetch: int = 0  # experts of the next layer that are fetched ahead
    bulk: int = 0  # experts that are on their way between steps at once; 0: none ever


def num_banks(limits: Limits) -> int:
    """Arrays of slots; see `Budget.banks`."""
    return 2 if limits.prefetch else 1


def limit_nbytes(gib: float) -> int | None:
    """Bytes of a limit in GiB; None for 0, which is none."""
    return int(gib * GIB) if gib else None


def gib_above(nbytes: int) -> str:
    """Bytes in GiB for people, rounded up to three digits or more: "11.94 GiB"."""
    gib = nbytes / GIB
    digits = 2 if gib >= 1 else 2 - math.floor(math.log10(max(gib, 1e-9)))
    return f"{math.ceil(gib * 10**digits) / 10**digits:.{digits}f} GiB"
