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
from moejax.policies.make import make_policy
from moejax.routing.simulate.costs import GIB
from moejax.routing.simulate.replay import EVENTS
from moejax.routing.simulate.runs import Run, run_policies
from moejax.routing.trace import DECODE
from scripts.studies.speed.lookup_steps import distinct_experts, trace_of

SHAPE, CONTEXT = "Qwen3-30B-A3B", 1024
BUDGETS = (3.0, 7.0, 12.0)  # GiB
TIER = "int4"
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
    """What a sequence of steps reads and moves."""

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
    trace = trace_of(steps, ids, CONFIGS[SHAPE].num_experts)
    policy = make_policy("on_demand")
    runs = [
        Run(policy=policy, tiers=(TIER,), expert_bytes=(nbytes,), slots=(count,)) for count in slots
    ]
    misses = [
        int(result.events[DECODE, EVENTS.index("misses"), 0])
        for result in run_policies(trace, runs)
    ]
    moved = tuple(nbytes * count / len(steps) for count in misses)
    return Moved(len(steps), distinct_experts(trace), moved)


def made_up_ids(count: int) -> np.ndarray:
    """int32[count, M, A], independent tokens of the shape's popularity."""
    work = make_workload(CONFIGS[SHAPE], num_steps=count, batch=1, exponent=EXPONENTS[SHAPE])
    return work.ids[:, :, 0]
