"""DynaExq's controller as maths: hotness, the hot set, and the swaps that lead to it.

Axes: N tokens, A experts a token, M sparse layers, E experts of a layer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.policies.base import Observation, Requests
from moejax.policies.ordering import ranks


def gate_means(observation: Observation) -> jax.Array:
    """Means float32[E] of g over the active tokens; 0 without any.

    g is the router's full softmax, and 0 for experts that a token did not choose: Algorithm 1
    lets inactive experts decay, which eq. 2 alone would not.
    """
    num_experts = observation.probabilities.shape[1]
    expert = jax.lax.iota(jnp.int32, num_experts)
    chosen = jnp.any(observation.ids[:, :, None] == expert[None, None], axis=1)
    chosen &= observation.active[:, None]
    total = jnp.sum(jnp.where(chosen, observation.probabilities, 0.0), axis=0)
    return total / jnp.maximum(num_active(observation), 1).astype(jnp.float32)


def num_active(observation: Observation) -> jax.Array:
    """Number of tokens that are not padding, int32[]."""
    return jnp.sum(observation.active, dtype=jnp.int32)


def smoothed(
    scores: jax.Array,  # float32[E], S
    means: jax.Array,  # float32[E], of `gate_means`
    num_tokens: jax.Array,  # int32[], n
    alpha: jax.Array,  # float32[], 0 to 1, less than 1
) -> jax.Array:
    """Applies eq. 2 to n tokens at once: S <- alpha^n S + (1 - alpha^n) mean(g), float32[E].

    For one token it is eq. 2. It does not depend on the order of the tokens, and a prompt counts as
    much as the same number of decoded ones.
    """
    kept = jnp.power(alpha, num_tokens.astype(jnp.float32))
    return kept * scores + (1 - kept) * means


class HotSet(NamedTuple):
    """Hot set and its threshold: lines 14 and 15 of Algorithm 1."""

    high: jax.Array  # bool[M, E], the set H
    last: jax.Array  # float32[M], the n_hot-th score, tau_h = top(n_hot, S) of section 3.5


def hot_set(
    scores: jax.Array,
    high: jax.Array,
    n_hot: jax.Array,
    tau: jax.Array,
    hysteresis: jax.Array,
) -> HotSet:
    """Chooses the top n_hot experts with S >= tau; ties go to hot ones, then to small ids.

    Args:
      scores: float32[M, E], S.
      high: bool[M, E], the set so far.
      n_hot: int32[M], K.
      tau: float32[M]; -inf lets all pass.
      hysteresis: float32[], the share by which a score must exceed a hot expert's to replace it,
        and by which a hot expert may fall below tau; 0 in the paper.
    """
    worth = jnp.where(high, scores * (1 + hysteresis), scores)
    place = ranks(worth, high)
    is_last = place == n_hot[:, None] - 1
    last = jnp.max(jnp.where(is_last, scores, 0.0), axis=1)
    return HotSet((place < n_hot[:, None]) & (worth >= tau[:, None]), last)


def swaps(
    scores: jax.Array,  # float32[M, E]
    high: jax.Array,  # bool[M, E], H, at most n_hot in a layer
    hot: jax.Array,  # bool[M, E], experts of the hot tier once all transfers in flight have arrived
    cold: jax.Array,  # bool[M, E], the cold tier
    n_hot: jax.Array,  # int32[M], slots of the hot tier
    cold_slots: jax.Array,  # int32[], slots of a layer in the cold tier
    tiers: tuple[jax.Array, jax.Array],  # int32[] of the hot tier and of the cold one
    max_requests: int,  # R, static and even
) -> Requests:
    """Demotions and promotions that lead to the hot set: lines 16 to 22 of Algorithm 1.

    In a layer the hottest promotion takes the slot of the coldest demotion, and so on; where slots
    are free, promotions take these first. Over the layers, the pair that gains the most hotness
    comes first. A demotion without a promotion needs room in the cold tier, if its expert is not
    there already.

    Returns:
      R requests, a demotion and then its promotion, either of which may be none.
    """
    num_layers, num_experts = scores.shape
    up, down = high & ~hot, ~high & hot
    free = jnp.maximum(n_hot - _num(hot), 0)
    # Places among the promotions, hottest first, and the demotions, coldest first.
    up_place = jnp.where(up, ranks(up, scores), num_experts)
    down_place = jnp.where(down, ranks(down, -scores) + free[:, None], num_experts)
    may_up = up_place < (free + _num(down))[:, None]
    alone = down & (down_place >= _num(up)[:, None])
    needs_room = alone & ~cold
    room = cold_slots - _num(cold)
    refused = needs_room & (ranks(needs_room, -scores) >= room[:, None])
    promoted, gain = _at_places(jnp.where(may_up, up_place, num_experts), scores)
    demoted, loss = _at_places(jnp.where(refused, num_experts, down_place), scores)
    some = (promoted >= 0) | (demoted >= 0)
    urgency = jnp.where(some, gain - loss, -jnp.inf).reshape(-1)
    num_pairs = min(max_requests // 2, urgency.size)
    urgency, pair = jax.lax.top_k(urgency, num_pairs)
    layer = jnp.broadcast_to(jax.lax.iota(jnp.int32, num_layers)[:, None], scores.shape)
    experts = jnp.stack([demoted, promoted], axis=-1).reshape(-1, 2)[pair]
    real = (urgency[:, None] > -jnp.inf) & (experts >= 0)
    wanted = jnp.stack([tiers[1], tiers[0]])
    fields = (layer.reshape(-1)[pair][:, None], experts, wanted[None])
    padding = (0, max_requests - 2 * num_pairs)
    return Requests(
        *(jnp.pad(jnp.where(real, x, -1).reshape(-1), padding, constant_values=-1) for x in fields)
    )


def _num(mask: jax.Array) -> jax.Array:
    """Number of set entries in each layer, int32[M]."""
    return jnp.sum(mask, axis=1, dtype=jnp.int32)


def _at_places(place: jax.Array, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Expert at each place 0..E - 1, int32[M, E] or -1, and its score, or 0."""
    index = jax.lax.broadcasted_iota(jnp.int32, place.shape, 1)
    layer = jax.lax.iota(jnp.int32, len(place))[:, None]
    expert = jnp.full(place.shape, -1, jnp.int32).at[layer, place].set(index, mode="drop")
    score = jnp.take_along_axis(scores, jnp.maximum(expert, 0), axis=1)
    return expert, jnp.where(expert >= 0, score, 0.0)
