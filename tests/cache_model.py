"""A plain Python model of a cache of experts: lists and dicts, one decision after the other."""

import dataclasses
from typing import Any

import numpy as np

from moejax.experts.residency import CacheSizes, Residency
from pallas_kernels.cache_plan.operands import CLOSED, EVENTS, LayerTables

ROW = ("slot_of", "owner", "last_use", "prefetched")


@dataclasses.dataclass(slots=True)
class Slot:
    owner: int = -1
    last_use: int = 0
    prefetched: bool = False


class CacheModel:
    """Follows the documents of `moejax.experts.residency`."""

    def __init__(self, spec: CacheSizes, max_needed: int) -> None:
        self.spec, self.max_needed = spec, max_needed
        self.slots = [[Slot() for _ in range(spec.most_slots)] for _ in range(spec.num_layers)]
        for layer in range(spec.longer_layers, spec.num_layers if spec.longer_layers else 0):
            self.slots[layer][-1].owner = CLOSED
        self.clock = 1
        self.counts = [dict.fromkeys(EVENTS, 0) for _ in range(spec.num_layers)]

    def where(self, layer: int, expert: int) -> int | None:
        found = [c for c, slot in enumerate(self.slots[layer]) if slot.owner == expert]
        assert len(found) <= 1
        return found[0] if found else None

    def victims(self, layer: int, safe: set[int]) -> list[int]:
        """Local slots in the order in which they are given away."""
        free, used = [], []
        for c, slot in enumerate(self.slots[layer]):
            if slot.owner == -1:
                free.append(c)
            elif slot.owner not in safe | {CLOSED}:
                used.append((slot.last_use, slot.owner, c))
        return free + [c for *_, c in sorted(used)]

    def free_up(self, layer: int, c: int) -> Slot:
        """Makes a slot free, and counts what leaves."""
        slot, counts = self.slots[layer][c], self.counts[layer]
        counts["evictions"] += slot.owner >= 0
        counts["prefetch_waste"] += slot.prefetched
        slot.owner, slot.last_use, slot.prefetched = -1, 0, False
        return slot

    def plan(self, layer: int, needed: set[int]) -> dict[str, Any]:
        counts = self.counts[layer]
        misses = [e for e in sorted(needed) if self.where(layer, e) is None]
        victims = self.victims(layer, needed)
        if len(misses) > len(victims):
            victims = [c for c in victims if self.slots[layer][c].owner == -1]
        hits = needed - set(misses)
        for e in hits:
            slot = self.slots[layer][self.where(layer, e)]
            counts["prefetch_hits"] += slot.prefetched
            slot.last_use, slot.prefetched = self.clock, False
        admitted = list(zip(misses, victims, strict=False))
        streamed = misses[len(admitted) :]
        for e, c in admitted:
            self.free_up(layer, c).owner = e
            self.slots[layer][c].last_use = self.clock
        counts["steps"] += bool(needed)
        counts["needed"] += len(needed)
        counts["hits"] += len(hits)
        counts["misses"] += len(misses)
        counts["admitted"] += len(admitted)
        counts["streamed"] += len(streamed)
        self.clock += 1
        width, first = self.spec.transient, sum(map(self.size, range(self.spec.num_layers)))
        places = {e: (0, self.place(layer, self.where(layer, e))) for e in needed - set(streamed)}
        admitted = [(e, self.place(layer, c)) for e, c in admitted]
        least = min(map(self.size, range(self.spec.num_layers)))
        most = min(self.max_needed, self.spec.num_experts - least)
        at_once = least < self.max_needed and most <= width
        if at_once:  # one wave is fetched with the admitted experts
            coming = [(e, first + i) for i, e in enumerate(streamed)]
            places |= {e: (0, slot) for e, slot in coming}
            return {"places": places, "admitted": admitted + coming, "streamed": []}
        places |= {e: (1 + i // width, first + i % width) for i, e in enumerate(streamed)}
        return {"places": places, "admitted": admitted, "streamed": streamed}

    def size(self, layer: int) -> int:
        """Slots of a layer that exist."""
        return sum(slot.owner != CLOSED for slot in self.slots[layer])

    def place(self, layer: int, c: int | None) -> int:
        """The global slot of a local one."""
        assert c is not None
        return sum(map(self.size, range(layer))) + c

    def predict(self, layer: int, wanted: set[int], limit: int) -> list[tuple[int, int]]:
        new = [e for e in sorted(wanted) if self.where(layer, e) is None][:limit]
        made = []
        for e, c in zip(new, self.victims(layer, wanted), strict=False):
            slot = self.free_up(layer, c)
            slot.owner, slot.last_use, slot.prefetched = e, self.clock, True
            self.counts[layer]["prefetched"] += 1
            made.append((e, self.place(layer, c)))
        return made

    def admit(self, layer: int, experts: list[int]) -> list[int]:
        """Global slots of experts that a transfer brought, or -1, in the order of the list."""
        victims, made = self.victims(layer, {e for e in experts if e >= 0}), []
        for e in experts:
            if e < 0 or not victims or self.where(layer, e) is not None:
                made.append(-1)
                continue
            c = victims.pop(0)
            slot = self.free_up(layer, c)
            slot.owner, slot.last_use, slot.prefetched = e, self.clock, True
            self.counts[layer]["bulk"] += 1
            made.append(self.place(layer, c))
        return made

    def row(self, layer: int) -> list[int]:
        """The tables of a layer, one after the other, in the order of `ROW`, then its counts."""
        slots, experts = self.slots[layer], range(self.spec.num_experts)
        slot_of = [-1] * len(experts)
        for c, slot in enumerate(slots):
            if slot.owner >= 0:
                slot_of[slot.owner] = c
        columns = [[s.owner, s.last_use, s.prefetched] for s in slots]
        flat = [value for column in zip(*columns, strict=True) for value in column]
        return [*slot_of, *flat, *self.counts[layer].values()]


def columns(residency: Residency) -> LayerTables:
    """The columns of all layers' tables."""
    return LayerTables.of(residency.table, residency.num_experts)


def check(residency: Residency, spec: CacheSizes) -> None:
    """Raises ValueError naming the invariant that does not hold."""
    num_layers, num_experts = spec.num_layers, spec.num_items
    shapes = {"table": (num_layers, num_experts + 3 * spec.most_slots), "clock": ()}
    for name, shape in shapes.items():
        leaf = getattr(residency, name)
        if leaf.dtype != np.int32 or leaf.shape != shape:
            raise ValueError(f"{name} is {leaf.dtype}{leaf.shape}, expected int32{shape}")
    owner, slots_of = np.asarray(columns(residency).owner), np.asarray(residency.slot_of)
    prefetched = np.asarray(columns(residency).prefetched)
    closed = np.zeros(owner.shape, bool)
    if spec.longer_layers:
        closed[spec.longer_layers * spec.banks :, -1] = True
    if not np.array_equal(owner == CLOSED, closed):
        raise ValueError(f"closed are {np.argwhere(owner == CLOSED).tolist()}")
    for layer in range(num_layers):
        experts = owner[layer][(owner[layer] != -1) & ~closed[layer]]
        if len(set(experts.tolist())) != len(experts):
            raise ValueError(f"layer {layer}: an expert is twice in owner")
        if len(experts) and not 0 <= experts.min() <= experts.max() < num_experts:
            raise ValueError(f"layer {layer}: owner has no expert of the layer")
        slot_of = np.full(num_experts, -1)
        used = owner[layer] >= 0
        slot_of[owner[layer][used]] = np.flatnonzero(used)
        if not np.array_equal(slot_of, slots_of[layer]):
            raise ValueError(f"layer {layer}: slot_of is not the inverse of owner")
        if (~used & prefetched[layer]).any():
            raise ValueError(f"layer {layer}: a slot without an owner is prefetched")
