"""How fast a trace goes through caches and policies, many settings side by side.

    python -m scripts.studies.speed.bench_sweep --device=gpu --settings=1000 --tokens=10000 \
        --limit=60 \
        --output=scripts/studies/speed/sweep_h200.jsonl
    python -m scripts.studies.speed.bench_sweep --device=cpu --settings=100 --limit=600

The trace is made up, of Qwen3-30B-A3B's shape: 48 layers, 8 of 128 experts a token. A figure is the
seconds of a whole sweep as `moejax.sweep` runs it, ceilings and tables of settings included, whose
programs are compiled; the first sweep less the second one is what compiling takes (`--nowarm`: one
sweep, compiling included). Beside it stands the time that the process had of all cores together,
which other processes do not lengthen as much. `--limit` fails where a sweep, compiling included,
takes longer.
"""

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import app, flags

from moejax.devices import choose_device
from moejax.files.result_rows import (
    ResultRow,
    append_rows,
    command_line,
    describe_device,
    package_versions,
    today,
)
from moejax.routing.simulate.sweeping import SweepPoint, sweep
from moejax.routing.trace import Trace
from scripts.studies.speed.sweep_grids import POLICIES, drifting_trace, grid_of, lists_of, tiers_of

_DEVICE = flags.DEFINE_enum("device", "auto", ["auto", "cpu", "gpu"], "where")
_SETTINGS = flags.DEFINE_integer("settings", 1000, "of a sweep", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 10_000, "of the trace, one a step", lower_bound=1)
_POLICY = flags.DEFINE_list(
    "policy", ["lru", "dynaexq", "dymoe", "buddymoe", "compose"], f"among {', '.join(POLICIES)}"
)
_LAYERS = flags.DEFINE_integer("layers", 48, "of the trace")
_EXPERTS = flags.DEFINE_integer("experts", 128, "of a layer")
_WIDTH = flags.DEFINE_integer("width", 8, "experts of a token")
_LIMIT = flags.DEFINE_float("limit", 0, "seconds that a sweep may take, compiling included; 0: any")
_WARM = flags.DEFINE_bool("warm", True, "a second sweep, to tell compiling from the rest")
_NOTE = flags.DEFINE_string("note", "", "what else is to be known of the run")
_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file that rows are appended to")


class Measured(NamedTuple):
    """Seconds of the first sweep, of the last one, and the process's on all cores in that one."""

    first: float
    seconds: float
    processor: float
    found: list[SweepPoint]


def measure(trace: Trace, policy: str) -> Measured:
    """One policy's grid."""
    lists = lists_of(trace) if policy in ("buddymoe", "compose") else None
    grid = grid_of(policy, _SETTINGS.value, trace.num_experts, lists)
    seconds = []
    for _ in range(1 + _WARM.value):
        start, processor = time.perf_counter(), time.process_time()
        found = sweep(trace, policy.removesuffix("_ahead"), grid, tiers_of(policy))
        seconds.append(time.perf_counter() - start)
        processor = time.process_time() - processor
    return Measured(seconds[0], seconds[-1], processor, found)


def main(argv: list[str]) -> None:
    """A line and a row a policy; exits with 1 where one takes too long."""
    del argv
    if unknown := set(_POLICY.value) - set(POLICIES):
        sys.exit(f"--policy: {', '.join(sorted(unknown))} is none of {', '.join(POLICIES)}")
    device = choose_device(_DEVICE.value)
    jax.config.update("jax_default_device", device)
    start = time.perf_counter()
    trace = drifting_trace(
        num_steps=_TOKENS.value,
        num_layers=_LAYERS.value,
        num_experts=_EXPERTS.value,
        width=_WIDTH.value,
        foreseen=_WIDTH.value,
    )
    print(f"trace made in {time.perf_counter() - start:.0f} s; sweeps on {describe_device(device)}")
    late = []
    for policy in _POLICY.value:
        done = measure(trace, policy)
        first, seconds = done.first, done.seconds
        rate = _SETTINGS.value * _TOKENS.value / seconds
        hits = [one.hit_rate for one in done.found]
        print(
            f"{policy}: {_SETTINGS.value} settings of {_TOKENS.value} tokens in {seconds:.1f} s "
            f"({done.processor:.1f} s of processors), "
            + (f"compiled in {first - seconds:.1f} s; " if _WARM.value else "compiling included; ")
            + f"{rate:.3g} settings x tokens a second; hits {min(hits):.2f} to {max(hits):.2f}",
            flush=True,
        )
        if _LIMIT.value and first > _LIMIT.value:
            late.append(f"{policy}: {first:.1f} s; the limit is {_LIMIT.value:g}")
        if _OUTPUT.value:
            append_rows(Path(_OUTPUT.value), [row(policy, done, rate, device)])
    if late:
        sys.exit("\n".join(late))


def row(policy: str, done: Measured, rate: float, device: jax.Device) -> ResultRow:
    """Makes a row of the results."""
    facts: dict[str, Any] = {
        "settings_x_tokens_a_second": rate,
        "processor_s": done.processor,
        "settings": _SETTINGS.value,
        "tokens": _TOKENS.value,
    }
    if _WARM.value:
        facts["compile_s"] = done.first - done.seconds
    if _NOTE.value:
        facts["note"] = _NOTE.value
    shape = f"{_LAYERS.value} layers, {_WIDTH.value} of {_EXPERTS.value} experts"
    return ResultRow(
        what=f"sweep, {policy}, {_SETTINGS.value} settings, {_TOKENS.value} tokens, {shape}",
        figure=done.seconds,
        unit="s",
        baseline=facts,
        device=describe_device(device),
        versions=package_versions("jax", "jaxlib"),
        date=today(),
        command=command_line(),
    )


if __name__ == "__main__":
    app.run(main)
