"""Contract of the expert MLP: cases, values, tolerances, THE check.

Expectations are float64 numpy; the tolerance follows from the dtype and the lengths of the sums.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

UNIT_ROUNDOFF = 2.0**-24  # of float32, in which products and sums are
# Roundoff of the output's dtype: half the distance from 1 to the next number.
OUTPUT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


class Shape(NamedTuple):
    """Axes of the operation: N tokens, A experts a token, E experts, D and F, M layers."""

    tokens: int
    width: int
    experts: int
    model_dim: int
    expert_dim: int
    layers: int = 2


# Shapes that a CPU can interpret. Mixtral's axes are cut to an eighth, which leaves F a multiple of
# 7 and of a power of two, as 14336 is.
SHAPES = {
    "qwen3_30b": Shape(1, 2, 3, 2048, 768, 1),
    "mixtral_reduced": Shape(2, 2, 3, 512, 1792, 1),
    "one_tile": Shape(1, 1, 1, 8, 8),
    "no_power_of_two": Shape(3, 2, 5, 72, 40),
    "demo": Shape(4, 4, 8, 256, 64),
}
GPU_SHAPES = {
    "qwen3_30b": Shape(4, 8, 16, 2048, 768),
    "mixtral": Shape(2, 2, 2, 4096, 14336, 1),
    "no_power_of_two": Shape(32, 2, 5, 72, 40),
    "demo": Shape(32, 4, 32, 256, 64, 7),
}
DTYPES = tuple(OUTPUT_ROUNDOFF)


class Operands(NamedTuple):
    """Arguments of `expert_mlp`, on the host."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


def random_operands(shape: Shape, dtype: str, seed: int, ids: Any = None) -> Operands:
    """Fresh operands; without `ids`, experts are drawn without repetition within a token."""
    rng = np.random.default_rng(seed)

    def normal(*size: int, scale: float = 1.0) -> np.ndarray:
        values = rng.standard_normal(size, dtype=np.float32) * np.float32(scale)
        return values.astype(jnp.dtype(dtype))

    s = shape
    if ids is None:
        ids = [rng.permutation(s.experts)[: s.width] for _ in range(s.tokens)]
    return Operands(
        x=normal(s.tokens, s.model_dim),
        ids=np.asarray(ids, np.int32),
        weights=rng.dirichlet(np.ones(s.width), s.tokens).astype(np.float32),
        gate_up=normal(s.layers, s.experts, 2 * s.expert_dim, s.model_dim, scale=s.model_dim**-0.5),
        down=normal(s.layers, s.experts, s.model_dim, s.expert_dim, scale=s.expert_dim**-0.5),
    )


def expected_and_tolerance(operands: Operands, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """float64[N, D] of the formula, and how far a right float32 sum in any order may be from it.

    A sum of k products in float32 differs by at most k u sum |products|, and by about the root of
    k in place of k when roundings are independent (Higham and Mary 2019): four times
    that is allowed. The error of a gate and an up value goes through SwiGLU, |d silu| <= 1.1, and
    then through the down projection. Last comes one rounding to the output's dtype.
    """
    dtype = operands.x.dtype.name
    x, weights = (a.astype(np.float64) for a in (operands.x, operands.weights))
    ids, expert_dim, model_dim = operands.ids, operands.down.shape[3], x.shape[1]
    u_inner = 4 * np.sqrt(model_dim) * UNIT_ROUNDOFF
    u_outer = 4 * np.sqrt(expert_dim * ids.shape[1]) * UNIT_ROUNDOFF
    expected, tolerance = np.zeros_like(x), np.zeros_like(x)
    for n in range(len(x)):
        for expert_id, weight in zip(ids[n], weights[n], strict=True):
            gate_up = operands.gate_up[layer, expert_id].astype(np.float64)
            down = operands.down[layer, expert_id].astype(np.float64)
            gate, up = np.split(gate_up @ x[n], 2)
            gate_error, up_error = np.split(u_inner * (np.abs(gate_up) @ np.abs(x[n])), 2)
            silu = gate / (1 + np.exp(-gate))
            hidden = silu * up
            hidden_error = 1.1 * gate_error * np.abs(up) + np.abs(silu) * up_error
            hidden_error += 8 * UNIT_ROUNDOFF * np.abs(hidden)  # exp, divide, two products
            expected[n] += weight * (down @ hidden)
            slack = hidden_error + u_outer * np.abs(hidden)
            tolerance[n] += weight * (np.abs(down) @ slack)
    tolerance += OUTPUT_ROUNDOFF[dtype] * (np.abs(expected) + tolerance)
    # Below the normal numbers rounding is no longer relative.
    return expected, tolerance + float(jnp.finfo(dtype).smallest_subnormal)


def violation(found: Any, operands: Operands, layer: int) -> str | None:
    """THE check: why `found` is not the operation's value, or None."""
    expected, tolerance = expected_and_tolerance(operands, layer)
    if found.shape != expected.shape or found.dtype != operands.x.dtype:
        return f"{found.dtype}{found.shape} in place of {operands.x.dtype}{expected.shape}"
    error = np.abs(np.asarray(found).astype(np.float64) - expected)
    outside = ~(error <= tolerance)  # NaN is outside
    if not outside.any():
        return None
    excess = np.where(outside, np.nan_to_num(error / tolerance, nan=np.inf), 0)
    worst = np.unravel_index(excess.argmax(), excess.shape)
    return (
        f"{outside.sum()} of {outside.size} values are out of tolerance, the worst at {worst}: "
        f"{error[worst]:.3g} from {expected[worst]:.3g}, allowed {tolerance[worst]:.3g}"
    )


class Case(NamedTuple):
    """One row of the contract."""

    shape: Shape
    dtype: str
    ids: tuple[tuple[int, ...], ...] | None = None  # None: drawn
    layer: int = 0


def contract(shapes: dict[str, Shape]) -> dict[str, Case]:
    """Cases of every implementation: every named shape in every dtype, and ids."""
    cases = {
        f"{name}_{dtype}": Case(shape, dtype, layer=shape.layers - 1)
        for name, shape in shapes.items()
        for dtype in OUTPUT_ROUNDOFF
    }
    small = Shape(4, 2, 3, 48, 24, 3)
    cases["one_expert_owns_all_rows"] = Case(small._replace(width=1), "bfloat16", ((1,),) * 4, 1)
    cases["experts_repeat_over_tokens"] = Case(small, "float32", ((0, 2), (2, 0), (0, 2), (0, 2)))
    cases["an_expert_twice_for_a_token"] = Case(small, "float32", ((1, 1), (2, 2), (0, 1), (1, 0)))
    cases["every_expert"] = Case(small._replace(width=3), "float16", ((2, 0, 1),) * 4, 2)
    return cases


def poisoned(operands: Operands, layer: int) -> Operands:
    """NaN wherever the operation has nothing to read: other layers, experts without a row."""
    keep = np.zeros(operands.gate_up.shape[:2], bool)
    keep[layer, np.unique(operands.ids)] = True

    def poison(stacked: np.ndarray) -> np.ndarray:
        return np.where(keep[:, :, None, None], stacked, stacked.dtype.type(np.nan))

    return operands._replace(gate_up=poison(operands.gate_up), down=poison(operands.down))
