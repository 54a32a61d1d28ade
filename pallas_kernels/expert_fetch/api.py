"""Public calls of the expert fetch, and their operation."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.expert_fetch import triton
from pallas_kernels.expert_fetch.reference import fetch_reference
from pallas_kernels.expert_fetch.tiles import CopyTiles
from pallas_kernels.op import Implementation, Operation
from pallas_kernels.target import Choice, Target

Arrays = TypeVar("Arrays")  # a pytree of arrays

# A choice is for the leaves of pools and those of stores, of all jobs.
OPERATION = Operation(
    "expert_fetch",
    kernels=(Implementation("triton", triton.refusal, triton.fetch_triton),),
    reference=lambda copies, after: [fetch_reference(*of) for of in copies],
    abstract=lambda copies, after: (
        [pool for of in copies for pool in of.pools], [host for of in copies for host in of.hosts]
    ),
)  # fmt: skip


def choose(pools: Arrays, hosts: Arrays, target: Target | None = None) -> Choice:
    """The first implementation in the order of preference that does not refuse."""
    return OPERATION.choose(*_leaves(pools, hosts), target=target)


class CopyJob(NamedTuple):
    """Copies between a store and its pool: pool[dst[j]] = host[src[j]] for every j, all arrays.

    A copy whose row or slot is negative or beyond the last is skipped. Of several that are not
    skipped and share a slot, the last is done; slots that none writes keep their bytes.
    """

    # a pytree of arrays [S, ...] on the device, such as a `PackedMatrices`; donate them, or XLA
    # copies them whole
    pools: Any
    # the same tree of arrays [R, ...] with the pools' row shapes and dtypes, in pinned host memory
    # (`memory_kind="pinned_host"`) or on the device
    hosts: Any
    src: jax.Array  # int32[J], rows of the store
    dst: jax.Array  # int32[J], slots


def fetch(
    jobs: Sequence[CopyJob],
    *,
    implementation: str | None = None,
    tiles: CopyTiles | None = None,
    after: Any = (),
    interpret: bool = False,
) -> list[Any]:
    """Runs all jobs in one launch, such as for experts of several precisions.

    What the device decides the device fetches: the kernel reads the store over the link itself, so
    the indices never visit the host. Deterministic: a slot has one writer.

    Args:
      jobs: of pools that are all different; one without indices leaves its pools as they are.
      after: a pytree of arrays on the device that are to be written before the copy begins: it
        takes them and leaves them alone. For a copy that may run beside other kernels.
      interpret: before jax 0.11.2 not with a store in host memory.

    Returns:
      The pools of each, in the same places in memory if they were donated.
    """
    copies = [triton.Copies(*_check(*job), job.src, job.dst) for job in jobs]
    some = [i for i, job in enumerate(jobs) if job.src.shape[0]]
    pools = [job.pools for job in jobs]
    if not some:
        return pools
    found = OPERATION(
        [copies[i] for i in some], jax.tree.leaves(after), implementation=implementation,
        tiles=tiles, interpret=interpret,
    )  # fmt: skip
    for i, new in zip(some, found, strict=True):
        pools[i] = jax.tree.unflatten(jax.tree.structure(pools[i]), new)
    return pools


def _leaves(pools: Arrays, hosts: Arrays) -> tuple[list[Any], list[Any]]:
    """Raises ValueError unless both are the same tree of at least one array."""
    trees: list[Any] = [jax.tree.structure(tree) for tree in (pools, hosts)]
    if trees[0] != trees[1] or not trees[0].num_leaves:
        raise ValueError(f"pools are {trees[0]}, stores {trees[1]}")
    return jax.tree.leaves(pools), jax.tree.leaves(hosts)


def _check(
    pools: Arrays, hosts: Arrays, src: jax.Array, dst: jax.Array
) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    """The leaves of both; raises ValueError for what does not fit."""
    pool_leaves, host_leaves = _leaves(pools, hosts)
    for pool, host in zip(pool_leaves, host_leaves, strict=True):
        if pool.ndim < 2 or pool.size == 0 or pool.shape[1:] != host.shape[1:]:
            raise ValueError(f"rows of {host.shape} do not fit slots of {pool.shape}")
        if pool.dtype != host.dtype:
            raise ValueError(f"a pool is {pool.dtype}, its store {host.dtype}")
    for name, leaves in (("pools", pool_leaves), ("stores", host_leaves)):
        if len({leaf.shape[0] for leaf in leaves}) > 1:
            raise ValueError(f"{name} of {', '.join(str(leaf.shape[0]) for leaf in leaves)} rows")
    for name, index in (("src", src), ("dst", dst)):
        if index.shape != src.shape or index.ndim != 1 or index.dtype != jnp.int32:
            raise ValueError(f"{name} is {index.dtype}{index.shape}, expected int32[J]")
    return pool_leaves, host_leaves
