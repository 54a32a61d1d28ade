"""Public call of the HQQ solve, its refusals, and the library's stop rule."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hqq_solve.settings import MAX_STEPS
from pallas_kernels.hqq_solve.triton import Tiles, hqq_solve_triton
from pallas_kernels.target import SIMULATED, Target, current_target, platform_refusal

GROUP_SIZES = (32, 64, 128)

Operand = jax.Array | jax.ShapeDtypeStruct


class HqqSolution(NamedTuple):
    """Quantized matrices: w = (codes - zeros) scales, group by group."""

    codes: jax.Array  # uint8[..., N, K]
    scales: jax.Array  # float32[..., N, G]
    zeros: jax.Array  # float32[..., N, G]
    errors: jax.Array  # float32[..., MAX_STEPS]: mean |error| before each step that was taken; or 0


def refusal(
    weights: Operand,
    low_rank: tuple[Operand, Operand] | None,
    bits: int,
    group_size: int,
    target: Target,
) -> str | None:
    """Returns all reasons why the kernel refuses, in one line, or None."""
    reasons = [reason] if (reason := platform_refusal(target)) else []
    if group_size not in GROUP_SIZES:
        reasons.append(f"group_size {group_size} is none of {', '.join(map(str, GROUP_SIZES))}")
    elif weights.shape[-1] % group_size:
        reasons.append(f"K={weights.shape[-1]} is no multiple of group_size {group_size}")
    if not 1 <= bits <= 8:
        reasons.append(f"bits {bits} is not in 1..8")
    if weights.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        reasons.append(f"weights are {weights.dtype}, not bfloat16, float16 or float32")
    if low_rank is not None:
        *lead, num_rows, num_inputs = weights.shape
        rank = low_rank[1].shape[-2]
        wanted = {"u": (*lead, num_rows, rank), "v": (*lead, rank, num_inputs)}
        for factor, (name, shape) in zip(low_rank, wanted.items(), strict=True):
            if tuple(factor.shape) != shape:
                reasons.append(f"{name} has shape {tuple(factor.shape)}, expected {shape}")
            if factor.dtype != jnp.float32:
                reasons.append(f"{name} is {factor.dtype}, not float32")
    return "; ".join(reasons) or None


def hqq_solve(
    weights: jax.Array,
    *,
    bits: int,
    group_size: int,
    low_rank: tuple[jax.Array, jax.Array] | None = None,
    steps: jax.Array | None = None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> HqqSolution:
    """Minimises |W - UV - s (q - z)|_p over z, s of each group fixed (MiLo eq. 4-9).

    Groups are independent, so a group's weights are read once and stay in registers through every
    step. Only the stop rule is global: with `steps=None` a matrix stops, as in the hqq library, at
    the first step before which its mean |error| did not fall; if that comes before the last step,
    and only then, the kernel runs once more with the right number of steps.

    Args:
      weights: [..., N, K] in bf16, fp16 or fp32, finite.
      low_rank: u float32[..., N, R] and v float32[..., R, K], whose product is subtracted from the
        weights in float32 inside the kernel; zero components change nothing.
      steps: int32[...], number of steps, up to `MAX_STEPS`; None for the stop rule.

    Raises:
      ValueError: the kernel refuses; one line lists all reasons.
    """
    target = SIMULATED if interpret else current_target()
    if reason := refusal(weights, low_rank, bits, group_size, target):
        raise ValueError(f"hqq_solve refuses: {reason}")
    *lead, num_rows, num_inputs = weights.shape
    flat = weights.reshape(-1, num_rows, num_inputs)
    if low_rank is not None:
        u, v = low_rank
        low_rank = u.reshape(-1, num_rows, u.shape[-1]), v.reshape(-1, v.shape[-2], num_inputs)

    def solve(steps: jax.Array) -> HqqSolution:
        found = hqq_solve_triton(
            flat, low_rank, steps, bits=bits, group_size=group_size, target=target, tiles=tiles
        )
        return HqqSolution(*found)

    if steps is None:
        first = solve(jnp.full(len(flat), MAX_STEPS, jnp.int32))
        needed = steps_until_stop(first.errors)
        stopped = jnp.any(needed < MAX_STEPS)
        solution = jax.lax.cond(stopped, lambda: solve(needed), lambda: first)
    else:
        solution = solve(steps.reshape(-1))
    return HqqSolution(*(x.reshape(*lead, *x.shape[1:]) for x in solution))


def steps_until_stop(errors: jax.Array) -> jax.Array:
    """Number of steps, int32[...], through the first that an unfallen error precedes.

    Args:
      errors: float32[..., I], mean |error| before each step; of a finite matrix.
    """
    best = jax.lax.cummin(errors, axis=errors.ndim - 1)
    fell = errors[..., 1:] < best[..., :-1]
    num_fallen = jnp.sum(jnp.cumprod(fell, axis=-1, dtype=jnp.int32), axis=-1)
    return jnp.minimum(num_fallen + 2, errors.shape[-1]).astype(jnp.int32)
