"""Bits per byte and expert load on held-out token streams."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.attention import AttentionImpl
from moejax.models.config import ModelConfig
from moejax.models.stacked import rms_norm
from moejax.models.transformer import forward, merge_weights, model_definition
from scripts.demo_training.corpus import END_OF_TEXT_ID, UNKNOWN_ID
from scripts.demo_training.losses import expert_counts
from scripts.demo_training.objective import Weights, require_trainable

Scorer = Callable[[Weights, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Windows(NamedTuple):
    """A stream cut for scoring; every target is scored once."""

    tokens: np.ndarray  # int32[W, T + 1]; column 0 is context only
    scored: np.ndarray  # bool[W, T], targets that count

    def batches(self, size: int) -> Iterator[tuple[jax.Array, jax.Array]]:
        """Yields both by so many windows; the last batch is padded with unscored rows."""
        for i in range(0, len(self.tokens), size):
            tokens, scored = (part[i : i + size] for part in self)
            missing = ((0, size - len(tokens)), (0, 0))
            yield jnp.asarray(np.pad(tokens, missing)), jnp.asarray(np.pad(scored, missing))


@dataclasses.dataclass(frozen=True)
class StreamScore:
    """Scores of a model on one stream."""

    bits: float  # total of the scored targets
    num_targets: int
    expert_counts: np.ndarray  # float64[M, E], assignments of the scored positions


def cut_windows(ids: np.ndarray, context: int, stride: int) -> Windows:
    """Cuts a stream into windows of `context` inputs that advance by `stride`.

    The stream is preceded by the end-of-text token, so that its first token is scored too. Each
    window but the first scores its last `stride` targets, which then see at least
    `context - stride` tokens. Separators between documents and `<unk>` are never scored.

    Args:
      ids: integer[N].
      context: T.
      stride: 1..T; T means windows that do not overlap.
    """
    stream = np.concatenate([[END_OF_TEXT_ID], ids]).astype(np.int32)
    num_windows = 1 + max(0, -(-(len(ids) - context) // stride))
    padded = np.full((num_windows - 1) * stride + context + 1, END_OF_TEXT_ID, np.int32)
    padded[: len(stream)] = stream
    places = np.arange(num_windows)[:, None] * stride + np.arange(context + 1)[None]
    tokens = padded[places]
    targets = tokens[:, 1:]
    scored = (targets != END_OF_TEXT_ID) & (targets != UNKNOWN_ID) & (places[:, 1:] <= len(ids))
    scored[1:, : context - stride] = False
    return Windows(tokens, scored)


def make_scorer(config: ModelConfig, dtype: jnp.dtype, attention: AttentionImpl) -> Scorer:
    """Compiles (weights, tokens int32[B, T + 1], scored bool[B, T]) -> (nats, counts[M, E])."""
    require_trainable(config)
    definition = model_definition(config)

    def score(
        weights: Weights, tokens: jax.Array, scored: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        cast = {name: leaf.astype(dtype) for name, leaf in weights.items()}
        model = merge_weights(definition, cast)
        hidden, routing = forward(model, tokens[:, :-1], experts="dense", attention=attention)
        hidden = rms_norm(hidden, model.final_norm[...], config.norm_eps)
        head = cast["embed"] if config.tied_embeddings else cast["head"]

        def row(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            x, target, mask = args
            logits = jnp.einsum("td,vd->tv", x, head, preferred_element_type=jnp.float32)
            picked = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
            nats = jax.nn.logsumexp(logits, axis=-1) - picked
            return jnp.sum(jnp.where(mask, nats, 0.0))

        nats = jnp.sum(jax.lax.map(row, (hidden, tokens[:, 1:], scored)))
        return nats, expert_counts(routing.ids, config.num_experts, scored.reshape(-1))

    return jax.jit(score)


def score_windows(
    scorer: Scorer, weights: Weights, windows: Windows, *, batch_size: int
) -> StreamScore:
    """Scores all windows, `batch_size` at a time; the last batch is padded with unscored rows."""
    nats, counts = [], []
    for batch in windows.batches(batch_size):
        batch_nats, batch_counts = scorer(weights, *batch)
        nats.append(batch_nats)
        counts.append(batch_counts)
    total = sum(float(x) for x in nats)
    load = np.sum([np.asarray(x, np.float64) for x in counts], axis=0)
    return StreamScore(total / float(np.log(2.0)), int(windows.scored.sum()), load)


def routing_table(loads: dict[str, np.ndarray], first: str, second: str) -> list[dict[str, float]]:
    """One row a layer: smallest and largest share over all streams, and how two streams differ.

    Args:
      loads: float64[M, E] assignments by stream.
      first: a stream, such as code.
      second: another, such as prose.

    Returns:
      `min_share`, `max_share` of the pooled assignments, and `total_variation`, half the L1
      distance between the two streams' shares.
    """
    pooled = np.sum(list(loads.values()), axis=0)
    pooled = pooled / pooled.sum(axis=1, keepdims=True)
    one, two = (loads[name] / loads[name].sum(axis=1, keepdims=True) for name in (first, second))
    variation = 0.5 * np.abs(one - two).sum(axis=1)
    return [
        {
            "layer": layer,
            "min_share": float(pooled[layer].min()),
            "max_share": float(pooled[layer].max()),
            "total_variation": float(variation[layer]),
        }
        for layer in range(len(pooled))
    ]
