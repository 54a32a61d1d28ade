"""Random traces for tests: steps of one token, of a few, of many; foreseen experts now and then."""

import numpy as np

from moejax.routing.trace import DECODE, PREFILL, Trace, id_dtype


def random_trace(
    *,
    step_sizes: list[int],
    num_layers: int,
    num_experts: int,
    width: int,
    foreseen: int = 0,
    seed: int = 0,
) -> Trace:
    """Tokens whose experts recur; steps of one token decode, the others are prompts."""
    rng = np.random.default_rng(seed)
    rows = sum(step_sizes)
    taste = rng.normal(0, 1.5, (num_layers, num_experts))
    step = np.repeat(np.arange(len(step_sizes), dtype=np.int32), step_sizes)
    noise = rng.gumbel(size=(rows, num_layers, num_experts))
    scores = taste + noise
    shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    ids = np.argsort(-scores, axis=-1)[..., :width]
    guess = np.argsort(-(scores + 0.5 * rng.gumbel(size=scores.shape)), axis=-1)
    guess = guess[:, 1:, :foreseen]
    predicted = None
    if foreseen:
        predicted = -np.sort(-np.take_along_axis(shares[:, 1:], guess, -1), axis=-1)
    kind = id_dtype(num_experts)
    phases = np.where(np.asarray(step_sizes) == 1, DECODE, PREFILL)
    trace = Trace(
        num_experts=num_experts,
        step=step,
        sequence=np.zeros(rows, np.int32),
        position=np.arange(rows, dtype=np.int32),
        phase=phases[step].astype(np.uint8),
        ids=ids.astype(kind),
        weights=np.take_along_axis(shares, ids, -1).astype(np.float16),
        predicted_ids=guess.astype(kind) if foreseen else None,
        predicted_probabilities=None if predicted is None else predicted.astype(np.float16),
        probabilities=shares.astype(np.float16),
        facts={"model": "random"},
    )
    trace.check()
    return trace
