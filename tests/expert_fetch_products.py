"""Products that a fetch runs beside, for the tests of the fused form."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels import expert_fetch as package
from pallas_kernels.expert_mlp import triton as mlp
from pallas_kernels.expert_mlp.tiles import Tiles as MlpTiles
from tests.expert_fetch_contract import SMALL_BLOCKS, Case, Operands, random_operands

MLP_TILES = MlpTiles(8, 16, 8, 16, 4, 2)


def hidden_operands() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(6)
    ids = jnp.asarray([[0, 2], [1, 0], [2, 1]], jnp.int32)
    x = jnp.asarray(rng.standard_normal((3, 48)), jnp.bfloat16)
    return ids, x, jnp.asarray(rng.standard_normal((2, 3, 32, 48)), jnp.bfloat16)


HIDDEN = {
    "name": "expert_gate_up",
    "grid": (6, 2),
    "out_shape": jax.ShapeDtypeStruct((3, 2, 16), jnp.float32),
    "num_warps": 4,
    "num_stages": 2,
}
hidden_body = functools.partial(mlp._hidden_body, layer=1, tiles=MLP_TILES)


def pool_product_body(slot_ref: Any, x_ref: Any, pool_ref: Any, y_ref: Any, best_ref: Any) -> None:
    """Program (row block, i): 16 rows of the product with slot i of some, and their largest."""
    block, i = pl.program_id(0), pl.program_id(1)
    rows = pl.ds(block * 16, 16)
    weights = pool_ref[slot_ref[i], rows, :].astype(jnp.float32)
    y = jnp.sum(weights * x_ref[:][None, :], axis=1)
    y_ref[i, rows] = y
    best_ref[i, block] = jnp.max(y) + jnp.float32(pl.num_programs(0) - 3)


def pool_product(
    operands: Operands, slots: jax.Array, x: jax.Array, **how: Any
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, jax.Array]]:
    """The product beside a fetch into the pool that it reads."""
    beside = package.fetch_beside(*operands, tiles=SMALL_BLOCKS, **how)
    return package.fused_call(
        beside,
        pool_product_body,
        name="pool_product",
        grid=(3, len(slots)),
        out_shape=[
            jax.ShapeDtypeStruct((len(slots), 48), jnp.float32),
            jax.ShapeDtypeStruct((len(slots), 3), jnp.float32),
        ],
        num_warps=4,
        num_stages=1,
        interpret=how.get("interpret", False),
    )(slots, x, beside.pools[0])


POOL_CASE = Case(
    (((48, 32), "bfloat16"), ((3, 5), "uint8")), slots=6, jobs=((3, 1), (-1, 0), (2, 4), (6, 1))
)


def pool_operands() -> tuple[Operands, jax.Array, jax.Array]:
    """Slots 0, 2, 3, 5 hold numbers and are multiplied; the jobs write 1 and 4."""
    operands = random_operands(POOL_CASE, seed=7)
    rng = np.random.default_rng(8)
    numbers = rng.standard_normal(operands.pools[0].shape).astype(jnp.bfloat16)
    operands = operands._replace(pools=(numbers, operands.pools[1]))
    x = jnp.asarray(rng.standard_normal(32), jnp.float32)
    return operands, jnp.asarray([5, 0, 3, 2], jnp.int32), x


def product_violation(found: Any, operands: Operands, slots: jax.Array, x: jax.Array) -> str | None:
    weights = np.asarray(operands.pools[0][np.asarray(slots)], np.float64)
    y = weights @ np.asarray(x, np.float64)
    error = np.abs(np.asarray(found[0], np.float64) - y).max()
    best = np.abs(np.asarray(found[1], np.float64) - y.reshape(-1, 3, 16).max(axis=2)).max()
    # Sums of 32 products of order 1 in float32.
    return None if max(error, best) < 32 * 32 * 2.0**-24 else f"errors {error}, {best}"
