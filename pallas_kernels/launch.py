"""The only caller of `pallas_call`: backend, interpret mode, names, version differences."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as pltriton


def triton_call(
    body: Callable[..., None],  # takes one ref per operand, then one per output
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int,
    interpret: bool,
    # operand -> output that takes its place in memory; the operand must be donated, or XLA copies
    # it. The body writes the output's ref.
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """Builds a Pallas-Triton kernel over whole arrays; the body indexes them itself.

    Triton is named explicitly: a bare `pallas_call` means Mosaic before jax 0.11.2 and Triton from
    it on. Its deprecation warning is the only one silenced.
    """

    def call(*operands: jax.Array) -> Any:
        # Not for this call alone: the warning comes when the caller's program is lowered.
        warnings.filterwarnings("ignore", message=".*[Tt]riton.*", category=DeprecationWarning)
        return pl.pallas_call(
            body,
            grid=grid,
            out_shape=out_shape,
            compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=interpret,
            name=name,
            input_output_aliases=dict(aliases or {}),
        )(*operands)

    return call


def mosaic_call(
    # takes the MLIR reference of each operand, output and scratch buffer
    body: Callable[..., None],
    *,
    name: str,
    num_blocks: int,  # thread blocks, or clusters of them; each block reads its index from ctaid.x
    out_shape: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any],
    num_warpgroups: int,
    cluster: int = 1,  # neighbouring blocks that reach each other's shared memory
) -> Callable[..., Any]:
    """Builds a Pallas-Mosaic kernel whose body is emitted whole, over whole arrays."""

    def traced(*refs: Any) -> None:
        whole = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        whole(lambda _, *emitted: body(*emitted))(*refs)

    return plgpu.kernel(
        traced,
        out_type=out_shape,
        scratch_types=tuple(scratch),
        grid=(num_blocks,),
        grid_names=("block",),
        cluster=(cluster,) if cluster > 1 else (),
        cluster_names=("part",) if cluster > 1 else (),
        num_threads=num_warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name=name,
    )


def mosaic_pipeline_call(
    # takes one ref per operand, then one per output, then the scratch by name
    body: Callable[..., None],
    *,
    name: str,
    num_blocks: int,
    out_shape: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    num_warpgroups: int,  # warpgroups per block, axis "warpgroup"; 128 threads each
    # the operand whose memory the only output reuses, see `aliases` of `triton_call`
    alias: int | None = None,
    approx_math: bool = False,  # powers of two by one instruction
    interpret: bool = False,  # on a CPU, from jax 0.11.1 on; not with an alias
) -> Callable[..., Any]:
    """Builds a Pallas-Mosaic kernel written in Pallas, whose warpgroups differ."""
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True,
        approx_math=approx_math,
    )  # fmt: skip
    mesh: dict[str, Any] = {
        "grid": (num_blocks,), "grid_names": ("block",), "num_threads": num_warpgroups,
        "thread_name": "warpgroup", "kernel_name": name,
    }  # fmt: skip
    if alias is None:
        if interpret:
            mesh["interpret"] = plgpu.InterpretGPUParams()  # type: ignore[attr-defined]
        return plgpu.kernel(
            body, out_type=out_shape, scratch_types=dict(scratch), compiler_params=params, **mesh
        )
    # `plgpu.kernel` has no aliases; this is what it calls, and jax before 0.11 lacks it.
    from jax._src.pallas import mpmd

    def scoped(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), collective_axes="warpgroup", **scratch)

    call = mpmd._mpmd_map(
        [(plgpu.Mesh(**mesh), scoped)], [out_shape], input_output_aliases={alias: 0},
        compiler_params=params, name=name,
    )  # fmt: skip
    return lambda *operands: call(*operands)[0]
