"""Gated delta rule (Yang et al., arXiv:2412.06464): layers with a state in place of a cache."""

import jax
import jax.numpy as jnp
from flax import nnx

from moejax import ops
from moejax.models.attention import Attend
from moejax.models.config import ModelConfig
from moejax.models.places import Place


class DeltaNet(nnx.Module):
    """The G layers by a delta rule; see `parts.DeltaNet` for the widths."""

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

    def __call__(
        self, normed: jax.Array, place: Place, token_mask: jax.Array, attend: Attend
    ) -> jax.Array:
        """[B, T, D] to what the layer adds to the stream, [B, T, D]."""
        raise NotImplementedError
