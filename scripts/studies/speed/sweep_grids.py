"""Grids of settings for `scripts.studies.speed.bench_sweep`."""

from typing import Any

import numpy as np

from moejax.policies.buddy_lists import BuddyLists, buddy_lists, conditional_coactivation
from moejax.routing.simulate.sweeping import LRU, Tiers
from moejax.routing.trace import Trace

POLICIES = (LRU, "dynaexq", "dymoe", "dymoe_ahead", "buddymoe", "compose")
# Bytes of an expert of Qwen3-30B-A3B, groups of 64.
ONE = Tiers(names=("int4",), expert_bytes=(2_654_208,))
TWO = Tiers(names=("int4", "int2"), expert_bytes=(2_654_208, 1_474_560))
_ALPHA, _MOST_BUDDIES = 0.95, 16


def tiers_of(policy: str) -> Tiers:
    """The forms in which it has experts."""
    return ONE if policy in (LRU, "buddymoe") else TWO


def lists_of(trace: Trace) -> BuddyLists:
    """By its own co-activations, up to 16 buddies an expert."""
    counts = np.zeros((trace.num_layers, trace.num_experts, trace.num_experts), np.float32)
    for layer in range(trace.num_layers):
        marks = np.zeros((len(trace), trace.num_experts), np.float32)
        np.put_along_axis(marks, trace.ids[:, layer].astype(np.int64), 1, axis=1)
        counts[layer] = marks.T @ marks
    return buddy_lists(conditional_coactivation(counts), _ALPHA, _MOST_BUDDIES)


def grid_of(policy: str, count: int, num_experts: int, lists: Any) -> list[dict[str, Any]]:
    """So many different settings, more of them by other values of the settings than slots.

    `lists`: of those that take buddies, one profile for all settings.
    """
    found: list[dict[str, Any]] = []
    for i in range(count):
        slots = 1 + i % (num_experts - 1)
        if policy == LRU:
            found.append({"slots": slots, "prefetch": i // (num_experts - 1) % 2})
        elif policy == "dynaexq":
            found.append({"slots": (slots, num_experts), "period": 32 + i})
        elif policy == "buddymoe":
            found.append({"slots": slots, "lists": lists, "rho": i % 9, "half_life": 64.0 + i})
        else:
            ahead = {"prefetch": -1 if policy == "dymoe_ahead" else 0}
            cheap = 1 + (i * 7) % (num_experts - 1)
            retention = 0.5 + 0.5 * (i % 101) / 100
            found.append({"slots": (slots, cheap), "retention": retention} | ahead)
            if policy == "compose":
                both = {"parts": "dynaexq+dymoe+buddymoe", "period": 32 + i}
                found[-1] |= both | {"lists": lists, "rho": i % 9}
    return found
