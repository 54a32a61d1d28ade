"""Router rows to start from: each replica's row finds the text of its own domains."""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.attention import AttentionImpl
from moejax.models.config import ModelConfig
from moejax.models.moe import Routing
from moejax.models.transformer import forward, merge_weights, model_definition
from scripts.demo_training.objective import Weights

_RIDGE = 1e-3  # of the mean square of a router's input


def domain_rows(
    weights: Weights,
    config: ModelConfig,
    crops: np.ndarray,
    replicas: np.ndarray,
    *,
    num_replicas: int,
    scale: float,
    attention: AttentionImpl,
) -> np.ndarray:
    """Regresses, in each layer, the replica of a token's domain on the router's input.

    Args:
      weights: of the parent.
      config: the parent as experts that all run.
      crops: int32[B, T] of all domains.
      replicas: int32[B], the replica that a crop's domain starts with.
      num_replicas: R, each of which some crop has.
      scale: root mean square of the logits.
      attention: which implementation runs causal attention.

    Returns:
      float32[L, R, D], ridge regression of one-hot replicas, centred, without an intercept.
    """
    wanted = np.eye(num_replicas, dtype=np.float32)[replicas]
    wanted -= wanted.mean(axis=0)
    definition = model_definition(config)

    @jax.jit
    def moments(
        weights: Weights, tokens: jax.Array, wanted: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        targets = jnp.repeat(wanted, tokens.shape[1], axis=0)

        def record(x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
            wide = x.astype(jnp.float32)
            return wide.T @ wide, wide.T @ targets

        model = merge_weights(definition, weights)
        records: tuple[jax.Array, jax.Array] = forward(
            model, tokens, attention=attention, record=record
        )[1]
        return records

    squares = np.zeros((config.num_layers, config.model_dim, config.model_dim))
    products = np.zeros((config.num_layers, config.model_dim, num_replicas))
    for crop, target in zip(crops, wanted, strict=True):
        found = jax.device_get(moments(weights, crop[None], target[None]))
        squares, products = squares + found[0], products + found[1]
    count = crops.size
    mean_square = np.trace(squares, axis1=1, axis2=2) / config.model_dim
    ridge = _RIDGE * mean_square[:, None, None] * np.eye(config.model_dim)
    rows = np.linalg.solve(squares + ridge, products)
    power = np.einsum("ldr,lde,ler->l", rows, squares, rows) / (num_replicas * count)
    return (rows * (scale / np.sqrt(power))[:, None, None]).swapaxes(1, 2).astype(np.float32)
