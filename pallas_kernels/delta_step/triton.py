"""The Pallas-Triton implementation: two launches.

The first, a program a key head, takes its channels through the convolution and writes their tail:
no other program reads them. The second, a program a value head, holds the head's state in
registers, reads it once and writes it once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.delta_step.reference import DeltaWeights, Projection, Widths, widths_of
from pallas_kernels.target import Target, platform_refusal
from pallas_kernels.triton.elements import iota

Ref = Any
Operand = jax.Array | jax.ShapeDtypeStruct
MAX_STATE = 2**14  # numbers of a head, in the registers of a program
STATE_WARP_VALUES = 2048  # of a warp: 64 a thread
MIXING_WARPS = 2


def refusal(states: Operand, tails: Operand, target: Target) -> str | None:
    """Reason why this implementation refuses, or None."""
    num_heads, key_dim, value_dim = states.shape[2:]
    reasons = [platform_refusal(target)]
    # The channels are K (2 key dim) + H value dim.
    num_keys, rest = divmod(tails.shape[3] - num_heads * value_dim, 2 * key_dim)
    repeats = num_heads // num_keys if num_keys > 0 else 0
    if rest or any(n < 1 or n & (n - 1) for n in (key_dim, value_dim, repeats)):
        reasons.append(
            f"heads of {key_dim} and {value_dim}, {repeats} values a key: no powers of two"
        )
    if key_dim * value_dim > MAX_STATE:
        reasons.append(f"a state of {key_dim} x {value_dim}, more than {MAX_STATE} numbers")
    return "; ".join(filter(None, reasons)) or None


def _silu(x: jax.Array) -> jax.Array:
    return x * jax.lax.logistic(x)


def _mixing_body(
    layer_ref: Ref, active_ref: Ref, rows_ref: Ref, conv_ref: Ref, tails_in_ref: Ref,
    mixed_ref: Ref, tails_ref: Ref, *, of: Widths, floor: float, rows_by_head: bool,
) -> None:  # fmt: skip
    """Program (b, k) mixes the channels of key head k of sequence b to `mixed` and `tails`."""
    del tails_in_ref  # the same memory as `tails_ref`
    b, head = pl.program_id(0), pl.program_id(1)
    layer, active = layer_ref[()], active_ref[b] != 0
    num_kept, key_width = tails_ref.shape[2], of.num_keys * of.key_dim
    values = of.repeats * of.value_dim
    for start, first, count, scale in (
        (0, head * of.key_dim, of.key_dim, of.key_dim**-0.5),
        (of.key_dim, key_width + head * of.key_dim, of.key_dim, 1.0),
        (2 * of.key_dim, 2 * key_width + head * values, values, None),
    ):
        channels = first + iota(count)
        row = head * of.stride + start + iota(count) if rows_by_head else channels
        token = rows_ref[b, row]
        inputs = [tails_ref[layer, b, tap, channels] for tap in range(num_kept)] + [token]
        total = jnp.zeros((count,), jnp.float32)
        for tap, x in enumerate(inputs):
            weight = conv_ref[layer, channels, 0, tap].astype(jnp.float32)
            total += x.astype(jnp.float32) * weight
        y = _silu(total)
        if scale is not None:
            y = y * (jax.lax.rsqrt(jnp.sum(y * y) + floor) * scale)
        mixed_ref[b, channels] = y
        for tap in range(num_kept):
            tails_ref[layer, b, tap, channels] = jnp.where(active, inputs[tap + 1], inputs[tap])


def _state_body(
    layer_ref: Ref, active_ref: Ref, rows_ref: Ref, b_and_a_ref: Ref, mixed_ref: Ref,
    dt_bias_ref: Ref, a_log_ref: Ref, norm_ref: Ref, states_in_ref: Ref, out_ref: Ref,
    states_ref: Ref, *, of: Widths, eps: float, rows_by_head: bool,
) -> None:  # fmt: skip
    """Program (b, h) advances value head h of sequence b.

    S_t^T q = exp(g) S^T q + (k . q) u, where u is written at k: both sums are of the old state.
    """
    del states_in_ref  # the same memory as `states_ref`
    b, head, wide = pl.program_id(0), pl.program_id(1), jnp.float32
    layer, active = layer_ref[()], active_ref[b] != 0
    of_key, number = head // of.repeats, head % of.repeats
    rows, columns = iota(of.key_dim), iota(of.value_dim)
    at = (layer, b, head, rows[:, None], columns[None])
    state = states_ref[at]
    key_width = of.num_keys * of.key_dim
    q, k = (mixed_ref[b, start + of_key * of.key_dim + rows] for start in (0, key_width))
    v = mixed_ref[b, 2 * key_width + head * of.value_dim + columns]
    if rows_by_head:
        of_b = 2 * of_key * of.repeats + number
        of_a = of_b + of.repeats
        gate = of_key * of.stride + 2 * of.key_dim + (of.repeats + number) * of.value_dim
    else:
        of_b, of_a = head, of.num_keys * of.repeats + head
        gate = of.channels + head * of.value_dim
    step = b_and_a_ref[b, of_a] + dt_bias_ref[layer, head]
    step = jnp.maximum(step, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(step)))  # softplus
    decay = jnp.where(active, jnp.exp(-jnp.exp(a_log_ref[layer, head]) * step), 1.0)
    beta = jnp.where(active, jax.lax.logistic(b_and_a_ref[b, of_b]), 0.0)
    written = beta * (v - decay * jnp.sum(k[:, None] * state, axis=0))
    read = decay * jnp.sum(q[:, None] * state, axis=0) + jnp.sum(k * q) * written
    # A state that rests keeps its bits: -0 + 0 would be 0.
    states_ref[at] = jnp.where(active, decay * state + k[:, None] * written[None], state)
    normed = read * jax.lax.rsqrt(jnp.sum(read * read) / of.value_dim + eps)
    normed = normed * norm_ref[layer, columns].astype(wide)
    opened = normed * _silu(rows_ref[b, gate + columns].astype(wide))
    out_ref[b, head * of.value_dim + columns] = opened.astype(out_ref.dtype)


def delta_step_triton(
    projection: Projection,
    states: jax.Array,
    tails: jax.Array,
    weights: DeltaWeights,
    layer: jax.Array,
    active: jax.Array,
    *,
    eps: float,
    floor: float,
    rows_by_head: bool,
    target: Target,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `api.delta_step` by Triton; two launches."""
    (rows, b_and_a), of = projection, widths_of(projection, states)
    batch, num_heads = len(rows), of.num_keys * of.repeats
    flags = active.astype(jnp.int32)
    form = f"{rows.dtype.name}_{of.num_keys}x{of.key_dim}_{num_heads}x{of.value_dim}"
    form += "" if rows_by_head else "_all_heads"
    mixing = (layer, flags, rows, weights.conv)
    mixed, tails = launch.triton_call(
        functools.partial(_mixing_body, of=of, floor=floor, rows_by_head=rows_by_head),
        name=f"delta_step_mixing_{form}",
        grid=(batch, of.num_keys),
        out_shape=[
            jax.ShapeDtypeStruct((batch, of.channels), jnp.float32),
            jax.ShapeDtypeStruct(tails.shape, tails.dtype),
        ],
        num_warps=MIXING_WARPS,
        num_stages=1,
        interpret=target.simulated,
        aliases={len(mixing): 1},
    )(*mixing, tails)
    operands = (
        layer, flags, rows, b_and_a, mixed, weights.dt_bias, weights.a_log, weights.norm,
    )  # fmt: skip
    opened, states = launch.triton_call(
        functools.partial(_state_body, of=of, eps=eps, rows_by_head=rows_by_head),
        name=f"delta_step_{form}",
        grid=(batch, num_heads),
        out_shape=[
            jax.ShapeDtypeStruct((batch, num_heads * of.value_dim), rows.dtype),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ],
        num_warps=min(16, max(1, of.key_dim * of.value_dim // STATE_WARP_VALUES)),
        num_stages=1,
        interpret=target.simulated,
        aliases={len(operands): 1},
    )(*operands, states)
    return opened, states, tails
