"""Buddy lists (BuddyMoE sections 3.2 and 3.3), made from a profile's counts.

Computed once, on the host, in float64: a list must not depend on the device that counted.

Axes: M sparse layers, E experts of a layer, K places of a list.
"""

from typing import Literal, NamedTuple

import numpy as np

# Sources of q: co-activations as eq. 4 counts them, those weighted by probability (section
# 3.3), or how alike outputs are.
Source = Literal["coactivations", "weighted", "outputs"]
# Relative: a prefix that should reach alpha does, however its float64 sum was rounded.
_ROUNDING = 1e-9


class BuddyLists(NamedTuple):
    """Buddy lists of every expert, the best buddy first.

    Invariants: a list holds no expert twice, not its own pivot, and only shares above 0, by falling
    share; -1 and share 0 pad it.
    """

    ids: np.ndarray  # int32[M, E, K]
    q: np.ndarray  # float32[M, E, K], the share q_(j|i) of each

    def sizes(self) -> np.ndarray:
        """Lengths |B(i; alpha)|, int64[M, E]; the paper reports their distribution."""
        return (self.ids >= 0).sum(axis=-1)


def conditional_coactivation(counts: np.ndarray, smoothing: float = 0.0) -> np.ndarray:
    """Eq. 4: q_(j|i) = M(i, j) / sum_j' M(i, j'), with q_(i|i) = 0; M + epsilon in place of M.

    float64[M, E, E], rows that sum to 1; to 0 for a pivot that never co-occurred, if epsilon is 0.

    Args:
      counts: [M, E, E], binary or probability-weighted; the diagonal is not read.
      smoothing: epsilon >= 0 (Laplace, section 3.3).
    """
    return _shares(counts.astype(np.float64) + smoothing)


def output_similarity(cosines: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Shares by similarity of two experts' outputs on the same inputs, in place of eq. 4.

    s(j|i) is the mean of cos(f_i(x), f_j(x)) over the tokens x that are routed to i, which is where
    i would be replaced; if i has no tokens, over those of j. Experts that point away (s <= 0) are
    no buddies. Divided by its sum like eq. 4, so that eq. 5 applies: rows of float64[M, E, E] sum
    to 1, or to 0 where nothing is alike.

    Args:
      cosines: [M, E, E], sums over the tokens of i (second axis) of the cosines with each j.
      tokens: [M, E], number of tokens of each i.
    """
    return _shares(output_gains(cosines, tokens))


def output_gains(cosines: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Gains max(0, s(j|i)), s of `output_similarity`: how well j approximates expert i.

    For outputs of equal length, the least squares choice of g in f_i ~ g f_j; not from the paper.
    float64[M, E, E], in [0, 1].
    """
    seen = tokens[:, :, None] > 0
    means = cosines.astype(np.float64) / np.maximum(tokens, 1e-30)[:, :, None]
    means = np.where(seen, means, np.where(seen.swapaxes(1, 2), means.swapaxes(1, 2), 0.0))
    return np.clip(means, 0.0, 1.0)


def _shares(values: np.ndarray) -> np.ndarray:
    values = np.where(np.eye(values.shape[-1], dtype=bool), 0.0, values)
    total = values.sum(axis=-1, keepdims=True)
    return np.divide(values, total, out=np.zeros_like(values), where=total > 0)


def buddy_lists(q: np.ndarray, alpha: float | np.ndarray, max_size: int) -> BuddyLists:
    """Eq. 5-6: the shortest prefix, by falling q, that covers alpha; at most `max_size` of it.

    Equal shares stand in order of id. Lists have K = min(max_size, E - 1) places, at least one.

    Args:
      q: [M, E, E].
      alpha: in (0, 1], one of all layers or [M].
      max_size: K_max >= 1.
    """
    num_layers, num_experts, _ = q.shape
    alphas = np.broadcast_to(np.asarray(alpha, np.float64), num_layers)
    width = max(1, min(max_size, num_experts - 1))
    order = np.argsort(-q, axis=-1, kind="stable")
    shares = np.take_along_axis(q, order, axis=-1)
    before = np.cumsum(shares, axis=-1) - shares
    listed = (before < alphas[:, None, None] * (1 - _ROUNDING)) & (shares > 0)
    return BuddyLists(
        ids=np.where(listed, order, -1)[..., :width].astype(np.int32),
        q=np.where(listed, shares, 0.0)[..., :width].astype(np.float32),
    )


def alpha_schedule(first: float, last: float, num_layers: int) -> np.ndarray:
    """Linear alpha_l, float64[M], from the first sparse layer to the last (section 3.3).

    Early layers are the more redundant ones (section 3.2).
    """
    return np.linspace(first, last, num_layers)
