"""From a checkpoint and limits to weights and experts that move."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from moejax.checkpoints.experts import ExpertReader, open_experts
from moejax.checkpoints.open import Checkpoint, open_checkpoint
from moejax.checkpoints.sizes import Sizes, checkpoint_sizes
from moejax.errors import MoejaxError
from moejax.experts.allocator import check_room, limits_on, room_nbytes
from moejax.experts.budget import Budget, Limits, Tier, make_budget, unused
from moejax.experts.budget.tables import RING_BLOCKS
from moejax.experts.disk_cache import DiskExperts
from moejax.experts.disk_reader import SsdReader, check_waiting
from moejax.experts.expert_memory import ExpertMemory
from moejax.experts.expert_pool import PoolSpec
from moejax.experts.host_store import HeldRows, HostStore, RowSupply
from moejax.experts.pinned_memory import check_pinned_limit
from moejax.experts.residency import CacheSpec
from moejax.experts.transfers import Transfers
from moejax.weights.qtensor import Weight

QUEUE_LENGTH = 64  # requests of a reader that wait


def tier_of(sizes: Sizes) -> Tier:
    """The form of a model's experts, as a budget takes it."""
    return Tier(name=sizes.expert_form, expert_nbytes=sizes.expert_nbytes)


def open_memory(
    checkpoint: Checkpoint,
    limits: Limits,
    *,
    dtype: str,
    device: jax.Device,
    batch: int,
    context: int,
    chunk: int,
    progress: bool,
) -> tuple[Mapping[str, Weight], ExpertMemory | None, Budget]:
    """Loads a model under limits: whole if it fits, else its experts to host memory or not at all.

    Args:
      checkpoint: any; an Orbax directory only if it fits.
      limits: of memory.
      dtype: of plain weights and activations, or "auto".
      device: of the model.
      batch: sequences at once.
      context: slots of the KV cache of each.
      chunk: tokens of one sequence that a prefill step takes.
      progress: show bars on stderr.

    Returns:
      The weights, what holds the experts that they lack (None: they lack none), and the budget.

    Raises:
      MoejaxError: the limits are too tight (the text names the least that would do), or the
        checkpoint cannot be read.
    """
    limits = limits_on(device, limits)
    chosen = np.dtype(checkpoint.choose_dtype(dtype, device))
    sizes = checkpoint_sizes(checkpoint, chosen)
    disk_source(checkpoint, limits)  # what is wrong with it is said before anything is read
    budget = make_budget(
        checkpoint.config,
        sizes.weights_nbytes,
        tier_of(sizes),
        batch=batch,
        context=context,
        chunk=chunk,
        limits=limits,
        platform=device.platform,
        itemsize=chosen.itemsize,
    )
    check_room(device, limits, budget.device)
    for line in unused(budget):
        logging.warning("%s", line)
    if not budget.pooled:
        weights = checkpoint.load(dtype=dtype, device=device, progress=progress)
        return weights, None, budget
    if sizes.refusal:
        raise MoejaxError(f"the experts do not fit and cannot move: {sizes.refusal}")
    check_pinned_limit(budget.total_host, device)  # of all allocations, before the first
    weights = checkpoint.load(dtype=dtype, device=device, progress=progress, experts=False)
    memory = load_experts(checkpoint, budget, dtype=dtype, device=device, progress=progress)
    return weights, memory, budget


def load_whole(
    checkpoint: Checkpoint, *, dtype: str, device: jax.Device, progress: bool
) -> Mapping[str, Weight]:
    """Loads a model to the device, of which nothing is planned; arguments as of `open_memory`.

    Raises:
      MoejaxError: the device's allocator cannot hold the weights, or they cannot be read.
    """
    if room_nbytes(device) is not None:
        chosen = np.dtype(checkpoint.choose_dtype(dtype, device))
        sizes, config = checkpoint_sizes(checkpoint, chosen), checkpoint.config
        experts = len(config.moe_layers) * config.num_experts * sizes.expert_nbytes
        check_room(device, Limits(), {**sizes.weights_nbytes, "experts": experts})
    return checkpoint.load(dtype=dtype, device=device, progress=progress)


def disk_source(checkpoint: Checkpoint, limits: Limits) -> Checkpoint:
    """Whose files experts are read from.

    Raises:
      MoejaxError: `limits.disk_path` is no checkpoint, or one of another model.
    """
    if not limits.disk_path:
        return checkpoint
    source = open_checkpoint(limits.disk_path)
    if source.config != checkpoint.config:
        raise MoejaxError(
            f"memory.disk_path={limits.disk_path} holds another model than {checkpoint.directory}"
        )
    return source


def load_experts(
    checkpoint: Checkpoint,
    budget: Budget,
    *,
    dtype: str,
    device: jax.Device,
    progress: bool,
    packed: Callable[[ExpertReader], Any] | None = None,
) -> ExpertMemory:
    """The host's rows, filled; the pool, empty; the disk, open where rows are too few.

    Args:
      checkpoint: its experts are read here, or from `budget.limits.disk_path` where that is given.
      budget: a pooled one.
      dtype: as in `open_memory`.
      device: likewise.
      progress: likewise.
      packed: what reads rows of another form from a reader of the checkpoint's.
    """
    source = disk_source(checkpoint, budget.limits)
    reader: Any = open_experts(source, dtype=dtype, device=device)
    with open_experts(checkpoint, dtype=dtype, device=device) as own:
        terms = own.load_compensators(device, progress=progress)
        forms: list[Any] = [jax.tree.structure((r.gate_up, r.down)) for r in (own, reader)]
        if own.row != reader.row or forms[0] != forms[1]:
            raise MoejaxError(
                f"memory.disk_path={budget.limits.disk_path} holds experts of another form than "
                f"{checkpoint.directory}: give a copy of it"
            )
    if packed is not None:
        reader = packed(reader)
    num_layers, num_experts = reader.num_layers, reader.num_experts
    waits = budget.host_rows < num_layers * num_experts
    if waits:
        check_waiting(reader, device, str(source.directory))
    store, row_of = None, np.full((num_layers, num_experts), -1, np.int32)
    arrays = tuple(jnp.zeros((0, *part.shape), part.dtype, device=device) for part in reader.row)
    if budget.host_rows:
        store = HostStore.allocate(reader, budget.host_rows, device)
        store.fill(progress=progress)
        row_of, arrays = store.row_of, store.arrays
    disk = None
    if waits:
        # Of the ring's place in the budget, what steps waited for has what transfers do not need.
        blocks = RING_BLOCKS // 2 if budget.limits.bulk else 1
        ring = SsdReader(reader, device, ring_blocks=blocks, queue_length=QUEUE_LENGTH)
        disk = DiskExperts(
            ring, store, reader.row, row_of, most_kept=RING_BLOCKS - blocks, most_ahead=blocks
        )
    else:
        reader.close()
    gate_up, down = jax.tree.unflatten(jax.tree.structure((reader.gate_up, reader.down)), arrays)
    cache = CacheSpec(
        num_layers=num_layers, num_experts=num_experts, slots=budget.slots,
        transient=budget.transient, banks=budget.banks,
    )  # fmt: skip
    limits = budget.limits
    read = disk.read if disk else None
    spec = PoolSpec(cache, limits.prefetch, read, prefetch_in=limits.prefetch_in)
    memory = ExpertMemory.of_rows(spec, gate_up, down, row_of, device, terms)
    memory.disk = disk
    if budget.limits.bulk:
        supply: RowSupply
        if disk is not None:
            supply = disk
        else:
            assert store is not None
            supply = HeldRows(row_of, store.rows)
        memory.transfers = Transfers(
            cache, memory.pool, supply, device, in_flight=budget.limits.bulk
        )
    return memory
