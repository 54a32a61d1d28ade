"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

import jax
import jax.numpy as jnp
from flax import nnx

from moejax import ops
from moejax.models.attention import Attend
from moejax.models.config import ModelConfig
from moejax.models.parameter import stacked_parameter
from moejax.models.places import Place
from moejax.models.rope import Angles


class LatentAttention(nnx.Module):
    """Projections of all layers; see `parts.LatentAttention` for the widths."""

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

    def __call__(
        self, normed: jax.Array, place: Place, angles: Angles, attend: Attend
    ) -> jax.Array:
        """[B, T, D] to what the layer adds to the stream, [B, T, D]."""
        raise NotImplementedError
