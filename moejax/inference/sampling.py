"""Sampling: logits to tokens by penalties, filters and the draw, in the order of Hugging Face.

`StepOutput` is what the host gets of a step: new tokens, and log-probabilities on request.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings of B sequences; arrays, so that they change without a retrace."""

    temperature: jax.Array  # float32[B]; 0 is greedy
    top_k: jax.Array  # int32[B]; 0 is off
    top_p: jax.Array  # float32[B] in (0, 1]; 1 is off
    min_p: jax.Array  # float32[B] in [0, 1]; 0 is off
    repetition_penalty: jax.Array  # float32[B]; 1 is off


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of the model's own probabilities: no penalty, temperature or filter.

    Axes: B rows, n tokens of a call (absent while one is chosen), N likeliest tokens.
    """

    chosen: jax.Array  # float32[B, n], of the token that was taken
    top: jax.Array  # float32[B, n, N], falling
    top_ids: jax.Array  # int32[B, n, N]


def logprobs_of(logits: jax.Array, tokens: jax.Array, num_top: int) -> Logprobs:
    """Log-probabilities of the chosen tokens and of the likeliest ones.

    Args:
      logits: float32[B, V], as the model gives them.
      tokens: int32[B].
      num_top: static, N; where V is less, the rest is -inf of token 0.
    """
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    count = min(num_top, logits.shape[-1])
    top, top_ids = jax.lax.top_k(logprobs, count)
    rest = ((0, 0), (0, num_top - count))
    return Logprobs(chosen, jnp.pad(top, rest, constant_values=-jnp.inf), jnp.pad(top_ids, rest))


def penalized(logits: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """Divides logits of seen tokens by the penalty, or multiplies them if negative.

    Keskar et al. 2019 (CTRL), section 4.1, with the sign rule of Hugging Face.

    Args:
      logits: float32[B, V].
      seen: bool[B, V], tokens of the prompt and of the answer so far.
      penalty: float32[B].
    """
    penalty = penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def filtered(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Applies temperature, then top-k, top-p and min-p; excluded logits become -inf.

    Top-p keeps the smallest set of most likely tokens whose mass reaches p (Holtzman et al. 2020,
    section 3.1), min-p what has at least p times the best token's probability (Nguyen et al. 2024,
    section 3.2). Ties at the edge of top-k all stay. The best token always stays.

    Args:
      logits: float32[B, V].
      sampling: settings of each row; rows of temperature 0 are left unscaled.

    Returns:
      float32[B, V], shifted so that the best logit of each row is 0.
    """
    vocab_size = logits.shape[-1]
    smallest = jnp.finfo(jnp.float32).tiny
    temperature = jnp.maximum(sampling.temperature, smallest)
    temperature = jnp.where(sampling.temperature > 0, temperature, 1.0)
    best = jnp.max(logits, axis=-1, keepdims=True)
    logits = (logits - best) / temperature[:, None]  # at most 0: no temperature overflows
    falling = -jnp.sort(-logits, axis=-1)

    k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab_size), vocab_size)
    edge = jnp.take_along_axis(falling, (k - 1)[:, None], axis=-1)
    falling = jnp.where(falling < edge, -jnp.inf, falling)
    logits = jnp.where(logits < edge, -jnp.inf, logits)

    probability = jax.nn.softmax(falling, axis=-1)
    mass_before = jnp.cumsum(probability, axis=-1) - probability
    # A sum of float32 reaches 1 before the last token does, so "off" is asked for by itself.
    within = (mass_before < sampling.top_p[:, None]) | (sampling.top_p[:, None] >= 1.0)
    kept = within & (falling > -jnp.inf)
    edge = jnp.min(jnp.where(kept, falling, falling[:, :1]), axis=-1, keepdims=True)
    logits = jnp.where(logits < edge, -jnp.inf, logits)

    best = jnp.max(logits, axis=-1, keepdims=True)
    floor = best + jnp.log(sampling.min_p)[:, None]  # log(0) is -inf: off
    return jnp.where(logits < floor, -jnp.inf, logits)


def draw(
    logits: jax.Array, keys: jax.Array, sampling: Sampling, *, all_greedy: bool
) -> tuple[jax.Array, jax.Array]:
    """Draws the next token of each row from its own random stream.

    Args:
      logits: float32[B, V].
      keys: B typed keys; each row's draw depends on its key and logits alone.
      sampling: settings of each row.
      all_greedy: static; True skips the sort and the draw.

    Returns:
      int32[B] and the keys for the next draw.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if all_greedy:
        return greedy, keys
    split = jax.vmap(jax.random.split)(keys)
    drawn = jax.vmap(jax.random.categorical)(split[:, 0], filtered(logits, sampling))
    return jnp.where(sampling.temperature > 0, drawn.astype(jnp.int32), greedy), split[:, 1]


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
