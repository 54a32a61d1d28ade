"""Bytes and time of verify steps at Qwen3-30B-A3B's shape, by the simulator and measured rows."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moejax.benchmarking.routing import EXPONENTS, make_workload
from moejax.config.commands import MemoryConfig, PlanConfig
from moejax.files.result_rows import read_rows
from moejax.models.shapes import CONFIGS
from moejax.planning import budget_of
from moejax.routing.simulate.costs import GIB

SHAPE, CONTEXT = "Qwen3-30B-A3B", 1024
BUDGETS = (3.0, 7.0, 12.0)  # GiB
POOLED, RESIDENT = "benchmark_h200.jsonl", "packed_model_h200.jsonl"
NAME = (
    r"{figure}, Qwen3-30B-A3B, random weights, INT4 g64 float, attention INT4, head bf16, "
    r"batch {batch}, (?:8|12) GiB, \d prompts of 512 random tokens; routing decode: made up, .*"
)


@dataclasses.dataclass(frozen=True)
class Clock:
    """Milliseconds of a step from the experts that it reads and the bytes that it moves.

    base(u) goes through measured (experts of a layer, ms), straight between them and beyond.
    """

    experts: tuple[float, ...]  # rising
    ms: tuple[float, ...]
    link_gib_per_s: float = np.inf

    def step_ms(self, experts: float, num_bytes: float) -> float:
        """Milliseconds of a step."""
        at = np.clip(np.searchsorted(self.experts, experts), 1, len(self.experts) - 1)
        (x0, x1), (y0, y1) = self.experts[at - 1 : at + 1], self.ms[at - 1 : at + 1]
        base = y0 + (experts - x0) * (y1 - y0) / (x1 - x0)
        return float(base + 1e3 * num_bytes / (self.link_gib_per_s * GIB))


def pooled_clock(folder: Path) -> Clock:
    """The clock of experts that move, a line through the rows of 8 and 12 GiB for each batch.

    The link is that of batch 1.
    """
    rows, lines, read = read_rows(folder / POOLED), [], []
    for batch in (1, 4):
        times, moved = (
            [
                row.figure
                for row in rows
                if re.fullmatch(NAME.format(figure=of, batch=batch), row.what)
            ]
            for of in ("TPOT median", "link bytes of a decoded token")
        )
        (ms0, ms1), (mb0, mb1) = times, [batch * megabytes for megabytes in moved]
        ms_a_mb = (ms0 - ms1) / (mb0 - mb1)
        lines.append((ms0 - mb0 * ms_a_mb, 1e9 / ms_a_mb / GIB))
        work = make_workload(CONFIGS[SHAPE], num_steps=64, batch=batch, exponent=EXPONENTS[SHAPE])
        read.append(work.distinct)
    return Clock(tuple(read), tuple(base for base, _ in lines), lines[0][1])


def resident_clock(folder: Path) -> Clock:
    """The clock of a resident model: batches of 1, 4 and 16, whose routing is near uniform."""
    config, points = CONFIGS[SHAPE], []
    missed = 1 - config.experts_per_token / config.num_experts
    for batch in (1, 4, 16):
        begins = (
            f"batch {batch} prompt 512 TPOT, random cache, calls of 16, {SHAPE}, 48 layers, INT4"
        )
        (ms,) = [r.figure for r in read_rows(folder / RESIDENT) if r.what.startswith(begins)]
        points.append((config.num_experts * (1 - missed**batch), ms))
    read, times = zip(*points, strict=True)
    return Clock(read, times)


def slots_of_budgets() -> tuple[dict[float, int], int]:
    """Slots of a layer under each budget as planned, and bytes of an expert."""
    found = {}
    for gib in BUDGETS:
        budget = budget_of(
            PlanConfig(
                shape=SHAPE, bits=4, attention_bits=4, context=CONTEXT,
                memory=MemoryConfig(device_gib=gib),
            )
        )  # fmt: skip
        found[gib] = budget.tiers[0].slots
        nbytes = budget.tiers[0].tier.expert_nbytes
    return found, nbytes


@dataclasses.dataclass(frozen=True)
class Moved:
    """Reads and moves of a sequence of steps."""

    steps: int
    experts: float  # of a layer that a step reads, the mean
    num_bytes: tuple[float, ...]  # of a step over the link, under each budget


def replayed(
    steps: Sequence[Sequence[int]], ids: np.ndarray, slots: Sequence[int], nbytes: int
) -> Moved:
    """Replays steps, each a list of positions, under LRU caches of so many slots.

    Args:
      ids: int[N, M, A], the experts of each position.
      slots: of a layer, each a cache.
      nbytes: of an expert.
    """
    masks = needed(steps, ids, CONFIGS[SHAPE].num_experts)
    misses = lru_misses(masks, slots)
    moved = tuple(float(nbytes * count / len(steps)) for count in misses)
    return Moved(len(steps), float(masks.sum(axis=-1).mean()), moved)


def needed(steps: Sequence[Sequence[int]], ids: np.ndarray, num_experts: int) -> np.ndarray:
    """bool[S, M, E], the experts that each step reads: the union of its positions'."""
    masks = np.zeros((len(steps), ids.shape[1], num_experts), bool)
    layers = np.arange(ids.shape[1])[None, :, None]
    for mask, step in zip(masks, steps, strict=True):
        mask[layers, ids[np.asarray(step)]] = True
    return masks


def lru_misses(masks: np.ndarray, slots: Sequence[int]) -> np.ndarray:
    """int[K], misses of caches that begin empty, by the rules of `moejax.routing.simulate`.

    Twenty times as fast as that on a CPU, which the test of this file compares it with. What does
    not fit beside a step's other experts passes without a slot, and then evicts nothing.
    """
    _, num_layers, num_experts = masks.shape
    size = np.asarray(slots)[:, None]
    used = np.zeros((len(slots), num_layers, num_experts), np.int64)  # last use; 0: absent
    found, expert = np.zeros(len(slots), np.int64), np.arange(num_experts)
    for now, need in enumerate(masks, 1):
        there = used > 0
        missed = need & ~there
        coming, free = missed.sum(axis=-1), size - there.sum(axis=-1)
        found += coming.sum(axis=-1)
        victims = there & ~need
        room = np.where(coming <= free + victims.sum(axis=-1), coming, free)
        gone = np.maximum(room - free, 0)
        order = np.where(victims, used * num_experts + expert, np.iinfo(np.int64).max)
        most = int(gone.max())
        if most:
            first = np.sort(np.partition(order, most - 1, axis=-1)[..., :most], axis=-1)
            last = np.take_along_axis(first, np.maximum(gone - 1, 0)[..., None], axis=-1)
            used[(order <= last) & victims & (gone > 0)[..., None]] = 0
        used[need & there] = now
        used[missed & (np.cumsum(missed, axis=-1) <= room[..., None])] = now
    return found


def made_up_ids(count: int) -> np.ndarray:
    """int32[count, M, A], independent tokens of the shape's popularity."""
    work = make_workload(CONFIGS[SHAPE], num_steps=count, batch=1, exponent=EXPONENTS[SHAPE])
    return work.ids[:, :, 0]
