"""Report of a run in one line: times, throughput, peak memory."""

import contextlib
import math
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from moejax.experts.budget import Budget
    from moejax.inference.generation import Timing

_MIB = 2**20
NO_COUNTS = (
    "--stats: nothing to count, as all experts are on the device and no policy runs; under "
    "memory.device_gib, memory.slots or policy.name there may be"
)


def closing_line(
    timing: "Timing",
    *,
    prompt_tokens: int,
    new_tokens: int,
    device_peak_bytes: int | None,
    settings: str = "",
) -> str:
    """Formats the figures of a request, or of a batch, for people.

    Args:
      timing: the whole call's; compiling is in none of its times, and is printed apart.
      new_tokens: tokens of all answers; tokens/s is these over the whole time, prefill included.
      settings: defaults that the answer used; "" for none.
    """
    total_s = timing.ttft_s + timing.decode_s
    tpot = "n/a" if math.isnan(timing.tpot_s) else f"{1e3 * timing.tpot_s:.2f} ms"
    return (
        f"prompt tokens {prompt_tokens}, new tokens {new_tokens}, "
        f"TTFT {1e3 * timing.ttft_s:.1f} ms, TPOT {tpot}, {new_tokens / total_s:.1f} tokens/s, "
        f"peak memory: device {_mib(device_peak_bytes)}, host {_mib(host_peak_bytes())}; "
        f"compile {timing.compile_s:.2f} s (in none of the times){settings and f'; {settings}'}"
    )


def tracing(directory: str) -> contextlib.AbstractContextManager[Any]:
    """Writes a profiler trace of what runs inside to a directory; "" for none."""
    if not directory:
        return contextlib.nullcontext()
    import jax

    return jax.profiler.trace(Path(directory).expanduser())


def placement(budget: "Budget | None") -> list[str]:
    """Describes where the experts are stored, a line; nothing without a budget."""
    if budget is None:
        return []
    total = f"{budget.total_device / 2**30:.2f} GiB planned on the device"
    if len(budget.tiers) > 1:
        if budget.tiers[0].tier.shares_slots:
            named = " and ".join(budget.names)
            text = f"{budget.tiers[0].slots} planes of a layer cached, of {named}"
            return [f"memory: {text}; {total}"]
        slots = (
            f"{tier.said_slots} of {tier.num_experts} in {tier.tier.name}" for tier in budget.tiers
        )
        return [f"memory: experts of a layer cached: {', '.join(slots)}; {total}"]
    if not budget.pooled:
        return [f"memory: all experts are on the device, {total}"]
    (tier,) = budget.tiers
    return [
        f"memory: {tier.said_slots} of {tier.num_experts} experts of a layer cached, "
        f"{tier.transient} transient slots, {tier.host_rows} of "
        f"{tier.num_layers * tier.num_experts} experts in host memory, {total}"
    ]


def host_peak_bytes() -> int:
    """Largest resident set of this process so far."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def device_peak_bytes(device: "jax.Device") -> int | None:
    """Most memory that JAX has held on `device`; None if it does not count (CPU)."""
    statistics = device.memory_stats() or {}
    return statistics.get("peak_bytes_in_use")


def _mib(num_bytes: int | None) -> str:
    return "n/a" if num_bytes is None else f"{num_bytes / _MIB:.0f} MiB"
