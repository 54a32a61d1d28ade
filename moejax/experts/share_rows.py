"""Rows of experts for a mesh: shares of an expert on each device, or whole experts of its own."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from moejax.errors import MoejaxError
from moejax.weights.qtensor import QTensor, Weight
from moejax.weights.shares import Shares, shares_of


class ShareRows:
    """A `host_store.RowSource` whose row is a share of an expert.

    `read` fills the shares of all devices of this process at once: the arrays of the first one's
    row, then those of the others'. The other attributes are those of the source of whole experts.
    """

    def __init__(self, source: Any, count: int, own: Sequence[int] | None = None) -> None:
        """Cuts the rows of `source` into `count` shares; whoever opened it closes it.

        `own`: the shares that `read` fills, those of this process; None: all.

        MoejaxError if experts of its form are not cut, or not into so many.
        """
        if getattr(source, "plane_bits", 0):
            raise MoejaxError(
                "a mesh does not serve tiers that refine the next one by a bit plane yet: leave "
                "the mesh out"
            )
        self._source, self._own = source, range(count) if own is None else own
        self.num_layers, self.num_experts = source.num_layers, source.num_experts
        self.uses_jax, self.plane_bits = source.uses_jax, 0
        down = source.down
        group_size = down.group_size if isinstance(down, QTensor) else None
        self.shares: Shares = shares_of(source.gate_up.shape[-2] // 2, count, group_size)
        self._tree = jax.tree.structure((source.gate_up, source.down))
        whole = [np.zeros(part.shape, part.dtype) for part in source.row]
        self.row = tuple(
            jax.ShapeDtypeStruct(part.shape, part.dtype) for part in self._cut(whole, 0)
        )
        self.row_nbytes = sum(part.size * part.dtype.itemsize for part in self.row)
        self.gate_up: Weight
        self.down: Weight
        gate_up, down = jax.tree.unflatten(
            self._tree,
            [
                jax.ShapeDtypeStruct((self.num_layers, self.num_experts, *part.shape), part.dtype)
                for part in self.row
            ],
        )
        self.gate_up, self.down = gate_up, self.shares.narrow(down)

    def _cut(self, whole: Sequence[np.ndarray], index: int) -> list[Any]:
        gate_up, down = jax.tree.unflatten(self._tree, whole)
        return jax.tree.leaves((self.shares.gate_up(gate_up, index), self.shares.down(down, index)))

    def read(
        self, layer: int, expert: int, into: Sequence[np.ndarray], *, check: bool = True
    ) -> None:
        """Fills one row on each device; see `ExpertReader.read`."""
        whole = [np.empty(part.shape, part.dtype) for part in self._source.row]
        self._source.read(layer, expert, whole, check=check)
        parts = (part for i in self._own for part in self._cut(whole, i))
        for view, part in zip(into, parts, strict=True):
            np.copyto(view, part)

    def close(self) -> None:
        """Closes the source."""
        self._source.close()


class OwnRows:
    """A `host_store.RowSource` of R rows a layer, each another expert on each device.

    `read` fills the rows of all devices, as that of `ShareRows`; `num_experts` is R.
    """

    def __init__(self, source: Any, experts: np.ndarray) -> None:
        """Hands the rows of `source` out, int32[n, M, R]; whoever opened it closes it."""
        self._source, self._experts = source, experts
        self.num_layers, self.num_experts = experts.shape[1:]
        self.uses_jax, self.plane_bits = source.uses_jax, 0
        self.row, self.row_nbytes = source.row, source.row_nbytes
        self.gate_up, self.down = source.gate_up, source.down

    def read(
        self, layer: int, expert: int, into: Sequence[np.ndarray], *, check: bool = True
    ) -> None:
        """Fills one row on each device; see `ExpertReader.read`."""
        width = len(self.row)
        for i, own in enumerate(self._experts[:, layer, expert].tolist()):
            self._source.read(layer, own, into[i * width : (i + 1) * width], check=check)

    def close(self) -> None:
        """Closes the source."""
        self._source.close()
