"""Grouped-query attention over layer-stacked weights."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from moejax import ops
from moejax.models.config import ModelConfig
from moejax.models.norm import rms_norm
from moejax.models.parameter import stacked_parameter
from moejax.models.rope import rotate

AttentionVia = Literal["xla", "cudnn"]

CUDNN_MAX_HEAD_DIM = 128


def default_attention_via(config: ModelConfig, dtype: jnp.dtype, platform: str) -> AttentionVia:
    """What serves causal attention on `platform`: cuDNN for half precision on a GPU, else XLA.

    `jax.nn.dot_product_attention` never picks cuDNN by itself.
    """
    half = dtype in (jnp.bfloat16, jnp.float16)
    served = config.head_dim % 8 == 0 and config.head_dim <= CUDNN_MAX_HEAD_DIM
    return "cudnn" if platform == "gpu" and half and served else "xla"


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sliding_window: int | None,
    via: AttentionVia,
) -> jax.Array:
    """Each token attends to itself and to those before it, within the window.

    Args:
      q: [B, T, H, C].
      k: [B, T, K, C], H a multiple of K.
      v: [B, T, K, C].
      sliding_window: tokens that a query sees, itself included; None: all.
      via: which implementation runs.

    Returns:
      [B, T, H, C] in `q.dtype`.
    """
    window = None if sliding_window is None else (sliding_window - 1, 0)
    with jax.numpy_dtype_promotion("standard"):  # it mixes weak and strong types inside
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=window, implementation=via
        )


def cached_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    sliding_window: int | None,
) -> jax.Array:
    """Queries at `positions` attend to cache slots 0..position (slot s holds position s).

    Written out because the cache keeps heads before slots, the order in which a head's keys are
    contiguous; `jax.nn.dot_product_attention` wants slots before heads and would transpose.

    Args:
      q: [B, T, H, C].
      keys: [B, K, S, C].
      values: [B, K, S, C].
      positions: int32[B, T].
      sliding_window: tokens that a query sees, itself included; None: all.

    Returns:
      [B, T, H, C] in `q.dtype`; scores and softmax are float32.
    """
    batch, length, num_heads, head_dim = q.shape
    num_kv = keys.shape[1]
    grouped = q.reshape(batch, length, num_kv, num_heads // num_kv, head_dim)
    scores = jnp.einsum("btkgc,bksc->bkgts", grouped, keys, preferred_element_type=jnp.float32)
    slots = jnp.arange(keys.shape[2], dtype=positions.dtype)[None, None, :]
    visible = slots <= positions[:, :, None]
    if sliding_window is not None:
        visible &= slots > positions[:, :, None] - sliding_window
    scores = jnp.where(visible[:, None, None], scores * (head_dim**-0.5), -jnp.inf)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    attended = jnp.einsum("bkgts,bksc->btkgc", probabilities, values)
    return attended.reshape(q.shape).astype(q.dtype)


class Attention(nnx.Module):
    """Projections, biases and head norms of all L layers."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
        kernels: ops.Kernels = ops.NO_KERNELS,
    ):
        self.config = config
        self.kernels = kernels
        self.norm = stacked_parameter("attention.norm", config, rngs, dtype)
        self.qkv_proj = stacked_parameter("attention.qkv_proj", config, rngs, dtype)
        self.o_proj = stacked_parameter("attention.o_proj", config, rngs, dtype)
        if config.qk_norm:
            self.q_norm = stacked_parameter("attention.q_norm", config, rngs, dtype)
            self.k_norm = stacked_parameter("attention.k_norm", config, rngs, dtype)
        if config.attention_bias:
            self.qkv_bias = stacked_parameter("attention.qkv_bias", config, rngs, dtype)
            self.o_bias = stacked_parameter("attention.o_bias", config, rngs, dtype)

    def project(
        self, x: jax.Array, layer: int, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Normed input to rotated queries [B, T, H, C], keys and values [B, T, K, C].

        Args:
          x: [B, T, D], the residual stream.
          layer: which layer.
          cos: float32[B, T, C / 2].
          sin: float32[B, T, C / 2].
        """
        c = self.config
        x = rms_norm(x, self.norm[layer], c.norm_eps)
        qkv = ops.linear(x, self.qkv_proj[...], layer, kernels=self.kernels)
        if c.attention_bias:
            qkv = qkv + self.qkv_bias[layer][None, None]
        qkv = qkv.reshape(*x.shape[:2], -1, c.head_dim)
        q, k, v = jnp.split(qkv, [c.num_heads, c.num_heads + c.num_kv_heads], axis=2)
        if c.qk_norm:
            q = rms_norm(q, self.q_norm[layer], c.norm_eps)
            k = rms_norm(k, self.k_norm[layer], c.norm_eps)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def output(self, attended: jax.Array, layer: int) -> jax.Array:
        """[B, T, H, C] to [B, T, D]."""
        flat = attended.reshape(*attended.shape[:2], -1)
        out = ops.linear(flat, self.o_proj[...], layer, kernels=self.kernels)
        if self.config.attention_bias:
            out = out + self.o_bias[layer][None, None]
        return out
