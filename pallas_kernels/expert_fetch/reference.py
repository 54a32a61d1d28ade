"""The operation in plain jnp; never optimised."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.row_gather.reference import gather_rows_reference


def _live_jobs(src: jax.Array, dst: jax.Array, num_rows: int, num_slots: int) -> jax.Array:
    """bool[J]: jobs whose row and slot exist, and whose slot no later such job writes."""
    valid = (src >= 0) & (src < num_rows) & (dst >= 0) & (dst < num_slots)
    jobs = jnp.arange(src.shape[0], dtype=jnp.int32)
    later = jobs[None, :] > jobs[:, None]
    overwritten = later & valid[None, :] & (dst[None, :] == dst[:, None])
    return valid & ~jnp.any(overwritten, axis=1)


def fetch_reference(
    pools: Sequence[jax.Array], hosts: Sequence[jax.Array], src: jax.Array, dst: jax.Array
) -> tuple[jax.Array, ...]:
    """Computes `api.fetch` in plain JAX; pools and stores as equally long sequences of arrays."""
    num_rows, num_slots = hosts[0].shape[0], pools[0].shape[0]
    live = _live_jobs(src, dst, num_rows, num_slots)
    row = jnp.where(live, src, 0)
    slot = jnp.where(live, dst, num_slots)  # out of range: dropped

    def one(pool: jax.Array, host: jax.Array) -> jax.Array:
        return jnp.asarray(pool).at[slot].set(gather_rows_reference(host, row), mode="drop")

    return tuple(one(pool, host) for pool, host in zip(pools, hosts, strict=True))
