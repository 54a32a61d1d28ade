"""Predictors of a layer's experts, replayed: before its attention, or from the layer before.

    python -m scripts.studies.quality.pre_attention --texts=DIR \
        --output=scripts/studies/quality/pre_attention.jsonl

DIR as of `scripts.studies.quality.policies`. Of the demo model, from recorded hidden states:

  look-ahead           this layer's router on the layer before's MLP input, as the package does
                       (DyMoE eq. 6); the first layer has none
  look-ahead, fitted   two linear functions of the layer before's MLP input
  pre-attention        this layer's router on its residual input, before attention
  pre-attention, fitted  two linear functions of the input of attention, normed (arXiv 2511.10676)

Both fitted ones have a ReLU between, D wide, and a pairwise logistic loss: a chosen expert's score
should exceed every other one's. They learn on the text that ships and are measured on others.

Each layer has an LRU cache of slots. Before a token's experts are needed, the most likely A of them
are prefetched where they are absent. Figures: recall of the A experts; fetches that remain at the
moment of need (each a stall), and prefetched experts that the token does not use (wasted).

THE BAR, written on 2026-11-25 before any row. Go, if with 8 and with 16 of 32 slots, on WikiText-2
and on the mixed text, the fitted predictor before attention leaves at least 20 % fewer stalls than
the look-ahead at no more wasted bytes. Else no go. A go would still have to show on a GPU that
attention is long enough to hide a fetch: a resident layer of Qwen3-30B-A3B in INT4 takes 40 us in
all, and one expert of 2.7 MB takes 49 us over a link of 50 GiB/s.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from moejax.devices import choose_device, enable_compilation_cache
from moejax.models.attention import causal_attention
from moejax.models.layer_index import LayerIndex, layer_indices
from moejax.models.moe import ResidentExperts
from moejax.models.rope import model_angles
from moejax.models.transformer import merge_weights, model_definition
from moejax.weights import linear as ops
from scripts.studies.measuring import Report
from scripts.studies.quality.bench import Model, Texts, Windows
from scripts.studies.quality.prediction import Predictor, fit, predict, recall, replay

SLOTS = (8, 16)
PREDICTORS = ("look-ahead", "look-ahead, fitted", "pre-attention", "pre-attention, fitted")

_TEXTS = flags.DEFINE_string("texts", None, "folder of the texts", required=True)
_WINDOW = flags.DEFINE_integer("window", 512, "tokens of a window")
_WIKI = flags.DEFINE_integer("wiki", 8, "windows of WikiText-2's test text")
_EACH = flags.DEFINE_integer("each", 2, "windows of each domain of the mixed text")
_CALIBRATION = flags.DEFINE_integer("calibration", 48, "windows that predictors learn on")
_STEPS = flags.DEFINE_integer("steps", 600, "of learning, 512 tokens each")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file to append to")
_CACHE = flags.DEFINE_string("cache", "", "compilation cache")


class States(NamedTuple):
    """Hidden states and routing of N tokens at every sparse layer.

    Attributes:
      before: float32[M, N, D], normed input of attention.
      residual: float32[M, N, E], router's logits of the input of the layer.
      ahead: float32[M, N, E], its logits of the layer before's MLP input; of layer 0 zeros.
      inputs: float32[M, N, D], normed input of the MLP.
      ids: int32[M, N, A], the router's choice.
    """

    before: Any
    residual: Any
    ahead: Any
    inputs: Any
    ids: Any


def states_of(model: Model, windows: Windows) -> States:
    """States of all windows, one after the other."""
    definition = model_definition(model.config, holds_experts=True)
    run = jax.jit(functools.partial(_states, model, definition))
    parts = [jax.device_get(run(model.weights, row[None, :-1])) for row in windows.tokens]
    return States(*(np.concatenate(part, axis=1) for part in zip(*parts, strict=True)))


def _states(model: Model, definition: Any, weights: Any, tokens: jax.Array) -> States:
    transformer, c = merge_weights(definition, weights), model.config
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    mask = jnp.ones(tokens.shape, bool)
    angles = model_angles(c, places, None)
    x = ops.take_rows(transformer.embed[...], tokens, transformer.dtype)
    experts = ResidentExperts(transformer.moe, "block", lambda *found: found)
    found, last = [], None

    def attend(index: LayerIndex, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        del index
        return causal_attention(q, k, v, c.sliding_window, "xla")

    def logits(hidden: jax.Array, index: Any) -> jax.Array:
        normed = transformer._mlp_normed(hidden, index.layer)
        return jnp.log(transformer.moe.route(normed, index.mlp).probabilities)

    for index in layer_indices(c):
        before = transformer.mix_norm(x, index)
        residual = logits(x, index)
        x = x + transformer.mix(before, index, angles, mask, attend)
        ahead = jnp.zeros_like(residual) if last is None else logits(last, index)
        last = x
        out, _, (inputs, routing) = transformer.mlp_block(x, index, mask, experts, None)
        x = x + out
        found.append(States(before[0], residual, ahead, inputs, routing.ids))
    return jax.tree.map(lambda *parts: jnp.stack(parts), *found)


def scores_of(states: States, fitted: dict[str, Predictor]) -> dict[str, np.ndarray]:
    """Scores of every predictor, float32[M, N, E]."""
    before = np.concatenate([np.zeros_like(states.inputs[:1]), states.inputs[:-1]])
    return {
        "look-ahead": states.ahead,
        "look-ahead, fitted": np.asarray(predict(fitted["look-ahead, fitted"], before)),
        "pre-attention": states.residual,
        "pre-attention, fitted": np.asarray(
            predict(fitted["pre-attention, fitted"], states.before)
        ),
    }


def main(argv: list[str]) -> None:
    """Learns, replays and reports."""
    del argv
    device = choose_device("cpu")
    enable_compilation_cache(_CACHE.value)
    model = Model("demo", device, "rtn")
    texts = Texts(Path(_TEXTS.value), model.tokenizer, _WINDOW.value)
    learned = states_of(model, texts.calibration(_CALIBRATION.value))
    before = np.concatenate([np.zeros_like(learned.inputs[:1]), learned.inputs[:-1]])
    # Layer 0 has no layer before: its predictor learns from ones and prefetches nothing.
    before[0] = 1.0
    num_experts, width = model.config.num_experts, model.config.experts_per_token
    fitted = {
        "look-ahead, fitted": fit(before, learned.ids, num_experts, _STEPS.value),
        "pre-attention, fitted": fit(learned.before, learned.ids, num_experts, _STEPS.value),
    }
    report = Report(device, "demo", _OUTPUT.value, ("moejax", "jax", "jaxlib", "optax"))
    size = model.nbytes("bf16")
    for windows in (texts.wikitext(_WIKI.value), texts.mixed(_EACH.value)):
        states = states_of(model, windows)
        tokens = states.ids.shape[1]
        scores = scores_of(states, fitted)
        for name in PREDICTORS:
            by_layer = recall(states.ids, scores[name])
            first = 1 if name.startswith("look-ahead") else 0
            report.add(
                f"pre_attention | {windows.name} | recall | {name}", float(by_layer[first:].mean()),
                "share", by_layer=by_layer.round(4).tolist(), tokens=tokens,
            )  # fmt: skip
        nothing = np.zeros_like(states.ahead)
        for slots in SLOTS:
            for name in ("nothing", *PREDICTORS):
                given = scores.get(name, nothing)
                found = replay(states.ids, given, slots=slots, count=width)
                needed, stalls, fetched, wasted = (int(part.sum()) for part in found)
                report.add(
                    f"pre_attention | {windows.name} | {slots} slots | {name}",
                    stalls / tokens, "stalls a token", needed=needed / tokens,
                    fetched=fetched / tokens, wasted=wasted / tokens,
                    wasted_bytes=wasted * size / tokens,
                    link_bytes=(fetched + stalls) * size / tokens,
                )  # fmt: skip
    print(report.table())


if __name__ == "__main__":
    app.run(main)
