"""Programs between steps: a policy's requests, and bulk transfers that reach the device.

An expert crosses the link as ONE array of words, so that a transfer costs one `jax.device_put`
whatever the number of arrays that an expert has. The program that writes its bytes
(`insert_experts`) chooses its slot: until then the slot keeps its old owner, and no step ever sees
a slot whose bytes are in flight.

Axes: n experts of one call, W words of an expert, C slots of a layer, S slots of the pool.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.experts import residency as tables
from moejax.experts.residency import CacheSizes, first_slot, no_counts
from moejax.experts.state import CacheSpec, ExpertCache, TierSlots
from moejax.policies.base import Requests, pairs_with_room

WORD_NBYTES = 4


@dataclasses.dataclass(frozen=True)
class BlobLayout:
    """Layout of an expert's arrays in its words, each from a full word on.

    Attributes:
      row: (shape, name of the dtype) of each array.
    """

    row: tuple[tuple[tuple[int, ...], str], ...]

    @classmethod
    def of(cls, row: Sequence[Any]) -> "BlobLayout":
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


def is_resident(pool: TierSlots, what: jax.Array) -> jax.Array:
    """bool[n], whether experts are in a slot; `what` is int32[2, n], layers and experts or -1."""
    layers, experts = jnp.maximum(what, 0)
    return (pool.residency.slot_of[layers, experts] >= 0) & (what[0] >= 0)


def bucket(number: int, largest: int) -> int:
    """Returns the capacity of the smallest program for so many experts."""
    return min(1 << (number - 1).bit_length(), largest)


def pad_ids(experts: Sequence[tuple[int, int]], size: int) -> np.ndarray:
    """int32[2, size], layers and experts, filled up with -1."""
    what = np.full((2, size), -1, np.int32)
    what[:, : len(experts)] = np.asarray(experts, np.int32).reshape(-1, 2).T
    return what


def insert_experts(
    spec: CacheSizes,
    layout: BlobLayout,
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
    residency, counts = pool.residency, pool.counts
    sized = dataclasses.replace(spec, num_layers=1, banks=1)
    empty = no_counts(1)

    def one(table: jax.Array, mine: jax.Array) -> Any:
        row = dataclasses.replace(residency, table=table[None])
        asked = jnp.where(mine, experts, -1)
        found, row, events = tables.admit(sized, row, 0, asked, empty)
        dropped = jnp.sum(mine & (found < 0), dtype=jnp.int32)
        events = events.add(0, bulk=dropped, prefetch_waste=dropped)
        return row.table[0], jnp.where(mine, found, -1), events.events[0]

    # Each layer by the first of its experts, for all of them, so that none takes another one's
    # slot; and all layers at once: one after the other took longer than the step beside it.
    same = (layers[:, None] == layers[None]) & (layers >= 0)[None]
    index = jnp.arange(len(layers), dtype=jnp.int32)
    leads = (jnp.argmax(same, axis=1) == index) & (layers >= 0)
    rows = jnp.maximum(layers, 0)
    table, local, events = jax.vmap(one)(residency.table[rows], same & leads[:, None])
    local = jnp.max(local, axis=0)
    slots = jnp.where(local >= 0, first_slot(spec, rows) + local, -1)
    places = jnp.where(leads, layers, spec.num_layers)
    table = residency.table.at[places].set(table, mode="drop")
    residency = dataclasses.replace(residency, table=table)
    events = counts.events.at[places].add(events, mode="drop")
    counts = dataclasses.replace(counts, events=events)
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


def is_ready(array: jax.Array) -> bool:
    """Whether an array is computed, so that reading it waits for nothing."""
    return bool(array.is_ready())  # type: ignore[attr-defined]


class TransferRequests(NamedTuple):
    """Requests of a policy between two steps.

    Attributes:
      moved: requests that are carried out, -1 in the place of the others.
      ahead: experts to read from the disk (`Policy.disk_prefetch`).
      idle: int32[], see `Policy.tokens_until_change`; 0 also where something is requested.
    """

    moved: Requests
    ahead: Requests
    idle: jax.Array


def request_transfers(
    spec: CacheSpec, cache: ExpertCache, in_flight: jax.Array, room: jax.Array
) -> tuple[ExpertCache, TransferRequests]:
    """Asks the policy for transfers before the next step, and applies its demotions.

    A demotion frees the slot of the higher tier; `moejax.experts.transfers` fetches promoted
    experts, but emulated tiers have them on return.

    Args:
      cache: donated.
      in_flight: bool[M, T, E].
      room: int32[], experts whose transfer may start now. Pairs of requests that a policy repeats
        (`Policy.repeats_requests`) are carried out while there is room before them; else a demotion
        would leave a slot empty for as long as its promotion waits. Other requests all are.
    """
    assert spec.policy is not None
    resident = spec.resident([tier.residency.table for tier in cache.tiers]) | in_flight
    requests, state = spec.policy.transfers(cache.state, resident)
    ahead = spec.policy.disk_prefetch(state, resident)
    idle = spec.policy.tokens_until_change(state, resident)
    if len(requests.layer) and spec.policy.repeats_requests:
        moves = (requests.layer >= 0) & ~resident[requests.layer, requests.tier, requests.expert]
        sets_out = pairs_with_room(moves, room)
        requests = Requests(*(jnp.where(sets_out, field, -1) for field in requests))
    if not len(requests.layer):
        return dataclasses.replace(cache, state=state), TransferRequests(requests, ahead, idle)
    pools = tuple(
        tier if is_full or len(cache.tiers) == 1 else _drop_higher_copies(tier, i, requests)
        for i, (tier, is_full) in enumerate(zip(cache.tiers, spec.full, strict=True))
    )
    if any(of.emulated for of in spec.tiers):
        pools = _insert_all_emulated(spec, pools, requests)
    idle = jnp.where(jnp.any(requests.layer >= 0), 0, idle)
    cache = dataclasses.replace(cache, tiers=pools, state=state)
    return cache, TransferRequests(requests, ahead, idle)


def _drop_higher_copies(pool: TierSlots, tier: int, requests: Requests) -> TierSlots:
    """Evicts from a tier the experts requested in a lower one."""
    shape = (len(pool.residency.table), pool.residency.num_experts)
    layer = jnp.where((requests.layer >= 0) & (requests.tier > tier), requests.layer, shape[0])
    gone = jnp.zeros(shape, bool).at[layer, requests.expert].set(True, mode="drop")
    residency, counts = tables.release_everywhere(pool.residency, gone, pool.counts)
    return dataclasses.replace(pool, residency=residency, counts=counts)


def _insert_all_emulated(
    spec: CacheSpec, pools: tuple[TierSlots, ...], requests: Requests
) -> tuple[TierSlots, ...]:
    """Admits requested experts to emulated tiers, in the order of requests."""

    def one(index: jax.Array, pools: tuple[TierSlots, ...]) -> tuple[TierSlots, ...]:
        layer, expert, tier = (numbers[index] for numbers in requests)
        found = list(pools)
        for i, of in enumerate(spec.tiers):
            if of.emulated and of.cache.slots:
                asked = jnp.where((layer >= 0) & (tier == i), expert, -1)
                found[i] = _insert_emulated(of.cache, found[i], jnp.maximum(layer, 0), asked[None])
        return tuple(found)

    return jax.lax.fori_loop(0, len(requests.layer), one, pools)


def _insert_emulated(
    cache: CacheSizes, slots: TierSlots, layer: jax.Array, experts: jax.Array
) -> TierSlots:
    """Admits experts like `insert_experts`, without bytes."""
    _, residency, counts = tables.admit(cache, slots.residency, layer, experts, slots.counts)
    return dataclasses.replace(slots, residency=residency, counts=counts)
