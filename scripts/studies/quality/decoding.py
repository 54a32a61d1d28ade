"""Teacher-forced decoding of a window under a policy with an LRU cache in each layer."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.attention import causal_attention
from moejax.models.expert_products import ExpertPairs, ExpertStacks, combine, products_by_block
from moejax.models.moe import Experts, MoeInputs, Routing
from moejax.models.transformer import merge_weights, model_definition
from moejax.policies.base import AnyPolicy, Observation, PolicySpec
from moejax.weights.linear import Index
from scripts.studies.quality.bench import Model


class Decoded(NamedTuple):
    """Results of a window or of several.

    Attributes:
      log_probabilities: float32[T, V], of the next token.
      misses: int32[M], experts that were fetched.
      substituted: float32[], gate weight of pairs that another expert served, of all pairs'.
    """

    log_probabilities: Any
    misses: Any
    substituted: Any


class Decoder:
    """The model as one sequence decodes under a policy with slots; a program serves its settings.

    A layer's cache and policy rows see nothing of other layers, and its inputs nothing of later
    tokens. So a layer decides all tokens of a window in a scan, and runs them together.
    """

    def __init__(self, model: Model, policy: AnyPolicy, slots: int, first: np.ndarray):
        """Caches begin with `first`, int[M, slots]."""
        config, self.model = model.config, model
        self.spec = PolicySpec(
            num_layers=model.num_layers, num_experts=config.num_experts,
            width=config.experts_per_token, tiers=("bf16",),
            expert_bytes=(model.nbytes("bf16"),), slots=(slots,),
        )  # fmt: skip
        stamps = np.full((model.num_layers, config.num_experts), -1, np.int32)
        np.put_along_axis(stamps, first, 0, axis=1)
        self._policy, self._slots, self._stamps = policy, slots, jnp.asarray(stamps)
        self._definition = model_definition(config, holds_experts=False)
        self._run = jax.jit(self._decode)

    def decode(self, policy: AnyPolicy, tokens: np.ndarray) -> Decoded:
        """Decodes a window, int32[T + 1], under another setting of the policy."""
        state = policy.init(self.spec)
        stacks = self.model.experts["bf16"]
        return self._run(state, self.model.dense, stacks, jnp.asarray(tokens[None, :-1]))

    def _decode(self, state: Any, weights: Any, stacks: Any, tokens: jax.Array) -> Decoded:
        model = merge_weights(self._definition, weights)
        c, decide = self.model.config, functools.partial(self._decided, state)

        class Decided(Experts):
            def __call__(self, carry: None, inputs: MoeInputs) -> tuple[jax.Array, None, Any]:
                layer, x, routing, token_mask, *_ = inputs
                ids, share, misses = decide(layer.mlp, routing)
                pairs = ExpertPairs(layer.mlp * c.num_experts + ids, token_mask[:, None])
                held = ExpertStacks(stacks[0][None], stacks[1][None], 0)
                products = products_by_block(x, pairs, held, len(stacks[0]), 2**20)
                other = jnp.sum(jnp.where(ids != routing.ids, routing.weights, 0.0))
                substituted = other / jnp.sum(routing.weights)
                return combine(products, pairs, share, x.dtype), None, (misses, substituted)

        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        hidden, _, (misses, substituted) = model.layers(
            tokens, places, jnp.ones(tokens.shape, bool),
            lambda _, q, k, v: causal_attention(q, k, v, c.sliding_window, "xla"), Decided(),
        )  # fmt: skip
        logits = model.project_to_vocab(hidden)[0]
        return Decoded(jax.nn.log_softmax(logits), misses, jnp.mean(substituted))

    def _decided(
        self, state: Any, layer: Index, routing: Routing
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Experts [T, A] and weights of all tokens of a layer, and its misses, int32[]."""
        experts = jnp.arange(self.spec.num_experts, dtype=jnp.int32)

        def token(carry: Any, given: Any) -> tuple[Any, Any]:
            state, stamps, now = carry
            probabilities, ids, weights = given
            resident = stamps >= 0
            seen = Observation(
                jnp.int32(layer), probabilities[None], ids[None], weights[None],
                jnp.ones(1, bool), resident[None],
            )  # fmt: skip
            decision, state = self._policy.decide(state, seen)
            used = jnp.any(decision.ids[0][:, None] == experts[None], axis=0)
            misses = jnp.sum(used & ~resident, dtype=jnp.int32)
            stamps = jnp.where(used, now, stamps)
            order = jnp.sum(
                (stamps[None] > stamps[:, None])
                | ((stamps[None] == stamps[:, None]) & (experts[None] < experts[:, None])),
                axis=1, dtype=jnp.int32,
            )  # fmt: skip
            stamps = jnp.where(order < self._slots, stamps, -1)
            return (state, stamps, now + 1), (decision.ids[0], decision.weights[0], misses)

        start = (state, self._stamps[layer], jnp.int32(1))
        given = (routing.probabilities, routing.ids, routing.weights)
        _, (ids, weights, misses) = jax.lax.scan(token, start, given)
        return ids, weights, jnp.sum(misses)
