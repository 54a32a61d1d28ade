"""Loads weights and movable experts of a checkpoint under limits and a policy."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from moejax.checkpoints.experts import ExpertReader, open_experts
from moejax.checkpoints.open import Checkpoint
from moejax.checkpoints.sizes import Sizes, checkpoint_sizes, stored_shares
from moejax.devices import DeviceMesh
from moejax.errors import MoejaxError
from moejax.experts.budget import (
    Budget,
    BudgetError,
    Limits,
    PolicyDemands,
    RunSizes,
    TierBudget,
    TierSize,
    make_budget,
    unused,
)
from moejax.experts.budget.planned import EMBEDDINGS, EMBEDDINGS_LEAF, RING_BLOCKS
from moejax.experts.cache import ExpertMemory, TierMemory, preload
from moejax.experts.disk_cache import DiskExperts, check_waiting
from moejax.experts.host_cores import HostCores, job_refusal, measure, num_threads
from moejax.experts.host_store import HostStore
from moejax.experts.host_worker import form_refusal, machine_refusal
from moejax.experts.machine import check_room, device_limits, room_nbytes
from moejax.experts.pinned_memory import check_pinned_limit, host_place
from moejax.experts.residency import CacheSizes
from moejax.experts.share_rows import OwnRows, ShareRows
from moejax.experts.state import TierSpec
from moejax.experts.tier_step import TierStep
from moejax.experts.tiering import (
    STORED,
    StoredTier,
    Tiering,
    choose,
    made_scheme,
    open_like,
    open_tier,
)
from moejax.experts.transfers import Transfers
from moejax.models.attention import copies_cache, stores_scores
from moejax.models.config import ModelConfig
from moejax.models.leaf_kinds import EXPERT_BIASES
from moejax.policies.base import AnyPolicy, PolicySpec, default_prefetch, moves_between_steps
from moejax.policies.dymoe import importance_nbytes
from moejax.quantization.pipeline.expert_rows import QuantizedRows
from moejax.quantization.pipeline.quantizers import Program
from moejax.weights import linear as ops
from moejax.weights.qtensor import Weight
from moejax.weights.shares import shares_of
from pallas_kernels import layout
from pallas_kernels.target import target_of


def tier_of(sizes: Sizes, name: str = "") -> TierSize:
    """Returns the form of a model's experts as a budget's tier, of its own name or another."""
    return TierSize(
        name=name or sizes.expert_form,
        expert_nbytes=sizes.expert_nbytes,
        low_rank_nbytes=sizes.low_rank_nbytes,
    )


def load_limited(
    checkpoint: Checkpoint,  # any; an Orbax directory only if it fits and no policy decides
    limits: Limits,
    tiering: Tiering | None = None,  # None: the router decides, of one tier
    *,
    dtype: str,  # of plain weights and activations, or "auto"
    device: jax.Device,
    batch: int,
    context: int,  # slots of the KV cache of each sequence
    chunks: Sequence[int],  # tokens of one sequence that a prefill step may take, rising
    progress: bool,
    mesh: DeviceMesh | None = None,
    is_running: bool = False,  # rows come and go, in a cache of pages
) -> tuple[Mapping[str, Weight], ExpertMemory | None, Budget]:
    """Loads a model under limits and a policy: whole if it fits and no policy decides.

    Returns:
      The weights, what holds the experts that they lack (None: they lack none), and the budget.

    Raises:
      MoejaxError: the limits are too tight (the text names the least that would do), the
        checkpoint or a tier cannot be read, or the policy's settings do not suit the tiers.
    """
    limits = device_limits(device, limits)
    policy, activations, stored, sources, refines, budget = plan_experts(
        checkpoint, limits, tiering, dtype=dtype, device=device, batch=batch, context=context,
        chunks=chunks, num_devices=mesh.size if mesh else 1,
        by_heads=mesh is not None and mesh.splits_heads, is_running=is_running,
        handed_out=mesh.num_handed_out if mesh else 0,
    )  # fmt: skip
    if not limits.device_gib:
        check_room(budget.device, room_nbytes(device))
    for line in unused(budget):
        logging.warning("%s", line)
    load = functools.partial(
        checkpoint.load, dtype=dtype, device=device, progress=progress, mesh=mesh
    )
    if not budget.pooled:
        return load(), None, budget
    check_pinned_limit(budget.total_host, device)  # of all allocations, before the first
    on_host = {EMBEDDINGS_LEAF: host_place(device)} if EMBEDDINGS in budget.host else {}
    weights = load(experts=False, places=on_host)
    memories, held = [], 0
    for tier, source, plane, part in zip(stored, sources, refines, budget.tiers, strict=True):
        memory = _load_tier(
            source, part, tier, tiering, dtype=dtype, device=device, progress=progress,
            last_plane=plane, mesh=mesh, dense=weights,
        )  # fmt: skip
        if tiering is not None and tiering.emulate:
            memory = _emulated(memory)
        if tiering is not None or part.has_all_slots:
            held += preload_first(memory, part, activations, held, checkpoint.config)
        memories.append(memory)
    names, width = [tier.name for tier in stored], checkpoint.config.experts_per_token
    return weights, ExpertMemory(memories, names, policy, width=width), budget


def _disk_source(checkpoint: Checkpoint, limits: Limits) -> Checkpoint:
    """Returns the checkpoint whose files experts are read from; errors as of `open_like`."""
    return open_like(limits.disk_path, checkpoint, "memory.disk_path=", checkpoint.read_bits)


class _Planned(NamedTuple):
    """Plan of a run before anything is read."""

    policy: AnyPolicy | None
    activations: Any  # int[M, E], how often the policy's profile chose each expert; None without
    stored: tuple[StoredTier, ...]
    sources: list[Checkpoint]
    refines: tuple[bool, ...]  # whether each tier is the last plane over the next one's
    budget: Budget


def plan_experts(
    checkpoint: Checkpoint,
    limits: Limits,
    tiering: Tiering | None,
    *,
    dtype: str,
    device: jax.Device,
    batch: int,
    context: int,
    chunks: Sequence[int],
    num_devices: int = 1,
    by_heads: bool = False,
    is_running: bool = False,
    handed_out: int = 0,
) -> _Planned:
    """Plans policy, tiers and bytes; arguments and errors as in `load_limited`.

    `by_heads`: whether a mesh splits attention; `handed_out`: experts of a layer that each of its
    devices has whole, 0: shares of all.
    """
    config = checkpoint.config
    if handed_out and limits.bulk:
        raise MoejaxError(
            f"memory.bulk={limits.bulk}: a mesh that hands experts out moves none between steps; "
            "leave bulk out, or experts out of mesh"
        )
    chosen = np.dtype(checkpoint.choose_dtype(dtype, device))
    own = checkpoint_sizes(
        checkpoint, chosen, num_devices, by_heads=by_heads, handed_out=handed_out
    )
    num_shares = 1 if handed_out else num_devices  # of an expert
    run = RunSizes(
        config=dataclasses.replace(own.config, vocab_size=config.vocab_size),
        weights_nbytes=own.weights_nbytes, batch=batch, context=context, chunk=chunks[0],
        longer_chunks=tuple(chunks[1:]), platform=device.platform, itemsize=chosen.itemsize,
        num_devices=num_devices, handed_out=handed_out,
        stores_scores=stores_scores(config, chosen.itemsize, target_of(device)),
        copies_cache=copies_cache(config, chosen.itemsize, target_of(device)),
        is_running=is_running, room_nbytes=None if limits.device_gib else room_nbytes(device),
    )  # fmt: skip
    policy: AnyPolicy | None = None
    activations, sources = None, [checkpoint]
    stored: tuple[StoredTier, ...] = (StoredTier(STORED, ""),)
    if tiering is not None:
        if not config.moe_layers:
            raise MoejaxError(f"{checkpoint.directory}: the model has no experts for a policy")
        if tiering.emulate and handed_out:
            raise MoejaxError("policy.emulate is of one device: leave experts out of mesh")
        if tiering.emulate and limits.device_gib:
            raise MoejaxError(
                "policy.emulate keeps every expert on the device, which memory.device_gib would "
                "bound: leave one of them out"
            )
        policy, activations = choose(tiering, checkpoint.directory, config)
        opened = [open_tier(tier, checkpoint) for tier in tiering.stored()]
        stored, sources = tuple(tier for tier, _ in opened), [source for _, source in opened]
    disks = [_disk_source(source, limits) for source in sources]  # what is wrong is said first
    refines = (False,) * len(stored)
    if tiering is None or policy is None:
        budget = make_budget(run, [tier_of(own)], limits)
        if budget.pooled and own.refusal:
            raise MoejaxError(f"the experts do not fit and cannot move: {own.refusal}")
    else:
        tiers = [
            _sizes(tier, source, tiering, dtype, device, num_shares)
            for tier, source in zip(stored, sources, strict=True)
        ]
        if num_shares > 1:
            width = _width_of_shares(checkpoint, stored, sources, tiering, chosen, num_devices)
            run = dataclasses.replace(run, config=dataclasses.replace(run.config, expert_dim=width))
        # On a mesh tiers are whole copies.
        is_one = len({source.directory for source in sources}) == 1 and num_devices == 1
        widths = [source.read_bits for source in sources] if is_one else []
        budget, refines = plan_tiers(
            policy, run, tiers, tiering.slots, limits, widths, may_share=not tiering.emulate
        )
    for tier, disk, part in zip(stored, disks, budget.tiers, strict=True):
        if part.host_share < 1:
            with open_experts(disk, dtype=dtype, device=device) as reader:
                rows = _rows_of(tier, tiering, reader)
                name = str(disk.directory) if tiering is None else f"tier {tier.name}"
                check_waiting(rows, device, name)
    return _Planned(policy, activations, stored, sources, refines, budget)


def plan_tiers(
    policy: AnyPolicy,
    run: RunSizes,
    tiers: Sequence[TierSize],
    slots: Sequence[int],
    limits: Limits,
    widths: Sequence[int] = (),
    *,
    may_share: bool = True,
) -> tuple[Budget, tuple[bool, ...]]:
    """Plans tiers under a policy, as bit planes of one copy where that can be.

    Args:
      tiers: as whole copies.
      slots: of a layer in each tier; (): see `budget.make_budget`.
      widths: bits in which each tier reads one checkpoint by planes; (): they read none.
      may_share: whether planes may share slots.

    Returns:
      The budget, and whether each tier is the last plane over the next one's.

    Raises:
      MoejaxError: as of `_budget_of_tiers`.
    """
    plan = functools.partial(
        _budget_of_tiers, policy, run, slots=slots, limits=limits, copies=tiers
    )
    found = _by_planes(plan, tiers, widths, may_share)
    return (plan(tiers), (False,) * len(tiers)) if found is None else (found, (True, False))


def _by_planes(
    plan: Callable[[Sequence[TierSize]], Budget],
    tiers: Sequence[TierSize],
    widths: Sequence[int],
    may_share: bool,
) -> Budget | None:
    """Plans a first tier of one plane over a second one, of the same checkpoint.

    So an expert in high precision counts once (DynaExq eq. 3.5). The second tier has every expert;
    where there is no room for that, or some planes are on the disk alone, planes of equal size
    share slots. Returns None where neither can be: the second tier is not one plane and the first
    one that and one more, or planes would share slots that differ in size or too few, or under a
    policy that moves experts between steps. Then each tier has whole copies.
    """
    planes = [layout.PREFIX_PLANES.get(bits, ()) for bits in widths]
    if [len(prefix) for prefix in planes] != [2, 1] or planes[0][:1] != planes[1]:
        return None
    high, low = tiers
    plane = high.expert_nbytes - low.expert_nbytes  # the base has all scales and zeros
    high = dataclasses.replace(high, expert_nbytes=plane)
    with contextlib.suppress(BudgetError):
        found = plan([high, low])
        second = found.tiers[1]
        is_full = second.has_all_slots and second.banks == 1
        if is_full and all(tier.host_share == 1 for tier in found.tiers):
            return found
    reason = "that needs every base plane on the device and every plane in host memory"
    if planes[0][0] == planes[0][1] and may_share:
        try:
            return plan(
                [
                    dataclasses.replace(high, planes=2, shares_slots=True),
                    dataclasses.replace(low, planes=2),
                ]
            )
        except BudgetError as error:
            reason = str(error)
    logging.warning(
        "tiers %s and %s have whole copies, not planes: %s", high.name, low.name, reason
    )
    return None


def _budget_of_tiers(
    policy: AnyPolicy,
    run: RunSizes,
    tiers: Sequence[TierSize],
    slots: Sequence[int],
    limits: Limits,
    copies: Sequence[TierSize] = (),
) -> Budget:
    """Makes a budget with a policy's prefetch, transfers and parts of its own.

    Limits on prefetch and transfers that are stated take precedence over the policy's.

    Args:
      copies: whole copies in the place of tiers that may be planes; (): the tiers are such.

    Raises:
      MoejaxError: the policy refuses the tiers, or the limits are too tight; a `BudgetError` too
        where tiers share slots and experts move between steps.
    """
    config = run.config
    if run.handed_out:
        _check_partitions(policy, tiers)
    num_layers, num_experts = run.num_layers, config.num_experts
    spec = PolicySpec(  # as if all were resident
        num_layers=num_layers, num_experts=num_experts, width=config.experts_per_token,
        tiers=tuple(tier.name for tier in tiers), slots=(num_experts,) * len(tiers),
        expert_bytes=tuple(tier.expert_nbytes for tier in tiers),
    )  # fmt: skip
    _check_suits(policy, copies or tiers, spec)
    state = jax.eval_shape(lambda: policy.init(spec))
    moves = moves_between_steps(policy, state, (num_layers, len(tiers), num_experts))
    if tiers[0].shares_slots and (moves or limits.bulk):
        raise BudgetError(
            "that needs every base plane on the device and every plane in host memory, since "
            "experts move between steps"
        )
    are_planes = list(tiers) != list(copies or tiers)  # a plane serves for no other one
    demands = PolicyDemands(
        slots=slots,
        prefetch=limits.prefetch or default_prefetch(policy, config.experts_per_token),
        bulk=limits.bulk or (None if moves else 0),
        between_steps=policy.transfer_tiers(spec),
        device=functools.partial(_policy_parts, policy),
        first_alone=not (moves or are_planes) and policy.first_alone(spec),
    )
    return make_budget(run, tiers, limits, demands)


def _load_tier(
    checkpoint: Checkpoint,
    budget: TierBudget,
    tier: StoredTier,
    tiering: Tiering | None,
    *,
    dtype: str,
    device: jax.Device,
    progress: bool,
    last_plane: bool,
    mesh: DeviceMesh | None,
    dense: Mapping[str, Weight],
) -> TierMemory:
    """Fills host rows, allocates an empty pool, opens the disk if rows are few."""
    limits = budget.limits
    rows_of = functools.partial(open_experts, dtype=dtype, device=device, last_plane=last_plane)
    reader: Any = rows_of(_disk_source(checkpoint, limits))
    with rows_of(checkpoint) as own:
        terms = own.load_compensators(device, progress=progress)
        forms: list[Any] = [jax.tree.structure((r.gate_up, r.down)) for r in (own, reader)]
        if own.row != reader.row or forms[0] != forms[1]:
            raise MoejaxError(
                f"memory.disk_path={limits.disk_path} holds experts of another form than "
                f"{checkpoint.directory}: give a copy of it"
            )
    if mesh is None or mesh.handed_out is not None:
        reader = _rows_of(tier, tiering, reader)
    else:
        reader = _rows_of(tier, tiering, reader, mesh.size, list(mesh.local))
    if mesh is not None and mesh.handed_out is not None:
        reader = OwnRows(reader, mesh.handed_out)
    if mesh is not None and any(terms):
        raise MoejaxError(
            f"the experts of {checkpoint.directory} have low-rank compensators, which a mesh does "
            "not serve yet; quantize them by another method, or leave the mesh out"
        )
    store, disk = None, None
    if budget.host_rows:
        store = HostStore(reader, budget.host_rows, device, mesh)
        store.fill(progress=progress)
    if budget.host_share < 1:
        # Experts that steps waited for get the bytes of the ring that transfers do not need.
        blocks = RING_BLOCKS // 2 if limits.bulk else 1
        disk = DiskExperts(reader, store, ring_blocks=blocks, most_kept=RING_BLOCKS - blocks)
    else:
        reader.close()
    return empty_tier(
        budget, reader, store, checkpoint.config, device, mesh, dense, refines=own.plane_bits,
        terms=terms, disk=disk,
    )  # fmt: skip


def empty_tier(
    budget: TierBudget,
    rows: Any,
    store: HostStore | None,
    config: ModelConfig,
    device: jax.Device,
    mesh: DeviceMesh | None,
    dense: Mapping[str, Weight],
    *,
    refines: int = 0,
    terms: Any = ((), ()),
    disk: DiskExperts | None = None,
) -> TierMemory:
    """Allocates the slots of a tier as its budget says, without experts.

    Args:
      rows: the source of `store`, and of `disk` where some experts are there alone, with the forms
        `gate_up` and `down` of its experts.
      store: None: no expert is in host memory.
      dense: weights by name, with the experts' biases if they have any.
      refines: as `TierSpec.refines`.
      terms: as `HostRows.terms`.
    """
    limits, tree = budget.limits, jax.tree.structure((rows.gate_up, rows.down))
    arrays: Any = [jnp.zeros((0, *part.shape), part.dtype, device=device) for part in rows.row]
    if store is not None:
        arrays = store.arrays
    supply = disk or store
    assert supply is not None
    cache = CacheSizes(
        num_layers=budget.num_layers, num_experts=budget.num_experts, slots=budget.slots,
        longer_layers=budget.longer_layers, transient=budget.transient, banks=budget.banks,
        apart=budget.apart, planes=budget.tier.planes,
    )  # fmt: skip
    spec = TierSpec(
        cache, limits.prefetch, disk.read if disk else None, prefetch_in=limits.prefetch_in,
        refines=refines, shares_slots=budget.tier.shares_slots,
        handed_out=config.num_experts if budget.run.handed_out else 0,
    )  # fmt: skip
    place = device if mesh is None else mesh.replicated
    gate_up, down = jax.tree.unflatten(tree, arrays)
    memory = TierMemory(spec, gate_up, down, supply.row_of, place, terms, disk)
    if limits.host_threads and store is not None:
        views = jax.tree.unflatten(tree, store.views)
        biases = [dense[name] for name in EXPERT_BIASES if name in dense]
        _use_host(memory, views, biases, config, limits.host_threads, device)
    if limits.bulk:
        memory.transfers = Transfers(cache, memory.pool, supply, device, in_flight=limits.bulk)
    return memory


def _use_host(
    memory: TierMemory, views: tuple[Any, Any], biases: Sequence[Any], config: ModelConfig,
    threads: int, device: jax.Device,
) -> None:  # fmt: skip
    """Has the host's cores multiply some misses, from a table that is measured now.

    Args:
      memory: of one tier, empty.
      views: numpy's of the host's rows, gate_up [R, 2F, D] and down [R, D, F].
      biases: as `HostCores`.
      threads: as `Limits.host_threads`, not 0.

    Raises:
      MoejaxError: the machine, the experts or the model cannot have it; the line says why.
    """
    reasons = [machine_refusal(), *map(form_refusal, views), job_refusal(config)]
    if said := next(filter(None, reasons), None):
        raise MoejaxError(f"memory.host_threads={threads} cannot be: {said}; set it to 0")
    row_of = np.asarray(memory.store.row_of)
    host = HostCores(*views, config, num_threads(threads), device, row_of, biases)
    tier = TierStep(memory.spec, config, memory.store, "block", ops.Kernels(target_of(device)))
    memory.pool = measure(host, tier, memory.pool, memory.ledger.expert_bytes)
    logging.info("%s", host.text)
    memory.use_host(host)


def _emulated(memory: TierMemory) -> TierMemory:
    """Moves all rows to the device; slots become tables only."""
    row_of = np.asarray(memory.store.row_of)
    if (row_of < 0).any():
        raise MoejaxError("policy.emulate holds every expert: set memory.host_gib=0")
    memory.close()
    place = memory.store.row_of.sharding
    device: jax.Device = next(iter(place.device_set))
    kind = device.default_memory().kind
    where = (memory.mesh.split() if memory.mesh else place).with_memory_kind(kind)
    gate_up, down = jax.device_put((memory.store.gate_up, memory.store.down), where)
    spec = dataclasses.replace(memory.spec, emulated=True, read=None)
    return TierMemory(spec, gate_up, down, row_of, place, memory.store.terms)


def _rows_of(
    tier: StoredTier,
    tiering: Tiering | None,
    reader: ExpertReader,
    num_devices: int = 1,
    own: Sequence[int] | None = None,
) -> ExpertReader | QuantizedRows | ShareRows:
    """Returns the reader of a tier's rows, which may be quantized or cut while they are read."""
    if num_devices > 1:
        rows = ShareRows(_rows_of(tier, tiering, reader), num_devices, own)
        if own is not None and tier.bits is None:  # a quantizer takes the whole expert
            reader.windows = rows.shares.windows(own)
        return rows
    if tiering is None or tier.bits is None:
        return reader
    scheme = made_scheme(tiering, tier.bits)
    return QuantizedRows(reader, Program(scheme=scheme, max_rank=0, passes=1))


def _sizes(
    tier: StoredTier, source: Checkpoint, tiering: Tiering, dtype: str, device: jax.Device,
    num_devices: int,
) -> TierSize:  # fmt: skip
    """Bytes of an expert of a tier; MoejaxError where it has no form in which experts move."""
    if tier.bits:
        with open_experts(source, dtype=dtype, device=device) as reader:
            rows = _rows_of(tier, tiering, reader, num_devices)
            return TierSize(name=tier.name, expert_nbytes=rows.row_nbytes)
    chosen = np.dtype(source.choose_dtype(dtype, device))
    sizes = checkpoint_sizes(source, chosen, num_devices)
    if sizes.refusal:
        raise MoejaxError(f"tier {tier.name} cannot move: {sizes.refusal}")
    return tier_of(sizes, tier.name)


def _width_of_shares(
    checkpoint: Checkpoint, stored: Sequence[StoredTier], sources: Sequence[Checkpoint],
    tiering: Tiering, dtype: np.dtype, num_devices: int,
) -> int:  # fmt: skip
    """Width of a device's share of an expert; MoejaxError if tiers or biases are cut elsewhere."""
    shares = {
        tier.name: shares_of(source.config.expert_dim, num_devices, tiering.group_size)
        if tier.bits
        else stored_shares(source, dtype, num_devices)
        for tier, source in zip(stored, sources, strict=True)
    }
    widths = {name: own.share_width for name, own in shares.items()}
    if len(set(widths.values())) > 1:
        said = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise MoejaxError(
            f"a mesh of {num_devices} cuts an expert to different widths "
            f"in different tiers ({said}): give tiers of one group size (policy.group_size), or "
            "another mesh"
        )
    biases = stored_shares(checkpoint, dtype, num_devices)
    for name, own in shares.items() if checkpoint.config.expert_bias else ():
        if any(own.span(i) != biases.span(i) for i in range(num_devices)):
            raise MoejaxError(
                f"a mesh of {num_devices} cuts the experts of tier {name} in units of "
                f"{own.unit} and their biases in units of {biases.unit}: give "
                f"policy.group_size={biases.unit}, or another mesh"
            )
    return next(iter(widths.values()))


def _check_suits(policy: AnyPolicy, tiers: Sequence[TierSize], spec: PolicySpec) -> None:
    """Raises MoejaxError before anything is read, if the policy refuses the tiers."""
    nbytes = [tier.expert_nbytes for tier in tiers]
    if sorted(nbytes, reverse=True) != nbytes:
        said = ", ".join(f"{tier.name} {tier.expert_nbytes}" for tier in tiers)
        raise MoejaxError(f"policy.tiers must be of falling fidelity; bytes of an expert: {said}")
    try:
        policy.init(spec)
    except MoejaxError as error:
        if len(tiers) > 1 or "tier" not in str(error):
            raise
        raise MoejaxError(
            f"{error} (tiers are named so: --config.policy.tiers=int4,int2)"
        ) from error


def _check_partitions(policy: AnyPolicy, tiers: Sequence[TierSize]) -> None:
    """Raises MoejaxError for what a mesh that hands experts out does not serve."""
    reason = policy.partition_refusal
    if len(tiers) > 1:
        reason = f"it has {len(tiers)} tiers"
    if reason:
        raise MoejaxError(
            f"a mesh that hands experts out does not serve this policy: {reason}; or leave experts "
            "out of mesh"
        )


def _policy_parts(policy: AnyPolicy, run: RunSizes) -> dict[str, int]:
    """Bytes by part that steps take on the device because the policy asks for it."""
    if not policy.needs.importance:
        return {}
    nbytes = max(
        importance_nbytes(
            batch=run.prefill_batch, length=run.chunk, num_keys=run.context,
            num_heads=run.config.num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            itemsize=run.itemsize, platform=run.platform,
        )
        for num_kv_heads, head_dim in run.config.watched_heads
    )  # fmt: skip
    return {"importance of tokens": nbytes}


def preload_first(
    memory: TierMemory, budget: TierBudget, activations: Any, held: int, config: ModelConfig
) -> int:
    """Fills an empty tier's slots with its first experts; returns how many a layer has.

    Every expert where there is room for all; else those that were chosen most (int[M, E]; None: not
    known, and none are), but for the first `held`, which are in tiers of higher fidelity. Where
    experts are handed out they are rows of each device, whose hottest experts come first.
    """
    if (first := _first_experts(memory, budget, activations, held)) is None:
        return 0
    device: jax.Device = next(iter(memory.store.row_of.sharding.device_set))
    preload(memory, config, ops.Kernels(target_of(device)), first)
    return first.shape[1]


def _first_experts(
    memory: TierMemory, budget: TierBudget, activations: Any, held: int
) -> np.ndarray | None:
    """Experts for `preload_first`, int32[M, n]."""
    if (np.asarray(memory.store.row_of) < 0).any() or not budget.slots or budget.tier.planes > 1:
        return None
    if activations is None and not budget.has_all_slots:
        return None
    if budget.has_all_slots or budget.run.handed_out:
        return np.tile(np.arange(budget.slots, dtype=np.int32), (budget.num_layers, 1))
    order = np.argsort(-np.asarray(activations), axis=1, kind="stable").astype(np.int32)
    order, every = order[:, held : held + budget.slots + (budget.longer_layers > 0)], budget.slots
    return np.concatenate([np.sort(order[:, :every], axis=1), order[:, every:]], axis=1)
