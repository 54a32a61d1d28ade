"""Counts of a router's choices for a profile (BuddyMoE sections 3.1 and 3.3), by batch.

Axes: N tokens, A experts a token, E experts of a layer, M sparse layers, D model width.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moejax.policies import buddy_gates
from moejax.policies.buddy_lists import Source, conditional_coactivation, output_similarity

_EXACT = jax.lax.Precision.HIGHEST  # a shorter product would round the counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertActivity:
    """Sums over tokens, each with a weight of its own; whole numbers are exact to 2^24."""

    tokens: jax.Array  # float32[], sum of the weights
    activations: jax.Array  # float32[M, E], A_l(i)
    coactivations: jax.Array  # float32[M, E, E], M_l(i, j), tokens that chose both; 0 where i = j
    weighted: jax.Array  # float32[M, E, E], sums of min(p~_i, p~_j) in place of counts
    entropies: jax.Array  # float32[M, bins], of TAE by `buddy_gates.entropy_bin`
    # float32[M, E, E], over tokens that chose i, of cos(f_i(x), f_j(x)); None where outputs are not
    # compared
    cosines: jax.Array | None = None
    # float32[M, E, E], tokens that chose i in layer l and j in the next sparse one; 0 for the last
    # layer. None in older profiles, which did not count it.
    following: jax.Array | None = None


def no_activity(num_layers: int, num_experts: int, *, outputs: bool) -> ExpertActivity:
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


def with_layer(
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


def with_following(
    activity: ExpertActivity,  # so far, with `following`; donate it
    layer: int,  # among the sparse ones, not the last
    ids: jax.Array,  # int32[N, A], of the layer
    next_ids: jax.Array,  # int32[N, A], of the next one
    token_weights: jax.Array,  # float32[N]
) -> ExpertActivity:
    """Counts pairs of choices in a layer and in the next sparse one."""
    assert activity.following is not None
    expert = jnp.arange(activity.activations.shape[1], dtype=jnp.int32)

    def marks(ids: jax.Array) -> jax.Array:
        return jnp.any(ids[:, :, None] == expert[None, None], axis=1).astype(jnp.float32)

    both = _products(marks(ids) * token_weights[:, None], marks(next_ids))
    return dataclasses.replace(activity, following=activity.following.at[layer].add(both))


def with_outputs(
    activity: ExpertActivity,  # so far, with `cosines`; donate it
    layer: int,  # among the sparse ones
    outputs: jax.Array,  # [E, N, D], f_e(x_n)
    ids: jax.Array,  # int32[N, A]
    token_weights: jax.Array,  # float32[N]
) -> ExpertActivity:
    """Compares the outputs of all experts for the same tokens."""
    assert activity.cosines is not None
    wide = outputs.astype(jnp.float32)
    length = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))
    unit = wide / jnp.maximum(length, float(np.finfo(np.float32).tiny))
    cosines = jnp.einsum("ind,jnd->nij", unit, unit, precision=_EXACT)
    expert = jnp.arange(len(outputs), dtype=jnp.int32)
    marks = jnp.any(ids[:, :, None] == expert[None, None], axis=1).astype(jnp.float32)
    found = jnp.einsum("ni,nij->ij", marks * token_weights[:, None], cosines, precision=_EXACT)
    return dataclasses.replace(activity, cosines=activity.cosines.at[layer].add(found))


def _products(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum("ne,nf->ef", x, y, precision=_EXACT)


def shares(activity: ExpertActivity, source: Source, smoothing: float) -> np.ndarray:
    """Shares q from the counts on the host, float64[M, E, E]; by outputs only if they are compared.

    Args:
      smoothing: epsilon of Laplace; outputs take none.
    """
    if source == "outputs":
        if activity.cosines is None:
            raise ValueError("outputs were not compared")
        return output_similarity(np.asarray(activity.cosines), np.asarray(activity.activations))
    counts = activity.weighted if source == "weighted" else activity.coactivations
    return conditional_coactivation(np.asarray(counts), smoothing)


def links_of(following: np.ndarray) -> np.ndarray:
    """Share float32[M, E, E] of tokens with expert i one layer earlier that choose j here.

    Rows sum to 1; to 0 for an i that was never chosen, and for the first layer.

    Args:
      following: [M, E, E], of `ExpertActivity`: tokens that chose i in layer l and j in the next.
    """
    counts = np.concatenate([np.zeros_like(following[:1]), following[:-1]]).astype(np.float64)
    total = counts.sum(axis=-1, keepdims=True)
    return np.divide(counts, total, out=np.zeros_like(counts), where=total > 0).astype(np.float32)
