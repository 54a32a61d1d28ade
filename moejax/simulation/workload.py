"""What the steps of a trace need of each layer, in arrays of fixed shapes."""

import dataclasses
from typing import Any

import jax
import numpy as np

from moejax.errors import MoejaxError
from moejax.traces import DECODE, Trace

# Steps that need more experts of a layer are sorted instead of searched.
MAX_NARROW = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Workload:
    """Steps in order; W experts at most are needed in a narrow step, P are foreseen.

    Invariants: a row of `needed` rises; E stands for none; a step is in `wide` or has `needed`.

    Attributes:
      needed: int32[S, M, W], experts that a narrow step's tokens were routed to.
      foreseen: int32[S, M, P], experts that the layer before foresaw, rising; layer 0 has none.
      rank: int32[S, M, P], their places by falling probability.
      is_decode: bool[S].
      wide_at: int32[S], index into `wide`, -1 for a narrow step.
      wide: bool[S', M, E], experts that the other steps need.
      num_experts: E, static.
    """

    needed: Any
    foreseen: Any
    rank: Any
    is_decode: Any
    wide_at: Any
    wide: Any
    num_experts: int = dataclasses.field(metadata={"static": True})

    @property
    def num_steps(self) -> int:
        """S."""
        return len(self.is_decode)

    @property
    def num_layers(self) -> int:
        """M."""
        return self.needed.shape[1]

    @property
    def has_wide(self) -> bool:
        """Whether any step is wide; static: a branch in a GPU's program waits for the host."""
        return len(self.wide) > 0

    @property
    def most_foreseen(self) -> int:
        """P."""
        return self.foreseen.shape[2]

    def masks(self) -> np.ndarray:
        """bool[S, M, E], what each step needs."""
        grid = np.zeros((*self.needed.shape[:2], self.num_experts + 1), bool)
        np.put_along_axis(grid, np.asarray(self.needed, np.int64), True, axis=2)
        masks = grid[..., :-1]
        wide_at = np.asarray(self.wide_at)
        masks[wide_at >= 0] = np.asarray(self.wide)[wide_at[wide_at >= 0]]
        return masks


def make_workload(trace: Trace, most_foreseen: int = 0) -> Workload:
    """The steps of a trace.

    Args:
      trace: checked.
      most_foreseen: P, the most experts that any setting brings ahead.

    Raises:
      MoejaxError: the trace does not foresee so many.
    """
    has = 0 if trace.predicted_ids is None else trace.predicted_ids.shape[2]
    if has < min(most_foreseen, trace.num_experts):
        raise MoejaxError(
            f"{most_foreseen} experts are to be brought ahead, the trace foresees {has}: record it "
            f"with --config.record_foreseen={most_foreseen}, or lower prefetch"
        )
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
    foreseen, rank = _foreseen(trace, starts, sizes, min(most_foreseen, num_experts))
    is_decode = trace.phase[starts] == DECODE
    return Workload(needed, foreseen, rank, is_decode, wide_at, wide, num_experts)


def _marked(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """bool[M, E] of uint[N, M, A]."""
    found = np.zeros((ids.shape[1], num_experts), bool)
    for layer in range(ids.shape[1]):
        found[layer, ids[:, layer].reshape(-1)] = True
    return found


def _foreseen(
    trace: Trace, starts: np.ndarray, sizes: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Experts int32[S, M, P] and their ranks, of the largest mass over a step's tokens."""
    shape = (len(starts), trace.num_layers, most)
    experts = np.full(shape, trace.num_experts, np.int32)
    rank = np.broadcast_to(np.arange(most, dtype=np.int32), shape)
    if not most or trace.num_layers == 1:
        return experts, np.ascontiguousarray(rank)
    assert trace.predicted_ids is not None
    assert trace.predicted_probabilities is not None
    single = sizes == 1
    experts[single, 1:] = trace.predicted_ids[starts[single], :, :most]
    for s in np.flatnonzero(~single):
        rows = slice(starts[s], starts[s] + sizes[s])
        ids, mass = trace.predicted_ids[rows], trace.predicted_probabilities[rows]
        for layer in range(trace.num_layers - 1):
            total = np.zeros(trace.num_experts, np.float32)
            np.add.at(total, ids[:, layer].reshape(-1), mass[:, layer].reshape(-1))
            experts[s, layer + 1] = np.argsort(-total, kind="stable")[:most]
    order = np.argsort(experts, axis=-1, kind="stable")
    return np.take_along_axis(experts, order, -1), order.astype(np.int32)
