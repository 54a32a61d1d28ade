"""From a router's products to experts and their weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.models.config import ModelConfig
from moejax.models.parts import RouterRule

# DeepSeek-V3's: keeps a sum of sigmoids away from zero.
SUM_FLOOR = 1e-20


class Routing(NamedTuple):
    """What the router said about N tokens."""

    probabilities: jax.Array  # float32[N, E], of all experts: the softmax, or sigmoids
    weights: jax.Array  # float32[N, A], of the chosen experts, normalised where the model does so
    ids: jax.Array  # int32[N, A], by falling weight


def route(
    x: jax.Array, router: jax.Array, config: ModelConfig, bias: jax.Array | None = None
) -> Routing:
    """Scores of all experts in float32, then the top A of them.

    Args:
      x: [N, D].
      router: [E, D].
      config: as in `routing_of`.
      bias: as in `routing_of`.
    """
    logits = jnp.einsum("nd,ed->ne", x, router, preferred_element_type=jnp.float32)
    return routing_of(logits, config, bias)


def routing_of(logits: jax.Array, config: ModelConfig, bias: jax.Array | None = None) -> Routing:
    """Of the router's products, float32[N, E].

    Args:
      logits: of every expert.
      config: gives A, the rule, and whether the chosen weights are divided by their sum.
      bias: float32[E], added to the scores that decide who is chosen.
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
    """float32[N, A], as a model with these scores weighs these experts.

    Args:
      scores: float32[N, E], of all experts: the softmax, or sigmoids.
      ids: int32[N, A], of the chosen ones.
      config: as in `routing_of`.
    """
    weights = jnp.take_along_axis(scores, ids, axis=-1, mode="clip")
    weights = _normalised(weights, config)
    return weights if config.router.scale == 1.0 else weights * config.router.scale


def foreseen(routing: Routing, config: ModelConfig) -> jax.Array:
    """float32[N, E]: the larger, the likelier a router that was asked ahead will want an expert.

    Where scores alone decide, they are it (DyMoE eq. 7); where groups or a bias do, whoever it
    would choose comes before all others.
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
    """With the weights times the model's routed scaling factor."""
    if config.router.scale == 1.0:
        return routing
    return routing._replace(weights=routing.weights * config.router.scale)


def _of_best_groups(scores: jax.Array, rule: RouterRule, bias: jax.Array | None) -> jax.Array:
    """What decides, float32[N, E]; nothing of a group that is not among the best is chosen."""
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
