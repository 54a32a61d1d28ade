"""Leaves stacked over layers: their start values, products with them, and norms by them."""

import functools
from collections.abc import Container
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.models.config import ModelConfig, leaf_dtype, weight_shapes
from moejax.weights import linear as ops
from moejax.weights.linear import Index
from pallas_kernels import residual_norm

INIT_STD = 0.02


class StackedModule(nnx.Module):
    """Weights of one part of all layers: the leaves `part.*` of `weight_shapes`, by their names."""

    part: ClassVar[str]

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
        kernels: ops.Kernels = ops.NO_KERNELS,
        without: Container[str] = (),  # leaves that lie elsewhere
    ):
        self.config, self.kernels = config, kernels
        for leaf in weight_shapes(config):
            part, _, name = leaf.partition(".")
            if part == self.part and leaf not in without:
                setattr(self, name, stacked_parameter(leaf, config, rngs, dtype))

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


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, *, zero_centred: bool = False
) -> jax.Array:
    """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019, eq. 4).

    The statistics and the division are float32; the result is cast to `x.dtype` before the
    weight multiplies it, the order in which Hugging Face rounds.

    Args:
      x: [..., D], any float dtype.
      weight: [D], the dtype of `x`.
      zero_centred: times 1 + weight, and rounded last (Qwen3-Next).

    Returns:
      [..., D] in `x.dtype`.
    """
    x32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if zero_centred:
        wide = x32 * inverse_rms * (1.0 + jnp.broadcast_to(weight.astype(jnp.float32), x.shape))
        return wide.astype(x.dtype)
    normed = (x32 * inverse_rms).astype(x.dtype)
    return normed * jnp.broadcast_to(weight, normed.shape)


def stacked_norm(
    x: jax.Array,  # [..., D]
    scales: jax.Array,  # [L, D] of all layers, the dtype of `x`
    layer: Index,
    eps: float,
    kernels: ops.Kernels,  # the permitted implementations; a reference means XLA here
    *,
    zero_centred: bool = False,
) -> jax.Array:
    """Normalises by one layer's scale, by the kernel unless it refuses.

    XLA sums the squares in an order that depends on what else it puts into the same kernel, and so
    on the rest of the program: a bfloat16 now and then rounds the other way. The kernel's order is
    fixed, so fetched experts give a resident model's results to the bit.
    """
    flat = x.reshape(-1, x.shape[-1])
    asked_for_none = kernels.implementation == ops.REFERENCE or kernels.target is None
    if asked_for_none or residual_norm.OPERATION.refusal("triton", flat, target=kernels.target):
        return rms_norm(x, scales[layer], eps, zero_centred=zero_centred)
    _, normed = norm_of_sum(
        flat, None, scales, jnp.int32(layer), eps=eps, zero_centred=zero_centred
    )
    return normed.reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("eps", "zero_centred"))
def norm_of_sum(
    x: jax.Array,
    delta: jax.Array | None,
    scales: jax.Array,
    layer: jax.Array,
    *,
    eps: float,
    zero_centred: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes x + delta and its norm by the kernel, [N, D]; jitted for all layers."""
    return residual_norm.residual_norm(
        x, delta, scales, layer=layer, eps=eps, zero_centred=zero_centred, implementation="triton"
    )


def rounded(x: jax.Array) -> jax.Array:
    """Rounds to the dtype of `x`; XLA may not skip it, as it may between sum and product.

    Between passes of a loop XLA rounds in any case: with this, unrolled layers and loops of one or
    several layers per pass agree to the bit.
    """
    kind = jnp.finfo(x.dtype)
    if kind.bits == 32:
        return x
    wide = jax.lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant)
    return wide.astype(x.dtype)
