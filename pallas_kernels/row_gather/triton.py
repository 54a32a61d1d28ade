"""Pallas-Triton implementation: one launch, a program per row."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.target import Target, platform_refusal
from pallas_kernels.triton.elements import iota, power_above

Ref = Any
Operand = jax.Array | jax.ShapeDtypeStruct
MAX_WIDTH = 16384
THREAD_VALUES = 8  # of a row: one load of 16 bytes
MAX_WARPS = 16


def refusal(matrix: Operand, target: Target) -> str | None:
    """Reason why this implementation refuses, or None."""
    reasons = [platform_refusal(target)]
    if matrix.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        reasons.append(f"the matrix is {matrix.dtype}, not a float of 16 or 32 bits")
    if matrix.shape[1] > MAX_WIDTH:
        reasons.append(f"rows of {matrix.shape[1]}, more than {MAX_WIDTH}")
    if matrix.size >= 2**31:  # Pallas counts elements in 32 bits, signed in Triton
        reasons.append(f"{matrix.shape} has 2 Gi elements or more")
    return "; ".join(filter(None, reasons)) or None


def _body(rows_ref: Ref, matrix_ref: Ref, out_ref: Ref) -> None:
    """Program n copies row n of the result."""
    place, (num_rows, width) = pl.program_id(0), matrix_ref.shape
    columns = iota(power_above(width))
    real = columns < width
    row = jnp.clip(rows_ref[place], 0, num_rows - 1)
    values = pltriton.load(matrix_ref.at[row, columns], mask=real, other=0.0)
    pltriton.store(out_ref.at[place, columns], values, mask=real)


def gather_rows_triton(matrix: jax.Array, rows: jax.Array, *, target: Target) -> jax.Array:
    """Computes `api.gather_rows` by Triton; one launch."""
    width = matrix.shape[1]
    (found,) = launch.triton_call(
        _body,
        name=f"row_gather_{matrix.dtype.name}_{width}",
        grid=(rows.shape[0],),
        out_shape=[jax.ShapeDtypeStruct((rows.shape[0], width), matrix.dtype)],
        num_warps=min(MAX_WARPS, max(1, power_above(width) // (32 * THREAD_VALUES))),
        num_stages=1,
        interpret=target.simulated,
    )(rows, matrix)
    return found
