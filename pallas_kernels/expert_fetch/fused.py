"""One launch in which a few programs copy while the others compute.

It is how bytes cross the link inside a step while the chip works: JAX has no streams, and two
kernels of one program run one after the other.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.expert_fetch.copying import copy_jobs, load_jobs
from pallas_kernels.expert_fetch.tiles import CopyTiles, default_tiles_beside

Ref = Any
Outputs = jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct]


class Beside(NamedTuple):
    """Copy jobs for another kernel's launch; arguments as in `api.fetch`."""

    pools: tuple[jax.Array, ...]  # of each array [S, ...]; donated
    hosts: tuple[jax.Array, ...]  # of each array [R, ...]
    src: jax.Array  # int32[J]
    dst: jax.Array  # int32[J]
    tiles: CopyTiles = default_tiles_beside()


def fused_call(
    beside: Beside | None,
    body: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Outputs,
    num_warps: int,
    num_stages: int,
    interpret: bool,
) -> Callable[..., tuple[tuple[jax.Array, ...], Any]]:
    """`launch.triton_call`, whose first programs do the jobs of `beside` and then end.

    The body is any Triton body; it sees its own grid. An operand that is one of `beside.pools`, the
    same object, is passed once: the body gets the pool's ref, and may read every slot that no job
    writes (a slot that one does holds old and new bytes while it runs). XLA would copy a pool that
    is an operand twice. Without jobs (None) it is that launch alone, and the pools are ().

    Returns:
      what takes the body's operands and returns (pools, outputs), donated arrays first.
    """
    launched = functools.partial(
        launch.triton_call, num_warps=num_warps, num_stages=num_stages, interpret=interpret
    )
    if beside is None:
        alone = launched(body, name=name, grid=grid, out_shape=out_shape)
        return lambda *operands: ((), alone(*operands))
    pools, hosts, src, dst, tiles = beside
    num, copiers = len(pools), tiles.num_programs

    def call(*operands: jax.Array) -> tuple[tuple[jax.Array, ...], Any]:
        places = [next((i for i, p in enumerate(pools) if p is x), None) for x in operands]
        own = [x for x, place in zip(operands, places, strict=True) if place is None]

        def both(*refs: Ref) -> None:
            src_ref, dst_ref, host_refs = refs[0], refs[1], refs[2 : 2 + num]
            own_refs = iter(refs[2 + 2 * num : 2 + 2 * num + len(own)])
            outputs = refs[2 + 2 * num + len(own) :]
            pool_refs, out_refs = outputs[:num], outputs[num:]
            in_refs = [next(own_refs) if i is None else pool_refs[i] for i in places]
            program = pl.program_id(0)

            def compute() -> None:
                with launch.renumbered(_unravel(program - copiers, grid), grid):
                    body(*in_refs, *out_refs)

            def copy() -> None:
                jobs = load_jobs(src_ref, dst_ref, host_refs[0], pool_refs[0])
                copy_jobs(program, jobs, host_refs, pool_refs, tiles)

            jax.lax.cond(program < copiers, copy, compute)

        single = isinstance(out_shape, jax.ShapeDtypeStruct)
        shapes = [out_shape] if isinstance(out_shape, jax.ShapeDtypeStruct) else out_shape
        outputs = launched(
            both,
            name=f"{name}_beside_fetch_{num}x{src.shape[0]}_{copiers}",
            grid=(copiers + math.prod(grid),),
            out_shape=[*(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools), *shapes],
            aliases={2 + num + i: i for i in range(num)},
        )(src, dst, *hosts, *pools, *own)
        computed = outputs[num:]
        return tuple(outputs[:num]), computed[0] if single else tuple(computed)

    return call


def _unravel(program: jax.Array, grid: Sequence[int]) -> list[jax.Array]:
    """Indices of a program, the first axis running fastest, as in a launch of its own."""
    indices = []
    for size in grid:
        indices.append(jax.lax.rem(program, jnp.int32(size)))
        program = jax.lax.div(program, jnp.int32(size))
    return indices
