"""moejax: `moejax.benchmark` on random weights, and `moejax.serve` on a random checkpoint."""

import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moejax.models.shapes import CONFIGS
from scripts.studies.peers import freetoken, servers
from scripts.studies.peers.running import NOT_RUN, Case, Figure, NotRunError, Place, decode, prefill

NAME = "moejax"
FORMS = {4: "INT4 g64, head INT8", 16: "bf16"}
MXFP4 = "MXFP4, the rest INT8"  # of gpt-oss; llama.cpp's files have Q8_0 there
THREADS = "the host's cores too"  # they multiply some of the experts that no slot has
AHEAD = "look-ahead"  # the next layer's likely experts are fetched beside a layer's products
LEAST_AHEAD_GIB = 7  # slots for the experts of two layers
# Needed experts that are among as many predicted ones, in the demo's recorded routing.
RECALL = 0.82
# GiB that the driver counts beside what JAX holds: CUDA's context and programs.
CONTEXT_GIB = 0.6
BF16 = 16  # bits
# GiB of device memory by shape, the context included, from small to large: they share a run.
BUDGETS = {
    "Qwen3-30B-A3B": (3, 4, 7, 12), "Mixtral-8x7B": (5, 8, 14, 20),
    "Qwen3-Next-80B-A3B": (8, 20, 32), "Qwen3.6-35B-A3B": (8, 12, 16), "GLM-4.7-Flash": (8, 12, 16),
    "gpt-oss-20b": (8, 12), "gpt-oss-120b": (8, 12, 16, 24), "tiny": (),
}  # fmt: skip
NEW_MODELS = ("Qwen3.6-35B-A3B", "GLM-4.7-Flash", "gpt-oss-20b", "gpt-oss-120b")
LONG_GIB = {"Qwen3-30B-A3B": 7, "Mixtral-8x7B": 14, "Qwen3-Next-80B-A3B": 20}  # long, batch, server
LARGE = {"Qwen3-30B-A3B": (30, 16, 8)}  # of bf16, beside FreeToken
# So that the driver counts what is used, and so that gpt-oss-120b fits 80 GB.
ENV = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_CLIENT_MEM_FRACTION": "0.95"}
SEQUENCES = (1, 4, 16, 64)
NEW_TOKENS = {"long": 33, "prompt": 9}
OWN = "the random routers' routing"
EVEN = "even routing"
RECORDED = "recorded routing"
SKEWED = "skewed routing"
ROUTINGS = (EVEN, RECORDED, SKEWED)
SKEWS = {"Qwen3-30B-A3B": "zipf:0.85"}  # that hits LRU caches as the published routing does


def cases(
    files: Path, shape: str, layers: int, tokens: tuple[int, ...], *, trace: str, platform: str
) -> Iterator[Case]:
    """All runs of a shape.

    Args:
      files: folder of compiled programs.
      tokens: of the prompts.
      trace: file of recorded routing; "": none is replayed.
    """
    common = (
        f"--config.shape={shape}", f"--config.layers={layers}", f"--config.platform={platform}",
        f"--config.compilation_cache={files / 'programs'}", "--config.count_experts=False",
    )  # fmt: skip
    is_mxfp4 = CONFIGS[shape].family == "gpt_oss"
    routings = {EVEN: "--config.skew=uniform"}
    if shape in SKEWS:
        routings[SKEWED] = f"--config.skew={SKEWS[shape]}"
    if trace:
        routings[RECORDED] = f"--config.trace={trace}"

    def case(
        bits: int, gibs: Sequence[float], routing: str, load: str, seconds: float,
        threads: int = 0, ahead: int = 0,
    ) -> Case:  # fmt: skip
        form = MXFP4 if is_mxfp4 else FORMS[bits]
        abouts = {}  # by what is left to JAX
        for gib in gibs:
            limit = f"{gib:g} GiB" if gib else "all on the device"
            about = f"{shape}, {layers or CONFIGS[shape].num_layers} layers, {form}, {limit}"
            about += f", {THREADS}" if threads else ""
            about += f", {AHEAD}" if ahead else ""
            of_jax = round(gib - CONTEXT_GIB, 2) if gib else 0.0
            abouts[of_jax] = about + f", {routing if gib else OWN} | {load}"
        words = [*common]
        if bits != BF16:
            rest = bits if not is_mxfp4 else 8
            words += [f"--config.bits={bits}", f"--config.mxfp4={is_mxfp4}", "--config.head_bits=8"]
            words += [f"--config.{part}_bits={rest}" for part in ("attention", "shared")]
        if any(gibs):
            words += [f"--config.budgets=({','.join(map(str, abouts))},)", routings[routing]]
        if threads:
            words.append(f"--config.memory.host_threads={threads}")
        if ahead:
            words += [f"--config.memory.prefetch={ahead}", f"--config.recall={RECALL}"]
        run = functools.partial(
            _measure, words=tuple(words), abouts=abouts, load=load, tokens=tokens
        )
        about, *others = abouts.values()
        return Case(NAME, about, seconds, run, tuple(others))

    yield case(4, (0,), EVEN, "one", 60)
    budgets = BUDGETS[shape]
    if budgets:
        yield case(4, budgets, EVEN, "prompt", 120)
    for routing in routings if budgets else ():
        yield case(4, budgets, routing, "one", 150)
        yield case(4, budgets, routing, "one", 150, threads=-1)
        if routing == RECORDED:  # which says how much a look-ahead predicts
            enough = [gib for gib in budgets if gib >= LEAST_AHEAD_GIB]
            width = CONFIGS[shape].experts_per_token
            yield case(4, enough, routing, "one", 150, ahead=width)
    if shape in LONG_GIB or not budgets:
        for gib in (0, LONG_GIB[shape]) if budgets else (0,):
            yield case(4, (gib,), EVEN, "long", 150)
            yield case(4, (gib,), EVEN, "batch", 120)
    for gib in LARGE.get(shape, ()):
        for routing in routings:
            yield case(BF16, (gib,), routing, "one", 120)
    if CONFIGS[shape].family == freetoken.FAMILY:
        served = [(4, gib) for gib in ((0, LONG_GIB[shape]) if budgets else (0,))]
        for bits, gib in served + [(BF16, gib) for gib in LARGE.get(shape, ())]:
            limit = f"{gib:g} GiB" if gib else "all on the device"
            depth = layers or CONFIGS[shape].num_layers
            about = f"{shape}, {depth} layers, {FORMS[bits]}, {limit}, {OWN}"
            run = functools.partial(
                _serve, shape=shape, layers=layers, bits=bits, gib=gib, tokens=tokens[0],
                platform=platform,
            )  # fmt: skip
            yield Case(NAME, f"{about} | server", 200, run)


def _measure(
    place: Place, *, words: tuple[str, ...], abouts: Mapping[float, str], load: str,
    tokens: tuple[int, ...],
) -> list[Figure]:  # fmt: skip
    lengths = tokens[1:2] if load == "prompt" else tokens[:1]
    if load == "long":
        lengths = tuple(sorted({*tokens[1:], min(8192, tokens[-1])}))
    batches = SEQUENCES if load == "batch" else (1,)
    found = []
    for length in lengths:
        record = place.logs / f"moejax_{load}.json"
        record.unlink(missing_ok=True)
        outputs = f"{record},{place.logs / 'benchmark.jsonl'}"  # the latter keeps all figures
        asked = [
            sys.executable, "-m", "moejax.benchmark", *words, f"--config.prompt_tokens={length}",
            f"--config.new_tokens={NEW_TOKENS.get(load, 65)}", f"--config.output={outputs}",
            f"--config.batches=({','.join(map(str, batches))},)",
        ]  # fmt: skip
        ran = place.run(asked, ENV, f"moejax_{load}")
        # The driver counts a process: only the peak of the whole run is known.
        more: dict[str, float | str] = {}
        if len(abouts) == 1 and ran.peak_gib is not None:
            more["peak_gib"] = ran.peak_gib
        found += [
            figure._replace(more=figure.more | more)
            for figure in of_record(record.read_text(encoding="utf-8"), length, abouts)
        ]
    return found


def of_record(text: str, length: int, abouts: Mapping[float, str]) -> Iterator[Figure]:
    """Figures of the JSON file that `moejax.benchmark` writes.

    Args:
      length: tokens of each prompt.
      abouts: of the rows, by the budget of JAX.

    Raises:
      NotRunError: no point was measured; it says why.
    """
    points = json.loads(text)["points"]
    if all(point["status"] == "refused" for point in points):
        raise NotRunError(points[0]["reason"])
    for point in points:
        about = abouts[point["device_gib"]]
        if point["status"] == "refused":
            if len(abouts) > 1:
                yield Figure(NOT_RUN, 0.0, {"error": point["reason"]}, about)
            continue
        figures, batch = point["figures"], point["batch"]
        more: dict[str, float | str] = {"planned_gib": float(point["device_gib"])}
        for name, key in (
            ("hit rate of decode", "hits_percent"), ("device memory peak", "own_peak_gib")
        ):  # fmt: skip
            if name in figures:
                more[key] = figures[name]["value"]
        for name, workload in (
            ("prefill throughput", prefill(length, batch)),
            ("decode throughput", decode(length, batch)),
        ):
            yield Figure(workload, figures[name]["value"], more, about)


def _serve(
    place: Place, *, shape: str, layers: int, bits: int, gib: float, tokens: int, platform: str
) -> list[Figure]:
    checkpoint = freetoken.checkpoint(place, shape, layers, bits)
    words = [
        sys.executable, "-m", "moejax.serve", f"--config.platform={platform}",
        f"--config.checkpoint={checkpoint}", "--config.port={port}",
        f"--config.context={tokens + 256}", f"--config.max_batch={servers.SEQUENCES[-1]}",
        f"--config.memory.device_gib={round(gib - CONTEXT_GIB, 2) if gib else 0}",
        f"--config.compilation_cache={place.files / 'programs'}",
    ]  # fmt: skip
    return servers.measure(place, words, ENV, servers.Prompts(tokens))
