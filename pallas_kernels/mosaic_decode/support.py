"""Refusals of the streaming kernels."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.layout import BLOCK
from pallas_kernels.mosaic_decode.fragments import STEP, CodeFormat
from pallas_kernels.mosaic_decode.low_rank_spec import MAX_RANK, MAX_TERMS
from pallas_kernels.mosaic_decode.matrix import ROWS
from pallas_kernels.packed import PLAIN_BITS, LowRank, PackedMatrices
from pallas_kernels.target import Target

Operand = jax.Array | jax.ShapeDtypeStruct
OLDEST_JAX = (0, 11, 2)  # the oldest that they ran on
MOST_BYTES_OF_U = 2**31 - 1  # `factor` counts them in 32 bits with a sign
KINDS = {"bfloat16": "bf16", "float16": "f16"}


def refusals(
    x: Operand,
    tiers: Sequence[PackedMatrices],
    target: Target,
    low_rank: Sequence[Sequence[LowRank]] = (),
) -> list[str]:
    """Lists every reason against multiplying rows like x [..., K] by the tiers' matrices."""
    found = []
    if target.platform != "gpu" or (target.capability or (0, 0)) != (9, 0):
        found.append(f"it runs on a gpu sm_90, this is {target.describe()}")
    if jax.__version_info__ < OLDEST_JAX and not target.simulated:
        found.append(f"jax {jax.__version__} is older than {'.'.join(map(str, OLDEST_JAX))}")
    if x.dtype.name not in KINDS:
        return [*found, f"x is {x.dtype}, not bfloat16 or float16"]
    for weights in tiers:
        reasons = _of_matrices(x, weights)
        if weights.num_outputs % ROWS:
            reasons.append(f"N {weights.num_outputs} is no multiple of {ROWS}")
        found += [reason for reason in reasons if reason not in found]
    for terms in low_rank:
        found += [reason for reason in _of_terms(x, terms) if reason not in found]
    return found


def _of_terms(x: Operand, low_rank: Sequence[LowRank]) -> list[str]:
    found = []
    if len(low_rank) > MAX_TERMS:
        found.append(f"{len(low_rank)} low-rank terms of a matrix, more than {MAX_TERMS}")
    for terms in low_rank:
        if terms.max_rank > MAX_RANK:
            found.append(f"low-rank terms of rank {terms.max_rank}, more than {MAX_RANK}")
        parts = [a for a in (terms.u.words, terms.u.scales, terms.u.zeros) if a is not None]
        if (num_bytes := max(a.size * a.dtype.itemsize for a in parts)) > MOST_BYTES_OF_U:
            found.append(f"U of low-rank terms has {num_bytes} bytes in an array")
        if terms.v.bits != PLAIN_BITS and terms.v.num_inputs % BLOCK:
            found.append(f"low-rank terms of K {terms.v.num_inputs}, no multiple of {BLOCK}")
        found += [f"V of low-rank terms: {reason}" for reason in _of_matrices(x, terms.v)]
    return list(dict.fromkeys(found))


def _of_matrices(x: Operand, weights: PackedMatrices) -> list[str]:
    kind, are_apart = KINDS[x.dtype.name], bool(weights.refinements)
    found, form = [], CodeFormat(weights.bits, kind, are_apart, weights.is_mxfp4)
    if form.planes > 2:
        found.append(f"it merges two planes, not {form.planes}")
    rest = weights.num_inputs % form.block
    is_short = weights.bits != PLAIN_BITS and rest in (form.block // 2, form.block // 4)
    if rest and not (is_short and form.in_position(rest) >= STEP // 2):
        found.append(f"K {weights.num_inputs} is no multiple of {form.block}")
    if weights.bits == PLAIN_BITS:
        if weights.words.dtype != x.dtype:
            found.append(f"plain weights are {weights.words.dtype} and x {x.dtype}")
        return found
    group = weights.group_size
    is_row = group == weights.num_inputs
    if group % STEP or (form.block % group and group % form.block and not is_row):
        found.append(f"groups of {group} are not 32, 64, 128, a multiple of {form.block} or a row")
    if rest and group < form.block:
        found += of_row_ends(weights, 2)  # then every second row begins at a whole word
        if weights.bits == 8 and group == STEP and rest == form.block // 2:
            found.append(
                f"K {weights.num_inputs} ends in half a block, in groups of {STEP} of 8 bits"
            )
    if weights.is_mxfp4:
        return found
    if weights.scales is not None and weights.scales.dtype not in (jnp.float16, jnp.float32):
        found.append(f"scales are {weights.scales.dtype}")
    return found


def of_row_ends(weights: PackedMatrices, unit: int) -> list[str]:
    """Reasons against a short block at the end of K, where scales are read by `unit` bytes."""
    constants = [a for a in (weights.scales, weights.zeros) if a is not None]
    if any(weights.num_groups * a.dtype.itemsize % unit for a in constants):
        return [
            f"K {weights.num_inputs} ends in part of a block, and the bytes of a row's scales or "
            f"zeros are no multiple of {unit}"
        ]
    return []
