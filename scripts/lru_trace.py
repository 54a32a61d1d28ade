"""Made-up routing with the hit rates that LRU caches are asked to have."""

from collections.abc import Mapping

import numpy as np


def lru_trace(
    hit_rates: Mapping[int, float],
    *,
    num_steps: int,
    num_layers: int,
    num_experts: int,
    width: int,
    seed: int = 0,
) -> np.ndarray:
    """Experts of one token a step, such that LRU caches hit as often as asked.

    An expert's stack distance is the number of others that were used since its last use. Each step
    takes `width` of the distances, position d with the probability that the curve's slope says
    there (systematic sampling, so that the shares hold exactly in the mean).

    Args:
      hit_rates: slots to the share of hits, both rising; all experts hit always.
      num_layers: M, whose traces are independent.
      width: A, experts a token.

    Returns:
      int32[num_steps, M, A], no expert twice in a token.

    Raises:
      ValueError: a slope that `width` experts a step cannot have.
    """
    chosen = np.zeros(num_experts)
    before, reached = 0, 0.0
    for slots, share in [*sorted(hit_rates.items()), (num_experts, 1.0)]:
        chosen[before:slots] = width * (share - reached) / max(1, slots - before)
        before, reached = slots, share
    if not np.all((chosen >= 0) & (chosen <= 1)):
        raise ValueError(f"{width} experts a step cannot have hit rates {dict(hit_rates)}")
    rng = np.random.default_rng(seed)
    trace = np.zeros((num_steps, num_layers, width), np.int32)
    for layer in range(num_layers):
        stack = rng.permutation(num_experts)  # the latest use first
        for step in range(num_steps):
            order = rng.permutation(num_experts)
            edges = np.cumsum(chosen[order])
            edges[-1] = width  # what rounding left of it
            places = order[np.searchsorted(edges, rng.uniform() + np.arange(width), side="right")]
            trace[step, layer] = stack[places]
            stack = np.concatenate([stack[places], np.delete(stack, places)])
    return trace
