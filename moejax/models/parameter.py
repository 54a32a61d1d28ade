"""Weight leaves of a module: their start values, and products with them."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.models.config import ModelConfig, leaf_dtype, weight_shapes
from moejax.weights import linear as ops

INIT_STD = 0.02


class StackedModule(nnx.Module):
    """Weights of one part of all layers, named as in `weight_shapes`."""

    part: ClassVar[str]
    kernels: ops.Kernels

    def linear(
        self,
        x: jax.Array,
        name: str,
        layer: ops.Index,
        out_dtype: jnp.dtype | None = None,
        *,
        always_kernel: bool = False,
    ) -> jax.Array:
        """Multiplies x [N, K] by a name's weight of a layer: [N, O], as `weights.linear.linear`."""
        return ops.linear(
            x, getattr(self, name)[...], layer, out_dtype, self.kernels,
            leaf=f"{self.part}.{name}", always_kernel=always_kernel,
        )  # fmt: skip


def stacked_parameter(
    name: str, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype
) -> nnx.Param[jax.Array]:
    """Creates leaf `name` of `weight_shapes(config)`, stacked over layers.

    Norm weights start at one (zero where they are centred there), biases at zero, matrices at
    N(0, 0.02^2), those that write to the residual stream at 0.02 / sqrt(2 L) (Radford et al. 2019,
    section 2.3).
    """
    shape, dtype = weight_shapes(config)[name], leaf_dtype(name, dtype)
    if name.endswith("norm"):
        centred = config.zero_centred_norm and name != "delta.norm"
        return nnx.Param((jnp.zeros if centred else jnp.ones)(shape, dtype))
    if name.endswith("bias"):
        return nnx.Param(jnp.zeros(shape, dtype))
    residual = name.endswith(("o_proj", "down"))
    std = INIT_STD / (2 * config.num_layers) ** 0.5 if residual else INIT_STD
    return nnx.Param((jax.random.normal(rngs.params(), shape, jnp.float32) * std).astype(dtype))
