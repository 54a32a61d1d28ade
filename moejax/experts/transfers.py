"""Bulk transfers between steps: fetches requested experts within a few steps.

    transfers.request(layer, experts)       # at any time, from any thread
    pool = transfers.advance(pool)          # before each step is dispatched: `ExpertMemory.step`
    transfers.send()                        # after all else that the step waits for

Each request passes through a pinned block of the host, a stage a step:

1. a thread copies the expert's row into a block, while steps run; where no row has it, the disk is
   asked first (`DiskExperts`);
2. before the next step, the block is put on the device: one DMA that overlaps that step, since a
   put waits for what was enqueued before it and overlaps what is enqueued after;
3. before the step after, once the bytes are there, `_insert_experts` chooses a slot, writes it and
   publishes it, for some experts in one program. Until then the slot's old owner serves.

The host never waits, and nothing is dispatched without requests.

An expert crosses the link as ONE array of words, so that a transfer costs one `jax.device_put`
whatever the number of arrays that an expert has. Axes: n experts of one call, W words of an expert.
"""

import concurrent.futures
import contextlib
import dataclasses
import enum
import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from moejax.devices import REPLICATED, mesh_of, specs_of
from moejax.errors import MoejaxError
from moejax.experts import residency as tables
from moejax.experts.disk_cache import DiskExperts
from moejax.experts.host_store import Expert, HostStore, copy_row
from moejax.experts.pinned_memory import allocate_host_arrays
from moejax.experts.residency import CacheSizes
from moejax.experts.state import TierSlots
from moejax.experts.transfer_programs import is_ready
from moejax.programs import CompiledPrograms

MOST_INSERTED = 8  # experts that one program writes to their slots
_LOOKED_AT = 64  # requests, of those that wait, before a step
WORD_NBYTES = 4  # of the words in which an expert crosses the link


@dataclasses.dataclass(frozen=True)
class _BlobLayout:
    """Layout of an expert's arrays in its words, each from a full word on."""

    row: tuple[tuple[tuple[int, ...], str], ...]  # (shape, name of the dtype) of each array

    @classmethod
    def of(cls, row: Sequence[Any]) -> "_BlobLayout":
        """Returns the layout of arrays; ValueError for numbers not of 1, 2 or 4 bytes."""
        found = cls(tuple((tuple(part.shape), str(np.dtype(part.dtype))) for part in row))
        for _, dtype in found.row:
            if jnp.dtype(dtype).itemsize not in (1, 2, 4):
                raise ValueError(f"experts of {dtype} do not go into words of {WORD_NBYTES} bytes")
        return found

    def _spans(self) -> Iterator[tuple[slice, tuple[int, ...], Any]]:
        """Words, shape and dtype of each array."""
        start = 0
        for shape, dtype in self.row:
            end = start - (-math.prod(shape) * jnp.dtype(dtype).itemsize // WORD_NBYTES)
            yield slice(start, end), shape, jnp.dtype(dtype)
            start = end

    @property
    def num_words(self) -> int:
        """Number of words, W."""
        return max(words.stop for words, _, _ in self._spans())

    def views(self, memory: np.ndarray) -> list[np.ndarray]:
        """The arrays of an expert in words of the host, uint32[W]; to be written to."""
        return [
            memory[words].view(dtype)[: math.prod(shape)].reshape(shape)
            for words, shape, dtype in self._spans()
        ]

    def parts(self, blob: jax.Array) -> list[jax.Array]:
        """The arrays of an expert out of its words on the device, uint32[W]."""
        parts = []
        for words, shape, dtype in self._spans():
            numbers = jax.lax.bitcast_convert_type(blob[words], dtype)
            parts.append(numbers.reshape(-1)[: math.prod(shape)].reshape(shape))
        return parts


def _bucket(number: int, largest: int) -> int:
    """Returns the capacity of the smallest program for so many experts."""
    return min(1 << (number - 1).bit_length(), largest)


def _pad_ids(experts: Sequence[tuple[int, int]], size: int) -> np.ndarray:
    """int32[2, size], layers and experts, filled up with -1."""
    what = np.full((2, size), -1, np.int32)
    what[:, : len(experts)] = np.asarray(experts, np.int32).reshape(-1, 2).T
    return what


def _insert_experts(
    spec: CacheSizes,
    layout: _BlobLayout,
    pool: TierSlots,
    blobs: tuple[jax.Array, ...],
    what: jax.Array,
) -> tuple[TierSlots, jax.Array]:
    """Admits arrived experts to slots, evicting by the rule of every step.

    An expert that meanwhile got a slot, or that finds no victim, is dropped: its bytes crossed the
    link for nothing, and count as `bulk` and as `prefetch_waste`.

    Args:
      layout: static, as is the spec.
      pool: donated.
      blobs: n of uint32[W].
      what: int32[2, n], layers and experts, no expert twice; -1: no such transfer, its blob is any.

    Returns:
      The pool, and int32[n] global slots, -1 where none was had.
    """
    layers, experts = what
    slots, residency, counts = tables.admit(spec, pool.residency, layers, experts, pool.counts)
    dropped = jnp.where((layers >= 0) & (slots < 0), layers, spec.num_layers)
    counts = counts.add(dropped, bulk=1, prefetch_waste=1)
    banks = []
    for number, bank in enumerate(pool.banks):
        here = (slots >= 0) & (layers % len(pool.banks) == number)
        places = jnp.where(here, slots, spec.num_slots)
        leaves, tree = jax.tree.flatten(bank)
        for i, blob in enumerate(blobs):
            parts = layout.parts(blob)
            leaves = [
                leaf.at[places[i]].set(part, mode="drop")
                for leaf, part in zip(leaves, parts, strict=True)
            ]
        banks.append(jax.tree.unflatten(tree, leaves))
    pool = dataclasses.replace(pool, banks=tuple(banks), residency=residency, counts=counts)
    return pool, slots


@dataclasses.dataclass(kw_only=True)
class _TransferCounters:
    """Sums of requests by outcome."""

    requested: int = 0  # accepted
    repeated: int = 0  # of what is on its way already
    failed: int = 0  # of which the bytes could not be read
    moved: int = 0  # experts that were sent over the link
    inserted: int = 0  # of them, those that got a slot
    dropped: int = 0  # of them, those that did not: by then in one, or every slot was pinned


class _State(enum.Enum):
    COPYING = "being copied to a block"
    FLYING = "on the link"
    INSERTING = "being written to a slot"


@dataclasses.dataclass(eq=False, kw_only=True)
class _Transfer:
    expert: Expert
    block: int
    copied: concurrent.futures.Future[None]
    state: _State = _State.COPYING
    staged: jax.Array | None = None  # the block's words on the device
    result: tuple[jax.Array, int] | None = None  # of `_insert_experts`, and the place in it


class Transfers:
    """The requests of one model. `request` may be called by any thread.

    Attributes:
      counters: sums of requests and transfers.
      most_in_flight: experts at once between their row and their slot.
      programs: some sizes of `_insert_experts`, compiled by the constructor.
    """

    def __init__(
        self,
        cache: CacheSizes,
        pool: TierSlots,
        supply: HostStore | DiskExperts,
        device: jax.Device,
        *,
        in_flight: int,
    ) -> None:
        """Allocates the blocks and compiles what runs between steps.

        Args:
          cache: sizes of the pool, which has slots.
          pool: gives the shapes.
          in_flight: experts at once between their row and their slot: so many blocks of host
            memory, and at most so many experts on the device beside the pool.
        """
        self.counters, self.most_in_flight = _TransferCounters(), in_flight
        self._mesh = mesh = mesh_of(pool.residency.clock.sharding)
        self.programs = CompiledPrograms(mesh=mesh)
        self._cache, self._supply = cache, supply
        rows = [jax.ShapeDtypeStruct(p.shape[1:], p.dtype) for p in jax.tree.leaves(pool.banks[0])]
        self._layout = _BlobLayout.of(rows)
        words = jax.ShapeDtypeStruct((self._layout.num_words,), np.uint32)
        self._blocks = allocate_host_arrays([words] * in_flight, device, mesh)
        self._free = list(range(in_flight))
        self._batch = min(in_flight, MOST_INSERTED)
        # The device's own memory: a put of a pinned array by device alone might move nothing.
        kind = device.default_memory().kind
        self._place: jax.sharding.Sharding
        self._split: jax.sharding.Sharding
        self._place = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        # Of an expert's words, of which each device of a mesh has those of its share.
        self._split = self._place
        if mesh is not None:
            self._place, self._split = mesh.replicated, mesh.split(kind)
        self._queue: dict[Expert, None] = {}  # in order of the requests
        self._moving: dict[Expert, _Transfer] = {}  # those that have a block
        self._lock = threading.Lock()
        self._copier = _copier()
        self._is_closed = False
        self._compile(pool)

    @property
    def pending(self) -> list[Expert]:
        """Experts that are accepted and not over."""
        with self._lock:
            return [*self._queue, *self._moving]

    def request(self, layer: int, experts: Iterable[int]) -> None:
        """Asks for experts of a layer, the most urgent first."""
        with self._lock:
            if self._is_closed:
                raise ValueError("the transfers are closed")
            for number in experts:
                expert = (int(layer), int(number))
                sizes = (self._cache.num_layers, self._cache.num_experts)
                if not all(0 <= i < size for i, size in zip(expert, sizes, strict=True)):
                    raise ValueError(f"no expert {expert[1]} of sparse layer {expert[0]}")
                if expert in self._queue or expert in self._moving:
                    self.counters.repeated += 1
                else:
                    self._queue[expert] = None
                    self.counters.requested += 1

    def advance(self, pool: TierSlots) -> TierSlots:
        """Advances transfers between two steps without waiting; `send` does the rest.

        `pool` is donated where something lands.
        """
        with self._lock:
            if self._is_closed or not (self._queue or self._moving):
                return pool
            self._finish_inserts()
            flying = self._in(_State.FLYING)
            ready = [t for t in flying if t.staged is not None and is_ready(t.staged)]
            for first in range(0, len(ready), self._batch):
                pool = self._insert(pool, ready[first : first + self._batch])
            return pool

    def send(self) -> None:
        """Sends experts that are ready in their blocks over the link, and has others copied there.

        The link does one put after the other, and a step waits for its own arguments: those go
        before this, and the step is dispatched after it, or nothing crosses beside the step.
        """
        with self._lock:
            if self._is_closed:
                return
            if ready := self._finish_copies():
                put = jax.device_put([self._blocks[t.block].array for t in ready], self._split)
                for transfer, words in zip(ready, put, strict=True):
                    transfer.staged, transfer.state = words, _State.FLYING
                self.counters.moved += len(ready)
            self._start()

    def forget_steps(self) -> None:
        """Drops the results of programs that ran behind a failed step.

        Landing transfers end as if they had found no slot.
        """
        with self._lock:
            for transfer in self._in(_State.INSERTING):
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    jax.block_until_ready(transfer.result)  # it may read the block until then
                self._end(transfer)
                self.counters.dropped += 1

    def close(self) -> None:
        """Forgets all requests; waits for a copy that runs. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            copying = self._in(_State.COPYING)
            self._queue, self._moving = {}, {}
        self._copier.shutdown(wait=True, cancel_futures=True)
        for transfer in copying:
            self._supply.release(transfer.expert)

    def _insert(self, pool: TierSlots, batch: list[_Transfer]) -> TierSlots:
        size = _bucket(len(batch), self._batch)
        what = jax.device_put(_pad_ids([transfer.expert for transfer in batch], size), self._place)
        blobs = [transfer.staged for transfer in batch]
        blobs += [blobs[0]] * (size - len(blobs))  # of layer -1: nothing is read of them
        arguments = (pool, tuple(blobs), what)
        try:
            pool, slots = self._program(arguments)(*arguments)
        except BaseException:
            for transfer in batch:
                self._end(transfer)
            raise
        slots.copy_to_host_async()
        for place, transfer in enumerate(batch):
            transfer.state, transfer.result = _State.INSERTING, (slots, place)
        return pool

    def _finish_inserts(self) -> None:
        """Frees the blocks of inserted experts, which are read no more."""
        for transfer in self._in(_State.INSERTING):
            assert transfer.result is not None
            slots, place = transfer.result
            if not is_ready(slots):
                continue
            try:
                slot = jax.device_get(slots)[place]
            except jax.errors.JaxRuntimeError:  # the pool is lost with it
                for other in self._in(_State.INSERTING):
                    self._end(other)
                raise
            self._end(transfer)
            if slot >= 0:
                self.counters.inserted += 1
            else:
                self.counters.dropped += 1

    def _finish_copies(self) -> list[_Transfer]:
        """Returns transfers that are copied to a block."""
        ready = []
        for transfer in self._in(_State.COPYING):
            if not transfer.copied.done():
                continue
            self._supply.release(transfer.expert)
            if (error := transfer.copied.exception()) is None:
                ready.append(transfer)
            else:
                self._end(transfer)
                self._report(transfer.expert, error)
        return ready

    def _start(self) -> None:
        """Gives blocks to requests of which the bytes are in host memory."""
        for expert in list(itertools.islice(self._queue, _LOOKED_AT)):
            if not self._free:
                break
            try:
                row = self._supply.acquire(expert)
            except MoejaxError as error:
                del self._queue[expert]
                self._report(expert, error)
                continue
            if row is None:
                continue
            block = self._free[-1]
            try:
                blocks = self._blocks[block].views
                into = [part for words in blocks for part in self._layout.views(words)]
                copied = self._copier.submit(copy_row, into, row)
            except RuntimeError:  # no thread: it waits where it was, and this copy must never run
                self._copier = _copier()
                self._supply.release(expert)
                raise
            del self._queue[expert]
            self._moving[expert] = _Transfer(expert=expert, block=self._free.pop(), copied=copied)

    def _report(self, expert: Expert, error: BaseException) -> None:
        self.counters.failed += 1
        logging.error("expert %d of sparse layer %d stays: %s", expert[1], expert[0], error)

    def _end(self, transfer: _Transfer) -> None:
        """Ends a transfer and frees its block."""
        del self._moving[transfer.expert]
        self._free.append(transfer.block)

    def _in(self, state: _State) -> list[_Transfer]:
        """Transfers with a block that are in this state."""
        return [transfer for transfer in self._moving.values() if transfer.state is state]

    def _compile(self, pool: TierSlots) -> None:
        """Compiles the programs, so that no step waits for it."""
        num_words = self._layout.num_words * (self._mesh.size if self._mesh else 1)
        blob = jax.ShapeDtypeStruct((num_words,), np.uint32, sharding=self._split)
        for size in sorted({_bucket(n, self._batch) for n in range(1, self._batch + 1)}):
            what = jax.ShapeDtypeStruct((2, size), np.int32, sharding=self._place)
            self._program((pool, (blob,) * size, what))

    def _program(self, inputs: Any) -> Any:
        results = REPLICATED if self._mesh is None else (specs_of(inputs[0]), REPLICATED)
        static = (self._cache, self._layout)
        return self.programs.get(_insert_experts, static, inputs, num_donated=1, results=results)


def _copier() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(1, "moejax-transfers")
