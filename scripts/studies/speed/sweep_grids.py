"""Grids of settings for `scripts.studies.speed.bench_sweep`."""

from typing import Any

import numpy as np

from moejax.policies.buddy_lists import BuddyLists, buddy_lists, conditional_coactivation
from moejax.routing.simulate.sweeping import LRU, Tiers
from moejax.routing.trace import DECODE, Trace, id_dtype

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


def drifting_trace(
    *,
    num_steps: int,
    num_layers: int,
    num_experts: int,
    width: int,
    foreseen: int = 0,
    seed: int = 0,
) -> Trace:
    """A decoded sequence by routers whose tastes drift: fast to make, whole probabilities with it.

    Logits are a taste of each layer, a walk around it that halves in 200 tokens, and noise of each
    token; what is foreseen is the truth with noise.

    Args:
      num_steps: tokens, one a step.
      num_layers: M.
      num_experts: E.
      width: A.
      foreseen: P, experts foreseen of each next layer; 0: none.
      seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    taste = rng.normal(0, 1.5, (num_layers, num_experts)).astype(np.float32)
    drift = np.zeros_like(taste)
    kept = np.float32(0.5 ** (1 / 200))
    kind = id_dtype(num_experts)
    ids = np.zeros((num_steps, num_layers, width), kind)
    weights = np.zeros(ids.shape, np.float16)
    shares = np.zeros((num_steps, num_layers, num_experts), np.float16)
    guess = np.zeros((num_steps, num_layers - 1, foreseen), kind)
    expected = np.zeros(guess.shape, np.float16)
    step_size = np.float32(1.5 * (1 - kept**2) ** 0.5)
    for step in range(num_steps):
        drift = kept * drift + step_size * rng.standard_normal(taste.shape, np.float32)
        logits = taste + drift + rng.standard_normal(taste.shape, np.float32)
        found = np.exp(logits - logits.max(axis=1, keepdims=True))
        found /= found.sum(axis=1, keepdims=True)
        shares[step] = found
        ids[step], chosen = _largest(found, width)
        weights[step] = chosen / chosen.sum(axis=1, keepdims=True)
        if foreseen:
            noise = np.exp(0.3 * rng.standard_normal(taste.shape, np.float32))
            guess[step], expected[step] = _largest((found * noise)[1:], foreseen)
    count = np.arange(num_steps, dtype=np.int32)
    trace = Trace(
        num_experts=num_experts,
        step=count,
        sequence=np.zeros(num_steps, np.int32),
        position=count,
        phase=np.full(num_steps, DECODE, np.uint8),
        ids=ids,
        weights=weights,
        predicted_ids=guess if foreseen else None,
        predicted_probabilities=expected if foreseen else None,
        probabilities=shares,
    )
    trace.check()
    return trace


def _largest(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Places and values of the largest few of each row, falling."""
    found = np.argpartition(-values, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(values, found, 1), axis=1)
    found = np.take_along_axis(found, order, 1)
    return found, np.take_along_axis(values, found, 1)
