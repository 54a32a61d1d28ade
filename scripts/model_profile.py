"""What a step costs beside its time: bandwidth of the card, launches, experts that were chosen."""

import collections
import dataclasses
import gzip
import json
import math
import re
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

from moejax import steps
from moejax.generation import GenerationSettings
from moejax.models.transformer import ChunkSpec, merge_weights, model_definition
from moejax.runner import Runner
from moejax.session import Session


def distinct_experts(runner: Runner, session: Session, spec: ChunkSpec) -> float:
    """Experts of a layer that one decode step of a session reads, the mean over layers.

    The routing of the next step is counted on the device. The session is used up.

    Args:
      runner: of the session.
      session: after a prefill or some steps; its cache is donated.
      spec: of the step.
    """
    definition = model_definition(runner.config, runner.kernels)

    def count(
        state: steps.DecodeState, weights: steps.Weights
    ) -> tuple[steps.DecodeState, jax.Array]:
        model = merge_weights(definition, weights)
        cache, _, routings = model.routed(
            state.tokens[:, None], state.positions[:, None], ~state.done[:, None], state.cache, spec
        )
        num_experts = runner.config.num_experts
        counts = [
            jnp.sum(jnp.zeros(num_experts, jnp.int32).at[routing.ids.reshape(-1)].max(1))
            for routing in routings
        ]
        mean = jnp.mean(jnp.stack(counts).astype(jnp.float32))
        return dataclasses.replace(state, cache=cache), mean

    _, mean = jax.jit(count, donate_argnums=0)(session.state, runner.weights)
    return float(mean)


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


def read_bandwidth(device: jax.Device) -> float:
    """Bytes a second of a plain sum over 4 GiB, the ceiling of this card; nan on a CPU.

    Sums are queued ten at a time, so that the host's dispatch is not in the figure.
    """
    if device.platform == "cpu":
        return math.nan
    x = jnp.ones((2**21, 1024), jnp.bfloat16, device=device)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    total(x).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([total(x) for _ in range(10)])
        times.append((time.perf_counter() - start) / 10)
    return x.nbytes / min(times)


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
