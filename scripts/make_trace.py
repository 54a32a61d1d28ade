"""A synthetic trace of a real shape, for `python -m moejax.sweep` where there are no weights.

    python -m scripts.make_trace --shape=Qwen3-30B-A3B --tokens=10000 --out=qwen3.trace

Experts recur so that LRU caches have the hit rates of `moejax.benchmarking.routing`;
weights are equal and nothing is foreseen. Qwen3's 10,000 tokens take 12 MB and two minutes.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from absl import app, flags

from moejax.benchmarking.routing import QWEN3_HIT_RATES
from moejax.models.shapes import SHAPES
from moejax.routing.trace import trace_of_replay, write_trace

# By the name of a shape; no rates of the others are published, and experts are drawn evenly.
HIT_RATES: Mapping[str, Mapping[int, float]] = {"Qwen3-30B-A3B": QWEN3_HIT_RATES}

_SHAPE = flags.DEFINE_enum("shape", "Qwen3-30B-A3B", sorted(SHAPES), "whose routing")
_TOKENS = flags.DEFINE_integer("tokens", 10_000, "decoded, one a step", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "of the draws")
_OUT = flags.DEFINE_string("out", None, "the file", required=True)


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


def main(argv: list[str]) -> None:
    """Writes the trace."""
    del argv
    shape = SHAPES[_SHAPE.value]
    replay = lru_trace(
        HIT_RATES.get(_SHAPE.value, {}),
        num_steps=_TOKENS.value,
        num_layers=len(shape.moe_layers),
        num_experts=shape.num_experts,
        width=shape.experts_per_token,
        seed=_SEED.value,
    )
    trace = trace_of_replay(replay, shape.num_experts)
    write_trace(Path(_OUT.value).expanduser(), trace)


if __name__ == "__main__":
    app.run(main)
