"""Two Pallas-Triton kernels: gate, up and SwiGLU; then down and the weighted sum.

With a token or two an expert there is nothing for the matrix units: each program multiplies
weight tiles by a slice of the input in registers and reduces once at its end. The bytes of the
chosen experts are read once a token.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.expert_mlp.tiles import Tiles

Ref = Any


def _hidden_body(
    ids_ref: Ref, x_ref: Ref, gate_up_ref: Ref, hidden_ref: Ref, *, layer: int, tiles: Tiles
) -> None:
    """Program (row, f): `gate_up_rows` values of silu(gate x) * up x for one assignment."""
    rows, columns = tiles.gate_up_rows, tiles.gate_up_columns
    width = ids_ref.shape[1]
    row, first = pl.program_id(0), pl.program_id(1) * rows
    token, slot = row // width, row % width
    expert_id = ids_ref[token, slot]
    expert_dim = gate_up_ref.shape[2] // 2

    def step(k: jax.Array, partial: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        columns_k = pl.ds(k * columns, columns)
        x = x_ref[token, columns_k].astype(jnp.float32)[None, :]
        gate = gate_up_ref[layer, expert_id, pl.ds(first, rows), columns_k]
        up = gate_up_ref[layer, expert_id, pl.ds(expert_dim + first, rows), columns_k]
        gate_sum, up_sum = partial
        return gate_sum + gate.astype(jnp.float32) * x, up_sum + up.astype(jnp.float32) * x

    zero = jnp.zeros((rows, columns), jnp.float32)
    gate, up = jax.lax.fori_loop(0, x_ref.shape[1] // columns, step, (zero, zero))
    gate, up = jnp.sum(gate, axis=1), jnp.sum(up, axis=1)
    hidden = gate * jax.nn.sigmoid(gate) * up
    hidden_ref[token, slot, pl.ds(first, rows)] = hidden.astype(hidden_ref.dtype)


def _down_body(
    ids_ref: Ref, weights_ref: Ref, hidden_ref: Ref, down_ref: Ref, out_ref: Ref, *, layer: int,
    tiles: Tiles,
) -> None:  # fmt: skip
    """Program (token, d): `down_rows` values of the weighted sum over the token's experts."""
    rows, columns = tiles.down_rows, tiles.down_columns
    token, first = pl.program_id(0), pl.program_id(1) * rows
    width, expert_dim = hidden_ref.shape[1:]

    def expert(slot: jax.Array, total: jax.Array) -> jax.Array:
        expert_id, weight = ids_ref[token, slot], weights_ref[token, slot]

        def step(k: jax.Array, partial: jax.Array) -> jax.Array:
            columns_k = pl.ds(k * columns, columns)
            hidden = hidden_ref[token, slot, columns_k].astype(jnp.float32)[None, :]
            down = down_ref[layer, expert_id, pl.ds(first, rows), columns_k]
            return partial + down.astype(jnp.float32) * (hidden * weight)

        return jax.lax.fori_loop(0, expert_dim // columns, step, total)

    zero = jnp.zeros((rows, columns), jnp.float32)
    total = jax.lax.fori_loop(0, width, expert, zero)
    out_ref[token, pl.ds(first, rows)] = jnp.sum(total, axis=1).astype(out_ref.dtype)


def expert_mlp_triton(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    layer: int,
    tiles: Tiles,
    interpret: bool,
) -> jax.Array:
    """Computes `api.expert_mlp` by Triton; two launches."""
    num_tokens, model_dim = x.shape
    width, expert_dim = ids.shape[1], down.shape[3]
    hidden = launch.triton_call(
        functools.partial(_hidden_body, layer=layer, tiles=tiles),
        name=f"expert_gate_up_{x.dtype.name}_{tiles.gate_up_rows}x{tiles.gate_up_columns}",
        grid=(num_tokens * width, expert_dim // tiles.gate_up_rows),
        out_shape=jax.ShapeDtypeStruct((num_tokens, width, expert_dim), jnp.float32),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(ids, x, gate_up)
    return launch.triton_call(
        functools.partial(_down_body, layer=layer, tiles=tiles),
        name=f"expert_down_{x.dtype.name}_{tiles.down_rows}x{tiles.down_columns}",
        grid=(num_tokens, model_dim // tiles.down_rows),
        out_shape=jax.ShapeDtypeStruct((num_tokens, model_dim), x.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(ids, weights, hidden, down)
