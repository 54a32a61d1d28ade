"""Public call of the delta step, and its operation."""

import jax
import jax.numpy as jnp

from pallas_kernels.delta_step import triton
from pallas_kernels.delta_step.reference import (
    DeltaWeights,
    Projection,
    delta_step_reference,
    widths_of,
)
from pallas_kernels.op import Implementation, Operation, check_operands, not_half

# A choice is for states [G, B, H, key dim, value dim] and tails [G, B, W - 1, channels], which are
# of the dtype of the activations.
OPERATION = Operation(
    "delta_step",
    kernels=(Implementation("triton", triton.refusal, triton.delta_step_triton),),
    reference=delta_step_reference,
    abstract=lambda projection, states, tails, *_, **__: (states, tails),
    shared_refusals=lambda states, tails: not_half(("tails are", tails.dtype)),
)


def delta_step(
    projection: Projection,
    states: jax.Array,
    tails: jax.Array,
    weights: DeltaWeights,
    *,
    layer: int | jax.Array,
    active: jax.Array,
    eps: float,
    floor: float,
    rows_by_head: bool = True,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs a layer of gated delta rule between its projections, for one token per sequence.

    Yang et al., arXiv:2412.06464: a causal convolution and a silu (section 3.4), queries and keys
    at length one, the gated delta rule (eq. 10)

        S_t = exp(g) S_{t-1} + k (beta (v - exp(g) S_{t-1}^T k))^T,   o_t = S_t^T q / sqrt(key dim)

    with beta = sigmoid(b) and g = -exp(a_log) softplus(a + dt_bias), then the norm of o over each
    head, times a scale and the silu of the gate. All in float32; the results are rounded.

    Args:
      projection: of the tokens, in bfloat16 or float16 (the reference takes float32 too).
      states: float32[G, B, H, key dim, value dim], whole: S of each head. The kernel writes it in
        place where the caller's program may (it is donated); else XLA copies it.
      tails: [G, B, W - 1, channels], the convolution's last inputs; likewise.
      active: bool[B]; other sequences keep state and tail, and their results are meaningless.
      floor: added to the sum of squares of queries and keys; static.
      rows_by_head: order of the projection, see `Projection`; static.

    Returns:
      [B, H value dim] in the dtype of the rows, states and tails.
    """
    _check(projection, states, tails, weights, active)
    operands = (projection, states, tails, weights, jnp.asarray(layer, jnp.int32), active)
    return OPERATION(
        *operands, eps=eps, floor=floor, rows_by_head=rows_by_head, implementation=implementation,
        interpret=interpret,
    )  # fmt: skip


def _check(
    projection: Projection,
    states: jax.Array,
    tails: jax.Array,
    weights: DeltaWeights,
    active: jax.Array,
) -> None:
    rows, b_and_a = projection
    axes = check_operands("delta_step", {
        "rows": (rows, "x[B, .]"), "tails": (tails, "x[G, B, tail, .]"),
        "states": (states, "float32[G, B, H, key dim, value dim]"),
    })  # fmt: skip
    of = widths_of(projection, states)
    if of.num_keys < 1 or axes["H"] % of.num_keys or rows.shape[1] != of.num_keys * of.stride:
        raise ValueError(f"delta_step: rows {rows.shape} are not of states {states.shape}")
    axes |= {"channels": of.channels, "taps": axes["tail"] + 1, "2 H": 2 * axes["H"]}
    check_operands("delta_step", {
        "rows": (rows, "x[B, .]"), "tails": (tails, "x[G, B, tail, channels]"),
        "taps": (weights.conv, "x[G, channels, 1, taps]"), "b and a": (b_and_a, "float32[B, 2 H]"),
        "dt_bias": (weights.dt_bias, "float32[G, H]"), "a_log": (weights.a_log, "float32[G, H]"),
        "scales of the norm": (weights.norm, "x[G, value dim]"), "active": (active, "bool[B]"),
    }, **axes)  # fmt: skip
