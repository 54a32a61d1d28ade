"""A synthetic trace of a real shape, for `python -m moejax.sweep` where there are no weights.

    python -m scripts.make_trace --shape=Qwen3-30B-A3B --tokens=10000 --out=qwen3.trace

Experts recur so that LRU caches have the hit rates of `moejax.benchmarking.routing`;
weights are equal and nothing is foreseen. Qwen3's 10,000 tokens take 12 MB and two minutes.
"""

from collections.abc import Mapping
from pathlib import Path

from absl import app, flags

from moejax.benchmarking.routing import QWEN3_HIT_RATES
from moejax.models.shapes import SHAPES
from moejax.routing.trace import trace_of_replay, write_trace
from scripts.lru_trace import lru_trace

# By the name of a shape; no rates of the others are published, and experts are drawn evenly.
HIT_RATES: Mapping[str, Mapping[int, float]] = {"Qwen3-30B-A3B": QWEN3_HIT_RATES}

_SHAPE = flags.DEFINE_enum("shape", "Qwen3-30B-A3B", sorted(SHAPES), "whose routing")
_TOKENS = flags.DEFINE_integer("tokens", 10_000, "decoded, one a step", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "of the draws")
_OUT = flags.DEFINE_string("out", None, "the file", required=True)


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
