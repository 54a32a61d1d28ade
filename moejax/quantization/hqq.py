"""Half-quadratic quantization (HQQ): the zero point that minimises a sparse error.

Badri and Shaji 2023, as MiLo's subproblem 1 (section 3.2.2) states it, and with the choices of the
hqq library's default solver where the texts leave them open. `kernel_hqq` is the GPU kernel, which
reads the weights once.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from moejax.quantization.grid import Codes, Grid, group_members, merge_groups, split_groups
from pallas_kernels.hqq_solve import hqq_solve, refusal
from pallas_kernels.hqq_solve.settings import (
    BETA,
    HARMLESS_ERROR,
    MAX_INVERSE_SCALE,
    MAX_STEPS,
    MIN_RANGE,
    NORM,
)
from pallas_kernels.target import SIMULATED, Target, current_target

State = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # steps done, zeros, least error, going


@functools.partial(jax.jit, static_argnames="grid")
def hqq(weights: jax.Array, grid: Grid, narrower: Sequence[jax.Array] = ()) -> Codes:
    """Minimises |W - s (q - z)|_p over z, with s fixed (MiLo eq. 4-9).

    A step is q = clip(round(w / s + z)), e = shrink(w - s (q - z)), z = mean(q - (w - e) / s) over
    the group. A matrix stops at the first step before which its mean absolute error did not fall.
    With planes every width has its own e, and z is the mean of theirs by their shares.

    Args:
      weights: float32[..., N, K], finite; each matrix stops by itself.
      grid: its zero is "float".
      narrower: what each narrower width of planes approximates; (): `weights` too.
    """
    num_inputs = weights.shape[-1]
    groups = split_groups(weights, grid.group_size)
    others = narrower or [weights] * (len(grid.widths) - 1)
    targets = [groups, *(split_groups(other, grid.group_size) for other in others)]
    inverse, start = _range_grid(groups, grid)
    mask, counts = group_members(num_inputs, grid.group_size, groups.ndim)
    num_weights = weights.shape[-2] * num_inputs

    def step(zeros: jax.Array) -> tuple[jax.Array, jax.Array]:
        def moved(zeros: jax.Array, keeps: bool) -> tuple[jax.Array, jax.Array]:
            codes = _codes(targets, inverse, zeros, grid)
            new, errors = jnp.zeros_like(zeros), []
            for width, target in zip(grid.widths, targets, strict=True):
                steps = width.steps(codes)
                error = target - (steps - zeros) / inverse
                rest = target - _shrink(error) if keeps else target
                mean = jnp.sum((steps - rest * inverse) * mask, axis=-1, keepdims=True) / counts
                new = new + width.share * mean
                errors.append(width.share * jnp.abs(error))
            return new, functools.reduce(jnp.add, errors)

        # Weights of a usual size have no error that outlasts the shrinking, and its powers are
        # nine tenths of a step's time on a CPU.
        new, error = moved(zeros, keeps=False)
        any_kept = jnp.max(error) > 0.999 * HARMLESS_ERROR
        new = jax.lax.cond(any_kept, lambda z: moved(z, keeps=True)[0], lambda z: new, zeros)
        total = jnp.sum(error * mask, axis=(-3, -2, -1), keepdims=True)
        return new, total / num_weights

    def again(state: State) -> jax.Array:
        count, _, _, active = state
        return (count < MAX_STEPS) & jnp.any(active)

    def body(state: State) -> State:
        count, zeros, best, active = state
        moved, error = step(zeros)
        zeros = jnp.where(active, moved, zeros)
        active = active & (error < best)
        return count + 1, zeros, jnp.minimum(best, error), active

    best = jnp.full((*groups.shape[:-3], 1, 1, 1), jnp.inf, jnp.float32)
    first = (jnp.int32(0), start, best, jnp.ones(best.shape, bool))
    zeros = jax.lax.while_loop(again, body, first)[1]
    codes = _codes(targets, inverse, zeros, grid).astype(jnp.uint8)
    return Codes(merge_groups(codes, num_inputs), 1 / inverse[..., 0], zeros[..., 0])


def _shrink(x: jax.Array) -> jax.Array:
    """Shrinkage sign(x) relu(|x| - |x|^(p - 1) / beta) (MiLo eq. 7), 0 at 0."""
    size = jnp.abs(x)
    power = jnp.where(size > 0, size, 1.0) ** (NORM - 1)
    return jnp.sign(x) * jnp.maximum(size - power * (1 / BETA), 0.0)


def _range_grid(groups: jax.Array, grid: Grid) -> tuple[jax.Array, jax.Array]:
    """Inverse scales and zeros float32[..., G, 1]; the library keeps the inverse throughout."""
    low = jnp.min(groups, axis=-1, keepdims=True)
    width = jnp.max(groups, axis=-1, keepdims=True) - low
    inverse = jnp.where(width > MIN_RANGE, grid.max_code / jnp.maximum(width, MIN_RANGE), 1.0)
    inverse = jnp.minimum(inverse, MAX_INVERSE_SCALE)
    return inverse, -low * inverse


def _codes(
    targets: Sequence[jax.Array], inverse: jax.Array, zeros: jax.Array, grid: Grid
) -> jax.Array:
    return grid.round(*(target * inverse + zeros for target in targets))


def kernel_refusal(
    weights: jax.Array | jax.ShapeDtypeStruct, grid: Grid, target: Target | None = None
) -> str | None:
    """Reason why `kernel_hqq` cannot take such weights, or None; `hqq` takes all."""
    if grid.zero_kind != "float":
        return f"hqq finds float zeros; zero_kind is {grid.zero_kind!r}"
    if grid.planes:
        return "it finds codes of one width"
    return refusal(weights, None, grid.bits, grid.group_size, target or current_target())


def kernel_hqq(
    weights: jax.Array,  # [..., N, K] in float32, bfloat16 or float16, finite
    u: jax.Array,  # float32[..., N, R]
    v: jax.Array,  # float32[..., R, K]
    grid: Grid,
    *,
    interpret: bool = False,  # runs the kernel on the CPU, for tests
) -> Codes:
    """Computes `hqq(weights - u v, grid)`, except for ties; a `MiloSettings.solver` on a GPU."""
    if reason := kernel_refusal(weights, grid, SIMULATED if interpret else None):
        raise ValueError(reason)
    solution = hqq_solve(
        weights,
        bits=grid.bits,
        group_size=grid.group_size,
        low_rank=(u, v) if u.shape[-1] else None,
        interpret=interpret,
    )
    return Codes(solution.codes, solution.scales, solution.zeros)
