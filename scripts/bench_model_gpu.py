"""Prefill and decode of real shapes with random bf16 weights made on the device.

    python scripts/bench_model_gpu.py --shape=Qwen3-30B-A3B --batch=1 --prompt=512

Prints TTFT, TPOT, the bytes that a token must read (dense weights, chosen experts, cache), what
share of the measured read bandwidth that is, launches a token counted in a profile, and the time
to compile without and with the persistent cache; writes JSON rows. With random weights the routing
is near uniform: for batches the distinct experts are counted, not assumed.
"""

import collections
import dataclasses
import functools
import gzip
import json
import math
import re
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from moejax.devices import choose_device, enable_compilation_cache
from moejax.engine import STEPS_PER_CALL
from moejax.generation import GenerationSettings
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.shapes import SHAPES
from moejax.results import (
    ResultRow,
    append_rows,
    command_line,
    describe_device,
    package_versions,
    today,
)
from moejax.runner import Runner

_SHAPE = flags.DEFINE_enum("shape", "Qwen3-30B-A3B", sorted(SHAPES), "which real shape")
_LAYERS = flags.DEFINE_integer("layers", 0, "fewer layers than the real ones; 0: all")
_BATCH = flags.DEFINE_multi_integer("batch", [1], "sequences decoded together")
_PROMPT = flags.DEFINE_integer("prompt", 512, "tokens of each prompt")
_CONTEXT = flags.DEFINE_integer("context", 2048, "cache length")
_NEW = flags.DEFINE_integer("new_tokens", 65, "tokens generated a run; one call decodes 16")
_REPEATS = flags.DEFINE_integer("repeats", 3, "timed runs; the median is reported")
_OUTPUT = flags.DEFINE_string("output", "", "JSON file of rows")
_CACHE = flags.DEFINE_string("cache", "", "persistent compilation cache")
_PLATFORM = flags.DEFINE_string("platform", "gpu", "gpu; cpu only tries the script")


@functools.partial(jax.jit, donate_argnums=0)
def _fill(leaf: jax.Array, index: jax.Array, key: jax.Array, std: jax.Array) -> jax.Array:
    values = jax.random.normal(key, leaf.shape[1:], jnp.bfloat16) * std.astype(jnp.bfloat16)
    return jax.lax.dynamic_update_index_in_dim(leaf, values, index, 0)


def random_weights(config: ModelConfig, device: jax.Device) -> dict[str, jax.Array]:
    """Bf16 leaves made on the device, a layer at a time; matrices N(0, 1/fan_in), norms one."""
    key = jax.random.key(0, impl="rbg")
    weights = {}
    for name, shape in weight_shapes(config).items():
        if name.endswith("norm"):
            weights[name] = jnp.ones(shape, jnp.bfloat16, device=device)
            continue
        leaf = jnp.zeros(shape, jnp.bfloat16, device=device)
        if len(shape) == 2:
            leaf = leaf[None]
        std = jnp.float32(1.0 if name == "embed" else shape[-1] ** -0.5)
        for layer in range(leaf.shape[0]):
            key, new = jax.random.split(key)
            leaf = _fill(leaf, jnp.int32(layer), new, std)
        weights[name] = leaf[0] if len(shape) == 2 else leaf
    return weights


def bytes_per_step(config: ModelConfig, batch: int, positions: int, distinct: float) -> int:
    """Least bytes that one decode step reads: every dense leaf, the chosen experts, the cache."""
    shapes = weight_shapes(config)
    dense = sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if (not name.startswith("moe.") and name != "embed") or name == "moe.router"
    )
    if config.tied_embeddings:
        dense += math.prod(shapes["embed"])
    expert = 3 * config.model_dim * config.expert_dim
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * positions * batch
    return int(2 * (dense + len(config.moe_layers) * distinct * expert + cache))


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


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the rows."""
    del argv
    device = choose_device(_PLATFORM.value)
    cache = enable_compilation_cache(_CACHE.value)
    compiled_from = "no cache"
    if cache is not None:
        compiled_from = "with a cache in use" if any(cache.iterdir()) else "into an empty cache"
    config = SHAPES[_SHAPE.value]
    if _LAYERS.value:
        config = dataclasses.replace(
            config, num_layers=_LAYERS.value, moe_layers=tuple(range(_LAYERS.value))
        )
    start = time.perf_counter()
    weights = jax.block_until_ready(random_weights(config, device))
    num_bytes = sum(leaf.nbytes for leaf in weights.values())
    print(
        f"{_SHAPE.value}, {config.num_layers} layers: {len(weights)} weight leaves, "
        f"{num_bytes / 2**30:.1f} GiB made in {time.perf_counter() - start:.1f} s"
    )
    bandwidth = read_bandwidth(device)
    print(f"read bandwidth of a plain sum: {bandwidth / 1e12:.2f} TB/s")
    runner = Runner(config, weights, device)
    rng = np.random.default_rng(0)
    rows: list[ResultRow] = []

    def record(what: str, figure: float, unit: str, **baseline: float) -> None:
        rows.append(
            ResultRow(
                what=f"{_SHAPE.value}, {config.num_layers} layers, bf16, {what}",
                figure=figure,
                unit=unit,
                baseline=baseline,
                device=describe_device(device),
                versions=package_versions("jax", "jaxlib", "flax"),
                date=today(),
                command=command_line(),
            )
        )
        print(f"  {what:58s} {figure:12.4f} {unit}  {baseline or ''}", flush=True)

    for batch in _BATCH.value:
        prompts = [rng.integers(0, config.vocab_size, _PROMPT.value).tolist() for _ in range(batch)]
        settings = GenerationSettings.of(max_new_tokens=_NEW.value)
        label = f"batch {batch} prompt {_PROMPT.value}"
        for steps_per_call in (STEPS_PER_CALL, 1):
            timings = []
            num_programs = runner.programs.num_traces
            for repeat in range(_REPEATS.value + 1):
                *_, (_, timing) = runner.run(prompts, _CONTEXT.value, settings, (), steps_per_call)
                if repeat == 0:
                    record(
                        f"{label} compile, calls of {steps_per_call}, {compiled_from}",
                        timing.compile_s,
                        "s",
                        **dict(runner.programs.history[num_programs:]),
                    )
                else:
                    timings.append(timing)
            ttft = statistics.median(t.ttft_s for t in timings)
            tpot = statistics.median(t.tpot_s for t in timings)
            if steps_per_call == STEPS_PER_CALL:
                record(f"{label} TTFT", ttft * 1e3, "ms")
                record(f"{label} prefill", batch * _PROMPT.value / ttft, "tokens/s")
            assignments = batch * config.experts_per_token
            share = 1 - (1 - config.experts_per_token / config.num_experts) ** batch
            distinct = min(assignments, config.num_experts * share)
            least = bytes_per_step(config, batch, _PROMPT.value + _NEW.value // 2, distinct)
            record(f"{label} TPOT, calls of {steps_per_call}", tpot * 1e3, "ms")
            record(f"{label} bytes a step at least", least / 1e9, "GB")
            record(
                f"{label} share of bandwidth, calls of {steps_per_call}",
                100 * least / tpot / bandwidth,
                "%",
                plain_sum_tb_per_s=bandwidth / 1e12,
            )
        session = runner.prefill(prompts, _CONTEXT.value, settings, ())
        step = runner.decode(session, 1, 1)
        jax.block_until_ready((session.state, step))
        num_programs = runner.programs.num_traces
        start = time.perf_counter()
        num_dispatches = 20
        for _ in range(num_dispatches):
            runner.decode(session, 1, 1)
        dispatch = (time.perf_counter() - start) / num_dispatches
        if runner.programs.num_traces != num_programs:
            raise RuntimeError("a program was compiled inside the timed loop: change --prompt")
        jax.block_until_ready(session.state)
        record(f"{label} dispatch of one step call", dispatch * 1e3, "ms")
        with tempfile.TemporaryDirectory() as trace:
            with jax.profiler.trace(trace):
                step = runner.decode(session, STEPS_PER_CALL, STEPS_PER_CALL)
                jax.block_until_ready((session.state, step))
            counted = launches(Path(trace))
        num_launches = sum(count for count, _ in counted.values())
        record(f"{label} launches a token", num_launches / STEPS_PER_CALL, "launches")
        for name, (count, spent) in sorted(counted.items(), key=lambda item: -item[1][1])[:20]:
            per_token = count / STEPS_PER_CALL, spent / STEPS_PER_CALL
            print("      {:8.1f} launches {:8.1f} us  {}".format(*per_token, name[:80]))
    if _OUTPUT.value:
        append_rows(Path(_OUTPUT.value), rows)


if __name__ == "__main__":
    app.run(main)
