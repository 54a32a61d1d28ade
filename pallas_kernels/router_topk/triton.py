"""Pallas-Triton implementation: one launch, a warp per row.

The k largest are found in k rounds. Probabilities are not negative, so their bits order as they do:
a round is two reductions of int32 over a warp, which are one instruction each (redux.sync, sm_80
and later) where one of float32 takes five shuffles.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import launch
from pallas_kernels.target import Target, platform_refusal
from pallas_kernels.triton.elements import iota, power_above

Ref = Any
Operand = jax.Array | jax.ShapeDtypeStruct
MAX_EXPERTS = 1024  # 32 values a thread, in registers
MAX_CHOSEN = 32  # rounds, unrolled
NUM_WARPS = 1  # more would reduce through shared memory, with barriers
TAKEN = np.int32(-1)  # the key of what may not be chosen (again), below that of every probability


def refusal(logits: Operand, k: int, target: Target) -> str | None:
    """Reason why this implementation refuses, or None."""
    reasons = [platform_refusal(target)]
    if logits.shape[1] > MAX_EXPERTS:
        reasons.append(f"{logits.shape[1]} experts, more than {MAX_EXPERTS}")
    if k > MAX_CHOSEN:
        reasons.append(f"{k} chosen, more than {MAX_CHOSEN}")
    return "; ".join(filter(None, reasons)) or None


def _keys(probabilities: jax.Array, real: jax.Array) -> jax.Array:
    """Keys int32 in the order of the probabilities; NaN is above all, as in `jax.lax.top_k`."""
    nan = jnp.full(probabilities.shape, jnp.nan, jnp.float32)  # whose sign bit is not set
    ordered = jnp.where(probabilities == probabilities, probabilities, nan)
    return jnp.where(real, jax.lax.bitcast_convert_type(ordered, jnp.int32), TAKEN)


def _body(
    logits_ref: Ref, *refs: Ref, k: int, normalise: bool,
) -> None:  # fmt: skip
    """Program n runs row n; `refs`: the first id, if it is not 0, and the outputs."""
    probabilities_ref, weights_ref, ids_ref = refs[-3:]
    row, num_experts = pl.program_id(0), logits_ref.shape[1]
    experts, places = iota(power_above(num_experts)), iota(power_above(k))
    real = experts < num_experts
    logits = pltriton.load(logits_ref.at[row, experts], mask=real, other=-jnp.inf)
    exps = jnp.exp(logits - jnp.max(logits))
    probabilities = exps / jnp.sum(exps)
    pltriton.store(probabilities_ref.at[row, experts], probabilities, mask=real)
    keys = _keys(probabilities, real)
    ids = jnp.zeros(places.shape, jnp.int32)
    weights, total = jnp.zeros(places.shape, jnp.float32), jnp.float32(0)
    for place in range(k):
        top = jnp.max(keys)
        # Some real expert has the key, for fewer than all are taken.
        lowest = jnp.min(jnp.where(keys == top, experts, jnp.int32(num_experts)))
        keys = jnp.where(experts == lowest, TAKEN, keys)
        weight = jax.lax.bitcast_convert_type(top, jnp.float32)
        total += weight
        ids = jnp.where(places == place, lowest, ids)
        weights = jnp.where(places == place, weight, weights)
    if normalise:
        weights = weights / total
    if len(refs) > 3:
        ids += refs[0][()]
    pltriton.store(ids_ref.at[row, places], ids, mask=places < k)
    pltriton.store(weights_ref.at[row, places], weights, mask=places < k)


def top_k_triton(
    logits: jax.Array,
    first: jax.Array | None = None,
    *,
    k: int,
    normalise: bool,
    target: Target,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `api.top_k` by Triton; one launch."""
    num_rows, num_experts = logits.shape
    chosen = (num_rows, k)
    probabilities, weights, ids = launch.triton_call(
        functools.partial(_body, k=k, normalise=normalise),
        name=f"router_topk_{num_experts}x{k}{'n' if normalise else ''}",
        grid=(num_rows,),
        out_shape=[
            jax.ShapeDtypeStruct(logits.shape, jnp.float32),
            jax.ShapeDtypeStruct(chosen, jnp.float32),
            jax.ShapeDtypeStruct(chosen, jnp.int32),
        ],
        num_warps=NUM_WARPS,
        num_stages=1,
        interpret=target.simulated,
    )(logits, *(() if first is None else (first,)))
    return probabilities, weights, ids
