"""Experts that a trace's steps need in each layer, in arrays of fixed shapes."""

import dataclasses
from typing import Any

import jax
import numpy as np

from moejax.routing.trace import DECODE, Trace

# Steps that need more experts of a layer are sorted instead of searched.
MAX_NARROW = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Workload:
    """Steps in order; a narrow step needs at most W experts.

    Invariants: a row of `needed` rises; E stands for none; a step is in `wide` or has `needed`.
    """

    needed: Any  # int32[S, M, W], experts that a narrow step's tokens were routed to
    is_decode: Any  # bool[S]
    wide_at: Any  # int32[S], index into `wide`, -1 for a narrow step
    wide: Any  # bool[S', M, E], experts that the other steps need
    num_experts: int = dataclasses.field(metadata={"static": True})  # E, static

    @property
    def num_steps(self) -> int:
        """Number of steps, S."""
        return len(self.is_decode)

    @property
    def num_layers(self) -> int:
        """Number of sparse layers, M."""
        return self.needed.shape[1]

    @property
    def has_wide(self) -> bool:
        """Whether any step is wide; static: a branch in a GPU's program waits for the host."""
        return len(self.wide) > 0

    def masks(self) -> np.ndarray:
        """Mask bool[S, M, E] of the experts each step needs."""
        grid = np.zeros((*self.needed.shape[:2], self.num_experts + 1), bool)
        np.put_along_axis(grid, np.asarray(self.needed, np.int64), True, axis=2)
        masks = grid[..., :-1]
        wide_at = np.asarray(self.wide_at)
        masks[wide_at >= 0] = np.asarray(self.wide)[wide_at[wide_at >= 0]]
        return masks


def make_workload(trace: Trace) -> Workload:
    """Collects the steps of a checked trace."""
    num_experts, num_layers = trace.num_experts, trace.num_layers
    _, starts, sizes = np.unique(trace.step, return_index=True, return_counts=True)
    num_steps = len(starts)
    single = sizes == 1
    experts: list[Any] = [None] * num_steps  # of steps of several tokens, bool[M, E]
    for s in np.flatnonzero(~single).tolist():
        rows = slice(starts[s], starts[s] + sizes[s])
        experts[s] = _marked(trace.ids[rows], num_experts)
    counts = {s: int(mask.sum(1).max()) for s, mask in enumerate(experts) if mask is not None}
    narrow = [s for s, count in counts.items() if count <= MAX_NARROW]
    width = max([counts[s] for s in narrow] + [trace.width] * bool(single.any()), default=1)
    needed = np.full((num_steps, num_layers, width), num_experts, np.int32)
    ids = trace.ids[starts[single]].astype(np.int32)
    needed[single, :, : trace.width] = np.sort(ids, axis=-1)
    for s in narrow:
        for layer, mask in enumerate(experts[s]):
            found = np.flatnonzero(mask)
            needed[s, layer, : len(found)] = found
    wide_steps = [s for s in counts if s not in set(narrow)]
    wide_at = np.full(num_steps, -1, np.int32)
    wide_at[wide_steps] = np.arange(len(wide_steps))
    wide = np.zeros((len(wide_steps), num_layers, num_experts), bool)
    for place, s in enumerate(wide_steps):
        wide[place] = experts[s]
    is_decode = trace.phase[starts] == DECODE
    return Workload(needed, is_decode, wide_at, wide, num_experts)


def _marked(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Converts ids uint[N, M, A] to a mask bool[M, E]."""
    found = np.zeros((ids.shape[1], num_experts), bool)
    for layer in range(ids.shape[1]):
        found[layer, ids[:, layer].reshape(-1)] = True
    return found
