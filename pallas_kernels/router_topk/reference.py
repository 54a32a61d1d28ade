"""Router top-k in plain jnp and float32; never optimised."""

import jax
import jax.numpy as jnp


def top_k_reference(
    logits: jax.Array, k: int, normalise: bool, first: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `api.top_k` in plain JAX."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    weights, ids = jax.lax.top_k(probabilities, k)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return probabilities, weights, ids if first is None else ids + first
