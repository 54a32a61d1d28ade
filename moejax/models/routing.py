"""Routing: from a router's logits to experts and their weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.models.config import ModelConfig, RouterRule

# DeepSeek-V3's: keeps a sum of sigmoids away from zero.
SUM_FLOOR = 1e-20


class Routing(NamedTuple):
    """Probabilities, chosen experts and weights of N tokens."""

    probabilities: jax.Array  # float32[N, E], of all experts: the softmax, or sigmoids
    weights: jax.Array  # float32[N, A], of the chosen experts, normalised where the model does so
    ids: jax.Array  # int32[N, A], by falling weight


def route(
    x: jax.Array, router: jax.Array, config: ModelConfig, bias: jax.Array | None = None
) -> Routing:
    """Scores all experts in float32 and takes the top A.

    Args:
      x: [N, D].
      router: [E, D].
    """
    logits = jnp.einsum("nd,ed->ne", x, router, preferred_element_type=jnp.float32)
    return routing_of(logits, config, bias)


def routing_of(logits: jax.Array, config: ModelConfig, bias: jax.Array | None = None) -> Routing:
    """Routes by logits, float32[N, E].

    Args:
      config: gives A, the rule, and whether the chosen weights are divided by their sum.
      bias: float32[E], added to the scores for the choice alone, not to the weights.
    """
    rule = config.router
    is_softmax = rule.scoring == "softmax"
    scores = jax.nn.softmax(logits, axis=-1) if is_softmax else jax.nn.sigmoid(logits)
    if rule.is_plain:
        weights, ids = jax.lax.top_k(scores, config.experts_per_token)
        return scaled(Routing(scores, _normalised(weights, config), ids), config)
    width = config.experts_per_token
    _, ids = jax.lax.top_k(_of_best_groups(scores, rule, bias), width)
    # A bias decides who is chosen, not who comes first.
    weights, order = jax.lax.top_k(weights_of(scores, ids, config), width)
    return Routing(scores, weights, jnp.take_along_axis(ids, order, axis=-1))


def weights_of(scores: jax.Array, ids: jax.Array, config: ModelConfig) -> jax.Array:
    """Weights float32[N, A] that the model's rule gives these experts.

    Args:
      scores: float32[N, E], of all experts: the softmax, or sigmoids.
      ids: int32[N, A], of the chosen ones.
    """
    weights = jnp.take_along_axis(scores, ids, axis=-1, mode="clip")
    weights = _normalised(weights, config)
    return weights if config.router.scale == 1.0 else weights * config.router.scale


def prefetch_scores(routing: Routing, config: ModelConfig) -> jax.Array:
    """Prefetch scores float32[N, E]: higher where the next router is likelier to choose.

    They are the router's scores where those alone decide (DyMoE eq. 7); with groups or a bias, the
    experts that it would choose come before all others.
    """
    if config.router.is_plain:
        return routing.probabilities
    numbers = jnp.arange(routing.probabilities.shape[1], dtype=routing.ids.dtype)
    chosen = jnp.any(routing.ids[:, :, None] == numbers[None, None], axis=1)
    return routing.probabilities + chosen.astype(jnp.float32)


def _normalised(weights: jax.Array, config: ModelConfig) -> jax.Array:
    if not config.norm_topk_prob:
        return weights
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / (total if config.router.scoring == "softmax" else total + SUM_FLOOR)


def scaled(routing: Routing, config: ModelConfig) -> Routing:
    """Multiplies the weights by the model's routed scaling factor."""
    if config.router.scale == 1.0:
        return routing
    return routing._replace(weights=routing.weights * config.router.scale)


def _of_best_groups(scores: jax.Array, rule: RouterRule, bias: jax.Array | None) -> jax.Array:
    """Choice scores float32[N, E], -inf outside the best groups."""
    deciding = scores if bias is None else scores + bias[None]
    if rule.num_groups == rule.top_groups:
        return deciding
    grouped = deciding.reshape(len(deciding), rule.num_groups, -1)
    best = 1 if rule.group_score == "max" else min(2, grouped.shape[-1])
    of_group = jnp.sum(jax.lax.top_k(grouped, best)[0], axis=-1)
    _, groups = jax.lax.top_k(of_group, rule.top_groups)
    numbers = jnp.arange(rule.num_groups, dtype=groups.dtype)
    kept = jnp.any(groups[:, :, None] == numbers[None, None], axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(deciding.shape)
