"""How the demo model routes: by text, for heavy hitters, and as seen from the layer before."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.attention import causal_attention
from moejax.models.moe import MoeInputs, ResidentExperts, Routing
from moejax.models.transformer import merge_weights, model_definition
from moejax.policies.dymoe import attention_received
from scripts.studies.quality.bench import Windows
from scripts.studies.quality.demo import WIKI, Demo, Finding, listed

HEAVY_SHARE = 0.1  # of a window's tokens are heavy hitters: our setting, the paper has none
TOP_SHARE = 0.25  # of the experts: whose share of the assignments is the figure
SHOWN_LAYER = 3  # of heavy hitters: the middle one of seven
SHOWN_TEXTS = ("books", "code", "math")


Array = jax.Array | np.ndarray


class Seen(NamedTuple):
    """Routing of one batch of windows, by layer."""

    chosen: Array  # float32[M, B, E], tokens that chose an expert
    heavy: Array  # float32[M, B, E], of them those that are heavy hitters in that layer
    cosines: Array  # float32[M - 1, B T], of the residual stream with the next layer's
    recall: Array  # float32[M - 1], of the next layer's experts, foreseen from this layer


def measure(demo: Demo) -> Iterator[Finding]:
    """Rows of every text and layer."""
    see = _program(demo)
    num_layers = len(demo.config.moe_layers)
    correlations = []
    for name, windows in demo.windows().items():
        seen = _over(see, demo, windows)
        yield from _counts(name, seen)
        correlations.append(_correlations(seen))
        if name in SHOWN_TEXTS:
            yield _one_window(name, seen)
        if name == WIKI:
            yield from _neighbours(name, seen)
    for layer in range(num_layers):
        values = np.concatenate([of_text[layer] for of_text in correlations])
        more = {"windows": len(values), "least": float(values.min()), "heavy share": HEAVY_SHARE}
        yield Finding(f"heavy correlation | all texts | layer {layer}", values.mean(), "", more)


def _program(demo: Demo) -> Callable[[Any, jax.Array], Seen]:
    config = demo.config
    definition = model_definition(config)

    def see(weights: Any, tokens: jax.Array) -> Seen:
        model = merge_weights(definition, weights)
        batch, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
        active = jnp.ones(tokens.shape, bool)
        received: list[jax.Array] = []
        foreseen: list[jax.Array] = []

        def attend(index: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            del index
            received.append(attention_received(q, k, positions, active))
            return causal_attention(q, k, v, config.sliding_window, "xla")

        class Watched(ResidentExperts):
            def __call__(self, carry: Any, inputs: MoeInputs) -> Any:
                if inputs.next_routing is not None:
                    foreseen.append(inputs.next_routing().ids)
                return super().__call__(carry, inputs)

        experts = Watched(model.moe, "block", lambda *found: found)
        _, _, (inputs, stacked) = model.layers(tokens, positions, active, attend, experts)
        inputs = inputs / model.mlp_norm[...][:, None]  # multiples of the residual stream
        routings = [Routing(*leaves) for leaves in zip(*stacked, strict=True)]
        num_heavy = round(HEAVY_SHARE * length)
        chosen, heavy = [], []
        for routing, share in zip(routings, received, strict=True):
            marks = jax.nn.one_hot(routing.ids, config.num_experts, dtype=jnp.float32).sum(1)
            marks = marks.reshape(batch, length, -1)
            most = jax.lax.top_k(share, num_heavy)[1]
            chosen.append(marks.sum(1))
            heavy.append(jnp.take_along_axis(marks, most[:, :, None], axis=1).sum(1))
        recall = [
            jnp.mean(jnp.any(a[:, :, None] == b.ids[:, None, :], axis=1), dtype=jnp.float32)
            for a, b in zip(foreseen, routings[1:], strict=True)
        ]
        pairs = itertools.pairwise(inputs)
        cosines = [_cosine(a, b) for a, b in pairs]
        return Seen(*map(jnp.stack, (chosen, heavy, cosines, recall)))

    return jax.jit(see)


def _cosine(x: jax.Array, y: jax.Array) -> jax.Array:
    """[N, D] and [N, D] to float32[N]."""
    lengths = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
    return jnp.sum(x * y, axis=-1) / lengths


def _over(see: Callable[[Any, jax.Array], Seen], demo: Demo, windows: Windows) -> Seen:
    """All windows, a few at once; recall is the mean over batches of equal size."""
    size = 4
    tokens = windows.tokens[:, :-1]
    if len(tokens) % size:
        raise ValueError(f"{len(tokens)} windows are no multiple of {size}")
    parts = [
        jax.device_get(see(demo.weights, jnp.asarray(tokens[i : i + size])))
        for i in range(0, len(tokens), size)
    ]
    chosen, heavy, cosines = (np.concatenate([p[j] for p in parts], axis=1) for j in range(3))
    return Seen(chosen, heavy, cosines, np.mean([part.recall for part in parts], axis=0))


def _counts(name: str, seen: Seen) -> Iterator[Finding]:
    for layer, by_window in enumerate(np.asarray(seen.chosen)):
        counts = by_window.sum(0)
        top = np.sort(counts)[::-1][: round(TOP_SHARE * len(counts))].sum() / counts.sum()
        more = {
            "assignments": int(counts.sum()),
            "most over least": float(counts.max() / max(counts.min(), 1)),
            "counts": listed(counts.astype(int)),
        }
        yield Finding(f"counts | {name} | layer {layer}", float(100 * top), "%", more)


def _correlations(seen: Seen) -> np.ndarray:
    """float64[M, windows], of an expert's tokens and its heavy hitters."""
    pairs = zip(np.asarray(seen.chosen), np.asarray(seen.heavy), strict=True)
    return np.array(
        [[np.corrcoef(a, h)[0, 1] for a, h in zip(*pair, strict=True)] for pair in pairs]
    )


def _one_window(name: str, seen: Seen) -> Finding:
    chosen, heavy = (np.asarray(part)[SHOWN_LAYER, 0] for part in (seen.chosen, seen.heavy))
    more = {"all tokens": listed(chosen.astype(int)), "heavy": listed(heavy.astype(int))}
    figure = float(np.corrcoef(chosen, heavy)[0, 1])
    return Finding(f"heavy | {name}, first window | layer {SHOWN_LAYER}", figure, "", more)


def _neighbours(name: str, seen: Seen) -> Iterator[Finding]:
    for layer, (cosines, recall) in enumerate(zip(seen.cosines, seen.recall, strict=True)):
        more = {
            "tenth percentile": float(np.percentile(cosines, 10)),
            "recall of the next layer's experts": float(recall),
        }
        what = f"similarity | {name} | layers {layer} and {layer + 1}"
        yield Finding(what, float(np.mean(cosines)), "cosine", more)
