"""Public call of the row gather, and its operation."""

import jax

from pallas_kernels.op import Implementation, Operation, check_operands
from pallas_kernels.row_gather import triton
from pallas_kernels.row_gather.reference import gather_rows_reference

# A choice is for the matrix [R, W].
OPERATION = Operation(
    "row_gather",
    kernels=(Implementation("triton", triton.refusal, triton.gather_rows_triton),),
    reference=gather_rows_reference,
    abstract=lambda matrix, rows: (matrix,),
)


def gather_rows(
    matrix: jax.Array,
    rows: jax.Array,
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes matrix[rows], where the matrix may lie in host memory.

    For tables of which a step needs some rows, such as embeddings: the kernel reads them over the
    link, so the indices never visit the host and the table takes nothing of the device.

    Args:
      matrix: [R, W], in pinned host memory (`memory_kind="pinned_host"`) or on the device.
      rows: int32[N]; beyond the ends, the first or the last row is meant.
      interpret: runs the kernel on the CPU, for tests; before jax 0.11.2 not with a matrix in host
        memory.

    Returns:
      [N, W] on the device.
    """
    check_operands("row_gather", {"matrix": (matrix, ".[R, W]"), "rows": (rows, "int32[N]")})
    return OPERATION(matrix, rows, implementation=implementation, interpret=interpret)
