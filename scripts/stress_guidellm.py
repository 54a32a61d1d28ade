"""GuideLLM against a server: a load generator that knows nothing of this package.

    python3 -m venv /tmp/guidellm && /tmp/guidellm/bin/pip install guidellm==0.8.1
    PATH="$PATH:/tmp/guidellm/bin" python -m scripts.stress_guidellm
    PATH="$PATH:/tmp/guidellm/bin" python -m scripts.stress_guidellm --target=http://gpu:8000 \
        --model=Qwen3-30B-A3B --tokenizer=DIR --streams=64 --requests=500 \
        --load=prompt_tokens=300,prompt_tokens_stdev=400,prompt_tokens_min=16,output_tokens=128

With --target it loads any server of OpenAI's API and prints the figures. Without it, it starts one
of the demo, with its defaults, and appends them to --results. Prompts are made up. Status 1 where a
request failed or was left, or the demo's server compiled a program meanwhile.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from scripts.stress_process import Server, running_server
from scripts.studies.measuring import Report

DEMO = Path(__file__).parents[1] / "moejax" / "demo"
VERSION = "0.8.1"
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# GuideLLM's metrics: a key, what it is, its unit, whether the mean or percentiles are told.
METRICS = (
    ("request_latency", "latency", "s", ("p50", "p95")),
    ("time_to_first_token_ms", "TTFT", "ms", ("p50", "p95")),
    ("inter_token_latency_ms", "time between tokens", "ms", ("p50", "p95")),
    ("requests_per_second", "requests", "1/s", ("mean",)),
    ("output_tokens_per_second", "output", "tokens/s", ("mean",)),
)

_GUIDELLM = flags.DEFINE_string("guidellm", "guidellm", "its command, of an environment of its own")
_TARGET = flags.DEFINE_string("target", "", "address of a running server; '': a demo's of its own")
_MODEL = flags.DEFINE_string("model", "demo", "the model's name for the target")
_API_KEY = flags.DEFINE_string("api_key", "", "the target's; '': none")
_TOKENIZER = flags.DEFINE_string("tokenizer", str(DEMO), "directory or name of a tokenizer")
_LOAD = flags.DEFINE_string(
    "load", "prompt_tokens=64,output_tokens=32", "fields of GuideLLM's data synthetic_text"
)
_STREAMS = flags.DEFINE_integer("streams", 8, "requests at once", lower_bound=1)
_REQUESTS = flags.DEFINE_integer("requests", 100, "of each endpoint", lower_bound=1)
_SECONDS = flags.DEFINE_integer("seconds", 120, "of each endpoint, at most", lower_bound=1)
_RESULTS = flags.DEFINE_string(
    "results", "scripts/studies/server/server.jsonl", "rows of the demo go here; '': none"
)


def run(target: str, path: str, report: Path) -> dict[str, Any]:
    """Metrics of one benchmark, as GuideLLM writes them."""
    backend = f"kind=openai_http,target={target},model={_MODEL.value},request_format={path}"
    command = [
        _GUIDELLM.value, "run", "--disable-console-interactive",
        "--backend", backend + (f",api_key={_API_KEY.value}" if _API_KEY.value else ""),
        "--profile", f"kind=concurrent,streams={_STREAMS.value}",
        "--constraint", f"kind=max_requests,count={_REQUESTS.value}",
        "--constraint", f"kind=max_duration,seconds={_SECONDS.value}",
        "--tokenizer", f"kind=huggingface_auto,model={_TOKENIZER.value}",
        "--data", f"kind=synthetic_text,{_LOAD.value}",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"} if not _TARGET.value else {**os.environ}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, env=environment, timeout=_SECONDS.value + 120, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"guidellm ended with status {done.returncode}: {done.stdout[-2000:]}")
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    found: dict[str, Any] = benchmark["metrics"]
    return found


@contextlib.contextmanager
def loaded_server(log: Path) -> Iterator[tuple[str, Server | None]]:
    """Address of the server under load, and its process if it is the demo's."""
    if _TARGET.value:
        yield _TARGET.value, None
        return
    with running_server(log) as server:
        yield f"http://127.0.0.1:{server.port}", server


def main(argv: list[str]) -> None:
    """Runs both endpoints, prints, appends rows."""
    del argv
    if shutil.which(_GUIDELLM.value) is None:
        sys.exit(f"error: no command {_GUIDELLM.value}: pip install guidellm=={VERSION}")
    faults = []
    about = "demo, float32, batches up to 8" if not _TARGET.value else _MODEL.value
    load = f"{_STREAMS.value} streams of {_LOAD.value}, {about}"
    device = _TARGET.value or jax.devices("cpu")[0]
    results = "" if _TARGET.value else _RESULTS.value
    report = Report(device, "", results, ("jax", "uvicorn", "starlette"))
    with (
        tempfile.TemporaryDirectory() as place,
        loaded_server(Path(place) / "log") as (target, server),
    ):
        compiled = server.metric("moejax_programs") if server else 0.0
        for name, path in ENDPOINTS.items():
            metrics = run(target, path, Path(place) / f"{name}.json")
            totals = metrics["request_totals"]
            left = totals["total"] - totals["successful"]
            if left:
                faults.append(f"{name}: {totals}")
            figures = [
                ("requests answered", totals["successful"], "requests"),
                ("requests failed or left", left, "requests"),
            ]
            for key, what, unit, kinds in METRICS:
                told = metrics[key]["successful"]
                for kind in kinds:
                    value = told["mean"] if kind == "mean" else told["percentiles"][kind]
                    figures.append((f"{what} {kind}", value, unit))
            for figure, value, unit in figures:
                said = f"server, GuideLLM {VERSION}, {name}, {figure}: {load}"
                report.add(said, float(f"{value:.6g}"), unit)
        if server and (compiled := server.metric("moejax_programs") - compiled):
            faults.append(f"{compiled:.0f} programs were compiled while clients waited")
    for line in faults:
        print(f"FAULT {line}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    app.run(main)
