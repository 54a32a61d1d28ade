"""The Pallas-Triton implementation: one launch, a warp a token."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.buddy_search.reference import Found
from pallas_kernels.dequant_matmul.triton import platform_refusal
from pallas_kernels.target import Target

Ref = Any
MAX_WIDTH = 32  # ranks, unrolled
MAX_PLACES = 256  # of a list, each compared with all experts of the token
NUM_WARPS = 1  # more would reduce through shared memory, with barriers
NOBODY = np.int32(-2)  # equals no listed expert, nor the -1 that pads lists


def refusal(width: int, places: int, target: Target) -> str | None:
    """Why this implementation cannot serve, or None; see `api.refusal`."""
    reasons = [platform_refusal(target)]
    if width > MAX_WIDTH:
        reasons.append(f"{width} experts a token, more than {MAX_WIDTH}")
    if places > MAX_PLACES:
        reasons.append(f"{places} places of a list, more than {MAX_PLACES}")
    return "; ".join(filter(None, reasons)) or None


def _iota(count: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (1 << (count - 1).bit_length(),), 0)


def _among(values: jax.Array, those: jax.Array) -> jax.Array:
    """bool[H]: values that are among `those`, [A]."""
    return jnp.max((values[:, None] == those[None, :]).astype(jnp.int32), axis=1) > 0


def _body(
    ids_ref: Ref, lists_ref: Ref, layer_ref: Ref, resident_ref: Ref, wanted_ref: Ref,
    depth_ref: Ref, budget_ref: Ref, found_ref: Ref, searched_ref: Ref, *, last_first: bool,
) -> None:  # fmt: skip
    """Program n: token n."""
    token, width, size = pl.program_id(0), ids_ref.shape[1], lists_ref.shape[2]
    layer, depth, budget = layer_ref[()], depth_ref[()], budget_ref[()]
    lanes, places = _iota(width), _iota(size)
    inside = lanes < width
    ids = pltriton.load(ids_ref.at[token, lanes], mask=inside, other=NOBODY)
    # All loads come first: they wait for each other nowhere else but in the addresses.
    usable, listed, wanted = [], [], []
    for rank in range(width):
        expert = ids_ref[token, rank]
        mine = pltriton.load(lists_ref.at[layer, expert, places], mask=places < size, other=-1)
        there = pltriton.load(resident_ref.at[jnp.maximum(mine, 0)], mask=mine >= 0, other=False)
        listed.append(mine)
        usable.append(there & (mine >= 0) & (places < depth) & ~_among(mine, ids))
        wanted.append(wanted_ref[token, rank])
    buddies, searched = jnp.full(lanes.shape, NOBODY, jnp.int32), lanes < 0
    num_replaced = jnp.int32(0)
    for rank in reversed(range(width)) if last_first else range(width):
        asks = wanted[rank] & (num_replaced < budget)
        free = usable[rank] & ~_among(listed[rank], buddies) & asks
        first = jnp.min(jnp.where(free, places, jnp.int32(size)))
        # Nobody's place is `size`, where a list whose length is no power of two is padded with -1.
        buddy = jnp.max(jnp.where(free & (places == first), listed[rank], NOBODY))
        buddies = jnp.where(lanes == rank, buddy, buddies)
        searched |= (lanes == rank) & asks
        num_replaced += (buddy >= 0).astype(jnp.int32)
    pltriton.store(found_ref.at[token, lanes], jnp.where(buddies >= 0, buddies, ids), mask=inside)
    pltriton.store(searched_ref.at[token, lanes], searched, mask=inside)


def search_triton(
    ids: jax.Array,
    lists: jax.Array,
    layer: jax.Array,
    resident: jax.Array,
    wanted: jax.Array,
    depth: jax.Array,
    budget: jax.Array,
    *,
    last_first: bool,
    interpret: bool,
) -> Found:
    """See `api.search`."""
    found = launch.triton_call(
        functools.partial(_body, last_first=last_first),
        name=f"buddy_search_{ids.shape[1]}x{lists.shape[2]}",
        grid=(len(ids),),
        out_shape=[
            jax.ShapeDtypeStruct(ids.shape, jnp.int32),
            jax.ShapeDtypeStruct(ids.shape, jnp.bool_),
        ],
        num_warps=NUM_WARPS,
        num_stages=1,
        interpret=interpret,
    )(ids, lists, layer, resident, wanted, depth, budget)
    return Found(*found)
