"""MLPs that every token passes: of the layers without experts, and beside the experts."""

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.models.config import ModelConfig
from moejax.models.expert_products import gated
from moejax.models.stacked import StackedModule, stacked_parameter
from moejax.weights import linear as ops
from moejax.weights.linear import Index


class DenseMlp(StackedModule):
    """The MLPs of all N layers that have no experts."""

    part = "mlp"

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
        kernels: ops.Kernels = ops.NO_KERNELS,
    ):
        self.kernels, self.gating = kernels, config.gating
        self.gate_up = stacked_parameter("mlp.gate_up", config, rngs, dtype)
        self.down = stacked_parameter("mlp.down", config, rngs, dtype)

    def __call__(self, x: jax.Array, layer: Index) -> jax.Array:
        """[N, D] to [N, D]; `layer` is the index among the dense layers."""
        hidden = gated(self.linear(x, "gate_up", layer), self.gating)
        return self.linear(hidden, "down", layer)


class SharedExpert(StackedModule):
    """The experts of all M sparse layers that every token takes, as one MLP a layer.

    Always on the device, with a precision of its own; policies never see it. It is multiplied by
    the sigmoid of a product of its own where the model has one.
    """

    part = "shared"

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
        kernels: ops.Kernels = ops.NO_KERNELS,
    ):
        self.kernels, self.gating = kernels, config.gating
        self.gate_up = stacked_parameter("shared.gate_up", config, rngs, dtype)
        self.down = stacked_parameter("shared.down", config, rngs, dtype)
        if config.shared_gate:
            self.gate = stacked_parameter("shared.gate", config, rngs, dtype)

    def __call__(self, x: jax.Array, layer: Index) -> jax.Array:
        """[N, D] to [N, D]; `layer` is the index among the sparse layers."""
        hidden = gated(self.linear(x, "gate_up", layer), self.gating)
        out = self.linear(hidden, "down", layer)
        if not hasattr(self, "gate"):
            return out
        wide = jnp.dtype(jnp.float32)
        opening = self.linear(x, "gate", layer, wide, always_kernel=True)
        return out * jax.nn.sigmoid(opening).astype(out.dtype)
