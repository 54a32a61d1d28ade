"""Rows of a host store with random experts, filled as those of a checkpoint are."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from moejax.benchmarking.random_weights import Packing, random_weights
from moejax.experts.host_store import HostStore
from moejax.models.config import ModelConfig
from moejax.models.kernel_choice import EXPERT_LEAVES
from moejax.models.shapes import one_layer_of
from moejax.weights.qtensor import Weight

NUM_DRAWN = 8  # different experts; the others are copies, in memory of their own


class SyntheticRows:
    """All experts of a shape in host memory; a `moejax.experts.host_store.RowSource`."""

    def __init__(
        self, config: ModelConfig, packing: Packing, device: jax.Device, num_rows: int = 0, *,
        host_gib: float = 0.0,
    ):  # fmt: skip
        """Draws some experts and fills the store.

        Args:
          config: of the model.
          packing: of its experts.
          device: of the store.
          num_rows: of the store, which experts then share; 0: one for each.
          host_gib: of the store at most, in place of a number; 0: no limit.
        """
        self.num_layers, self.num_experts = len(config.moe_layers), config.num_experts
        small = dataclasses.replace(one_layer_of(config, NUM_DRAWN), vocab_size=64)
        drawn = random_weights(small, packing, device)
        stacks: Any = tuple(drawn[name] for name in EXPERT_LEAVES)
        leaves, self._tree = jax.tree.flatten(stacks)
        self._drawn = [np.asarray(leaf)[0] for leaf in leaves]
        self.row = tuple(jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype) for leaf in leaves)
        self.row_nbytes = sum(part.size * part.dtype.itemsize for part in self.row)
        self.uses_jax = False
        del drawn, stacks, leaves
        total = self.num_layers * self.num_experts
        if host_gib:
            num_rows = max(1, int(host_gib * 2**30) // self.row_nbytes)
        num_rows = min(num_rows or total, total)
        store = self.store = HostStore(self, num_rows, device)
        store.fill(progress=False)
        self.nbytes, self.row_of = num_rows * self.row_nbytes, store.row_of
        self.row_of[...] = (
            np.arange(total).reshape(self.row_of.shape) % num_rows
        )  # few rows are shared
        self.stacks: tuple[Weight, Weight] = jax.tree.unflatten(self._tree, store.arrays)

    def read(
        self, layer: int, expert: int, into: Sequence[np.ndarray], *, check: bool = True
    ) -> None:
        """One of the drawn experts."""
        del check
        for part, drawn in zip(into, self._drawn, strict=True):
            np.copyto(part, drawn[(layer * self.num_experts + expert) % NUM_DRAWN])
