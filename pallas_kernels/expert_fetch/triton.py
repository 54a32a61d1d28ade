"""The Pallas-Triton kernel: one launch for all jobs and all arrays."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.expert_fetch.copying import copy_jobs, load_jobs
from pallas_kernels.expert_fetch.tiles import CopyTiles, default_tiles
from pallas_kernels.target import Target

Ref = Any
Operand = jax.Array | jax.ShapeDtypeStruct

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "bfloat16", "float32")
MIN_CAPABILITY = (8, 0)


def refusal(pools: Sequence[Operand], hosts: Sequence[Operand], target: Target) -> str | None:
    """Reason why this implementation refuses, or None."""
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


class Copies(NamedTuple):
    """Jobs between one store and its pool; see `api.fetch`."""

    pools: Sequence[jax.Array]  # of each array [S, ...]
    hosts: Sequence[jax.Array]  # of each array [R, ...]
    src: jax.Array  # int32[J]
    dst: jax.Array  # int32[J]


def fetch_triton(
    copies: Sequence[Copies],
    after: Sequence[jax.Array] = (),
    *,
    tiles: CopyTiles | None = None,
    target: Target,
) -> list[tuple[jax.Array, ...]]:
    """Computes `api.fetch_all` by Triton; one launch."""
    tiles = tiles or default_tiles()
    sizes = [len(of.pools) for of in copies]
    num, pools = sum(sizes), [pool for of in copies for pool in of.pools]
    read = [x for of in copies for x in (of.src, of.dst, *of.hosts)]

    def body(*refs: Ref) -> None:
        inputs, outputs, dealt, stores = iter(refs), iter(refs[-num:]), jnp.int32(0), []
        for size in sizes:
            src_ref, dst_ref, *host_refs = itertools.islice(inputs, 2 + size)
            pool_refs = list(itertools.islice(outputs, size))
            jobs = load_jobs(src_ref, dst_ref, host_refs[0], pool_refs[0])
            stores.append((jobs, host_refs, pool_refs))
        for store in stores:
            dealt = copy_jobs(pl.program_id(0), *store, tiles, dealt)

    jobs = "_".join(f"{len(of.pools)}x{of.src.shape[0]}" for of in copies)
    found = iter(
        launch.triton_call(
            body,
            name=f"expert_fetch_{jobs}_{tiles.num_programs}x{tiles.block_bytes}",
            grid=(tiles.num_programs,),
            out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
            num_warps=tiles.num_warps,
            num_stages=1,
            interpret=target.simulated,
            aliases={len(read) + len(after) + i: i for i in range(num)},
        )(*read, *after, *pools)
    )
    return [tuple(itertools.islice(found, size)) for size in sizes]
