"""Grids of settings for `scripts.bench_sweep`."""

from typing import Any

from moejax.simulation.sweeping import LRU

POLICIES = (LRU, "dynaexq", "dymoe", "dymoe_ahead")


def grid_of(policy: str, count: int, num_experts: int) -> list[dict[str, Any]]:
    """So many different settings, more of them by other values of the settings than slots."""
    found: list[dict[str, Any]] = []
    for i in range(count):
        slots = 1 + i % (num_experts - 1)
        if policy == LRU:
            found.append({"slots": slots, "prefetch": i // (num_experts - 1) % 2})
        elif policy == "dynaexq":
            found.append({"slots": (slots, num_experts), "period": 32 + i})
        else:
            ahead = {"prefetch": -1 if policy == "dymoe_ahead" else 0}
            cheap = 1 + (i * 7) % (num_experts - 1)
            retention = 0.5 + 0.5 * (i % 101) / 100
            found.append({"slots": (slots, cheap), "retention": retention} | ahead)
    return found
