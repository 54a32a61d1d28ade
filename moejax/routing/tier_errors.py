"""Errors of experts' outputs in each tier, and what they make of a layer's output.

Of a token, y = sum_a w_a f_a is what a layer's chosen experts give, W = sum_a w_a, and d_a is what
the form in which pair a runs loses of f_a. Then

    |y - y'| = |sum_a w_a d_a| <= sum_a w_a |d_a|     (triangle inequality)
    |y - y'|^2 <= W sum_a w_a |d_a|^2         a bound (Cauchy-Schwarz)
    |y - y'|^2 ~ sum_a w_a^2 |d_a|^2          an estimate, for uncorrelated errors

Both right sides are sums over pairs. So a profile's sums over all pairs, as if each form had served
every pair, times the share of the gate mass that each form served, are what a run makes of a layer.
That takes the pairs of a form to be like all pairs of the layer: only where one form serves every
pair is the bound a theorem, on the profile's text.

Axes: M sparse layers, E experts, K forms: tiers, then "skipped", then "substituted".
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SKIPPED, SUBSTITUTED = "skipped", "substituted"


class _LayerErrors(NamedTuple):
    """Root of the mean squared error of each layer's output, over that of the output itself."""

    estimate: np.ndarray  # float64[M], errors of a token's experts without correlation
    bound: np.ndarray  # float64[M], errors that all point one way

    @property
    def mean(self) -> tuple[float, float]:
        """Estimate and bound of the root mean square over layers."""
        estimate, bound = (float(np.sqrt(np.mean(of**2))) for of in self)
        return estimate, bound


@dataclasses.dataclass(frozen=True)
class TierErrors:
    """Squared errors of experts' outputs, summed over a text's pairs of token and chosen expert.

    A skipped pair loses all of its output; a substituted one is taken to run the first buddy of its
    expert's list, and loses all where the list is empty.
    """

    tiers: tuple[str, ...]
    plain: np.ndarray  # float[M, E, K], sums of |d|^2
    bounds: np.ndarray  # float[M, E, K], sums of w W |d|^2
    estimates: np.ndarray  # float[M, E, K], sums of w^2 |d|^2
    outputs: np.ndarray  # float[M], sums of |y|^2 over tokens

    def of_gate(self, tiers: Sequence[str], gate: np.ndarray) -> _LayerErrors:
        """Errors of layers whose gate mass was served so.

        Args:
          tiers: names of the run's tiers, of which the profile has every one.
          gate: float64[M, T + 3], as of `moejax.experts.ledger.Ledger`: of substituted pairs the
            tiers' columns have the mass too, and lose it here in proportion.
        """
        served, skipped, substituted, whole = np.split(
            np.asarray(gate, np.float64), np.cumsum([len(tiers), 1, 1]), axis=1
        )
        in_tiers = np.maximum(served.sum(axis=1, keepdims=True), 1e-30)
        own = served * (1 - np.minimum(substituted / in_tiers, 1))
        shares = np.concatenate([own, skipped, substituted], axis=1) / np.maximum(whole, 1e-30)
        forms = [*map(self.tiers.index, tiers), len(self.tiers), len(self.tiers) + 1]

        def root(sums: np.ndarray) -> np.ndarray:
            of_layer = sums[..., forms].sum(axis=1, dtype=np.float64)
            outputs = np.maximum(self.outputs.astype(np.float64), 1e-30)
            found: np.ndarray = np.sqrt((shares * of_layer).sum(axis=1) / outputs)
            return found

        return _LayerErrors(root(self.estimates), root(self.bounds))
