"""A synthetic trace of a real shape, for `python -m moejax.sweep` where there are no weights.

    python -m scripts.make_trace --shape=Qwen3-30B-A3B --tokens=10000 --out=qwen3.trace

Experts are drawn as `moejax.benchmark` draws them (`moejax.benchmarking.routing`): those of
Qwen3-30B-A3B so that LRU caches hit as a published curve, others evenly. Weights are equal and
nothing is foreseen. Qwen3's 10,000 tokens take 12 MB.
"""

import dataclasses
from pathlib import Path

import numpy as np
from absl import app, flags

from moejax.benchmarking.routing import EXPONENTS, make_workload
from moejax.models.shapes import SHAPES
from moejax.routing.trace import trace_of_replay, write_trace

_SHAPE = flags.DEFINE_enum("shape", "Qwen3-30B-A3B", sorted(SHAPES), "whose routing")
_TOKENS = flags.DEFINE_integer("tokens", 10_000, "decoded, one a step", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "of the draws")
_OUT = flags.DEFINE_string("out", None, "the file", required=True)


def main(argv: list[str]) -> None:
    """Writes the trace."""
    del argv
    shape, exponent = SHAPES[_SHAPE.value], EXPONENTS.get(_SHAPE.value, 0.0)
    one = dataclasses.replace(shape, num_layers=1, moe_layers=(0,))
    num_layers = len(shape.moe_layers)
    replay = np.empty((_TOKENS.value, num_layers, shape.experts_per_token), np.int32)
    for layer in range(num_layers):  # one at a time: all probabilities are gigabytes
        seed = _SEED.value * num_layers + layer
        made = make_workload(one, num_steps=_TOKENS.value, batch=1, exponent=exponent, seed=seed)
        replay[:, layer] = made.ids[:, 0, 0]
    write_trace(Path(_OUT.value).expanduser(), trace_of_replay(replay, shape.num_experts))


if __name__ == "__main__":
    app.run(main)
