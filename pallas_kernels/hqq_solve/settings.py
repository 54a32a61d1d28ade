"""Settings of a solve, and the two limits that the hqq library puts on scales."""

import dataclasses

MIN_RANGE = 1e-4  # of a group; a narrower one takes scale 1
MAX_INVERSE_SCALE = 2e4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolveSettings:
    """Static settings of a solve.

    Attributes:
      bits: of a code.
      group_size: weights along K that share a scale and a zero.
      max_steps: half-quadratic steps.
      norm: p of the error's l_p norm, below 1 or 1.
      beta: weight of the quadratic term.
      round_start: rounds the zero that the solve starts with.
    """

    bits: int
    group_size: int
    max_steps: int
    norm: float
    beta: float
    round_start: bool

    @property
    def harmless_error(self) -> float:
        """Error below which it shrinks to nothing, beta^(-1 / (2 - p)) (MiLo eq. 7)."""
        return float(self.beta ** (-1 / (2 - self.norm)))
