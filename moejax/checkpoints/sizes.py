"""What weights take on a device, before any is read: from headers, or from shapes."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moejax.checkpoints.formats.interfaces import CodesKind, FactorsKind, Fp8Kind, Tensors
from moejax.checkpoints.formats.leaves import Part, code_arrays, common_kind
from moejax.checkpoints.formats.load import plan_parts
from moejax.checkpoints.formats.native_reader import BF16_BITS
from moejax.checkpoints.load import EXPERT_LEAVES
from moejax.checkpoints.open import Checkpoint
from moejax.checkpoints.safetensors_reader import stored_tensors
from moejax.experts.budget import LOW_RANK, Tier
from moejax.models.config import ModelConfig, leaf_dtype, weight_shapes
from moejax.models.leaf_kinds import leaves_of
from moejax.weights.qtensor import FP8_BLOCK
from pallas_kernels import layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a model's weights, as `moejax.experts.budget.make_budget` takes them."""

    weights_nbytes: Mapping[str, int]  # of what stays on the device, by leaf
    tier: Tier  # of the experts; of 0 bytes where there are none
    refusal: str | None = None  # why the experts have no form in which they could move


def checkpoint_sizes(checkpoint: Checkpoint, dtype: np.dtype) -> Sizes:
    """Of a checkpoint as `Checkpoint.load` gives it, from the headers of its files.

    Args:
      checkpoint: of any kind.
      dtype: of what is plain.

    Raises:
      MoejaxError: as `Checkpoint.load`, but for what only reading the weights shows.
    """
    config, directory = checkpoint.config, checkpoint.directory
    if not checkpoint.is_quantized:
        refusal = str(checkpoint.orbax_is_whole()) if checkpoint.is_orbax else None
        return _sizes(config, {}, {}, _form(None, dtype), dtype, refusal)
    parts = plan_parts(directory, config, Tensors(stored_tensors(directory)))
    packed, low_rank, refusals = {}, {}, []
    forms: list[str] = []
    for leaf, shape in weight_shapes(config).items():
        found = _packed_nbytes(shape, parts[leaf])
        if found is not None:
            packed[leaf], reason = found
            low_rank[leaf] = _factors_nbytes(shape, parts[leaf])
            if leaf in EXPERT_LEAVES and reason:
                refusals.append(f"{leaf} is {reason}")
        if leaf in EXPERT_LEAVES:
            forms.append(_form(common_kind(parts[leaf]) if found else None, dtype))
    refusal = f"{directory}: {' and '.join(refusals)}" if refusals else None
    return _sizes(config, packed, low_rank, " and ".join(dict.fromkeys(forms)), dtype, refusal)


def shape_sizes(
    config: ModelConfig,
    dtype: np.dtype,
    *,
    expert_kind: CodesKind | None,
    attention_kind: CodesKind | None = None,
    shared_kind: CodesKind | None = None,
) -> Sizes:
    """Of a model without a checkpoint.

    Args:
      config: of the model.
      dtype: of what is plain.
      expert_kind: how the experts and dense MLPs are packed; None: not at all.
      attention_kind: the same of the projections of attention, or of a delta rule.
      shared_kind: the same of the experts that every token takes.
    """
    kinds = dict.fromkeys(leaves_of("experts", "mlp"), expert_kind)
    kinds |= dict.fromkeys(leaves_of("attention"), attention_kind)
    kinds |= dict.fromkeys(leaves_of("shared_experts"), shared_kind)
    shapes = weight_shapes(config)
    packed = {
        leaf: codes_nbytes(shapes[leaf], kind)
        for leaf, kind in kinds.items()
        if kind is not None and leaf in shapes
    }
    return _sizes(config, packed, {}, _form(expert_kind, dtype), dtype, None)


def codes_nbytes(shape: Sequence[int], kind: CodesKind) -> int:
    """Of matrices [..., N, K] in codes, without permutations and compensators."""
    *lead, rows, inputs = shape
    arrays = code_arrays(kind, rows, inputs).values()
    return math.prod(lead) * sum(math.prod(size) * dtype.itemsize for size, dtype in arrays)


def _sizes(
    config: ModelConfig,
    packed: Mapping[str, int],
    low_rank: Mapping[str, int],
    form: str,
    dtype: np.dtype,
    refusal: str | None,
) -> Sizes:
    """From the bytes of packed leaves; the others are plain."""
    nbytes = {
        leaf: packed.get(leaf, math.prod(shape) * leaf_dtype(leaf, dtype).itemsize)
        for leaf, shape in weight_shapes(config).items()
    }
    experts = sum(nbytes.pop(leaf, 0) for leaf in EXPERT_LEAVES)
    terms = sum(low_rank.get(leaf, 0) for leaf in EXPERT_LEAVES)
    nbytes = {leaf: size + low_rank.get(leaf, 0) for leaf, size in nbytes.items()}
    if terms:
        nbytes[f"moe{LOW_RANK}"] = terms
    num_experts = len(config.moe_layers) * config.num_experts
    expert_nbytes = experts // num_experts if num_experts else 0
    name = form if num_experts else "none"
    return Sizes(
        weights_nbytes=nbytes, tier=Tier(name=name, expert_nbytes=expert_nbytes), refusal=refusal
    )


def _form(kind: Any, dtype: np.dtype) -> str:
    """How experts are stored, such as "int4"; `dtype` where they are plain."""
    if isinstance(kind, CodesKind):
        return f"int{kind.bits}"
    return "fp8" if isinstance(kind, Fp8Kind) else f"{8 * dtype.itemsize}-bit floats"


def _packed_nbytes(shape: tuple[int, ...], parts: Sequence[Part]) -> tuple[int, str | None] | None:
    """Bytes, and what keeps it out of a slot; None of a leaf that will be plain."""
    if all(part.matrix is None for part in parts):
        return None
    kind = common_kind(parts)
    *lead, rows, inputs = shape
    if isinstance(kind, CodesKind):
        nbytes = codes_nbytes(shape, kind)
        if not any(part.matrix and part.matrix.order for part in parts):
            return nbytes, None
        return nbytes + math.prod(lead) * inputs * 4, "permuted (act-order)"
    if isinstance(kind, Fp8Kind):
        blocks = -(-rows // FP8_BLOCK) * -(-inputs // FP8_BLOCK)
        return math.prod(lead) * (rows * inputs + 4 * blocks), "FP8"
    return None


def _factors_nbytes(shape: tuple[int, ...], parts: Iterable[Part]) -> int:
    """Of compensators: a pool for every place among the rows and every kind of factors."""
    *lead, _, inputs = shape
    ranks: dict[tuple[int, int, FactorsKind], int] = {}
    for part in parts:
        matrix = part.matrix
        if matrix is not None and matrix.factors is not None and matrix.rank:
            pool = (part.placement.start, part.placement.shape[0], matrix.factors)
            ranks[pool] = ranks.get(pool, 0) + matrix.rank
    return sum(
        rank * _factor_nbytes(kind, rows, kind.u_group_size)
        + rank * _factor_nbytes(kind, inputs, kind.v_group_size)
        + 2 * 4 * math.prod(lead)
        for (_, rows, kind), rank in ranks.items()
    )


def _factor_nbytes(kind: FactorsKind, length: int, group_size: int) -> int:
    """Of one row of a factor."""
    if kind.bits == BF16_BITS:
        return 2 * length
    scales = layout.num_groups(length, group_size) * np.dtype(kind.scale_dtype).itemsize
    return 4 * layout.num_words(length, kind.bits) + scales
