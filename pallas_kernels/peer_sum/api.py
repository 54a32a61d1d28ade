"""Public call of the sum over a mesh's devices, and its operation."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.op import Implementation, Operation
from pallas_kernels.peer_sum import triton


def _psum(x: jax.Array, peers: jax.Array | None, *, axis: str, dtype: Any) -> jax.Array:
    del peers
    return jax.lax.psum(x, axis).astype(dtype)


# A choice is for x [...] and whether there are mailboxes.
OPERATION = Operation(
    "peer_sum",
    kernels=(Implementation("triton", triton.refusal, triton.peer_sum_triton),),
    reference=_psum,
    abstract=lambda x, peers, **_: (x, peers is not None),
)


def peer_sum(
    x: jax.Array,
    peers: jax.Array | None,
    *,
    axis: str,
    dtype: Any,
    implementation: str | None = None,
) -> jax.Array:
    """Sums float32 over all devices of a mesh, inside `jax.shard_map`; each calls it in one order.

    Args:
      x: [...], the device's part.
      peers: int32[1, 1 + 2 P], its row of `mailboxes_of(mesh).peers`; None: XLA sums.
      axis: the mesh's, for XLA's sum.
      dtype: of the result.

    Returns:
      [...] in `dtype`, equal to the bit on all devices.
    """
    dtype = jnp.dtype(dtype)
    return OPERATION(x, peers, axis=axis, dtype=dtype, implementation=implementation)
