"""Output of a compiled step: new tokens, and log-probabilities on request."""

import dataclasses

import jax
import jax.numpy as jnp

from moejax.inference.sampling import Logprobs

NO_TOKEN = -1  # in the place of a token: the row has ended, or rests
NOT_FINITE = -2  # the row's logits named none, and it ends here


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """The new tokens of a call of n steps.

    Invariant: the leading axes of all arrays are those of `tokens`.
    """

    tokens: jax.Array  # int32[B, n], NO_TOKEN or NOT_FINITE where there is none
    logprobs: Logprobs | None  # None where the program tells none

    def at_step(
        self, index: jax.Array, tokens: jax.Array, logprobs: Logprobs | None
    ) -> "StepOutput":
        """Writes the result of step `index`, int32[]: int32[B] and its logprobs or None."""

        def place(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[:, index].set(new)

        return jax.tree.map(place, self, StepOutput(tokens, logprobs))


def names_a_token(logits: jax.Array) -> jax.Array:
    """bool[B], whether a softmax of logits [B, V] is a distribution.

    It is none of a NaN, of +inf, or of -inf alone; -inf beside a finite logit masks its token.
    """
    # XLA's maximum on a CPU loses a NaN (jax 0.10.2, 2026-11-24).
    numbers = jnp.where(jnp.isnan(logits), jnp.inf, logits)
    return jnp.isfinite(jnp.max(numbers, axis=-1))


def empty_step_output(batch: int, length: int, top_logprobs: int) -> StepOutput:
    """Empty output for `length` tokens of each row.

    Args:
      length: n.
      top_logprobs: N, likeliest tokens told beside each; 0: no logprobs at all.
    """
    tokens = jnp.full((batch, length), NO_TOKEN, jnp.int32)
    if not top_logprobs:
        return StepOutput(tokens, None)
    top = jnp.zeros((batch, length, top_logprobs), jnp.float32)
    return StepOutput(tokens, Logprobs(top[..., 0], top, jnp.zeros(top.shape, jnp.int32)))
