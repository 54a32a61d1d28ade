"""Prediction of experts that may become hot, to read the disk ahead (DynaExq section 3.3).

The paper predicts them "by leveraging cross-layer activation correlations" and says no more. Here
the predicted hotness of a layer's experts is that of the layer before, carried over by how often a
token that chose the one chose the other (`links_of`). Alternatively an expert's own hotness
predicts: an expert that is nearly hot becomes hot.

Axes: M sparse layers, E experts of a layer.
"""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.policies.base import Requests
from moejax.policies.ordering import ranks


def links_of(following: np.ndarray) -> np.ndarray:
    """Share float32[M, E, E] of tokens with expert i one layer earlier that choose j here.

    Rows sum to 1; to 0 for an i that was never chosen, and for the first layer.

    Args:
      following: [M, E, E], of `ExpertActivity`: tokens that chose i in layer l and j in the next.
    """
    counts = np.concatenate([np.zeros_like(following[:1]), following[:-1]]).astype(np.float64)
    total = counts.sum(axis=-1, keepdims=True)
    return np.divide(counts, total, out=np.zeros_like(counts), where=total > 0).astype(np.float32)


def expected(scores: jax.Array, links: jax.Array) -> jax.Array:
    """Hotness float32[M, E] predicted from the layer before; the first layer keeps its own.

    `scores`, float32[M, E], are S of eq. 2, `links`, float32[M, E, E], those of `links_of`.
    """
    before = jnp.einsum("le,lef->lf", scores[:-1], links[1:], precision=jax.lax.Precision.HIGHEST)
    return jnp.concatenate([scores[:1], before])


def nearly_hot(
    worth: jax.Array, settled: jax.Array, tier: jax.Array, count: int, is_due: jax.Array
) -> Requests:
    """Requests the `count` most valuable experts of each layer that are not settled.

    The first of every layer comes before the second of any.

    Args:
      worth: float32[M, E]; experts with 0 are never requested.
      settled: bool[M, E], experts that are hot or will be.
      tier: int32[], the hot tier.
      is_due: bool[], whether to request anything.
    """
    num_layers, num_experts = worth.shape
    place = ranks(~settled, worth)
    index = jax.lax.broadcasted_iota(jnp.int32, place.shape, 1)
    layer = jax.lax.broadcasted_iota(jnp.int32, (num_layers, count), 0)
    wanted = ~settled & (worth > 0) & is_due
    rows = jax.lax.iota(jnp.int32, num_layers)[:, None]
    expert = jnp.full((num_layers, num_experts), -1, jnp.int32)
    expert = expert.at[rows, jnp.where(wanted, place, num_experts)].set(index, mode="drop")
    expert = expert[:, :count].T.reshape(-1)
    asked = expert >= 0
    return Requests(jnp.where(asked, layer.T.reshape(-1), -1), expert, jnp.where(asked, tier, -1))
