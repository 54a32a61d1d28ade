"""What a step costs beside its time: launches, and sessions without a prompt."""

import collections
import dataclasses
import gzip
import json
import re
from pathlib import Path
from unittest import mock

import jax

from moejax.generation import GenerationSettings
from moejax.runner import Runner
from moejax.session import Session


def session_without_prefill(
    runner: Runner, batch: int, position: int, cache_length: int, settings: GenerationSettings
) -> Session:
    """As after prompts of `position` tokens, with a random cache: no prefill is compiled or run."""
    prompts = [[0] * position] * batch
    with mock.patch.object(runner, "_chunks", lambda *_: iter(())):
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
