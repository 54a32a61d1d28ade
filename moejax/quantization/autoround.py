"""AutoRound: rounding offsets and ranges learned by signed gradient descent.

(Cheng et al. 2024, "Optimize weight rounding via signed gradient descent for the quantization of
LLMs", section 3.) It differs from the published method in its objective: there the output error of
a whole decoder block on batches of calibration inputs; here that of the one matrix, on all of them,
which the Hessian gives exactly: |(W - Wq) X|^2 = tr((W - Wq) H (W - Wq)^T) up to a factor. So
nothing is sampled, experts are solved side by side, and since rows do not meet in this objective
each row keeps its own best step.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from moejax.quantization.grid import Codes, Grid, merge_groups, split_groups
from moejax.quantization.hessian import damped
from moejax.quantization.rtn import range_grid

LEAST_RANGE = 0.5  # of the factors on a group's smallest and largest value; most is 1
DAMPING = 0.01  # share of H's mean diagonal added to it, against few tokens


class _Parameters(NamedTuple):
    """Learned parameters."""

    offset: jax.Array  # float32[N, G, group_size], the paper's V, in -0.5..0.5
    high: jax.Array  # float32[N, G], its alpha: factor on the group's largest value
    low: jax.Array  # float32[N, G], its beta: on the smallest


@functools.partial(jax.jit, static_argnames=("grid", "iterations"))
def autoround(weights: jax.Array, hessian: jax.Array, grid: Grid, iterations: int = 200) -> Codes:
    """argmin of tr((W - Wq) H (W - Wq)^T), Wq = s (clip(round(W / s + z + V)) - z).

    Starts as RTN, so no row ends worse than RTN's under the damped H; with H zero or not finite it
    stays RTN. vmap it over experts.

    Args:
      weights: [N, K], any float dtype, finite.
      hessian: float32[K, K], running mean of 2 x x^T; its scale does not matter.
      iterations: over which the step size falls linearly from 1 / iterations to 0.
    """
    weights = weights.astype(jnp.float32)
    num_rows, num_inputs = weights.shape
    hessian = damped(hessian, DAMPING)
    groups = split_groups(weights, grid.group_size)
    ones = jnp.ones(groups.shape[:2], jnp.float32)
    start = _Parameters(jnp.zeros_like(groups), ones, ones)
    schedule = optax.linear_schedule(1 / iterations, 0.0, iterations)
    descent = optax.sign_sgd(schedule)

    def row_errors(parameters: _Parameters) -> tuple[jax.Array, jax.Array]:
        codes, scales, zeros = _quantize(parameters, groups, grid)
        values = (codes - zeros[..., None]) * scales[..., None]
        difference = merge_groups(groups - values, num_inputs)
        product = jnp.einsum("nk,kj->nj", difference, hessian, precision="highest")
        # With the product held fixed the gradient is half the true one, its sign the same, and
        # the backward pass needs no second product.
        errors = jnp.sum(jax.lax.stop_gradient(product) * difference, axis=-1)
        return jnp.sum(errors), errors

    def step(_: jax.Array, state: tuple) -> tuple:
        parameters, descent_state, best, least = state
        gradient, errors = jax.grad(row_errors, has_aux=True)(parameters)
        better = errors < least
        best = jax.tree.map(
            lambda old, new: jnp.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old),
            best,
            parameters,
        )
        with jax.numpy_dtype_promotion("standard"):
            updates, descent_state = descent.update(gradient, descent_state)
            moved = optax.apply_updates(parameters, updates)
        moved = _Parameters(
            jnp.clip(moved.offset, -0.5, 0.5),
            jnp.clip(moved.high, LEAST_RANGE, 1.0),
            jnp.clip(moved.low, LEAST_RANGE, 1.0),
        )
        return moved, descent_state, best, jnp.where(better, errors, least)

    with jax.numpy_dtype_promotion("standard"):
        descent_state = descent.init(start)
    least = jnp.full(num_rows, jnp.inf, jnp.float32)
    # One more than `iterations`: the last moves nothing, it judges what came out.
    _, _, best, _ = jax.lax.fori_loop(0, iterations + 1, step, (start, descent_state, start, least))
    codes, scales, zeros = _quantize(best, groups, grid)
    return Codes(merge_groups(codes, num_inputs).astype(jnp.uint8), scales, zeros)


def _quantize(
    parameters: _Parameters, groups: jax.Array, grid: Grid
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes codes (as float32), scales and zeros; rounding passes gradients through."""
    low = parameters.low * jnp.min(groups, axis=-1)
    high = parameters.high * jnp.max(groups, axis=-1)
    scales, zeros = range_grid(jnp.stack([low, high], axis=-1), grid)
    if grid.zero_kind == "integer":
        zeros = _straight_through(-jnp.minimum(low, 0.0) / scales, zeros)
    steps = groups / scales[..., None] + zeros[..., None] + parameters.offset
    codes = jnp.clip(_straight_through(steps, jnp.round(steps)), 0, grid.max_code)
    return codes, scales, zeros


def _straight_through(smooth: jax.Array, rounded: jax.Array) -> jax.Array:
    """Returns `rounded`, with the gradient of `smooth` (Bengio et al. 2013)."""
    # In this order the value is `rounded` to the last bit.
    return (smooth - jax.lax.stop_gradient(smooth)) + jax.lax.stop_gradient(rounded)
