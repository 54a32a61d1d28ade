"""The two gates of BuddyMoE (section 3.1): which tokens tolerate a buddy, and which batches.

Axes: N tokens, A experts a token, E experts of a layer, M sparse layers.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from moejax.policies.base import of_few

ENTROPY_BINS = 1000  # of the histogram from which a profile calibrates tau
DELTA_BINS = 32  # a power of two: edges are exact
_LEAST = float(np.finfo(np.float32).tiny)


def chosen_probabilities(
    probabilities: jax.Array, ids: jax.Array, temperature: jax.Array | float = 1.0
) -> jax.Array:
    """Renormalises the router's probabilities over the chosen experts: p~, float32[N, A].

    With a temperature (0.8 to 1.2 works well, says the paper), softmax(z / T) restricted to them,
    which is p^(1/T) over its sum.

    Args:
      probabilities: float32[N, E], the full softmax.
      ids: int32[N, A].
    """
    chosen = jnp.take_along_axis(probabilities, ids, axis=-1, mode="clip")
    logits = jnp.log(jnp.maximum(chosen, _LEAST)) / temperature
    shifted = jnp.exp(logits - of_few(jnp.maximum, logits))
    return shifted / of_few(jnp.add, shifted)


def activating_entropy(chosen: jax.Array) -> jax.Array:
    """Eq. 1: TAE(x) = -sum_i p~(i|x) log p~(i|x) / log k, in [0, 1]; 0 where k = 1.

    Of p~ float32[N, A] as float32[N]; low for a token that prefers few of its experts.
    """
    width = chosen.shape[-1]
    if width == 1:
        return jnp.zeros(chosen.shape[:-1], chosen.dtype)
    total = of_few(jnp.add, chosen * jnp.log(jnp.maximum(chosen, _LEAST)))[..., 0]
    return jnp.clip(-total / math.log(width), 0.0, 1.0)


def _probability_margin(chosen: jax.Array) -> jax.Array:
    """Margin m(x) = p~_max - p~_2nd, float32[N], of falling p~ float32[N, A]; 1 where k = 1."""
    if chosen.shape[-1] == 1:
        return jnp.ones(chosen.shape[:-1], chosen.dtype)
    return chosen[..., 0] - chosen[..., 1]


def tolerates(chosen: jax.Array, tau: jax.Array, margin: jax.Array) -> jax.Array:
    """TAE gate, bool[N]: a token keeps its experts if TAE <= tau or its margin >= gamma.

    A high tau is the cautious one (section 3.1; 3.4 says the reverse).

    Args:
      chosen: float32[N, A], p~ by falling probability.
      tau: float32[]; below 0 all pass.
      margin: float32[], gamma; above 1 all pass.
    """
    return (activating_entropy(chosen) > tau) & (_probability_margin(chosen) < margin)


def requested_experts(ids: jax.Array, asked: jax.Array, num_experts: int) -> jax.Array:
    """Requested experts R(B), bool[E]: those of the pairs `asked`, bool[N, A], of `ids`."""
    given = jnp.where(asked, ids, -1).reshape(-1)
    return jnp.any(given[:, None] == jnp.arange(num_experts, dtype=jnp.int32)[None], axis=0)


def missing_share(requested: jax.Array, resident: jax.Array) -> jax.Array:
    """Eq. 2: delta, float32[]: the share of the requested experts that are not resident.

    Both are bool[E], with several partitions of one partition's experts; 0 where none is requested.
    """
    asked = jnp.sum(requested, dtype=jnp.int32)
    missing = jnp.sum(requested & ~resident, dtype=jnp.int32)
    return missing.astype(jnp.float32) / jnp.maximum(asked, 1).astype(jnp.float32)


def beta_within(missing: jax.Array, budget: jax.Array) -> jax.Array:
    """Smallest beta that keeps the fetches of bypassed layers within a budget (section 3.1).

    The gate bypasses replacement where delta >= beta, and every miss is then fetched: the mean of
    n_cpu w over the layers with delta >= beta stays within B. Exact to a bin; float32[], above 1
    where even delta = 1 must not bypass.

    Args:
      missing: float32[DELTA_BINS + 1], experts missing in a mean step, by delta of their layer.
      budget: float32[], B / w, experts that a step may transfer.
    """
    place = jnp.arange(DELTA_BINS + 1, dtype=jnp.int32)
    from_here = jnp.where(place[None] >= place[:, None], missing[None], 0.0)
    over = jnp.sum(from_here, axis=1) > budget
    return jnp.sum(over, dtype=jnp.int32).astype(jnp.float32) / DELTA_BINS


def entropy_bin(entropy: jax.Array) -> jax.Array:
    """Bin int32[N] of each TAE, of `ENTROPY_BINS`; bin b spans (b / bins, (b + 1) / bins]."""
    upper = jnp.ceil(entropy * ENTROPY_BINS).astype(jnp.int32)
    return jnp.clip(upper - 1, 0, ENTROPY_BINS - 1)


def percentile_tau(histogram: np.ndarray, percentile: float) -> np.ndarray:
    """Threshold tau_l: the p-th percentile of each layer's TAE, up to which no buddy serves.

    float32[M]: the upper edge of the first bin down to which p % of the tokens lie; -1 where p is 0
    or a layer saw no token.

    Args:
      histogram: [M, bins], by `entropy_bin`; sums of tokens' weights.
      percentile: p in [0, 100]; the paper's range is 10 to 20. 0 lets all tokens pass.
    """
    counts = histogram.astype(np.float64)
    total = counts.sum(axis=-1, keepdims=True)
    reached = np.cumsum(counts, axis=-1) >= total * percentile / 100 * (1 - 1e-12)
    edges = (np.argmax(reached, axis=-1) + 1) / histogram.shape[-1]
    forbids = (total[:, 0] > 0) & (percentile > 0)
    return np.where(forbids, edges, -1.0).astype(np.float32)
