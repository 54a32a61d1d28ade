"""The only caller of `pallas_call`: backend, interpret mode, names, version differences."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton


def triton_call(
    body: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int,
    interpret: bool,
) -> Callable[..., Any]:
    """A Pallas-Triton kernel over whole arrays; the body indexes them itself.

    Triton is named explicitly: a bare `pallas_call` means Mosaic before jax 0.11.2 and Triton from
    it on. Its deprecation warning is the only one silenced.

    Args:
      body: takes one ref an operand, then one an output.
      name: operation, dtype and tile; what a profile shows.
      grid: programs.
      out_shape: of the output, or of each of several.
      num_warps: of a program.
      num_stages: of Triton's software pipeline.
      interpret: runs the body on the CPU, for tests.
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
        )(*operands)

    return call
