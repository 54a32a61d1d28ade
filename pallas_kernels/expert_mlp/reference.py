"""Expert MLP in plain jnp and float32; never optimised."""

import jax
import jax.numpy as jnp


def expert_mlp_reference(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    layer: int,
) -> jax.Array:
    """Computes `api.expert_mlp` in plain JAX."""
    x32 = x.astype(jnp.float32)
    gate, up = jnp.split(gate_up[layer][ids].astype(jnp.float32), 2, axis=2)
    gate = jnp.einsum("nafd,nd->naf", gate, x32)
    up = jnp.einsum("nafd,nd->naf", up, x32)
    out = jnp.einsum("nadf,naf->nad", down[layer][ids].astype(jnp.float32), jax.nn.silu(gate) * up)
    return jnp.einsum("nad,na->nd", out, weights.astype(jnp.float32)).astype(x.dtype)
