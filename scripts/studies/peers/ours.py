"""moejax: `moejax.benchmark` on random weights, and `moejax.serve` on a random checkpoint."""

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from moejax.models.shapes import CONFIGS
from scripts.studies.peers import freetoken, servers
from scripts.studies.peers.running import Case, Figure, NotRunError, Place, decode, prefill

NAME = "moejax"
FORMS = {4: "INT4 g64, head bf16", 16: "bf16"}
# GiB of device memory by shape; 0: no limit.
BUDGETS = {
    "Qwen3-30B-A3B": (0, 12, 7, 4, 3), "Mixtral-8x7B": (0, 20, 14, 8, 5),
    "Qwen3-Next-80B-A3B": (0, 32, 20, 8), "tiny": (0,),
}  # fmt: skip
LARGE = {"Qwen3-30B-A3B": (30, 16, 8)}  # of bf16, beside FreeToken
ENV = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # so that the driver's count means something
SEQUENCES = (1, 4, 16, 64)
EVEN = "even routing"
RECORDED = "recorded routing"


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
        f"--config.compilation_cache={files / 'programs'}",
    )  # fmt: skip
    routings = {EVEN: "--config.skew=uniform"}
    if trace:
        routings[RECORDED] = f"--config.trace={trace}"

    def case(bits: int, gib: float, routing: str, load: str, seconds: float) -> Case:
        limit = f"{gib:g} GiB" if gib else "all on the device"
        about = f"{shape}, {layers or CONFIGS[shape].num_layers} layers, {FORMS[bits]}, {limit}"
        about += f", {routing}" if gib else ", the random routers' routing"
        words = [*common, f"--config.bits={bits}", f"--config.attention_bits={bits}"]
        words += [f"--config.memory.device_gib={gib:g}", routings[routing]] if gib else []
        run = functools.partial(_measure, words=tuple(words), load=load, tokens=tokens)
        return Case(NAME, f"{about} | {load}", seconds, run)

    budgets = BUDGETS[shape]
    for gib in budgets:
        for routing in routings if gib else (EVEN,):
            yield case(4, gib, routing, "one", 150)
    for gib in (*budgets[:1], *budgets[2:3]):
        yield case(4, gib, EVEN, "long", 240)
        yield case(4, gib, EVEN, "batch", 200)
    for gib in LARGE.get(shape, ()):
        for routing in routings:
            yield case(16, gib, routing, "one", 200)
    if CONFIGS[shape].family == freetoken.FAMILY:
        for gib in (*budgets[:1], *budgets[2:3]):
            limit = f"{gib:g} GiB" if gib else "all on the device"
            depth = layers or CONFIGS[shape].num_layers
            about = f"{shape}, {depth} layers, INT4 by moejax.quantize, {limit}, "
            about += "the random routers' routing"
            run = functools.partial(
                _serve, shape=shape, layers=layers, gib=gib, tokens=tokens[0], platform=platform
            )
            yield Case(NAME, f"{about} | server", 300, run)


def _measure(
    place: Place, *, words: tuple[str, ...], load: str, tokens: tuple[int, ...]
) -> list[Figure]:
    lengths = tokens[:1]
    if load == "long":
        lengths = tuple(sorted({*tokens[1:], min(8192, tokens[-1])}))
    batches = SEQUENCES if load == "batch" else (1,)
    found = []
    for length in lengths:
        record = place.logs / f"moejax_{load}.json"
        record.unlink(missing_ok=True)
        asked = [
            sys.executable, "-m", "moejax.benchmark", *words, f"--config.prompt_tokens={length}",
            f"--config.new_tokens={33 if load == 'long' else 65}", f"--config.output={record}",
            f"--config.batches=({','.join(map(str, batches))},)",
        ]  # fmt: skip
        ran = place.run(asked, ENV, f"moejax_{load}")
        more: dict[str, float | str] = {}
        if ran.peak_gib is not None:
            more["peak_gib"] = ran.peak_gib
        found += [
            figure._replace(more=figure.more | more)
            for figure in of_record(record.read_text(encoding="utf-8"), length)
        ]
    return found


def of_record(text: str, length: int) -> Iterator[Figure]:
    """Figures of the JSON file that `moejax.benchmark` writes.

    Args:
      length: tokens of each prompt.

    Raises:
      NotRunError: no point was measured; it says why.
    """
    points = json.loads(text)["points"]
    measured = [point for point in points if point["status"] == "measured"]
    if not measured:
        raise NotRunError(points[0]["reason"])
    for point in measured:
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
            yield Figure(workload, figures[name]["value"], more)


def checkpoint(place: Place, shape: str, layers: int) -> Path:
    """INT4 checkpoint of the random one, quantized where it is not there."""
    plain = freetoken.checkpoint(place, shape, layers)
    path = plain.with_name(f"{plain.name}-int4")
    if not path.exists():
        part = plain.with_name(f"{plain.name}-int4-part")
        place.run(
            [sys.executable, "-m", "moejax.quantize", f"--config.checkpoint={plain}",
             f"--config.output={part}", "--config.method=rtn", "--config.bits=4"], log="quantize",
        )  # fmt: skip
        part.replace(path)
    return path


def _serve(
    place: Place, *, shape: str, layers: int, gib: float, tokens: int, platform: str
) -> list[Figure]:
    words = [
        sys.executable, "-m", "moejax.serve", f"--config.platform={platform}",
        f"--config.checkpoint={checkpoint(place, shape, layers)}", "--config.port={port}",
        f"--config.context={tokens + 256}", f"--config.max_batch={servers.SEQUENCES[-1]}",
        f"--config.memory.device_gib={gib:g}",
        f"--config.compilation_cache={place.files / 'programs'}",
    ]  # fmt: skip
    return servers.measure(place, words, ENV, tokens)
