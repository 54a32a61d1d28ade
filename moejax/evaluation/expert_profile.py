"""Counts a model's routing over text, to make BuddyMoE's lists."""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import MoejaxError
from moejax.files import result_rows as results
from moejax.inference import steps
from moejax.inference.runner import Runner
from moejax.models.expert_products import gated
from moejax.models.kv_cache import KVCache
from moejax.models.moe import ResidentExperts, Routing, SparseMoe
from moejax.models.transformer import ChunkSpec, merge_weights
from moejax.policies import buddy_gates
from moejax.routing.profile_file import ExpertActivity, config_sha256
from moejax.text.corpus import Text, TokenizedText
from moejax.text.windows import Windowing, windows
from moejax.weights import linear as ops

if TYPE_CHECKING:
    from moejax.engine import Engine

# Tokens whose outputs of all experts are compared at a time: bounds their memory.
COMPARED_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Counting:
    """How tokens are counted; static."""

    warmup: int = 0  # first tokens of a window, which have seen little of the text
    warmup_weight: float = 1.0  # weight of one of them (BuddyMoE section 3.3), 0 to 1
    temperature: float = 1.0  # temperature of p~ in TAE
    # whether the outputs of all experts are compared: each runs on every token
    outputs: bool = False


def profile(
    runner: Runner,  # its model holds its experts
    ids: np.ndarray,  # integer[n], at least two; the last one is not fed, since nothing follows it
    window: int,  # tokens that see each other
    batch_size: int,
    counting: Counting,
    on_batch: Callable[[int], None] = lambda num_tokens: None,
) -> ExpertActivity:
    """Counts the routing of a stream of tokens, in windows that do not overlap.

    Returns:
      The counts, on the host.

    Raises:
      MoejaxError: the model has no experts, or there are too few tokens, or none that counts.
    """
    config = runner.config
    if not config.moe_layers:
        raise MoejaxError("the model has no sparse layers, so there are no experts to profile")
    if len(ids) < 2:
        raise MoejaxError(f"the text has {len(ids)} tokens; two are the least to profile")
    activity = jax.device_put(
        _no_activity(len(config.moe_layers), config.num_experts, outputs=counting.outputs),
        runner.device,
    )
    count = _step(counting)
    for tokens, lengths, _ in windows(np.asarray(ids), Windowing(window, window), batch_size):
        activity = runner.scan_windows(count, activity, tokens, lengths)
        on_batch(int(lengths.sum()))
    if not float(activity.tokens) > 0:
        raise MoejaxError(
            f"nothing is counted: warmup={counting.warmup} of weight "
            f"{counting.warmup_weight:g} is all of every window of {window} tokens"
        )
    return jax.device_get(activity)


@functools.cache
def _step(counting: Counting) -> Callable[..., steps.StepResult[tuple[KVCache, ExpertActivity]]]:
    """Step for `Runner.scan_windows`; one object per setting, since functions are program keys."""

    def profile_chunk(
        program: steps.StepProgram,
        spec: ChunkSpec,
        state: tuple[KVCache, ExpertActivity],
        experts: None,
        inputs: steps.StepInputs,
        chunk: steps.TokenChunk,
    ) -> steps.StepResult[tuple[KVCache, ExpertActivity]]:
        del experts  # the model holds all of them
        cache, activity = state
        model = merge_weights(program.definition, inputs.weights)
        positions, mask = steps.chunk_positions(chunk)
        share = jnp.where(positions < counting.warmup, counting.warmup_weight, 1.0)
        counted = jnp.where(mask, share.astype(jnp.float32), 0.0).reshape(-1)

        def record(x: jax.Array, routing: Routing) -> tuple[jax.Array | None, Routing]:
            return x if counting.outputs else None, routing

        run = ResidentExperts(model.moe, spec.experts, record)
        cache, _, _, (x, (probabilities, _, ids)) = model(
            chunk.tokens, positions, mask, cache, spec, run, chunk.lengths
        )
        for layer in range(len(ids)):
            activity = _with_layer(
                activity, layer, probabilities[layer], ids[layer], counted, counting.temperature
            )
            if layer > 0:
                activity = _with_following(activity, layer - 1, ids[layer - 1], ids[layer], counted)
            if counting.outputs:
                activity = _compared(activity, model.moe, layer, x[layer], ids[layer], counted)
        activity = dataclasses.replace(activity, tokens=activity.tokens + counted.sum())
        return steps.StepResult((cache, activity), None, None, None)

    return profile_chunk


def _compared(
    activity: ExpertActivity,  # so far, with `cosines`; donate it
    moe: SparseMoe,
    layer: int,  # among the sparse ones
    x: jax.Array,  # [N, D]
    ids: jax.Array,  # int32[N, A]
    counted: jax.Array,  # float32[N], weights of the tokens
) -> ExpertActivity:
    """Adds the cosines of all experts' outputs f_e(x_n), a few tokens at a time."""
    gate_up = ops.matrix(moe.gate_up[...], (layer,), x.dtype)
    down = ops.matrix(moe.down[...], (layer,), x.dtype)
    size, biases = math.gcd(len(x), COMPARED_TOKENS), moe.biases

    def add(
        activity: ExpertActivity, part: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[ExpertActivity, None]:
        x, ids, counted = part
        products = jnp.einsum("nd,ekd->enk", x, gate_up)
        if biases is not None:
            products = products + biases.gate_up[layer][:, None]
        outputs = jnp.einsum("enf,edf->end", gated(products, moe.config.gating), down)
        if biases is not None:
            outputs = outputs + biases.down[layer][:, None]
        wide = outputs.astype(jnp.float32)
        length = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))
        unit = wide / jnp.maximum(length, float(np.finfo(np.float32).tiny))
        cosines = jnp.einsum("ind,jnd->nij", unit, unit, precision=_EXACT)
        chosen = _marks(ids, len(outputs)) * counted[:, None]
        found = jnp.einsum("ni,nij->ij", chosen, cosines, precision=_EXACT)
        assert activity.cosines is not None
        return dataclasses.replace(activity, cosines=activity.cosines.at[layer].add(found)), None

    parts = jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), (x, ids, counted))
    return jax.lax.scan(add, activity, parts)[0]


def provenance(
    checkpoint: str, directory: Path, engine: "Engine", text: Text, stream: TokenizedText
) -> dict[str, Any]:
    """Records the checkpoint, text, devices and versions of a profile."""
    config = engine.config
    return {
        "checkpoint": checkpoint,
        "config_sha256": config_sha256(directory),
        "family": config.family,
        "sparse_layers": list(config.moe_layers),
        "experts": config.num_experts,
        "experts_per_token": config.experts_per_token,
        "bits_per_weight": engine.bits_per_weight,
        "dtype": str(engine.dtype),
        "text": {"source": text.source, "sha256": text.sha256, "bytes": text.num_bytes},
        "tokens": len(stream.ids),
        "bos": stream.bos,
        "tokenizer_sha256": stream.tokenizer_sha256,
        "device": results.describe_device(engine.device),
        "versions": results.package_versions("jax", "jaxlib", "flax", "numpy", "tokenizers"),
        "date": results.today(),
        "command": results.command_line(),
    }


_EXACT = jax.lax.Precision.HIGHEST  # a shorter product would round the counts


def _no_activity(num_layers: int, num_experts: int, *, outputs: bool) -> ExpertActivity:
    """Empty counts, before any token; with `outputs`, outputs will be compared."""
    pairs = (num_layers, num_experts, num_experts)
    return ExpertActivity(
        tokens=jnp.zeros((), jnp.float32),
        activations=jnp.zeros(pairs[:2], jnp.float32),
        coactivations=jnp.zeros(pairs, jnp.float32),
        weighted=jnp.zeros(pairs, jnp.float32),
        entropies=jnp.zeros((num_layers, buddy_gates.ENTROPY_BINS), jnp.float32),
        cosines=jnp.zeros(pairs, jnp.float32) if outputs else None,
        following=jnp.zeros(pairs, jnp.float32),
    )


def _with_layer(
    activity: ExpertActivity,  # so far; donate it
    layer: int,  # among the sparse ones
    probabilities: jax.Array,  # float32[N, E]
    ids: jax.Array,  # int32[N, A], by falling probability
    token_weights: jax.Array,  # float32[N]; 0 for padding
    temperature: float = 1.0,  # temperature of p~ in TAE
) -> ExpertActivity:
    """Counts a layer's routing."""
    num_experts = probabilities.shape[1]
    chosen = buddy_gates.chosen_probabilities(probabilities, ids)
    is_expert = (ids[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None]).astype(
        jnp.float32
    )
    marks = jnp.sum(is_expert, axis=1)
    both = _products(marks * token_weights[:, None], marks)
    # The later of two ranks has the smaller p~: each is paired with all before it.
    before = jnp.cumsum(is_expert, axis=1) - is_expert
    least = is_expert * (chosen * token_weights[:, None])[:, :, None]
    half = _products(least.reshape(-1, num_experts), before.reshape(-1, num_experts))
    smoothed = buddy_gates.chosen_probabilities(probabilities, ids, temperature)
    bins = buddy_gates.entropy_bin(buddy_gates.activating_entropy(smoothed))
    off_diagonal = 1 - jnp.eye(num_experts, dtype=jnp.float32)
    return dataclasses.replace(
        activity,
        activations=activity.activations.at[layer].add(jnp.diagonal(both)),
        coactivations=activity.coactivations.at[layer].add(both * off_diagonal),
        weighted=activity.weighted.at[layer].add(half + half.T),
        entropies=activity.entropies.at[layer, bins].add(token_weights),
    )


def _with_following(
    activity: ExpertActivity,  # so far, with `following`; donate it
    layer: int,  # among the sparse ones, not the last
    ids: jax.Array,  # int32[N, A], of the layer
    next_ids: jax.Array,  # int32[N, A], of the next one
    token_weights: jax.Array,  # float32[N]
) -> ExpertActivity:
    """Counts pairs of choices in a layer and in the next sparse one."""
    assert activity.following is not None
    chosen, following = (_marks(of, activity.activations.shape[1]) for of in (ids, next_ids))
    both = _products(chosen * token_weights[:, None], following)
    return dataclasses.replace(activity, following=activity.following.at[layer].add(both))


def _marks(ids: jax.Array, num_experts: int) -> jax.Array:
    """float32[N, E], 1 where a token chose an expert."""
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    return jnp.any(ids[:, :, None] == expert[None, None], axis=1).astype(jnp.float32)


def _products(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum("ne,nf->ef", x, y, precision=_EXACT)
