"""A layer's index among the layers of its kind: a number or, in a loop, on the device."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.models.config import ModelConfig
from moejax.weights.linear import Index

# Layers per pass of the loop, the same wherever experts are. XLA on a CPU (jax 0.11.2) may
# end a float32 sum in another last bit where a pass ends than between two layers of one.
LAYERS_A_PASS = 2


class _NextMoeLayer(NamedTuple):
    """The next sparse layer."""

    layer: Index  # among all
    mlp: Index  # among the sparse ones


class LayerIndex(NamedTuple):
    """One layer: its indices (int32[] inside a loop over layers) and its static kinds."""

    layer: Index  # among all
    mixer: Index  # among those that attend, or those by a delta rule
    mlp: Index  # among the sparse layers, or the dense ones
    is_delta: bool
    is_sparse: bool
    next_moe: _NextMoeLayer | None  # None after the last sparse layer; in a loop that one itself
    turn: int  # `mlp` where that is static; in a loop that of the first pass
    window: int | None = None  # tokens that a query sees, itself included; None: all


class _Loop(NamedTuple):
    """A loop over layers first .. first + num_turns * num_passes - 1, `num_turns` a pass."""

    first: int
    num_turns: int
    num_passes: int

    @property
    def end(self) -> int:
        """First layer after the loop."""
        return self.first + self.num_turns * self.num_passes


@functools.cache
def layer_indices(config: ModelConfig) -> tuple[LayerIndex, ...]:
    """All layers' indices, in order."""
    found, counts = [], {"attention": 0, "delta": 0, "sparse": 0, "dense": 0}
    deltas = set(config.delta_net.layers) if config.delta_net else set()
    sparse, sparse_layers = set(config.moe_layers), config.moe_layers
    for layer in range(config.num_layers):
        mixer = "delta" if layer in deltas else "attention"
        mlp = "sparse" if layer in sparse else "dense"
        index = counts[mlp]
        next_moe = None
        if mlp == "sparse" and index + 1 < len(sparse_layers):
            next_moe = _NextMoeLayer(sparse_layers[index + 1], index + 1)
        found.append(
            LayerIndex(
                layer=layer,
                mixer=counts[mixer],
                mlp=index,
                is_delta=mixer == "delta",
                is_sparse=mlp == "sparse",
                next_moe=next_moe,
                turn=index,
                window=config.window_of(layer),
            )
        )
        counts[mixer] += 1
        counts[mlp] += 1
    return tuple(found)


def scan_plan(config: ModelConfig, num_turns: int, layers_a_pass: int = LAYERS_A_PASS) -> _Loop:
    """Plans the loop over a model's layers; no loop if fewer than two passes remain.

    A loop begins after the last dense layer, and a pass has a multiple of the period in which kinds
    of layers repeat: only indices differ between passes. (XLA copies the cache of a loop with one
    pass.)

    Args:
      num_turns: a pass has a multiple of so many layers.
    """
    first = max(config.dense_layers, default=-1) + 1
    kinds = [(index.is_delta, index.window) for index in layer_indices(config)[first:]]
    lengths = range(1, len(kinds) + 1)
    period = next((n for n in lengths if kinds[n:] == kinds[: len(kinds) - n]), 1)
    num_turns = math.lcm(layers_a_pass, period, num_turns)
    num_passes = len(kinds) // num_turns
    return _Loop(first, num_turns, num_passes if num_passes > 1 else 0)


def scanned_layer(config: ModelConfig, loop: _Loop, turn: int, number: jax.Array) -> LayerIndex:
    """Index of layer `turn` in pass `number`, int32[], of a loop."""
    start, pattern = layer_indices(config)[loop.first + turn], layer_indices(config)[loop.first :]
    alike = sum(index.is_delta == start.is_delta for index in pattern[: loop.num_turns])
    layer = start.layer + number * loop.num_turns
    mlp = start.mlp + number * loop.num_turns
    next_moe = _NextMoeLayer(
        jnp.minimum(layer + 1, config.num_layers - 1),
        jnp.minimum(mlp + 1, len(config.moe_layers) - 1),
    )
    mixer = start.mixer + number * alike
    return LayerIndex(
        layer, mixer, mlp, start.is_delta, start.is_sparse, next_moe, start.turn, start.window
    )
