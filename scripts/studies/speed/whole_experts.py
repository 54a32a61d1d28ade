"""Experts of a loaded model as rows for a host store."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass
class WholeExperts:
    """Experts of a loaded model as a `host_store.RowSource`."""

    gate_up: Any
    down: Any
    uses_jax: bool = False

    def __post_init__(self) -> None:
        self._leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((self.gate_up, self.down))]
        self.num_layers, self.num_experts = self._leaves[0].shape[:2]
        self.row = tuple(jax.ShapeDtypeStruct(n.shape[2:], n.dtype) for n in self._leaves)
        self.row_nbytes = sum(n[0, 0].nbytes for n in self._leaves)

    def read(
        self, layer: int, expert: int, into: Sequence[np.ndarray], *, check: bool = True
    ) -> None:
        """Copies one expert."""
        del check
        for view, leaf in zip(into, self._leaves, strict=True):
            np.copyto(view, leaf[layer, expert])
