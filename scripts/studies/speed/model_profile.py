"""Costs of a step beside its time: launches, memory, and sessions without a prompt."""

import collections
import contextlib
import dataclasses
import gzip
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from moejax.inference.generation import GenerationSettings
from moejax.inference.runner import Runner, Session


def session_without_prefill(
    runner: Runner, batch: int, position: int, cache_length: int, settings: GenerationSettings
) -> Session:
    """Session after `position` random tokens: no prefill is compiled or run."""
    prompts = [[0] * position] * batch
    with mock.patch.object(runner, "_prompt_chunks", lambda *_: iter(())):
        session = runner.prefill(prompts, cache_length, settings, ())
    cache = session.state.cache
    drawn = [
        jax.jit(lambda key, like: jax.random.normal(key, like.shape, like.dtype), donate_argnums=1)(
            jax.random.key(i, impl="rbg"), leaf
        )
        for i, leaf in enumerate(jax.tree.leaves(cache))
    ]
    cache = jax.tree.unflatten(jax.tree.structure(cache), drawn)
    session.state = dataclasses.replace(session.state, cache=cache)
    return session


@contextlib.contextmanager
def programs_used(runner: Runner) -> Iterator[list[jax.stages.Compiled]]:
    """Collects the programs that a runner's calls take, compiled now or before; none twice."""
    used: list[jax.stages.Compiled] = []
    own = runner.programs.get

    def get(*arguments: Any, **options: Any) -> jax.stages.Compiled:
        program = own(*arguments, **options)
        if not any(program is other for other in used):
            used.append(program)
        return program

    with mock.patch.object(runner.programs, "get", get):
        yield used


def held_gib(*trees: Any) -> float:
    """GiB of the arrays of some trees."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(trees)) / 2**30


def largest_memory(programs: Iterable[jax.stages.Compiled], held: float) -> dict[str, float]:
    """GiB of the device while the program runs that takes most, as XLA planned it, by part.

    Unlike the allocator's peak it is of these programs alone, whatever ran before. "total" is
    `held` + "temp" + "output" - "alias"; nothing where XLA does not say. Of what is held, arguments
    that a program does not use (the head, of a prefill chunk) are not in its "argument".

    Args:
      programs: of a phase.
      held: GiB of what stays on the device between them: weights, cache, slots of experts.
    """
    found: list[dict[str, float]] = []
    for program in programs:
        try:
            stats = program.memory_analysis()
        except jax.errors.JaxRuntimeError as error:  # of programs from the persistent cache
            print(f"  no memory of a program: {error!s:.200}", flush=True)
            continue
        if stats is None:
            continue
        parts = {
            part: getattr(stats, f"{part}_size_in_bytes") / 2**30
            for part in ("argument", "temp", "output", "alias")
        }
        found.append({"total": held + parts["temp"] + parts["output"] - parts["alias"], **parts})
    return max(found, key=lambda parts: parts["total"], default={})


def graph_launches(directory: Path) -> int:
    """CUDA graphs that the host launched, in a trace."""
    events = (
        event
        for path in directory.rglob("*.trace.json.gz")
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    )
    return sum(event.get("name", "").startswith("cuGraphLaunch") for event in events)


def launches(directory: Path) -> dict[str, tuple[int, float]]:
    """Count and microseconds of the events on the GPU's streams, by name without its number."""
    found: dict[str, tuple[int, float]] = collections.defaultdict(lambda: (0, 0.0))
    for path in directory.rglob("*.trace.json.gz"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
        streams = {
            (e["pid"], e["tid"])
            for e in events
            if e.get("name") == "thread_name" and "Stream" in e["args"]["name"]
        }
        for event in events:
            on_gpu = "GPU" in names.get(event.get("pid"), "")
            if on_gpu and event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
                name = re.sub(r"[_.\d]+$", "", event["name"])
                count, spent = found[name]
                found[name] = (count + 1, spent + event["dur"])
    return found
