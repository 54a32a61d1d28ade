"""Sizes of weights on a device, before any is read: from headers, or from shapes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from moejax.checkpoints.leaves import LeafPlan
from moejax.checkpoints.open import Checkpoint
from moejax.checkpoints.reader import refuse_division
from moejax.devices import rows_of
from moejax.models.config import ModelConfig, leaf_dtype, weight_shapes
from moejax.models.head_shares import HEAD_LEAVES, HeadShares, splits_heads
from moejax.models.leaf_kinds import EXPERT_BIASES, EXPERT_LEAVES, VOCABULARY_LEAVES, leaves_of
from moejax.weights.handed_out import table_nbytes
from moejax.weights.qtensor import CodesKind
from moejax.weights.shares import Shares, shares_of

PLACES = "places of experts"  # the tables of a mesh that hands experts out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model's weights, and the form of its experts."""

    weights_nbytes: Mapping[str, int]  # of every leaf but the experts
    expert_nbytes: int  # of one expert, without low-rank factors; 0 where there are none
    low_rank_nbytes: int  # low-rank factors of all experts
    expert_form: str  # "int4", or "none"
    config: ModelConfig  # of what a device has; on a mesh its shares and rows (`config_of_share`)
    refusal: str | None = None  # why the experts have no form in which they could move
    handed_out: int = 0  # R, experts of a layer that a device has, where they are handed out


def checkpoint_sizes(
    checkpoint: Checkpoint, dtype: np.dtype, num_devices: int = 1, *, by_heads: bool = False,
    handed_out: int = 0,
) -> Sizes:  # fmt: skip
    """Sizes of the leaves that `Checkpoint.load` gives; of a plain checkpoint no file is opened.

    On a mesh of `num_devices` they are those of each device (`config_of_share`); `by_heads`:
    whether it splits attention; `handed_out`: experts of a layer that each has, 0: shares of all.

    Raises MoejaxError as `Checkpoint.load`, but for what only reading the weights shows.
    """
    config, directory = checkpoint.config, checkpoint.directory
    division: dict[str, Any] = {"by_heads": by_heads, "handed_out": handed_out}
    if not checkpoint.is_quantized:
        if num_devices > 1:
            config = config_of_share(config, num_devices, None, **division)
        sizes = sizes_of_each(shape_sizes(config, dtype, expert_kind=None), num_devices, handed_out)
        refusal = str(checkpoint.orbax_is_whole()) if checkpoint.is_orbax else None
        return dataclasses.replace(sizes, refusal=refusal)
    leaves = dict(checkpoint.reader(dtype).leaves)
    refusals = {leaf: leaves[leaf].refusal for leaf in EXPERT_LEAVES if leaf in leaves}
    said = [f"{leaf} is {refusal}" for leaf, refusal in refusals.items() if refusal]
    refusal = f"{directory}: {' and '.join(said)}" if said else None
    if num_devices > 1 and config.moe_layers:
        for leaf in EXPERT_LEAVES:
            refuse_division(leaves[leaf], are_whole=handed_out > 0)
        kind = leaves[EXPERT_LEAVES[1]].kind
        group_size = kind.group_size if isinstance(kind, CodesKind) else None
        config = config_of_share(config, num_devices, group_size, **division)
        shapes = weight_shapes(config)
        cut = [leaf for leaf in VOCABULARY_LEAVES if leaf in leaves and leaves[leaf].splits_by_rows]
        others = (*EXPERT_BIASES, *(HEAD_LEAVES if by_heads else ()))
        cut += [leaf for leaf in others if leaf in leaves]
        leaves |= {
            leaf: dataclasses.replace(leaves[leaf], shape=shapes[leaf], parts=())
            for leaf in (*(() if handed_out else EXPERT_LEAVES), *cut)
        }
    sizes = sizes_of_each(_sizes(config, leaves), num_devices, handed_out)
    return dataclasses.replace(sizes, refusal=refusal)


def sizes_of_each(sizes: Sizes, num_devices: int, handed_out: int) -> Sizes:
    """Sizes of each device that has so many whole experts of a layer; 0: as they are."""
    if not handed_out:
        return sizes
    num_layers, num_experts = len(sizes.config.moe_layers), sizes.config.num_experts
    nbytes = dict(sizes.weights_nbytes)
    for leaf in EXPERT_BIASES:
        if leaf in nbytes:
            nbytes[leaf] = nbytes[leaf] // num_experts * handed_out
    nbytes[PLACES] = table_nbytes(num_layers, num_experts, num_devices, handed_out)
    return dataclasses.replace(sizes, weights_nbytes=nbytes, handed_out=handed_out)


def stored_shares(checkpoint: Checkpoint, dtype: np.dtype, num_devices: int) -> Shares:
    """Shares of each expert, as it is stored, on a mesh; raises as `checkpoint_sizes`."""
    if not checkpoint.is_quantized:
        return shares_of(checkpoint.config.expert_dim, num_devices, None)
    return checkpoint.reader(dtype).shares(num_devices)


def config_of_share(
    config: ModelConfig, num_devices: int, group_size: int | None, *, by_heads: bool = False,
    handed_out: int = 0,
) -> ModelConfig:  # fmt: skip
    """Model of what each device of a mesh has: a share of every expert, rows of the vocabulary.

    Args:
      group_size: as of `shares_of`.
      by_heads: whether it has a share of the heads, too.
      handed_out: experts that it has whole, so many of a layer; `num_experts` is that of all.
    """
    width = config.expert_dim
    if not handed_out:
        width = shares_of(width, num_devices, group_size).share_width
    rows = rows_of(config.vocab_size, num_devices)
    own = HeadShares(config, num_devices).own if by_heads else config
    return dataclasses.replace(own, expert_dim=width, vocab_size=rows)


def mesh_splits_heads(
    checkpoint: Checkpoint, asked: bool | None, num_devices: int, *, dtype: np.dtype, batch: int,
    context: int,
) -> bool:  # fmt: skip
    """Whether a mesh splits a checkpoint's attention; see `splits_heads`."""
    if num_devices == 1:
        return False
    shares = HeadShares(checkpoint.config, num_devices)
    refusal = shares.refusal()
    if checkpoint.is_quantized and refusal is None:
        refusal = checkpoint.reader(dtype).heads_refusal(shares)
    how = {"batch": batch, "context": context, "itemsize": dtype.itemsize}
    return splits_heads(shares, asked, refusal, **how)


def shape_sizes(
    config: ModelConfig,
    dtype: np.dtype,
    *,
    expert_kind: CodesKind | None,
    attention_kind: CodesKind | None = None,
    shared_kind: CodesKind | None = None,
    head_kind: CodesKind | None = None,
) -> Sizes:
    """Sizes of a model without a checkpoint; kinds are None where leaves are plain, in `dtype`.

    `expert_kind` is that of dense MLPs too, `attention_kind` that of a delta rule too.
    """
    kinds = dict.fromkeys(leaves_of("experts", "mlp"), expert_kind)
    kinds |= dict.fromkeys(leaves_of("attention"), attention_kind)
    kinds |= dict.fromkeys(leaves_of("shared_experts"), shared_kind)
    kinds |= dict.fromkeys(leaves_of("head"), head_kind)
    leaves = {
        leaf: LeafPlan(
            name=leaf, shape=shape, dtype=np.dtype(leaf_dtype(leaf, dtype)), kind=kinds.get(leaf)
        )
        for leaf, shape in weight_shapes(config).items()
    }
    return _sizes(config, leaves)


def _sizes(config: ModelConfig, leaves: Mapping[str, LeafPlan]) -> Sizes:
    nbytes = {leaf: plan.nbytes for leaf, plan in leaves.items()}
    low_rank = {
        leaf: sum(pool.nbytes for pool in plan.factor_pools) for leaf, plan in leaves.items()
    }
    experts = sum(nbytes.pop(leaf, 0) for leaf in EXPERT_LEAVES)
    terms = sum(low_rank.pop(leaf, 0) for leaf in EXPERT_LEAVES)
    nbytes = {leaf: size + low_rank[leaf] for leaf, size in nbytes.items()}
    num_experts = len(config.moe_layers) * config.num_experts
    expert_nbytes = experts // num_experts if num_experts else 0
    forms = dict.fromkeys(leaves[leaf].form for leaf in EXPERT_LEAVES if leaf in leaves)
    form = " and ".join(forms) or "none"
    return Sizes(
        weights_nbytes=nbytes, expert_nbytes=expert_nbytes, low_rank_nbytes=terms,
        expert_form=form, config=config,
    )  # fmt: skip
