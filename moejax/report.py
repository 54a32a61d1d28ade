"""What a run cost, in one line: times, throughput, peak memory."""

import math
import resource
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

    from moejax.generation import Timing

_MIB = 2**20


def closing_line(
    timing: "Timing", *, prompt_tokens: int, new_tokens: int, device_peak_bytes: int | None
) -> str:
    """The figures of a request, or of a batch of them, for people.

    Args:
      timing: of the whole call; compiling is in none of its times, and is printed apart.
      prompt_tokens: of all prompts.
      new_tokens: of all answers; tokens/s is these over the whole time, prefill included.
      device_peak_bytes: see the function of this name.
    """
    total_s = timing.ttft_s + timing.decode_s
    tpot = "n/a" if math.isnan(timing.tpot_s) else f"{1e3 * timing.tpot_s:.2f} ms"
    return (
        f"prompt tokens {prompt_tokens}, new tokens {new_tokens}, "
        f"TTFT {1e3 * timing.ttft_s:.1f} ms, TPOT {tpot}, {new_tokens / total_s:.1f} tokens/s, "
        f"peak memory: device {_mib(device_peak_bytes)}, host {_mib(host_peak_bytes())}; "
        f"compile {timing.compile_s:.2f} s (in none of the times)"
    )


def host_peak_bytes() -> int:
    """The largest resident set that this process has had."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def device_peak_bytes(device: "jax.Device") -> int | None:
    """The most memory that JAX has held on `device`; None where it does not count (CPU)."""
    statistics = device.memory_stats() or {}
    return statistics.get("peak_bytes_in_use")


def _mib(num_bytes: int | None) -> str:
    return "n/a" if num_bytes is None else f"{num_bytes / _MIB:.0f} MiB"
