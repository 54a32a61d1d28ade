"""Routing for models of random weights: replayed from a trace, or made up with a stated skew."""

import dataclasses

import numpy as np

from moejax.benchmarking.synthetic_traces import scaled_trace
from moejax.benchmarking.workloads import EXPONENTS, Workload, make_workload, predictions
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.routing.trace import DECODE, Trace, replay_of_trace

# Steps after which what is replayed begins again, and tokens in them at most.
MOST_STEPS, LEAST_STEPS, MOST_TOKENS = 256, 32, 2048
CHOSEN_MASS = 0.9  # of a softmax that a trace of chosen experts stands for


@dataclasses.dataclass(frozen=True)
class Routing:
    """What decode steps take in place of the router's choice, and where it is from."""

    work: Workload
    about: str


def num_steps(batch: int) -> int:
    """S of a workload for so many sequences."""
    return max(LEAST_STEPS, min(MOST_STEPS, MOST_TOKENS // batch))


def with_skew(
    config: ModelConfig,
    batch: int,
    *,
    shape: str,
    exponent: float | None,
    recall: float,
    seed: int,
) -> Routing:
    """Made up, popularity like Zipf's law (`workloads` says how).

    Args:
      config: of the model.
      batch: sequences.
      shape: its name, which says what skew is known of it.
      exponent: s; None: the shape's of `workloads.EXPONENTS`, else 0.
      recall: share of the needed experts that look-ahead expects.
      seed: of the draws.
    """
    why = "as asked"
    if exponent is None:
        exponent = EXPONENTS.get(shape, 0.0)
        why = f"{shape}'s own" if exponent else f"no skew of {shape} is published"
    steps = num_steps(batch)
    work = make_workload(
        config, num_steps=steps, batch=batch, exponent=exponent, recall=recall, seed=seed
    )
    popularity = f"popularity of rank r as r^-{exponent:g}" if exponent else "even popularity"
    how = f"{popularity} ({why}), {steps} steps over and over{_said(recall)}"
    return Routing(work, f"made up, {how}")


def of_trace(
    config: ModelConfig, trace: Trace, batch: int, *, recall: float, seed: int, name: str
) -> Routing:
    """Of the decoded tokens of a trace, the sequences of a batch at different places of it.

    A trace of another number of experts is scaled (`synthetic_traces.scaled_trace`), and its gates
    are made up; layers that it lacks are its layers again, from another place.

    Args:
      config: of the model.
      trace: as recorded.
      batch: sequences.
      recall: as in `with_skew`.
      seed: likewise.
      name: of the trace, for people.

    Raises:
      MoejaxError: nothing was decoded, or the trace cannot be scaled to the shape.
    """
    ids, gates = _scaled(config, trace, name)
    steps = num_steps(batch)
    work = workload_of(_spread(ids, batch, steps), _spread(gates, batch, steps), config.num_experts,
                       recall=recall, seed=seed)  # fmt: skip
    is_own = (trace.num_experts, trace.width) == (config.num_experts, config.experts_per_token)
    how = "its own gates" if is_own else f"scaled from {trace.num_experts} experts, gates made up"
    used = min(steps, len(ids))
    return Routing(work, f"trace {name}, {how}, {used} steps over and over{_said(recall)}")


def workload_of(
    ids: np.ndarray, gates: np.ndarray, num_experts: int, *, recall: float, seed: int
) -> Workload:
    """Chosen experts and their weights as what routers say: `CHOSEN_MASS` is theirs.

    Args:
      ids: int32[S, M, B, A].
      gates: float32[S, M, B, A], falling, sums of 1.
      num_experts: E.
      recall: as in `with_skew`.
      seed: likewise.
    """
    rest = (1 - CHOSEN_MASS) / max(1, num_experts - ids.shape[-1])
    probabilities = np.full((*ids.shape[:-1], num_experts), rest, np.float32)
    # A gate of 0 is a chosen expert all the same: not below what is not chosen.
    np.put_along_axis(probabilities, ids, CHOSEN_MASS * gates + rest, axis=-1)
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    rng = np.random.default_rng(seed)
    return Workload(ids, probabilities, predictions(rng, probabilities, ids, recall), 0)


def _scaled(config: ModelConfig, trace: Trace, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 and gates float32 [S, M, A] of a trace's first decoded sequence, for the shape."""
    is_decoded = trace.phase == DECODE
    first = int(trace.sequence[is_decoded][0]) if is_decoded.any() else None
    ids = replay_of_trace(trace, first)
    layers, experts, width = len(config.moe_layers), config.num_experts, config.experts_per_token
    if (trace.num_experts, trace.width) == (experts, width):
        gates = trace.weights[is_decoded & (trace.sequence == first)].astype(np.float32)
        order = np.argsort(-gates, axis=-1, kind="stable")
        pairs = (np.take_along_axis(rows, order, axis=-1) for rows in (ids, gates))
        ids, gates = (_over_layers(rows, layers) for rows in pairs)
        return ids, gates / gates.sum(axis=-1, keepdims=True)
    try:
        ids = scaled_trace(
            ids, trace.num_experts, num_layers=layers, of_experts=experts, width=width
        )
    except ValueError as error:
        raise MoejaxError(f"trace {name} does not suit the shape: {error}") from error
    falling = np.arange(width, 0, -1, dtype=np.float32)
    return ids, np.broadcast_to(falling / falling.sum(), ids.shape)


def _spread(rows: np.ndarray, batch: int, steps: int) -> np.ndarray:
    """[S, M, B, A] of [s, M, A]: the sequences of a batch read it from different places."""
    shape = (steps, *rows.shape[1:])
    places = [np.roll(rows, -(b * len(rows) // batch), axis=0) for b in range(batch)]
    return np.stack([np.resize(place, shape) for place in places], axis=2)


def _said(recall: float) -> str:
    return f"; look-ahead expects {100 * recall:g} % of what is needed"


def _over_layers(rows: np.ndarray, num_layers: int) -> np.ndarray:
    """[S, m, A] with more layers, or fewer: those again, from other places of the trace."""
    own = rows.shape[1]
    turns = -(-num_layers // own)
    return np.stack(
        [
            np.roll(rows[:, layer % own], -(layer // own * len(rows) // turns), axis=0)
            for layer in range(num_layers)
        ],
        axis=1,
    )
