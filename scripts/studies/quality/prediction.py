"""Predictors of experts: two linear functions that are fitted, a replay of prefetch by scores."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Predictor = dict[str, jax.Array]


def fit(x: np.ndarray, ids: np.ndarray, num_experts: int, steps: int) -> Predictor:
    """Two linear functions of each layer that rank its experts.

    Args:
      x: float32[M, N, D].
      ids: int32[M, N, A], the choice that they are to foretell.
    """
    layers, count, dim = x.shape
    keys = jax.random.split(jax.random.key(0), 3)
    first = jax.random.normal(keys[0], (layers, dim, dim)) * dim**-0.5
    last = jax.random.normal(keys[1], (layers, dim, num_experts)) * dim**-0.5
    parameters = {"first": first, "last": last}
    scale = np.sqrt(np.mean(np.square(x), axis=(1, 2), keepdims=True))
    schedule = optax.cosine_decay_schedule(3e-3, steps)
    optimizer = optax.adam(schedule)

    def loss(parameters: Predictor, x: jax.Array, ids: jax.Array) -> jax.Array:
        scores = predict(parameters, x)
        chosen = jnp.any(jax.nn.one_hot(ids, num_experts, dtype=bool), axis=-2)
        own = jnp.take_along_axis(scores, ids, axis=-1)
        gaps = own[..., :, None] - scores[..., None, :]
        pairs = jax.nn.softplus(-gaps)
        return jnp.sum(jnp.where(chosen[..., None, :], 0.0, pairs)) / x.shape[1]

    @jax.jit
    def step(carry: Any, x: jax.Array, ids: jax.Array) -> Any:
        parameters, state = carry
        gradients = jax.grad(loss)(parameters, x, ids)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state

    carry = (parameters, optimizer.init(parameters))
    drawn = np.random.default_rng(0)
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        for _ in range(steps):
            rows = drawn.integers(0, count, 512)
            carry = step(carry, jnp.asarray(x[:, rows] / scale), jnp.asarray(ids[:, rows]))
    fitted = carry[0]
    return {**fitted, "first": fitted["first"] / jnp.asarray(scale)}


@jax.jit
def predict(parameters: Predictor, x: jax.Array) -> jax.Array:
    """Scores float32[M, N, E] of float32[M, N, D]."""
    hidden = jax.nn.relu(jnp.einsum("mnd,mdh->mnh", x, parameters["first"]))
    return jnp.einsum("mnh,mhe->mne", hidden, parameters["last"])


class Replayed(NamedTuple):
    """Counts of a replay, int32[M] each."""

    needed: Any
    stalls: Any
    fetched: Any  # ahead
    wasted: Any


@functools.partial(jax.jit, static_argnames=("slots", "count"))
def replay(ids: jax.Array, scores: jax.Array, *, slots: int, count: int) -> Replayed:
    """Replays each layer's LRU cache with `count` experts prefetched by score.

    Args:
      ids: int32[M, N, A].
      scores: float32[M, N, E]; a row of equal ones prefetches nothing.
    """
    num_experts = scores.shape[-1]
    expert = jnp.arange(num_experts, dtype=jnp.int32)

    def kept(stamps: jax.Array) -> jax.Array:
        later = (stamps[None] > stamps[:, None]) | (
            (stamps[None] == stamps[:, None]) & (expert[None] < expert[:, None])
        )
        return jnp.where(jnp.sum(later, axis=1, dtype=jnp.int32) < slots, stamps, -1)

    def token(carry: Any, given: Any) -> tuple[Any, Any]:
        stamps, now = carry
        ids, scores = given
        threshold = jax.lax.top_k(scores, count)[0][-1]
        guessed = (scores >= threshold) & (jnp.max(scores) > jnp.min(scores))
        fetched = guessed & (stamps < 0)
        stamps = kept(jnp.where(guessed, now, stamps))
        used = jnp.any(ids[:, None] == expert[None], axis=0)
        counts = [used, used & (stamps < 0), fetched, fetched & ~used]
        stamps = kept(jnp.where(used, now + 1, stamps))
        sums = [jnp.sum(mask, dtype=jnp.int32) for mask in counts]
        return (stamps, now + 2), Replayed(*sums)

    def layer(ids: jax.Array, scores: jax.Array) -> Replayed:
        start = (jnp.where(expert < slots, 0, -1), jnp.int32(1))
        _, found = jax.lax.scan(token, start, (ids, scores))
        return jax.tree.map(lambda part: jnp.sum(part, dtype=jnp.int32), found)

    return jax.vmap(layer)(ids, scores)


def recall(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Share of the A experts among the A of the highest scores, float64[M]."""
    width = ids.shape[-1]
    guessed = np.argpartition(-scores, width - 1, axis=-1)[..., :width]
    hits = (ids[..., :, None] == guessed[..., None, :]).any(-1)
    return hits.mean(axis=(1, 2))
