"""The Pallas-Triton kernel: a program holds whole groups in registers through all steps.

In code units, with y = w / s and t = y + z, a step is

    q = clip(round(t), 0, 2^b - 1),  d = t - q,  z <- z - mean(sign(d) min(|d|, c |d|^(p - 1)))

with c = s^-(2 - p) / beta: MiLo's eq. 6-9 (q, then e = shrink(w - s (q - z)), then the mean of
q - (w - e) / s) put into one another. The min is |d| itself wherever the error s |d| is below
beta^(-1 / (2 - p)), 0.17 by default: then nothing of e is left. No error of a group can be larger
than its range, so a program whose groups are all narrower than that, as they are in nearly every
trained layer, takes a loop without logarithm and exponential; its zeros are the same.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.hqq_solve.settings import (
    BETA,
    HARMLESS_ERROR,
    MAX_INVERSE_SCALE,
    MAX_STEPS,
    MIN_RANGE,
    NORM,
)
from pallas_kernels.target import Target
from pallas_kernels.triton.elements import power_above

Ref = Any
Step = Callable[[jax.Array], jax.Array]

# Adding it to 0..255 and taking it off again rounds half to even, with two additions at full rate;
# the instruction that rounds runs at an eighth of it.
_ROUNDER = 1.5 * 2**23
_ERRORS_LENGTH = power_above(MAX_STEPS)  # of a Triton tile


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Registers of one program: `rows` groups, cut into parts of `columns` inputs."""

    rows: int
    columns: int
    num_warps: int


def _default_tiles(num_rows: int, group_size: int) -> Tiles:
    """Chooses 512 weights per warp, 16 per thread, and no row spread over warps.

    A group's sum is mostly within threads: the parts of a group are added first, and the 16
    columns of a part lie on 4 threads, so a sum over a group costs two shuffles, not four or five.
    One warp a program needs no barrier.
    """
    rows = 1
    while rows < max(512 // group_size, 1) and num_rows % (2 * rows) == 0:
        rows *= 2
    return Tiles(rows=rows, columns=min(16, group_size), num_warps=1)


def _body(*refs: Ref, bits: int, group_size: int, tiles: Tiles, rank: int) -> None:
    """Program (g, n, b) solves group g of `tiles.rows` rows of matrix b."""
    steps_ref, weights_ref, *factor_refs = refs[: 4 if rank else 2]
    codes_ref, scales_ref, zeros_ref, errors_ref = refs[-4:]
    group, tile, matrix = (pl.program_id(axis) for axis in range(3))
    rows = pl.ds(tile * tiles.rows, tiles.rows)
    spans = [
        pl.ds(group * group_size + first, tiles.columns)
        for first in range(0, group_size, tiles.columns)
    ]
    parts = [weights_ref[matrix, rows, span].astype(jnp.float32) for span in spans]
    if rank:
        u_ref, v_ref = factor_refs

        def subtract(r: jax.Array, parts: list[jax.Array]) -> list[jax.Array]:
            u = u_ref[matrix, r, rows][:, None]
            return [
                part - u * v_ref[matrix, r, span][None, :]
                for part, span in zip(parts, spans, strict=True)
            ]

        parts = jax.lax.fori_loop(0, rank, subtract, parts)
    low = jnp.min(functools.reduce(jnp.minimum, parts), axis=1)
    width = jnp.max(functools.reduce(jnp.maximum, parts), axis=1) - low
    top = float(2**bits - 1)
    inverse = jnp.where(width > MIN_RANGE, top / jnp.maximum(width, MIN_RANGE), 1.0)
    inverse = jnp.minimum(inverse, MAX_INVERSE_SCALE)
    scales, zeros = 1 / inverse, -low * inverse
    scaled = [part * inverse[:, None] for part in parts]
    zeros, errors = _solve(scaled, scales, zeros, width, steps_ref[matrix], top, group_size)
    for part, span in zip(scaled, spans, strict=True):
        codes = _nearest(part + zeros[:, None], top)
        codes_ref[matrix, rows, span] = codes.astype(jnp.int32).astype(jnp.uint8)
    scales_ref[matrix, group, rows] = scales
    zeros_ref[matrix, group, rows] = zeros
    errors_ref[matrix, tile * pl.num_programs(0) + group, :] = errors


def _solve(
    scaled: list[jax.Array],
    scales: jax.Array,
    zeros: jax.Array,
    width: jax.Array,
    num_steps: jax.Array,
    top: float,
    group_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Zeros after `num_steps` steps, and the sum of |error| before each of them."""
    lanes = jax.lax.broadcasted_iota(jnp.int32, (_ERRORS_LENGTH,), 0)

    def loop(pull: Step, zeros: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            zeros, errors = state
            moved, size = jnp.zeros_like(scaled[0]), jnp.zeros_like(scaled[0])
            for part in scaled:
                place = part + zeros[:, None]
                distance = place - _nearest(place, top)
                moved += pull(distance)
                size += jnp.abs(distance)
            total = jnp.sum(jnp.sum(size, axis=1) * scales)
            zeros -= jnp.sum(moved, axis=1) * (1 / group_size)
            return zeros, jnp.where(lanes == i, total, errors)

        start = (zeros, jnp.zeros(lanes.shape, jnp.float32))
        return jax.lax.fori_loop(0, num_steps, step, start)

    # c |d|^(p - 1) as a power of two.
    offset = (-(2 - NORM) * jnp.log(scales) - math.log(BETA)) / math.log(2)

    def shrinking(distance: jax.Array) -> jax.Array:
        size = jnp.abs(distance)
        exponent = jnp.log(size) * ((NORM - 1) / math.log(2)) + offset[:, None]
        size = jnp.minimum(size, jnp.exp2(exponent))
        return jnp.where(distance < 0, -size, size)

    return jax.lax.cond(
        jnp.max(width) < 0.99 * HARMLESS_ERROR,
        functools.partial(loop, lambda distance: distance),
        functools.partial(loop, shrinking),
        zeros,
    )


def _nearest(place: jax.Array, top: float) -> jax.Array:
    # Clipped between the two, so that no compiler folds them.
    return jnp.clip(place + _ROUNDER, _ROUNDER, _ROUNDER + top) - _ROUNDER


def hqq_solve_triton(
    weights: jax.Array,
    low_rank: tuple[jax.Array, jax.Array] | None,
    steps: jax.Array,
    *,
    bits: int,
    group_size: int,
    target: Target,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes `api.hqq_solve` by Triton, with one leading axis; one launch.

    The kernel writes scales and zeros as [B, G, N], so that a program's lie side by side.
    """
    num_matrices, num_rows, num_inputs = weights.shape
    tiles = tiles or _default_tiles(num_rows, group_size)
    num_groups = num_inputs // group_size
    grid = (num_groups, num_rows // tiles.rows, num_matrices)
    rank = 0 if low_rank is None else low_rank[1].shape[1]
    factors = (low_rank[0].swapaxes(1, 2), low_rank[1]) if low_rank is not None else ()
    per_group = jax.ShapeDtypeStruct((num_matrices, num_groups, num_rows), jnp.float32)
    codes, scales, zeros, errors = launch.triton_call(
        functools.partial(_body, bits=bits, group_size=group_size, tiles=tiles, rank=rank),
        name=f"hqq_solve_int{bits}_g{group_size}_r{rank}_{tiles.rows}",
        grid=grid,
        out_shape=(
            jax.ShapeDtypeStruct(weights.shape, jnp.uint8),
            per_group,
            per_group,
            jax.ShapeDtypeStruct((num_matrices, grid[0] * grid[1], _ERRORS_LENGTH), jnp.float32),
        ),
        num_warps=tiles.num_warps,
        num_stages=1,
        interpret=target.simulated,
    )(steps, weights, *factors)
    means = jnp.sum(errors, axis=1)[:, :MAX_STEPS] / (num_rows * num_inputs)
    return codes, scales.swapaxes(1, 2), zeros.swapaxes(1, 2), means
