"""llama.cpp: llama-bench, llama-batched-bench and llama-server on a file of random weights."""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moejax.models.shapes import CONFIGS
from scripts.studies.peers import servers
from scripts.studies.peers.running import Case, Figure, NotRunError, Place, decode, prefill

NAME = "llama.cpp"
FORM, FORM_OF_GPT_OSS = "Q4_K, head Q6_K", "MXFP4, the rest Q8_0"
# Layers whose experts stay with the CPU: points near the memory of our budgets among them.
ON_CPU = {
    "Qwen3-30B-A3B": (0, 16, 32, 40, 42, 44, 48), "Mixtral-8x7B": (0, 7, 16, 24, 28, 32),
    "Qwen3-Next-80B-A3B": (0, 12, 27, 42, 48), "Qwen3.6-35B-A3B": (0, 8, 12, 18, 24, 27),
    "GLM-4.7-Flash": (0, 2, 14, 16, 27, 29), "gpt-oss-20b": (0, 9, 10),
    "gpt-oss-120b": (0, 23, 24, 28, 31, 33), "tiny": (0, 2),
}  # fmt: skip
# Of the loads that run with one of them: near the memory of `ours.LONG_GIB`.
MIDDLE = {"Qwen3-30B-A3B": 32, "Mixtral-8x7B": 16, "Qwen3-Next-80B-A3B": 27}
# Layers on the CPU and `-ub` of the load `prompt`: what larger chunks take is left by fewer layers.
CHUNKS = {
    "Qwen3-30B-A3B": (
        (17, 512), (20, 2048), (24, 4096), (33, 512), (36, 2048), (40, 4096), (45, 512),
        (47, 1024), (48, 2048),
    ),
    "tiny": ((2, 32),),
}  # fmt: skip
FETCH = {"GGML_OP_OFFLOAD_MIN_BATCH": "1"}  # decode fetches experts to the GPU, too
SEQUENCES = (1, 4, 16, 64)


@dataclasses.dataclass(frozen=True)
class Build:
    """A built llama.cpp."""

    folder: Path  # of its programs
    gguf: str  # folder of its gguf package; "": it is installed
    version: str  # as it was fetched, such as "b11434"; "": what the program says


@dataclasses.dataclass(frozen=True)
class Setting:
    """Flags, threads of the host and environment of a run."""

    flags: tuple[str, ...]
    threads: int
    env: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """Says it as it would be typed."""
        said = [f"{name}={value}" for name, value in self.env]
        return " ".join([*said, *self.flags, f"-t {self.threads}"])


def cases(build: Build, shape: str, layers: int, tokens: tuple[int, ...]) -> Iterator[Case]:
    """All runs of a shape; `tokens`: of the prompts."""
    counts = ON_CPU[shape]
    if layers:  # the same shares of fewer layers
        counts = tuple(dict.fromkeys(round(n * layers / max(counts)) for n in counts))

    def case(load: str, seconds: float, setting: Setting) -> Case:
        form = FORM_OF_GPT_OSS if CONFIGS[shape].family == "gpt_oss" else FORM
        about = f"{shape}, {_depth(shape, layers)} layers, {form}, {setting} | {load}"
        run = functools.partial(
            _measure, build=build, shape=shape, layers=layers, load=load, setting=setting,
            tokens=tokens,
        )  # fmt: skip
        return Case(NAME, about, seconds, run)

    most = max(counts)
    for count in counts:
        yield case("one", 45, Setting(("-ncmoe", str(count)), 16))
    exps = ("-ot", "exps=CPU")
    yield case("one", 60, Setting(exps, 16, tuple(FETCH.items())))
    yield case("one", 45, Setting((*exps, "-ub", "2048"), 16))
    yield case("one", 45, Setting(exps, 16))
    for threads in {8, os.cpu_count() or 1} - {16}:
        yield case("one", 45, Setting(("-ncmoe", str(most)), threads))
    some = MIDDLE[shape] if shape in MIDDLE and not layers else counts[len(counts) // 2]
    for count in dict.fromkeys((0, some, most)):
        yield case("long", 90, Setting(("-ncmoe", str(count)), 16))
        yield case("batch", 90, Setting(("-ncmoe", str(count)), 16))
    for count, chunk in CHUNKS.get(shape, ()) if not layers else ():
        yield case("prompt", 30, Setting(("-ncmoe", str(count), "-ub", str(chunk)), 16))
    for count in dict.fromkeys((0, some)):
        yield case("server", 90, Setting(("-ncmoe", str(count)), 16))


def _depth(shape: str, layers: int) -> int:
    return layers or CONFIGS[shape].num_layers


def weights(place: Place, build: Build, shape: str, layers: int) -> Path:
    """The file of random weights, written where it is not there."""
    name = f"{shape}-{_depth(shape, layers)}.gguf"
    given = (f"--shape={shape}", f"--layers={layers}", f"--gguf={build.gguf}")
    return place.random_files(name, *given)


def _measure(
    place: Place, *, build: Build, shape: str, layers: int, load: str, setting: Setting,
    tokens: tuple[int, ...],
) -> list[Figure]:  # fmt: skip
    model = weights(place, build, shape, layers)
    common = ["-m", str(model), "-ngl", "99", "-t", str(setting.threads), "-fa", "on"]
    common += setting.flags
    if load == "server":
        return _serve(place, build, [*common], setting, tokens[0])
    log = f"llama_{load}"
    if load == "batch":
        context = (tokens[0] + 64) * max(SEQUENCES)
        words = [
            *_program(build, "llama-batched-bench"), *common, "-c", str(context), "-npp",
            str(tokens[0]), "-ntg", "64", "-npl", ",".join(map(str, SEQUENCES)),
            "--output-format", "jsonl",
        ]  # fmt: skip
        ran = place.run(words, dict(setting.env), log)
        found = list(of_batched_bench(ran.stdout))
        return [_with(figure, ran.peak_gib, build, ran.stderr) for figure in found]
    bench = [*_program(build, "llama-bench"), *common, "-o", "jsonl"]
    if load == "one":
        runs = [["-p", str(tokens[0]), "-n", "64", "-r", "3"]]
    elif load == "prompt":
        runs = [["-p", str(tokens[1]), "-b", str(tokens[1]), "-n", "0", "-r", "3"]]
    else:
        depths = ",".join(map(str, dict.fromkeys((min(8192, tokens[-1]), tokens[-1]))))
        prompts = ",".join(map(str, tokens[1:]))
        once = ["-r", "1"]
        runs = [["-p", prompts, "-n", "0", *once], ["-p", "0", "-n", "32", *once, "-d", depths]]
    figures = []
    for words in runs:
        ran = place.run([*bench, *words], dict(setting.env), log)
        figures += [
            _with(f, ran.peak_gib, build, ran.stderr) for f in of_bench(ran.stdout, tokens[0])
        ]
    return figures


def _program(build: Build, name: str) -> list[str]:
    path = build.folder / name
    if not path.exists():
        raise NotRunError(f"there is no {name} in the build")
    return [str(path)]


def _with(figure: Figure, peak: float | None, build: Build, said: str) -> Figure:
    more = dict(figure.more)
    if peak is not None:
        more["peak_gib"] = peak
    if build.version:
        more["version"] = build.version
    if found := re.search(r"\b(b\d{4,6})\b", said):
        more.setdefault("version", found[1])
    return figure._replace(more=more)


def of_bench(output: str, context: int) -> Iterator[Figure]:
    """Figures of llama-bench's JSON Lines.

    Args:
      context: tokens that decode without a depth stands for: llama-bench begins it with an empty
        cache, others after a prompt.

    Raises:
      NotRunError: there is none.
    """
    for row in _rows(output, "n_prompt"):
        more: dict[str, float | str] = {"stddev": float(row["stddev_ts"])}
        if row["build_number"]:
            more["version"] = f"b{row['build_number']}"
        workload = (
            prefill(row["n_prompt"]) if row["n_prompt"] else decode(row["n_depth"] or context)
        )
        if row["n_gen"] and not row["n_depth"]:
            more["empty_cache"] = 1.0
        yield Figure(workload, float(row["avg_ts"]), more)


def of_batched_bench(output: str) -> Iterator[Figure]:
    """Figures of llama-batched-bench's JSON Lines.

    Raises:
      NotRunError: there is none.
    """
    for row in _rows(output, "speed_tg"):
        yield Figure(prefill(row["pp"], row["pl"]), float(row["speed_pp"]), {})
        yield Figure(decode(row["pp"], row["pl"]), float(row["speed_tg"]), {})


def _rows(output: str, key: str) -> list[dict[str, Any]]:
    rows = []
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise NotRunError(f"output that is no JSON: {line[:80]}") from error
            if key in row:
                rows.append(row)
    if not rows:
        raise NotRunError("it printed no result")
    return rows


def _serve(
    place: Place, build: Build, common: list[str], setting: Setting, tokens: int
) -> list[Figure]:
    most = servers.SEQUENCES[-1]
    words = [
        *_program(build, "llama-server"), *common, "-c", str(most * (tokens + 256)), "-np",
        str(most), "--port", "{port}", "--no-webui",
    ]  # fmt: skip
    found = servers.measure(place, words, dict(setting.env), servers.Prompts(tokens))
    return [_with(figure, None, build, "") for figure in found]
