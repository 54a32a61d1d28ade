"""The model over calibration text, a layer at a time: what each matrix's inputs look like.

    run = LayerRun(config, tokens, embed, dtype=jnp.float32, device=device)
    for layer in range(config.num_layers):
        captured = run.capture(layer_weights(layer))
        h, count = captured.hessian("moe.down", expert=3)   # for gptq, autoround
        run.advance(quantized_layer)                        # or the originals

In memory at a time: hidden states of all tokens twice (a layer's input, and what its MLP reads) in
temporary files, whose pages the system may take back; one layer's weights on the device, the
Hessians of its attention, and those of as many experts as `hessian_bytes` allows. A run that goes
on after a kill calls `advance` alone for the layers that are done: with the same weights it arrives
at the same hidden states, bit for bit.

Weights of one layer are named as in `weight_shapes`, without the layers' axis.
"""

import math
import os
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.attention import default_attention_impl
from moejax.models.config import ModelConfig, leaf_dtype
from moejax.models.moe import default_expert_impl
from moejax.quantization.hessian import mean_hessian
from moejax.quantization.pipeline.layer_steps import (
    attention_step,
    expert_step,
    layer_step,
    mlp_step,
    one_layer,
    watched_leaves,
)
from moejax.weights.qtensor import Weight, dense


class _Hessian(NamedTuple):
    """Hessian of a matrix's inputs."""

    mean: jax.Array  # float32[K, K], mean of 2 x x^T
    num_tokens: int


class LayerRun:
    """Hidden states of the calibration text, advanced layer by layer.

    Attributes:
      layer: index of the next layer.
      hidden: [S, T, D], its input, in a temporary file.

    Args:
      tokens: int32[S, T], whole sequences of one length.
      embed: [V, D].
      dtype: of the activations and of the weights that meet them.
      tokens_per_step: of whole sequences that run together; one sequence at least.
      hessian_bytes: of experts, held at a time; at least one expert's.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokens: np.ndarray,
        embed: Weight | np.ndarray,
        *,
        dtype: Any,
        device: jax.Device,
        tokens_per_step: int = 4096,
        hessian_bytes: int = 4 * 2**30,
    ):
        self.config, self._device, self._hessian_bytes = config, device, hessian_bytes
        self.layer = 0
        self._dtype = jnp.dtype(dtype)
        self._attention = default_attention_impl(config, self._dtype, device.platform)
        num_sequences, length = tokens.shape
        self._step = _sequences_per_step(num_sequences, max(1, tokens_per_step // length))
        table = embed if isinstance(embed, np.ndarray) else np.asarray(dense(embed, self._dtype))
        self.hidden = _file_backed((*tokens.shape, table.shape[1]), self._dtype)
        for part, ids in zip(self._steps(self.hidden), self._steps(tokens), strict=True):
            part[...] = table[ids].astype(self._dtype)

    def capture(self, weights: Mapping[str, Any]) -> "CapturedLayer":
        """Runs layer `self.layer` and keeps its matrices' inputs; does not advance."""
        return CapturedLayer(self, weights)

    def advance(self, weights: Mapping[str, Any]) -> None:
        """Advances the hidden states through layer `self.layer`, with any weights of it."""
        config, placed = self._one_layer(), self._place(weights)
        num_tokens = self._step * self.hidden.shape[1]
        experts = default_expert_impl(num_tokens, config, self._dtype, self._device.platform)
        for part in self._steps(self.hidden):
            x = jax.device_put(part, self._device)
            part[...] = np.asarray(layer_step(placed, x, config, experts, self._attention))
        self.layer += 1

    def _one_layer(self) -> ModelConfig:
        """Configuration of the next layer."""
        if self.layer >= self.config.num_layers:
            raise ValueError(f"the model has no layer {self.layer}")
        return one_layer(self.config, self.layer)

    def _steps(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Views of the sequences that run together; the last may have fewer."""
        return [tokens[first : first + self._step] for first in range(0, len(tokens), self._step)]

    def _place(self, weights: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Moves weights to the run's device, plain, in the model's dtypes."""
        placed = {}
        for name, weight in weights.items():
            dtype = jnp.dtype(leaf_dtype(name, self._dtype))
            placed[name] = dense(jax.device_put(weight, self._device), dtype).astype(dtype)
        return placed


class CapturedLayer:
    """Hessians of one layer's matrices, by leaf; experts' are computed on request.

    Attributes:
      num_tokens: tokens of every Hessian but the experts'.
      expert_tokens: int[E], tokens routed to each expert; None in a dense layer.
    """

    def __init__(self, run: LayerRun, weights: Mapping[str, Any]):
        self._run, self._config, self._weights = run, run._one_layer(), run._place(weights)
        self._chunks: dict[str, tuple[int, jax.Array]] = {}  # leaf: first expert, float32[e, K, K]
        self.num_tokens = run.hidden.shape[0] * run.hidden.shape[1]
        self.expert_tokens: np.ndarray | None = None
        self._mlp_hidden = _file_backed(run.hidden.shape, run.hidden.dtype)
        self._totals = self._run_tokens()

    def hessian(self, leaf: str, expert: int | None = None) -> _Hessian:
        """Returns the Hessian of one matrix; request experts in order, neighbours share a pass.

        `leaf` is one of `layer_steps.watched_leaves`, or "moe.gate_up" or "moe.down" of an expert.
        """
        if leaf in self._totals:
            return _mean(self._totals[leaf], self.num_tokens)
        if leaf not in ("moe.gate_up", "moe.down") or self.expert_tokens is None:
            raise ValueError(f"no Hessian of {leaf}; there are {', '.join(self._totals)}")
        if expert is None or not 0 <= expert < self._config.num_experts:
            raise ValueError(f"{leaf} of expert {expert}, not in 0..{self._config.num_experts - 1}")
        first, totals = self._chunks.get(leaf, (0, None))
        if totals is None or not first <= expert < first + len(totals):
            first, totals = self._chunks[leaf] = self._expert_chunk(leaf, expert)
        return _mean(totals[expert - first], int(self.expert_tokens[expert]))

    def _run_tokens(self) -> dict[str, jax.Array]:
        """Runs attention and router over all tokens: fills `_mlp_hidden`, counts, sums x x^T."""
        c, run = self._config, self._run
        with jax.default_device(run._device):
            widths = watched_leaves(c).items()
            totals = {leaf: jnp.zeros((k, k), jnp.float32) for leaf, k in widths}
            counts = jnp.zeros(c.num_experts, jnp.int32)
        for part, out in zip(run._steps(run.hidden), run._steps(self._mlp_hidden), strict=True):
            x = jax.device_put(part, run._device)
            x, totals = attention_step(self._weights, x, totals, c, run._attention)
            out[...] = np.asarray(x)
            totals, counts = mlp_step(self._weights, x, totals, counts, c)
        if c.moe_layers:
            self.expert_tokens = np.asarray(counts)
        return totals

    def _expert_chunk(self, leaf: str, expert: int) -> tuple[int, jax.Array]:
        """First expert and sums float32[e, K, K] of the chunk with `expert`."""
        c = self._config
        width = c.model_dim if leaf == "moe.gate_up" else c.expert_dim
        self._chunks.pop(leaf, None)  # before its successor is allocated
        at_once = min(c.num_experts, max(1, self._run._hessian_bytes // 2 // (4 * width * width)))
        at_once = -(-c.num_experts // -(-c.num_experts // at_once))
        # The last chunk overlaps the one before it: one shape, one program.
        first = min(expert // at_once * at_once, c.num_experts - at_once)
        totals = jnp.zeros((at_once, width, width), jnp.float32, device=self._run._device)
        start = jax.device_put(np.int32(first), self._run._device)
        for part in self._run._steps(self._mlp_hidden):
            x = jax.device_put(part, self._run._device)
            totals = expert_step(self._weights, x, totals, start, c, leaf)
        return first, totals


def _mean(total: jax.Array, num_tokens: int) -> _Hessian:
    return _Hessian(mean_hessian(total, jnp.int32(num_tokens)), num_tokens)


def _sequences_per_step(num_sequences: int, most: int) -> int:
    """Sequences per step, at most `most`; a divisor of the whole if one is near."""
    most = min(most, num_sequences)
    divisors = [n for n in range(max(1, most // 2), most + 1) if num_sequences % n == 0]
    return divisors[-1] if divisors else most


def _file_backed(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Allocates zeros in a temporary file ($TMPDIR), deleted with the array.

    The room is reserved at once (OSError), since a page without room kills the process.
    """
    with tempfile.TemporaryFile() as file:
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        return np.asarray(np.memmap(file, dtype, "w+", shape=shape))
