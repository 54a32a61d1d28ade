"""From a checkpoint, a policy and limits to weights and experts in several tiers."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.checkpoints.experts import ExpertReader, open_experts
from moejax.checkpoints.open import Checkpoint
from moejax.checkpoints.sizes import checkpoint_sizes
from moejax.errors import MoejaxError
from moejax.experts.allocator import check_room, limits_on
from moejax.experts.budget import (
    Budget,
    Limits,
    Tier,
    TieredBudget,
    default_bulk,
    make_tiered_budget,
)
from moejax.experts.disk_reader import check_waiting
from moejax.experts.expert_memory import ExpertMemory
from moejax.experts.load import disk_source, load_experts
from moejax.experts.pinned_memory import check_pinned_limit
from moejax.experts.tiered_memory import TieredMemory, warm
from moejax.experts.tiering import Chosen, StoredTier, Tiering, choose
from moejax.models.config import ModelConfig
from moejax.policies.attention_importance import importance_nbytes
from moejax.policies.base import AnyPolicy, PolicySpec, moves_between_steps
from moejax.quantization.pipeline.expert_rows import QuantizedRows
from moejax.quantization.pipeline.quantizers import Program
from moejax.quantization.pipeline.recipe import Scheme
from moejax.weights import linear as ops
from moejax.weights.qtensor import Weight
from pallas_kernels.target import target_of


def open_tiered(
    checkpoint: Checkpoint,
    tiering: Tiering,
    limits: Limits,
    *,
    dtype: str,
    device: jax.Device,
    batch: int,
    context: int,
    chunk: int,
    progress: bool,
) -> tuple[Mapping[str, Weight], TieredMemory, TieredBudget]:
    """Loads a model whose experts move under a policy.

    Args:
      checkpoint: any but an Orbax directory; all but the experts is read from it.
      tiering: the policy and the tiers.
      limits: of memory.
      dtype: as in `opening.open_memory`, and so are the rest.
      device: likewise.
      batch: likewise.
      context: likewise.
      chunk: likewise.
      progress: likewise.

    Raises:
      MoejaxError: the model has no experts, a tier cannot be had, the policy's settings do not suit
        the tiers, or the limits are too tight.
    """
    config, limits = checkpoint.config, limits_on(device, limits)
    planned = plan_tiers(
        checkpoint, tiering, limits, dtype=dtype, device=device, batch=batch, context=context,
        chunk=chunk,
    )  # fmt: skip
    chosen, stored, sources, budget = planned
    check_room(device, limits, budget.device)
    check_pinned_limit(budget.total_host, device)
    weights = checkpoint.load(dtype=dtype, device=device, progress=progress, experts=False)
    memories, held = [], 0
    for tier, source, part in zip(stored, sources, budget.tiers, strict=True):
        packed = functools.partial(_quantized, tier=tier, tiering=tiering) if tier.bits else None
        memory = load_experts(
            source, part, dtype=dtype, device=device, progress=progress, packed=packed
        )
        if tiering.emulate:
            memory = emulated(memory, device)
        if (first := _first(chosen, part, memory, held)) is not None:
            held += first.shape[1]
            warm(memory, config, ops.Kernels(target_of(device)), first)
        memories.append(memory)
    width = config.experts_per_token
    names = [tier.name for tier in stored]
    return weights, TieredMemory(chosen.policy, names, memories, width=width), budget


class Planned(NamedTuple):
    """What is known of a run before anything is read."""

    chosen: Chosen
    stored: tuple[StoredTier, ...]
    sources: list[Checkpoint]
    budget: TieredBudget


def plan_tiers(
    checkpoint: Checkpoint,
    tiering: Tiering,
    limits: Limits,
    *,
    dtype: str,
    device: jax.Device,
    batch: int,
    context: int,
    chunk: int,
) -> Planned:
    """The policy, the tiers and every byte; arguments and errors as of `open_tiered`."""
    config, stored = checkpoint.config, tiering.stored()
    if not config.moe_layers:
        raise MoejaxError(f"{checkpoint.directory}: the model has no experts for a policy")
    if tiering.emulate and limits.device_gib:
        raise MoejaxError(
            "policy.emulate keeps every expert on the device, which memory.device_gib would bound: "
            "leave one of them out"
        )
    chosen = choose(tiering, checkpoint.directory, config)
    itemsize = np.dtype(checkpoint.choose_dtype(dtype, device)).itemsize
    sources = [tier.checkpoint(checkpoint) for tier in stored]
    for source in sources:
        disk_source(source, limits)
    tiers = [
        _sizes(tier, source, tiering, dtype, device)
        for tier, source in zip(stored, sources, strict=True)
    ]
    own = checkpoint_sizes(checkpoint, np.dtype(checkpoint.choose_dtype(dtype, device)))
    budget = budget_of_tiers(
        chosen.policy, config, own.weights_nbytes, tiers, slots=tiering.slots, limits=limits,
        batch=batch, context=context, chunk=chunk, itemsize=itemsize, device=device,
    )  # fmt: skip
    for tier, source, part in zip(stored, sources, budget.tiers, strict=True):
        if part.host_share < 1:
            with open_experts(disk_source(source, limits), dtype=dtype, device=device) as reader:
                rows = _quantized(reader, tier=tier, tiering=tiering) if tier.bits else reader
                check_waiting(rows, device, f"tier {tier.name}")
    return Planned(chosen, stored, sources, budget)


def budget_of_tiers(
    policy: AnyPolicy,
    config: ModelConfig,
    weights_nbytes: Mapping[str, int],
    tiers: Sequence[Tier],
    *,
    slots: Sequence[int],
    limits: Limits,
    batch: int,
    context: int,
    chunk: int,
    itemsize: int,
    device: jax.Device,
) -> TieredBudget:
    """`make_tiered_budget` with what a policy asks for: look-ahead, transfers, parts of its own.

    Args:
      policy: who decides.
      config: of the model; the rest is as of `make_tiered_budget`.
      weights_nbytes: likewise.
      tiers: likewise.
      slots: likewise.
      limits: likewise; what they say of look-ahead and transfers goes before the policy's.
      batch: likewise.
      context: likewise.
      chunk: likewise.
      itemsize: likewise.
      device: of the run.

    Raises:
      MoejaxError: the policy refuses the tiers, or the limits are too tight.
    """
    _check_suits(policy, tiers, config)
    num_layers, num_experts = len(config.moe_layers), config.num_experts
    state = jax.eval_shape(lambda: policy.init(_spec(tiers, config)))
    asks = moves_between_steps(policy, state, (num_layers, len(tiers), num_experts))
    bulk = default_bulk([tier.expert_nbytes for tier in tiers]) if asks else 0
    return make_tiered_budget(
        config,
        weights_nbytes,
        tiers,
        slots=slots,
        prefetch=limits.prefetch or _ahead(policy, config.experts_per_token),
        bulk=limits.bulk or min(bulk, num_layers * num_experts),
        batch=batch,
        context=context,
        chunk=chunk,
        limits=limits,
        platform=device.platform,
        itemsize=itemsize,
        of_policy=_policy_parts(policy, config, batch, context, chunk, itemsize, device),
        first_alone=not asks and policy.high_serves_low,
    )


def emulated(memory: ExpertMemory, device: jax.Device) -> ExpertMemory:
    """The same with all rows on the device, and slots that are tables only.

    Raises:
      MoejaxError: rows are missing.
    """
    row_of = np.asarray(memory.store.row_of)
    if (row_of < 0).any():
        raise MoejaxError("policy.emulate holds every expert: set memory.host_gib=0")
    memory.close()
    kind = jax.sharding.SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    gate_up, down = jax.device_put((memory.store.gate_up, memory.store.down), kind)
    spec = dataclasses.replace(memory.spec, emulated=True, read=None)
    return ExpertMemory.of_rows(spec, gate_up, down, row_of, device, memory.store.terms)


def _quantized(reader: ExpertReader, *, tier: StoredTier, tiering: Tiering) -> QuantizedRows:
    assert tier.bits is not None
    scheme = Scheme(
        method=tiering.quantizer,
        bits=tier.bits,
        group_size=tiering.group_size,
        zero_kind="float",
        scale_dtype="float16",
        factor_bits=8,
    )
    return QuantizedRows(reader, Program(scheme=scheme, max_rank=0, passes=1))


def _sizes(
    tier: StoredTier, source: Checkpoint, tiering: Tiering, dtype: str, device: jax.Device
) -> Tier:
    """Bytes of an expert of a tier.

    Raises:
      MoejaxError: it has no form in which experts move.
    """
    if tier.bits:
        with open_experts(source, dtype=dtype, device=device) as reader:
            rows = _quantized(reader, tier=tier, tiering=tiering)
            return Tier(name=tier.name, expert_nbytes=rows.row_nbytes)
    sizes = checkpoint_sizes(source, np.dtype(source.choose_dtype(dtype, device)))
    if sizes.refusal:
        raise MoejaxError(f"tier {tier.name} cannot move: {sizes.refusal}")
    return Tier(name=tier.name, expert_nbytes=sizes.expert_nbytes)


def _spec(tiers: Sequence[Tier], config: Any) -> PolicySpec:
    """As if all were resident."""
    return PolicySpec(
        num_layers=len(config.moe_layers),
        num_experts=config.num_experts,
        width=config.experts_per_token,
        tiers=tuple(tier.name for tier in tiers),
        expert_bytes=tuple(tier.expert_nbytes for tier in tiers),
        slots=(config.num_experts,) * len(tiers),
    )


def _check_suits(policy: AnyPolicy, tiers: Sequence[Tier], config: Any) -> None:
    """Raises MoejaxError before anything is read, if the policy refuses the tiers."""
    nbytes = [tier.expert_nbytes for tier in tiers]
    if sorted(nbytes, reverse=True) != nbytes:
        said = ", ".join(f"{tier.name} {tier.expert_nbytes}" for tier in tiers)
        raise MoejaxError(f"policy.tiers must be of falling fidelity; bytes of an expert: {said}")
    try:
        policy.init(_spec(tiers, config))
    except MoejaxError as error:
        if len(tiers) > 1 or "tier" not in str(error):
            raise
        raise MoejaxError(
            f"{error} (tiers are named so: --config.policy.tiers=int4,int2)"
        ) from error


def _policy_parts(
    policy: AnyPolicy, c: ModelConfig, batch: int, context: int, chunk: int, itemsize: int,
    device: jax.Device,
) -> dict[str, int]:  # fmt: skip
    """Bytes by part that steps take on the device because the policy asks for it."""
    if not policy.needs.importance:
        return {}
    nbytes = max(
        importance_nbytes(
            batch=batch, length=chunk, num_keys=context, num_heads=c.num_heads,
            num_kv_heads=num_kv_heads, head_dim=head_dim, itemsize=itemsize,
            platform=device.platform,
        )
        for num_kv_heads, head_dim in c.watched_heads
    )  # fmt: skip
    return {"importance of tokens": nbytes}


def _ahead(policy: AnyPolicy, width: int) -> int:
    """Experts of the next layer that a step of decode may bring ahead."""
    if not policy.needs.predicted:
        return 0
    asked = int(getattr(policy, "prefetch", -1))
    return asked if asked >= 0 else width


def _first(chosen: Chosen, budget: Budget, memory: ExpertMemory, held: int) -> np.ndarray | None:
    """int32[M, n], what is in the slots before any token; None: nothing.

    Every expert where there is room for all; else those that the policy's profile saw most, but for
    the first `held`, which are in tiers of higher fidelity.
    """
    if (np.asarray(memory.store.row_of) < 0).any() or not budget.slots:
        return None
    num_layers, num_experts = budget.num_layers, budget.num_experts
    if budget.slots == num_experts:
        return np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, 1))
    if chosen.activations is None:
        return None
    order = np.argsort(-np.asarray(chosen.activations), axis=1, kind="stable")
    return np.sort(order[:, held : held + budget.slots], axis=1).astype(np.int32)
