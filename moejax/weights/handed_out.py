"""Experts handed out whole to the devices of a mesh, in place of a share of each.

A device holds R experts of each sparse layer, in *rows*, and runs the pairs (token n, a) whose
expert is its own; the sum over the devices is the layer's. Of an expert that c devices hold each
runs every c-th pair of a step, whoever is in slots, so that no bit depends on residency.

Axes: n devices, M sparse layers, E experts of a layer, N tokens, A experts of each.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_NONE = -1  # a row, where a device has no such expert


def table_of(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """Tables of `OwnExperts` of all devices, int32[n, K, M, E], from int32[n, M, R]."""
    count, num_layers, num_rows = experts.shape
    row = np.full((count, num_layers, num_experts), _NONE, np.int32)
    numbers = np.broadcast_to(np.arange(num_rows, dtype=np.int32), experts.shape)
    np.put_along_axis(row, experts.astype(np.int64), numbers, axis=2)
    holds = row >= 0
    copies = np.broadcast_to(holds.sum(axis=0, dtype=np.int32), row.shape)
    if copies.max(initial=1) == 1:
        return row[:, None]
    turn = np.cumsum(holds, axis=0, dtype=np.int32) - 1
    return np.stack([row, turn, copies], axis=1)


def table_nbytes(num_layers: int, num_experts: int, count: int, rows: int) -> int:
    """Bytes of a device's table."""
    return 4 * num_layers * num_experts * (1 if count * rows == num_experts else 3)


class OwnExperts(NamedTuple):
    """The experts that a device holds, inside a step."""

    # int32[K, M, E]: the row of each expert, -1 where another device has it; where some have copies
    # (K = 3) also which copy this one is, and how many there are
    table: jax.Array

    def of_pairs(self, layer: int | jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows of the pairs' experts int32[N, A], 0 elsewhere; bool[N, A], which run here."""
        of_layer = self.table[:, layer]
        row = of_layer[0][ids]
        mine = row >= 0
        if len(self.table) > 1:
            number = jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
            mine &= number % of_layer[2][ids] == of_layer[1][ids]
        return jnp.maximum(row, 0), mine

    def rows(self, layer: int | jax.Array, ids: jax.Array) -> jax.Array:
        """Rows of experts int32[L], of which some are -1; -1 where another device has it."""
        return jnp.where(ids >= 0, self.table[0, layer][ids], _NONE)

    def by_row(self, layer: int | jax.Array, values: jax.Array, num_rows: int) -> jax.Array:
        """Values of experts [E] in the order of the rows, [R]."""
        row = self.table[0, layer]
        places = jnp.where(row >= 0, row, num_rows)
        return jnp.zeros(num_rows, values.dtype).at[places].set(values, mode="drop")
