"""Buddy search in Pallas-Triton: one launch, a warp per token."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.buddy_search.reference import LEAST, Found, Gate
from pallas_kernels.target import Target, platform_refusal
from pallas_kernels.triton.elements import iota, power_above

Ref = Any
MAX_WIDTH = 32
MAX_PLACES = 256  # of a list, each compared with all experts of the token
NUM_WARPS = 1  # more would reduce through shared memory, with barriers
NOBODY = np.int32(-2)  # equals no listed expert, nor the -1 that pads lists


def refusal(width: int, places: int, target: Target) -> str | None:
    """Reason why this implementation refuses, or None."""
    reasons = [platform_refusal(target)]
    if width > MAX_WIDTH:
        reasons.append(f"{width} experts a token, more than {MAX_WIDTH}")
    if places > MAX_PLACES:
        reasons.append(f"{places} places of a list, more than {MAX_PLACES}")
    return "; ".join(filter(None, reasons)) or None


def _among(values: jax.Array, those: jax.Array) -> jax.Array:
    """Mask bool[H] of values that are among `those`, [A]."""
    return jnp.max((values[:, None] == those[None, :]).astype(jnp.int32), axis=1) > 0


def _tolerates(of: Mapping[str, Ref], token: jax.Array, layer: jax.Array, ids: jax.Array) -> Any:
    """Whether the gate lets a token pass; see `reference.tolerates`."""
    width = of["ids"].shape[1]
    tau, margin = of["tau"][layer], of["margin"][()]
    is_off = (tau < 0) & (margin > 1)  # no entropy is negative, no difference above 1
    if width == 1:
        return is_off
    return jax.lax.cond(is_off, lambda: is_off, lambda: _is_sure(of, token, ids, tau, margin))


def _is_sure(
    of: Mapping[str, Ref], token: jax.Array, ids: jax.Array, tau: jax.Array, margin: jax.Array
) -> jax.Array:
    """Whether the gate lets a token of several experts pass, by their probabilities."""
    width = of["ids"].shape[1]
    lanes = iota(power_above(width))
    inside = lanes < width
    place = of["probabilities"].at[token, jnp.maximum(ids, 0)]
    chosen = pltriton.load(place, mask=inside, other=LEAST)
    logits = jnp.log(jnp.maximum(chosen, LEAST)) / of["temperature"][()]
    logits = jnp.where(inside, logits, -jnp.inf)
    shares = jnp.exp(logits - jnp.max(logits))
    shares = shares / jnp.sum(shares)
    nats = -jnp.sum(shares * jnp.log(jnp.maximum(shares, LEAST)))
    entropy = jnp.clip(nats / math.log(width), 0.0, 1.0)
    signs = jnp.where(lanes == 0, 1.0, jnp.where(lanes == 1, -1.0, 0.0))
    return (entropy > tau) & (jnp.sum(shares * signs) < margin)


def _held(ref: Ref, layer: jax.Array, experts: jax.Array, mask: jax.Array, other: bool) -> Any:
    """Whether experts are resident, bool; `other` where the mask is not set."""
    experts = jnp.maximum(experts, 0)
    if len(ref.shape) == 1:
        return pltriton.load(ref.at[experts], mask=mask, other=other)
    return pltriton.load(ref.at[layer, experts], mask=mask, other=int(other) - 1) >= 0


def _body(*refs: Ref, names: tuple[str, ...], last_first: bool) -> None:
    """Program n searches for token n."""
    of = dict(zip(names, refs, strict=True))  # what is changed comes twice: the output counts
    ids_ref, lists_ref, resident_ref = of["ids"], of["lists"], of["resident"]
    token, width, size = pl.program_id(0), ids_ref.shape[1], lists_ref.shape[2]
    layer, depth, budget = of["layer"][()], of["depth"][()], of["budget"][()]
    lanes, places = iota(power_above(width)), iota(power_above(size))
    inside = lanes < width
    ids = pltriton.load(ids_ref.at[token, lanes], mask=inside, other=NOBODY)
    there = _held(resident_ref, layer, ids, inside, other=True)
    if len(of["allowed"].shape) == 1:
        allowed = of["allowed"][token]
    else:
        allowed = pltriton.load(of["allowed"].at[token, lanes], mask=inside, other=False)
    if "tau" in of:
        allowed &= _tolerates(of, token, layer, ids)
    missing = inside & ~there & allowed
    end = jnp.int32(-1 if not last_first else len(lanes))

    def is_left(found: tuple[jax.Array, ...]) -> jax.Array:
        number, *_, num_replaced = found
        return (number < count) & (num_replaced < budget)

    def search(found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Searches for the next rank whose expert is missing: there are few if buddies pay."""
        number, before, buddies, searched, num_replaced = found
        if last_first:
            rank = jnp.max(jnp.where(missing & (lanes < before), lanes, -1))
        else:
            rank = jnp.min(jnp.where(missing & (lanes > before), lanes, len(lanes)))
        expert = jnp.max(jnp.where(lanes == rank, ids, NOBODY))
        listed = pltriton.load(lists_ref.at[layer, expert, places], mask=places < size, other=-1)
        held = _held(resident_ref, layer, listed, listed >= 0, other=False)
        free = held & (listed >= 0) & (places < depth)
        free &= ~_among(listed, ids) & ~_among(listed, buddies)
        first = jnp.min(jnp.where(free, places, jnp.int32(size)))
        # Nobody's place is `size`, where a list whose length is no power of two is padded with -1.
        buddy = jnp.max(jnp.where(free & (places == first), listed, NOBODY))
        stands_in = (buddy >= 0).astype(jnp.int32)
        if "replaced" in of:
            pltriton.atomic_add(of["replaced"], (layer, expert), stands_in)
        return (
            number + 1, rank, jnp.where(lanes == rank, buddy, buddies),
            searched | (lanes == rank), num_replaced + stands_in,
        )  # fmt: skip

    none = jnp.full(lanes.shape, NOBODY, jnp.int32)
    count = jnp.sum(missing.astype(jnp.int32))
    start: tuple[Any, ...] = (jnp.int32(0), end, none, lanes < 0, jnp.int32(0))
    _, _, buddies, searched, _ = jax.lax.while_loop(is_left, search, start)
    found = jnp.where(buddies >= 0, buddies, ids)
    pltriton.store(of["found"].at[token, lanes], found, mask=inside)
    pltriton.store(of["searched"].at[token, lanes], searched, mask=inside)


def search_triton(
    ids: jax.Array,
    lists: jax.Array,
    layer: jax.Array,
    resident: jax.Array,
    allowed: jax.Array,
    depth: jax.Array,
    budget: jax.Array,
    gate: Gate | None,
    replaced: jax.Array | None,
    *,
    last_first: bool,
    target: Target,
) -> Found:
    """Computes `api.search` by Triton."""
    operands = {
        "ids": ids, "lists": lists, "layer": layer, "resident": resident, "allowed": allowed,
        "depth": depth, "budget": budget,
    }  # fmt: skip
    if gate is not None:
        operands |= gate._asdict()
    changed = {} if replaced is None else {"replaced": replaced}
    results = {
        "found": jax.ShapeDtypeStruct(ids.shape, jnp.int32),
        "searched": jax.ShapeDtypeStruct(ids.shape, jnp.bool_),
        **{name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in changed.items()},
    }
    outputs = launch.triton_call(
        functools.partial(_body, names=(*operands, *changed, *results), last_first=last_first),
        name=f"buddy_search_{ids.shape[1]}x{lists.shape[2]}" + "_gated" * (gate is not None),
        grid=(len(ids),),
        out_shape=list(results.values()),
        num_warps=NUM_WARPS,
        num_stages=1,
        interpret=target.simulated,
        aliases={len(operands): 2} if changed else {},
    )(*operands.values(), *changed.values())
    found = dict(zip(results, outputs, strict=True))
    return Found(found["found"], found["searched"], found.get("replaced"))
