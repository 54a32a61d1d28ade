"""A trace cut into calls of one shape, to replay policies."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.routing.trace import DECODE, Trace

CALL_STEPS = 16  # decode steps of a call, where the trace does not know: those of the engine
_LEAST_ROWS = 16  # tokens of a prompt's chunk are padded to a power of two from here on


class LayerTokens(NamedTuple):
    """Routing of N tokens at one layer; arrays as in `moejax.routing.trace`, no layer axis."""

    ids: Any
    weights: Any
    probabilities: Any
    importance: Any
    predicted_ids: Any
    predicted_probabilities: Any

    def dense(self, num_experts: int) -> tuple[Any, ...]:
        """Observation's ids, weights, probabilities [N, E], importance and predicted [N, E].

        If the trace lacks probabilities, they are the weights, and 0 for experts that were not
        chosen.
        """
        ids, weights = self.ids.astype(jnp.int32), self.weights.astype(jnp.float32)
        probabilities = self.probabilities
        if probabilities is None:
            probabilities = _spread(ids, weights, num_experts)
        predicted = None
        if self.predicted_ids is not None:
            foreseen = self.predicted_ids.astype(jnp.int32)
            predicted = _spread(
                foreseen, self.predicted_probabilities.astype(jnp.float32), num_experts
            )
        importance = self.importance
        if importance is not None:
            importance = importance.astype(jnp.float32)
        return ids, weights, probabilities.astype(jnp.float32), importance, predicted


class Tokens(NamedTuple):
    """Tokens of a step: active bool[N], layers' arrays [N, M, ...]; calls stack more axes."""

    active: Any
    layers: LayerTokens

    def by_layer(self) -> LayerTokens:
        """Moves the layer axis to the front."""
        return jax.tree.map(lambda array: jnp.swapaxes(array, 0, 1), self.layers)


class Segment(NamedTuple):
    """Calls of one shape: tokens [calls, steps, ...]."""

    tokens: Tokens
    is_prefill: bool


def segments(trace: Trace) -> Iterator[Segment]:
    """Cuts the trace in order; padding of a call or a step is not active."""
    _, starts, sizes = np.unique(trace.step, return_index=True, return_counts=True)
    phases = trace.phase[starts]
    layers, per_call = _layers(trace), trace.steps_per_call or CALL_STEPS

    def kind(s: int) -> tuple[bool, int]:
        if phases[s] == DECODE:
            return False, int(sizes[s])
        return True, max(_LEAST_ROWS, 1 << (int(sizes[s]) - 1).bit_length())

    for (is_prefill, rows), group in itertools.groupby(range(len(starts)), kind):
        steps = list(group)
        length = 1 if is_prefill else per_call
        shape = (-(-len(steps) // length), length, rows)
        index = np.full((shape[0] * length, rows), -1, np.int64)
        for place, s in enumerate(steps):
            index[place, : sizes[s]] = starts[s] + np.arange(sizes[s])
        index = index.reshape(shape)
        yield Segment(Tokens(index >= 0, jax.tree.map(_rows(index), layers)), is_prefill)


def _rows(index: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that takes these rows of an array."""
    return lambda array: array[index]


def _layers(trace: Trace) -> LayerTokens:
    """Routing of all layers [N, M, ...]; the last layer predicts nothing."""

    def padded(array: np.ndarray | None) -> np.ndarray | None:
        if array is None:
            return None
        return np.pad(array, ((0, 0), (0, 1), (0, 0)))

    return LayerTokens(
        trace.ids,
        trace.weights,
        trace.probabilities,
        trace.importance,
        padded(trace.predicted_ids),
        padded(trace.predicted_probabilities),
    )


def _spread(ids: jax.Array, values: jax.Array, num_experts: int) -> jax.Array:
    """Scatters values [N, n] at ids [N, n] to float32[N, E]."""
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    return jnp.sum(
        jnp.where(ids[:, :, None] == expert[None, None], values[:, :, None], 0.0), axis=1
    )
