"""Measures of a study model on held-out text: predictions, use of experts, their likeness."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.attention import AttentionImpl
from moejax.models.config import ModelConfig
from moejax.models.moe import Routing
from moejax.models.stacked import rms_norm
from moejax.models.transformer import forward, merge_weights, model_definition
from scripts.demo_training.losses import expert_counts
from scripts.demo_training.objective import Weights
from scripts.demo_training.scoring import cut_windows
from scripts.studies.study_model.distillation import Parts, token_losses

COMPARED_TOKENS = 64  # of a batch, on which all experts run to compare their outputs


class Sums(NamedTuple):
    """Sums over the scored tokens of some windows."""

    divergence: jax.Array  # float32 scalars, in nats
    cross_entropy: jax.Array
    parent_cross_entropy: jax.Array
    agreed: jax.Array  # float32, tokens of which both models find the same one likeliest
    loads: jax.Array  # float32[M, E], assignments
    cosines: jax.Array  # float32[M, 2], of replicas' outputs and of other experts', over tokens
    compared: jax.Array  # float32 scalar, tokens of `cosines`


Meter = Callable[[Weights, Parts, jax.Array, jax.Array], Sums]


def pair_cosines(outputs: jax.Array, counted: jax.Array, num_shards: int) -> jax.Array:
    """Sums the mean cosine of experts' outputs over tokens.

    Args:
      outputs: [N, E, D].
      counted: bool[N], tokens that count.
      num_shards: S; expert e is a replica of shard e mod S.

    Returns:
      float32[2]: of pairs of replicas of one shard, of pairs of different shards.
    """
    wide = outputs.astype(jnp.float32)
    norms = jnp.linalg.norm(wide, axis=-1, keepdims=True)
    unit = jnp.where(counted[:, None, None], wide / jnp.maximum(norms, 1e-30), 0.0)
    cosines = jnp.einsum("ned,nfd->ef", unit, unit)
    shards = np.arange(outputs.shape[1]) % num_shards
    same = shards[:, None] == shards[None]
    masks = np.stack([same & ~np.eye(len(shards), dtype=bool), ~same])
    pairs = np.maximum(masks.sum(axis=(1, 2)), 1).astype(np.float32)
    return jnp.einsum("ef,cef->c", cosines, masks.astype(np.float32)) / pairs


def make_meter(
    student: ModelConfig, parent: ModelConfig, dtype: jnp.dtype, attention: AttentionImpl
) -> Meter:
    """Compiles (trained, parts, tokens int32[B, T + 1], scored bool[B, T]) -> `Sums`."""
    definitions = model_definition(student), model_definition(parent)
    num_shards = parent.num_experts

    def measure(trained: Weights, parts: Parts, tokens: jax.Array, scored: jax.Array) -> Sums:
        cast = {name: leaf.astype(dtype) for name, leaf in trained.items()}
        layer_of = iter(range(student.num_layers))
        step = max(1, scored.size // COMPARED_TOKENS)
        counted = scored.reshape(-1)[::step]

        def compare(x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
            layer, few = next(layer_of), x[::step]
            gate_up, down = cast["moe.gate_up"][layer], cast["moe.down"][layer]
            gate, up = jnp.split(jnp.einsum("nd,efd->nef", few, gate_up), 2, axis=-1)
            outputs = jnp.einsum("nef,edf->ned", jax.nn.silu(gate) * up, down)
            return routing.ids, pair_cosines(outputs, counted, num_shards)

        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        model = merge_weights(definitions[0], parts.shared | cast)
        hidden, (ids, cosines) = forward(model, inputs, attention=attention, record=compare)
        teacher = merge_weights(definitions[1], parts.shared | parts.parent)
        wanted = forward(teacher, inputs, attention=attention)[0]
        scale = parts.shared["final_norm"]
        normed = [rms_norm(x, scale, student.norm_eps) for x in (hidden, wanted)]

        def row(of: tuple[jax.Array, ...]) -> jax.Array:
            x, y, target, mask = of
            found = token_losses(x, y, parts.shared["embed"], target)
            return jnp.stack([jnp.sum(jnp.where(mask, values, 0.0)) for values in found])

        losses = jnp.sum(jax.lax.map(row, (*normed, targets, scored)), axis=0)
        loads = expert_counts(ids, student.num_experts, scored.reshape(-1))
        compared = jnp.sum(counted, dtype=jnp.float32)
        return Sums(losses[0], losses[1], losses[2], losses[3], loads, cosines, compared)

    return jax.jit(measure)


@dataclasses.dataclass(frozen=True)
class Measures:
    """Measures of one stream."""

    tokens: int  # scored
    divergence: float  # nats a token
    cross_entropy: float
    parent_cross_entropy: float
    agreement: float  # share of tokens of which both models find the same one likeliest
    shares: np.ndarray  # float64[M, E], each expert's share of a layer's assignments
    cosines: np.ndarray  # float64[M, 2]

    def fields(self, bytes_per_token: float) -> dict[str, Any]:
        """JSON fields; bits a byte by the stream's mean length of a token."""
        bits = np.log(2.0) * bytes_per_token
        top = self.top_quarter()
        return {
            "tokens": self.tokens,
            "perplexity": float(np.exp(self.cross_entropy)),
            "parent_perplexity": float(np.exp(self.parent_cross_entropy)),
            "bits_per_byte": self.cross_entropy / bits,
            "parent_bits_per_byte": self.parent_cross_entropy / bits,
            "divergence": self.divergence,
            "agreement": self.agreement,
            "top_quarter": [round(float(x), 4) for x in top],
            "top_quarter_later": float(np.mean(top[len(top) // 2 :])),
            "shares": np.round(self.shares, 4).tolist(),
            "replica_cosine": np.round(self.cosines[:, 0], 4).tolist(),
            "other_cosine": np.round(self.cosines[:, 1], 4).tolist(),
        }

    def top_quarter(self) -> np.ndarray:
        """Share of a layer's assignments that its busiest quarter of experts takes, float64[M]."""
        quarter = max(1, self.shares.shape[1] // 4)
        return np.sort(self.shares, axis=1)[:, -quarter:].sum(axis=1)


def measure_stream(
    meter: Meter,
    trained: Weights,
    parts: Parts,
    ids: np.ndarray,
    *,
    context: int,
    batch_size: int = 8,
) -> Measures:
    """Measures a stream of tokens in windows that do not overlap; the last batch is padded."""
    windows = cut_windows(ids, context, context)
    total: Sums | None = None
    for batch in windows.batches(batch_size):
        found = jax.device_get(meter(trained, parts, *batch))
        found = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
        total = found if total is None else jax.tree.map(np.add, total, found)
    assert total is not None
    count = int(windows.scored.sum())
    loads, cosines = np.asarray(total.loads), np.asarray(total.cosines)
    return Measures(
        tokens=count,
        divergence=float(total.divergence / count),
        cross_entropy=float(total.cross_entropy / count),
        parent_cross_entropy=float(total.parent_cross_entropy / count),
        agreement=float(total.agreed / count),
        shares=loads / loads.sum(axis=1, keepdims=True),
        cosines=cosines / float(total.compared),
    )
