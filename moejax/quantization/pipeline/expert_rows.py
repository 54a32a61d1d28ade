"""Experts of a plain checkpoint, or in MXFP4, as packed rows, quantized while they are read."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoints.experts import ExpertReader
from moejax.errors import MoejaxError
from moejax.quantization.pipeline.quantizers import Program, quantize_stack
from moejax.weights.qtensor import QTensor, Weight, dense


def quantized_form(experts: Any, program: Program) -> Weight:
    """Form [..., N, K] of plain or MXFP4 experts once they are quantized, without compensators.

    MoejaxError if they are packed in another form, or groups are longer than their rows.
    """
    if isinstance(experts, QTensor) and not experts.is_mxfp4:
        raise MoejaxError(
            "experts that are packed already cannot be quantized once more: name a checkpoint for "
            "each tier"
        )
    kind, shape = program.scheme.kind, experts.shape
    if kind.group_size > shape[-1]:
        raise MoejaxError(
            f"groups of {kind.group_size} are longer than an expert's row of {shape[-1]}"
        )
    return kind.tensor(shape[-1], kind.arrays(shape))


class QuantizedRows:
    """A `host_store.RowSource` over a reader of experts; its methods are thread-safe.

    Its attributes are those of `ExpertReader`; rows are computed, so that no disk can stand for
    host memory (`uses_jax`).
    """

    def __init__(self, reader: ExpertReader, program: Program):
        """Quantizes plain or MXFP4 experts by `program`, without compensators.

        Whoever opened `reader` closes it. MoejaxError as of `quantized_form`.
        """
        plain = (reader.gate_up, reader.down)
        self._reader, self._program = reader, program
        self.num_layers, self.num_experts = reader.num_layers, reader.num_experts
        self._plain_row, self._forms = reader.row, plain
        self.gate_up, self.down = (quantized_form(part, program) for part in plain)
        leaves = jax.tree.leaves((self.gate_up, self.down))
        self.row = tuple(jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype) for leaf in leaves)
        self.row_nbytes = sum(part.size * part.dtype.itemsize for part in self.row)
        self.uses_jax = True

    def read(
        self, layer: int, expert: int, into: Sequence[np.ndarray], *, check: bool = True
    ) -> None:
        """Fills one row; see `ExpertReader.read`."""
        plain = [np.empty(part.shape, part.dtype) for part in self._plain_row]
        self._reader.read(layer, expert, plain, check=check)
        cpu = jax.devices("cpu")[0]
        with jax.default_device(cpu):
            tree = jax.tree.structure(self._forms)
            experts = jax.tree.unflatten(tree, [jnp.asarray(part)[None] for part in plain])
            stacks = [dense(part, jnp.float32).astype(jnp.float32) for part in experts]
        no_rank = jnp.zeros(1, jnp.int32)
        packed = [quantize_stack(s, no_rank, None, self._program).tensor for s in stacks]
        for view, leaf in zip(into, jax.tree.leaves(packed), strict=True):
            np.copyto(view, np.asarray(leaf)[0])

    def close(self) -> None:
        """Closes the reader."""
        self._reader.close()
