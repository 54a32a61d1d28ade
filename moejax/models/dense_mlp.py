"""MLPs that every token passes: of the layers without experts, and beside the experts."""

import jax
import jax.numpy as jnp

from moejax.models.expert_products import gated
from moejax.models.stacked import StackedModule
from moejax.weights.linear import Index


class DenseMlp(StackedModule):
    """The MLPs of all N layers that have no experts."""

    part = "mlp"

    def __call__(self, x: jax.Array, layer: Index) -> jax.Array:
        """[N, D] to [N, D]; `layer` is the index among the dense layers."""
        hidden = gated(self.linear(x, "gate_up", layer), self.config.gating)
        return self.linear(hidden, "down", layer)


class SharedExpert(StackedModule):
    """The experts of all M sparse layers that every token takes, as one MLP a layer.

    Always on the device, with a precision of its own; policies never see it. It is multiplied by
    the sigmoid of a product of its own where the model has one.
    """

    part = "shared"

    def __call__(self, x: jax.Array, layer: Index) -> jax.Array:
        """[N, D] to [N, D]; `layer` is the index among the sparse layers."""
        hidden = gated(self.linear(x, "gate_up", layer), self.config.gating)
        out = self.linear(hidden, "down", layer)
        if not self.config.shared_gate:
            return out
        wide = jnp.dtype(jnp.float32)
        opening = self.linear(x, "gate", layer, wide, always_kernel=True)
        return out * jax.nn.sigmoid(opening).astype(out.dtype)
