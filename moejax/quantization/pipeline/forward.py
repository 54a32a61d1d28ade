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

import dataclasses
import functools
import math
import os
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.attention import AttentionImpl, default_attention_impl
from moejax.models.config import ModelConfig, leaf_dtype, weight_shapes
from moejax.models.expert_products import block_size, gated
from moejax.models.layer_index import layer_indices
from moejax.models.leaf_kinds import kind_of
from moejax.models.moe import ExpertImpl, Experts, MoeInputs, ResidentExperts, default_expert_impl
from moejax.models.rope import model_angles
from moejax.models.transformer import Transformer, merge_weights, model_definition, whole_attention
from moejax.quantization.hessian import add_outer_products, mean_hessian
from moejax.weights.qtensor import RecordedInput, Weight, dense

Weights = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]  # of x x^T by leaf; a trace replaces them

# Whose inputs are the same for all of a layer's tokens; those of experts are `_expert_step`'s.
_WATCHED_KINDS = ("attention", "shared_experts", "mlp", "router")


def _one_layer(config: ModelConfig, layer: int) -> ModelConfig:
    """The configuration of one layer as a model of its own, almost without a vocabulary."""
    delta = config.delta_net
    if delta is not None:
        is_delta = layer in delta.layers
        delta = dataclasses.replace(delta, layers=(0,)) if is_delta else None
    moe_layers = (0,) if layer in config.moe_layers else ()
    return dataclasses.replace(
        config, num_layers=1, moe_layers=moe_layers, delta_net=delta, window_layers=None,
        sliding_window=config.window_of(layer), vocab_size=1, tied_embeddings=True,
    )  # fmt: skip


def _watched_leaves(config: ModelConfig) -> dict[str, int]:
    """Leaves of one layer (`_one_layer`) whose inputs are summed, and K of each."""
    shapes = weight_shapes(config)
    return {leaf: shapes[leaf][-1] for leaf in shapes if kind_of(leaf) in _WATCHED_KINDS}


@functools.partial(jax.jit, static_argnames=("config", "experts", "attention"))
def _layer_step(
    weights: Weights,
    x: jax.Array,
    config: ModelConfig,
    experts: ExpertImpl,
    attention: AttentionImpl,
) -> jax.Array:
    """Runs the whole layer, [B, T, D] to [B, T, D]."""
    model = _model(weights, config)
    x = _mixed(model, x, attention)
    run = ResidentExperts(model.moe if config.moe_layers else None, experts)
    return x + _mlp(model, x, run)[0]


@functools.partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="totals")
def _attention_step(
    weights: Weights, x: jax.Array, totals: Sums, config: ModelConfig, attention: AttentionImpl
) -> tuple[jax.Array, Sums]:
    """Runs the first half of the layer on x [B, T, D], attention or a delta rule.

    Returns [B, T, D] after it, and the sums of x x^T by leaf, `totals` (donated) with its inputs.
    """
    sums = dict(totals)
    return _mixed(_model(weights, config, sums), x, attention), sums


@functools.partial(jax.jit, static_argnames="config", donate_argnames=("totals", "counts"))
def _mlp_step(
    weights: Weights, x: jax.Array, totals: Sums, counts: jax.Array, config: ModelConfig
) -> tuple[Sums, jax.Array]:
    """Sums the inputs of the MLP's matrices but the experts', and counts experts' tokens.

    `x` is [B, T, D] after attention; `totals`, by leaf, and `counts`, int32[E], are donated.
    """
    sums = dict(totals)
    _, routed = _mlp(_model(weights, config, sums), x, _NoExperts())
    if routed is None:
        return sums, counts
    _, ids = routed
    return sums, counts + jnp.bincount(ids.reshape(-1), length=config.num_experts)


@functools.partial(jax.jit, static_argnames=("config", "leaf"), donate_argnames="totals")
def _expert_step(
    weights: Weights,
    x: jax.Array,  # [B, T, D] after attention
    totals: jax.Array,  # float32[e, K, K], sums of x x^T; donated
    first: jax.Array,
    config: ModelConfig,
    leaf: str,  # "moe.gate_up" (K = D) or "moe.down" (K = F)
) -> jax.Array:
    """Sums the inputs of experts from `first` on, over the tokens routed to each.

    Assignments are sorted by expert and processed in blocks of one expert.
    """
    _, (flat, ids) = _mlp(_model(weights, config), x, _NoExperts())
    num_rows, width = ids.size, ids.shape[1]
    size = block_size(num_rows, config.num_experts)
    order = jnp.argsort(ids.reshape(-1), stable=True).astype(jnp.int32)
    token = jnp.pad(order // width, (0, size))
    counts = jnp.bincount(ids.reshape(-1), length=config.num_experts)
    starts = jnp.cumsum(counts) - counts
    within = jnp.arange(size, dtype=jnp.int32)

    def expert(i: jax.Array, totals: jax.Array) -> jax.Array:
        start, count = starts[first + i], counts[first + i]

        def block(j: jax.Array, total: jax.Array) -> jax.Array:
            rows = jax.lax.dynamic_slice_in_dim(token, start + j * size, size)
            inputs = jnp.where((within + j * size < count)[:, None], flat[rows], 0)
            if leaf == "moe.down":
                gate_up = weights["moe.gate_up"][first + i]
                products = jnp.einsum("nd,fd->nf", inputs, gate_up)
                if config.expert_bias:
                    products = products + weights["moe.gate_up_bias"][first + i][None]
                inputs = gated(products, config.gating)
                # Of rows that are none a bias would make some.
                inputs = jnp.where((within + j * size < count)[:, None], inputs, 0)
            return add_outer_products(total, inputs)

        total = jax.lax.fori_loop(0, -(-count // size), block, totals[i])
        return totals.at[i].set(total)

    return jax.lax.fori_loop(0, len(totals), expert, totals)


def _add_inputs(sums: Sums, leaf: str, inputs: jax.Array) -> None:
    """Adds the inputs, rows [..., K], of a leaf's matrix to its sum."""
    sums[leaf] = add_outer_products(sums[leaf], inputs.reshape(-1, inputs.shape[-1]))


class _NoExperts(Experts):
    """Records a sparse layer's tokens [N, D] and choices int32[N, A]; runs no expert."""

    def __call__(self, carry: Any, inputs: MoeInputs) -> tuple[jax.Array, Any, Any]:
        """Adds nothing, as `Experts`."""
        return jnp.zeros_like(inputs.x), carry, (inputs.x, inputs.routing.ids)


def _mixed(model: Transformer, x: jax.Array, impl: AttentionImpl) -> jax.Array:
    """Runs attention or the delta rule on the residual stream, [B, T, D]."""
    (index,) = layer_indices(model.config)
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    angles, attend = model_angles(model.config, positions), whole_attention(model, impl)
    mask = jnp.ones(x.shape[:2], bool)
    return x + model.mix(model.mix_norm(x, index), index, angles, mask, attend)


def _mlp(model: Transformer, x: jax.Array, experts: Experts) -> tuple[jax.Array, Any]:
    """Residual addition of the layer's MLP for [B, T, D], and the experts' record."""
    (index,) = layer_indices(model.config)
    out, _, record = model.mlp_block(x, index, jnp.ones(x.shape[:2], bool), experts, None)
    return out, record


def _model(weights: Weights, config: ModelConfig, sums: Sums | None = None) -> Transformer:
    """Builds the model of one layer; its watched leaves record inputs in `sums`."""
    leaves: dict[str, Any] = {leaf: weight[None] for leaf, weight in weights.items()}
    if sums is not None:
        for leaf in _watched_leaves(config):
            leaves[leaf] = RecordedInput(leaves[leaf], functools.partial(_add_inputs, sums, leaf))
    norm = weights["mlp_norm"]
    rest = {"embed": jnp.zeros((1, config.model_dim), norm.dtype), "final_norm": norm}
    return merge_weights(_definition(config), leaves | rest)


_definition = functools.cache(model_definition)


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
        config, placed = _one_layer(self.config, self.layer), self._place(weights)
        num_tokens = self._step * self.hidden.shape[1]
        experts = default_expert_impl(num_tokens, config, self._dtype, self._device.platform)
        for part in self._steps(self.hidden):
            x = jax.device_put(part, self._device)
            part[...] = np.asarray(_layer_step(placed, x, config, experts, self._attention))
        self.layer += 1

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
        self._config = _one_layer(run.config, run.layer)
        self._run, self._weights = run, run._place(weights)
        self._chunks: dict[str, tuple[int, jax.Array]] = {}  # leaf: first expert, float32[e, K, K]
        self.num_tokens = run.hidden.shape[0] * run.hidden.shape[1]
        self.expert_tokens: np.ndarray | None = None
        self._mlp_hidden = _file_backed(run.hidden.shape, run.hidden.dtype)
        self._totals = self._run_tokens()

    def hessian(self, leaf: str, expert: int | None = None) -> _Hessian:
        """Returns the Hessian of one matrix; request experts in order, neighbours share a pass.

        `leaf` is one of `_watched_leaves`, or "moe.gate_up" or "moe.down" of an expert.
        """
        if leaf in self._totals:
            return _mean(self._totals[leaf], self.num_tokens)
        assert expert is not None and self.expert_tokens is not None
        first, totals = self._chunks.get(leaf, (0, None))
        if totals is None or not first <= expert < first + len(totals):
            first, totals = self._chunks[leaf] = self._expert_chunk(leaf, expert)
        return _mean(totals[expert - first], int(self.expert_tokens[expert]))

    def _run_tokens(self) -> dict[str, jax.Array]:
        """Runs attention and router over all tokens: fills `_mlp_hidden`, counts, sums x x^T."""
        c, run = self._config, self._run
        with jax.default_device(run._device):
            widths = _watched_leaves(c).items()
            totals = {leaf: jnp.zeros((k, k), jnp.float32) for leaf, k in widths}
            counts = jnp.zeros(c.num_experts, jnp.int32)
        for part, out in zip(run._steps(run.hidden), run._steps(self._mlp_hidden), strict=True):
            x = jax.device_put(part, run._device)
            x, totals = _attention_step(self._weights, x, totals, c, run._attention)
            out[...] = np.asarray(x)
            totals, counts = _mlp_step(self._weights, x, totals, counts, c)
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
            totals = _expert_step(self._weights, x, totals, start, c, leaf)
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
