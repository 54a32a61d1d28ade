"""Cache-aware routing: experts that are resident get a bonus in the router's ranking.

Cache-Prior of "Mixture of Cache-Conditional Experts for Efficient Mobile Device Inference" (arXiv
2412.00099), without training. Of a token's logits z, and m the mask of resident experts:

    z' = z + lambda Delta m       Delta: running mean over tokens of max(z) - min(z)

A token takes its top J experts by z, then the rest of its A by z'. Weights come from z alone. At
lambda = 0 the router decides, at 1 the cache nearly alone. Missing experts that are chosen are
fetched.

The paper leaves open, and here: Delta is of each layer, over all active tokens so far, the token's
own step too. Prompts are routed as they are: their tokens need most experts anyway. A token's
weights keep their sum, as where the router normalises them.

Axes: N tokens, A experts a token, E experts of a layer, M sparse layers.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import MoejaxError
from moejax.policies.base import Decision, Observation, Policy, PolicySpec, layer_axes_of, ranks
from moejax.policies.baselines import as_routed
from moejax.policies.settings import check_number

_LEAST = float(np.finfo(np.float32).tiny)


class CacheAwareState(NamedTuple):
    """Settings that sweep, and the mean span of each layer's logits."""

    strength: jax.Array  # float32[], lambda
    kept: jax.Array  # int32[], J
    span: jax.Array  # float32[M], sum of max(z) - min(z) over tokens
    tokens: jax.Array  # float32[M], how many


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheAware(Policy[CacheAwareState]):
    """Prefers resident experts in decode steps, over one tier; both settings may sweep."""

    name: ClassVar[str] = "cache_aware"
    substitutes: ClassVar[bool] = True

    strength: float = 0.2  # lambda
    kept: int = 1  # J, experts that a token takes whether they are resident or not

    def __post_init__(self) -> None:
        check_number("strength", self.strength, 0)
        check_number("kept", self.kept, 0, integer=True)

    @property
    def layer_axes(self) -> Any:
        """Names the state's layer axes, as `Policy.layer_axes`."""
        return layer_axes_of(CacheAwareState, span=0, tokens=0)

    def init(self, spec: PolicySpec) -> CacheAwareState:
        """Makes the first state, as `Policy.init`."""
        if len(spec.tiers) != 1:
            raise MoejaxError(f"cache_aware serves one tier, not {', '.join(spec.tiers)}")
        return CacheAwareState(
            jnp.asarray(self.strength, jnp.float32),
            jnp.asarray(self.kept, jnp.int32),
            jnp.zeros(spec.num_layers, jnp.float32),
            jnp.zeros(spec.num_layers, jnp.float32),
        )

    def decide(
        self, state: CacheAwareState, observation: Observation
    ) -> tuple[Decision, CacheAwareState]:
        """Chooses experts, as `Policy.decide`; where one changes it keeps the place in its row."""
        o = observation
        logits = jnp.log(jnp.maximum(o.probabilities, _LEAST))  # up to a constant of the token
        spans = jnp.max(logits, axis=-1) - jnp.min(logits, axis=-1)
        spans = jnp.where(o.active, spans, 0.0)
        state = state._replace(
            span=state.span.at[o.layer].add(jnp.sum(spans)),
            tokens=state.tokens.at[o.layer].add(jnp.sum(o.active, dtype=jnp.float32)),
        )
        routed = as_routed(o, jnp.zeros((), jnp.int32))
        if o.is_prefill:
            return routed, state
        mean = state.span[o.layer] / jnp.maximum(state.tokens[o.layer], 1.0)
        bonus = state.strength * mean * o.resident[0].astype(jnp.float32)
        ids = biased_choice(o.ids, logits, bonus, state.kept)
        chosen = jnp.take_along_axis(o.probabilities, ids, axis=-1, mode="clip")
        total = jnp.sum(o.weights, axis=-1, keepdims=True)
        weights = chosen / jnp.maximum(jnp.sum(chosen, axis=-1, keepdims=True), _LEAST) * total
        same = jnp.all(ids == o.ids, axis=-1, keepdims=True)
        weights = jnp.where(same, o.weights, weights)
        return routed._replace(ids=ids, weights=weights), state


def biased_choice(
    ids: jax.Array, logits: jax.Array, bonus: jax.Array, kept: jax.Array
) -> jax.Array:
    """Experts of each token under a bonus, int32[N, A].

    An expert that stays has its old place; new ones, the best first, take the places that are left.

    Args:
      ids: int32[N, A], the router's choice, by falling probability.
      logits: float32[N, E].
      bonus: float32[E], added to the logits.
      kept: int32[], the router's first choices that stay.
    """
    num_experts, width = logits.shape[1], ids.shape[1]
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    place = jnp.arange(width, dtype=jnp.int32)
    is_own = ids[:, :, None] == expert[None, None]  # [N, A, E]
    is_routed = jnp.any(is_own, axis=1)
    is_kept = jnp.any(is_own & (place < kept)[None, :, None], axis=1)
    biased = logits + bonus[None]
    # Ties go to the router's choice: without a bonus it stays.
    order = ranks(is_kept, biased, is_routed)
    stays = is_routed & (order < width)
    newcomers = ~is_routed & (order < width)
    new_rank = jnp.where(newcomers, ranks(newcomers, biased), width)
    own_stays = jnp.any(is_own & stays[:, None], axis=-1)  # [N, A]
    hole = jnp.cumsum(~own_stays, axis=-1, dtype=jnp.int32) - 1
    fills = new_rank[:, None] == hole[:, :, None]  # [N, A, E]
    new = jnp.sum(jnp.where(fills, expert[None, None], 0), axis=-1, dtype=jnp.int32)
    return jnp.where(own_stays, ids, new)
