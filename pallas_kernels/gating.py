"""Gated activation between the two products of an MLP or an expert.

Configurations hold it, and are read without JAX, which is imported where it is used.
"""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gating:
    """g sigmoid(alpha g) (u + up_offset) of gates g and ups u; SwiGLU as it stands.

    With a limit, gates are clamped from above and ups from both sides first (gpt-oss: alpha 1.702,
    limit 7, up_offset 1).
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __call__(self, gate: "jax.Array", up: "jax.Array") -> "jax.Array":
        """Applies it to two arrays of one shape and float dtype."""
        import jax

        gate, up = self.limited(gate, up)
        if self.alpha == 1.0:
            return jax.nn.silu(gate) * up
        return gate * jax.nn.sigmoid(gate * self.alpha) * up

    def limited(self, gate: "jax.Array", up: "jax.Array") -> "tuple[jax.Array, jax.Array]":
        """Gates and ups after the limit, ups with the offset: the factors beside the sigmoid."""
        import jax.numpy as jnp

        if self.limit is not None:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.maximum(jnp.minimum(up, self.limit), -self.limit)
        return gate, up + self.up_offset if self.up_offset else up


SWIGLU = Gating()
