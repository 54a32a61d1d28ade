"""Launches a body: compiled by Mosaic GPU, or simulated on the CPU."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import launch
from pallas_kernels.mosaic_decode.emit import Mlir
from pallas_kernels.testing import simulator

WARP = 32


def launch_blocks(
    body: Callable[..., None],
    operands: Sequence[jax.Array],
    *,
    name: str,
    num_blocks: int,
    num_warps: int,
    out_shapes: Sequence[jax.ShapeDtypeStruct],
    shared_floats: int,
    interpret: bool,
    cluster: int = 1,
) -> list[jax.Array]:
    """Runs a body for every block.

    Args:
      body: takes the instructions, then references to operands, outputs and the scratch.
      num_warps: warps per block; a multiple of 4.
      shared_floats: float32 of the one scratch buffer in shared memory.
    """
    if not interpret:
        call = launch.mosaic_call(
            lambda *refs: body(Mlir(), *refs),
            name=name,
            num_blocks=num_blocks,
            out_shape=tuple(out_shapes),
            scratch=[plgpu.SMEM((shared_floats,), np.float32)],
            num_warpgroups=num_warps // 4,
            cluster=cluster,
        )
        return list(call(*operands))

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        outputs = [np.empty(out.shape, out.dtype) for out in out_shapes]
        for out in outputs:
            out.view(np.uint8).fill(0xFF)  # NaN in every float type
        simulator.run_blocks(
            body, num_blocks, num_warps * WARP, [np.asarray(a) for a in arrays], outputs,
            [shared_floats], cluster,
        )  # fmt: skip
        return outputs

    return list(jax.pure_callback(run, list(out_shapes), *operands))
