"""HQQ by the GPU kernel, of weights less a low-rank term; reads the weights once."""

import jax

from moejax.quantization.grid import Codes, Grid
from moejax.quantization.hqq import HqqSettings
from pallas_kernels.hqq_solve import OPERATION, SolveSettings, hqq_solve
from pallas_kernels.target import SIMULATED, Target


def kernel_refusal(
    weights: jax.Array | jax.ShapeDtypeStruct, grid: Grid, target: Target | None = None
) -> str | None:
    """Reason why `kernel_hqq` cannot take such weights, or None; `hqq` takes all."""
    if grid.zero_kind != "float":
        return f"hqq finds float zeros; zero_kind is {grid.zero_kind!r}"
    return OPERATION.refusal("triton", weights, None, grid.bits, grid.group_size, target=target)


def kernel_hqq(
    weights: jax.Array,
    u: jax.Array,
    v: jax.Array,
    grid: Grid,
    settings: HqqSettings = HqqSettings(),  # noqa: B008
    *,
    interpret: bool = False,
) -> Codes:
    """Computes `hqq(weights - u v, grid)`, except for ties; a `MiloSettings.solver` on a GPU.

    Args:
      weights: [..., N, K] in float32, bfloat16 or float16, finite.
      u: float32[..., N, R].
      v: float32[..., R, K].
      interpret: runs the kernel on the CPU, for tests.
    """
    if reason := kernel_refusal(weights, grid, SIMULATED if interpret else None):
        raise ValueError(reason)
    solution = hqq_solve(
        weights,
        SolveSettings(
            bits=grid.bits,
            group_size=grid.group_size,
            max_steps=settings.iterations,
            norm=settings.norm,
            beta=settings.beta,
            round_start=settings.round_start,
        ),
        low_rank=(u, v) if u.shape[-1] else None,
        implementation="triton",
        interpret=interpret,
    )
    return Codes(solution.codes, solution.scales, solution.zeros)
