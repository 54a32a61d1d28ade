"""The Pallas-Triton kernel: one launch for all jobs and all arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.expert_fetch.copying import copy_jobs
from pallas_kernels.expert_fetch.tiles import CopyTiles
from pallas_kernels.target import Target

Ref = Any
Operand = jax.Array | jax.ShapeDtypeStruct

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "bfloat16", "float32")
MIN_CAPABILITY = (8, 0)


def refusal(pools: Sequence[Operand], hosts: Sequence[Operand], target: Target) -> str | None:
    """Why the kernel cannot copy between arrays of these shapes, or None."""
    reasons = []
    if target.platform != "gpu":
        reasons.append(f"runs on a GPU, this is {target.describe()}")
    elif target.capability is not None and target.capability < MIN_CAPABILITY:
        reasons.append(f"needs sm_80, this is {target.describe()}")
    for pool, host in zip(pools, hosts, strict=True):
        if jnp.dtype(pool.dtype).name not in DTYPES:
            reasons.append(f"an array is {pool.dtype}, none of {', '.join(DTYPES)}")
        # Pallas counts elements in 32 bits, signed in Triton, up to 4 GiB, in 64 beyond.
        reasons += [
            f"{array.dtype}{array.shape} has 2 to 4 Gi elements of a byte"
            for array in (pool, host)
            if array.size >= 2**31 and array.size * array.dtype.itemsize <= 2**32
        ]
    return "; ".join(reasons) or None


def fetch_triton(
    pools: Sequence[jax.Array],
    hosts: Sequence[jax.Array],
    src: jax.Array,
    dst: jax.Array,
    tiles: CopyTiles,
    interpret: bool,
    after: Sequence[jax.Array] = (),
) -> tuple[jax.Array, ...]:
    """See `api.fetch`; pools and stores as equally long sequences of arrays; one launch."""
    num, first_pool = len(pools), 2 + len(pools) + len(after)

    def body(*refs: Ref) -> None:
        src_ref, dst_ref, host_refs, pool_refs = *refs[:2], refs[2 : 2 + num], refs[-num:]
        copy_jobs(pl.program_id(0), src_ref, dst_ref, host_refs, pool_refs, tiles)

    return tuple(
        launch.triton_call(
            body,
            name=f"expert_fetch_{num}x{src.shape[0]}_{tiles.num_programs}x{tiles.block_bytes}",
            grid=(tiles.num_programs,),
            out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
            num_warps=tiles.num_warps,
            num_stages=1,
            interpret=interpret,
            aliases={first_pool + i: i for i in range(num)},
        )(src, dst, *hosts, *after, *pools)
    )
