"""Number of experts per layer in high precision (DyMoE, section 4.3). Host maths only.

Eq. 4 is r(l) = (1 - lambda) f(l) + lambda with f(l) = (cos(pi l / (L - 1)) + 1) / 2. Every profile
f here has the mean 1/2, so that the mean of r(l) is r = (1 + lambda) / 2, the retention that the
paper states in its tables: lambda = 2 r - 1, and r is at least 0.5. l counts sparse layers.
"""

from collections.abc import Sequence

import numpy as np

from moejax.errors import MoejaxError

SCHEDULES = ("cosine", "linear", "sensitivity", "equal")
ROUNDINGS = ("diffused", "ceil")


def retention_ratios(
    schedule: str, retention: float, num_layers: int, sensitivity: Sequence[float] = ()
) -> np.ndarray:
    """Ratios r(l) of eq. 4, float64[L], with mean `retention`.

    Args:
      schedule: "cosine" (the paper's), "linear" (falls from 1 to lambda), "sensitivity" (f
        proportional to what was measured, cut at 1), or "equal" (r in every layer).
      retention: r, 0.5 to 1; with "equal" 0 to 1.
      sensitivity: one per layer, such as the loss that its quantization alone causes (Figure 5);
        not negative.

    Raises:
      MoejaxError: a ratio below 0.5, or sensitivities from which no profile can be made.
    """
    if schedule == "equal" or num_layers == 1:
        return np.full(num_layers, float(retention))
    if retention < 0.5:
        raise MoejaxError(
            f"retention={retention} must be 0.5 or more, since lambda = 2 r - 1 of eq. 4 is not "
            "negative; schedule='equal' takes less"
        )
    depth = np.arange(num_layers) / (num_layers - 1)
    if schedule == "cosine":
        profile = (np.cos(np.pi * depth) + 1) / 2
    elif schedule == "linear":
        profile = 1 - depth
    else:
        profile = _proportional(np.asarray(sensitivity, np.float64), num_layers)
    floor = 2 * retention - 1
    return (1 - floor) * profile + floor


def critical_counts(ratios: np.ndarray, num_requested: int, rounding: str) -> np.ndarray:
    """Number t_l of critical experts in each layer, int64[L], eq. 5.

    Args:
      ratios: float64[L], r(l).
      num_requested: M of eq. 5: experts that a layer is asked for, k at decode, E at prefill.
      rounding: "ceil" is the paper's letter: it demotes almost nothing where M is small. "diffused"
        carries what rounding leaves on to the next layer, so that the first l layers together
        have round(M sum r), and all of them round(M r L).
    """
    wanted = np.asarray(ratios, np.float64) * num_requested
    # Sums of ratios that are exact on paper must not fall to the other side of an integer.
    if rounding == "ceil":
        return np.ceil(wanted - 1e-9).astype(np.int64)
    total = np.floor(np.cumsum(wanted) + 0.5 + 1e-9).astype(np.int64)
    return np.diff(total, prepend=0)


def _proportional(sensitivity: np.ndarray, num_layers: int) -> np.ndarray:
    """Profile f(l) = min(1, c s_l), with the c for which the mean of f is 1/2."""
    if sensitivity.shape != (num_layers,):
        raise MoejaxError(
            f"sensitivity has {sensitivity.size} numbers, but the model has {num_layers} sparse "
            "layers: give one of each"
        )
    half = num_layers / 2
    if not (np.isfinite(sensitivity) & (sensitivity >= 0)).all():
        raise MoejaxError("sensitivity must have numbers of 0 or more")
    if np.count_nonzero(sensitivity) < half:
        raise MoejaxError(
            "sensitivity is 0 in more than half of the layers: no profile has mean 1/2"
        )
    falling = np.sort(sensitivity)[::-1]
    for num_full in range(num_layers):
        scale = (half - num_full) / falling[num_full:].sum()
        if scale * falling[num_full] <= 1:
            break
    profile: np.ndarray = np.minimum(1.0, scale * sensitivity)
    return profile
