"""The hqq library's default solver: its steps, its norm, and its two limits on scales."""

MAX_STEPS = 20  # half-quadratic
NORM = 0.7  # p of the error's l_p norm
BETA = 10.0  # weight of the quadratic term
# Error below which it shrinks to nothing, beta^(-1 / (2 - p)) (MiLo eq. 7).
HARMLESS_ERROR = BETA ** (-1 / (2 - NORM))
MIN_RANGE = 1e-4  # of a group; a narrower one takes scale 1
MAX_INVERSE_SCALE = 2e4  # the scale stays within float16
