"""Converts a configuration of `moejax.plan` to a budget."""

import dataclasses
import types
from collections.abc import Sequence
from typing import cast

import jax
import numpy as np

from moejax.checkpoints.open import Checkpoint, open_checkpoint
from moejax.checkpoints.sizes import (
    PLACES,
    Sizes,
    checkpoint_sizes,
    config_of_share,
    mesh_splits_heads,
    shape_sizes,
    sizes_of_each,
)
from moejax.config.commands import PlanConfig
from moejax.devices import asked_heads, mesh_size
from moejax.engine import PLANNED_CONTEXT
from moejax.errors import MoejaxError
from moejax.experts.bits import bits_of_sizes
from moejax.experts.budget import Budget, RunSizes, TierSize, make_budget
from moejax.experts.load import plan_experts, plan_tiers, tier_of
from moejax.experts.placement import num_handed_out
from moejax.experts.tiering import STORED, StoredTier, choose, shape_is_mxfp4
from moejax.inference.chunking import planned_chunks
from moejax.models.attention import copies_cache, stores_scores
from moejax.models.config import ModelConfig
from moejax.models.head_shares import HEAD_LEAVES, HeadShares, splits_heads
from moejax.models.leaf_kinds import VOCABULARY_LEAVES
from moejax.models.shapes import SHAPES
from moejax.quantization.pipeline.recipe import parse_planes
from moejax.weights.qtensor import MXFP4, CodesKind
from pallas_kernels import mxfp4
from pallas_kernels.target import target_of


def budget_of(config: PlanConfig) -> Budget:
    """Plans the budget of a configuration; tiers of a shape have the bits that their names say."""
    tiering, limits = config.policy.tiering(), config.memory.limits()
    _, model, own, itemsize = model_of(config)
    context, chunks = _sizes(config, model, itemsize)
    if not config.shape:
        checkpoint = open_checkpoint(config.checkpoint, config.read_bits)
        planned = plan_experts(
            checkpoint, limits, tiering,
            dtype=config.dtype, device=_device(config), batch=config.batch, context=context,
            chunks=chunks, num_devices=mesh_size(config.mesh),
            by_heads=_splits_heads(config, checkpoint), is_running=config.running,
            handed_out=num_handed_out(config.mesh, checkpoint.config),
        )  # fmt: skip
        return planned.budget
    run = RunSizes(
        config=dataclasses.replace(own.config, vocab_size=model.vocab_size),
        weights_nbytes=own.weights_nbytes, batch=config.batch, context=context, chunk=chunks[0],
        longer_chunks=chunks[1:], platform=platform_of(config), itemsize=itemsize,
        num_devices=mesh_size(config.mesh), handed_out=own.handed_out,
        stores_scores=stores_scores(model, itemsize, target_of(_device(config))),
        copies_cache=copies_cache(model, itemsize, target_of(_device(config))),
        is_running=config.running,
    )  # fmt: skip
    if tiering is None:
        return make_budget(run, [tier_of(own)], limits)
    if tiering.emulate:
        raise MoejaxError("a shape takes no policy.emulate")
    tiers, widths, dims = [], [], []
    for tier in tiering.stored():
        bits = _bits_of(config, tier)
        of_checkpoint = config.planes or tier.name == STORED
        group = config.group_size if of_checkpoint else tiering.group_size
        sizes = _sizes_of_shape(config, bits, group)
        tiers.append(tier_of(sizes, tier.name))
        widths.append(bits)
        dims.append(sizes.config.expert_dim)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, expert_dim=max(dims)))
    policy = choose(tiering, None, model).policy
    by_planes = config.planes and run.num_devices == 1  # tiers of a mesh are whole copies
    budget, _ = plan_tiers(policy, run, tiers, tiering.slots, limits, widths if by_planes else ())
    return budget


def bits_line(
    model: ModelConfig, sizes: Sizes, tiers: Sequence[TierSize], num_devices: int = 1
) -> str:
    """Bits per weight of the experts in each tier, of the rest, and overall."""
    of_layer = sizes.handed_out or model.num_experts  # of each device, or shares of them
    num_experts = len(model.moe_layers) * of_layer * num_devices
    experts = {
        tier.name: num_experts * tier.expert_nbytes + tier.low_rank_nbytes
        for tier in tiers
        if num_experts
    }
    by_heads = sizes.config.num_heads < model.num_heads
    split = (*VOCABULARY_LEAVES, *(HEAD_LEAVES if by_heads else ()))  # of which there is a part
    weights = {
        name: nbytes * (num_devices if name in split else 1)
        for name, nbytes in sizes.weights_nbytes.items()
        if name != PLACES
    }
    return f"weights: {bits_of_sizes(model, weights, experts).describe()}"


def _sizes(config: PlanConfig, model: ModelConfig, itemsize: int) -> tuple[int, tuple[int, ...]]:
    """Slots of the KV cache, and tokens that a prefill chunk may have."""
    context = _context(config, model)
    if context > model.context_limit:
        raise MoejaxError(f"context={context} is beyond the model's own {model.context_limit}")
    batch = 1 if config.running else config.batch  # of a prefill step
    if config.chunk:
        return context, (min(context, config.chunk),)
    return context, planned_chunks(model, batch, context, itemsize, target_of(_device(config)))


def _context(config: PlanConfig, model: ModelConfig) -> int:
    return config.context or min(PLANNED_CONTEXT, model.context_limit)


def _splits_heads(config: PlanConfig, checkpoint: Checkpoint | None) -> bool:
    """Whether the mesh of a plan splits attention."""
    count, asked = mesh_size(config.mesh), asked_heads(config.mesh)
    model = checkpoint.config if checkpoint else SHAPES[config.shape]
    context = _context(config, model)
    if checkpoint is not None:
        dtype = np.dtype(checkpoint.choose_dtype(config.dtype, _device(config)))
        return mesh_splits_heads(
            checkpoint, asked, count, dtype=dtype, batch=config.batch, context=context
        )
    shares = HeadShares(model, count)
    refusal = shares.refusal(1 if config.attention_bits == 16 else config.group_size)
    return count > 1 and splits_heads(
        shares, asked, refusal, batch=config.batch, context=context,
        itemsize=_dtype_of_shape(config).itemsize,
    )  # fmt: skip


def _device(config: PlanConfig) -> "jax.Device":
    """Stand-in device: a plan needs only the platform's name; what is free is not known."""
    found = types.SimpleNamespace(platform=platform_of(config), memory_stats=lambda: None)
    return cast("jax.Device", found)


def platform_of(config: PlanConfig) -> str:
    """Platform of a plan: an accelerator unless the configuration says otherwise."""
    return "gpu" if config.platform == "auto" else config.platform


def model_of(config: PlanConfig) -> tuple[str, ModelConfig, Sizes, int]:
    """Name, shape, sizes of the weights, and bytes per number of the activations."""
    checkpoint = None if config.shape else open_checkpoint(config.checkpoint, config.read_bits)
    model = checkpoint.config if checkpoint else SHAPES[config.shape]
    if checkpoint is not None:
        dtype = np.dtype(checkpoint.choose_dtype(config.dtype, _device(config)))
        by_heads = _splits_heads(config, checkpoint)
        sizes = checkpoint_sizes(
            checkpoint, dtype, mesh_size(config.mesh), by_heads=by_heads,
            handed_out=num_handed_out(config.mesh, model),
        )  # fmt: skip
        return config.checkpoint, model, sizes, dtype.itemsize
    sizes = _sizes_of_shape(config, _bits_of(config), config.group_size)
    return config.shape, model, sizes, _dtype_of_shape(config).itemsize


def _dtype_of_shape(config: PlanConfig) -> np.dtype:
    wide = config.dtype == "float32" or (config.dtype == "auto" and platform_of(config) == "cpu")
    return np.dtype(np.float32 if wide else np.float16)  # bfloat16 is of this size too


def _bits_of(config: PlanConfig, tier: StoredTier | None = None) -> int:
    """Bits of a shape's experts in a tier; None: as they are stored, by planes the widest width."""
    planes = parse_planes(config.planes) if config.planes else ()
    stored = planes[-1] if planes else mxfp4.BITS if config.mxfp4 else config.bits
    bits = stored if tier is None else tier.bits_of_shape(stored)
    if tier is not None and planes and bits not in planes:
        raise MoejaxError(
            f"policy.tiers: {tier.name} is none of the widths of planes={config.planes}"
        )
    return bits


def _sizes_of_shape(config: PlanConfig, bits: int, group_size: int) -> Sizes:
    """Sizes of a shape with experts and dense MLPs in so many bits and such groups."""
    tiering = config.policy.tiering()
    stored = tiering.stored() if tiering else ()
    is_mxfp4 = shape_is_mxfp4(config.mxfp4, stored) and bits == mxfp4.BITS
    if is_mxfp4 and config.planes:
        raise MoejaxError(
            f"policy.tiers: mxfp4 has no bit planes: name int4 of planes={config.planes}, or "
            "leave planes out"
        )

    def kind(bits: int, group_size: int = config.group_size) -> CodesKind | None:
        if bits == 16:
            return None
        return CodesKind(bits=bits, group_size=group_size, zero_kind="float", scale_dtype="float16")

    experts = MXFP4 if is_mxfp4 else kind(bits, group_size)
    if experts is not None and config.planes:
        experts = experts.prefix(bits)
    model, count = SHAPES[config.shape], mesh_size(config.mesh)
    handed_out = num_handed_out(config.mesh, model)
    if count > 1:
        unit = None if experts is None else experts.group_size
        by_heads = _splits_heads(config, None)
        model = config_of_share(model, count, unit, by_heads=by_heads, handed_out=handed_out)
    try:
        sizes = shape_sizes(
            model, _dtype_of_shape(config), expert_kind=experts,
            attention_kind=kind(config.attention_bits), shared_kind=kind(config.shared_bits),
            head_kind=kind(config.head_bits),
        )  # fmt: skip
        return sizes_of_each(sizes, count, handed_out)
    except ValueError as error:  # groups that are longer than a row
        raise MoejaxError(f"shape={config.shape}: {error}") from error
