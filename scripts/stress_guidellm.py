"""GuideLLM against the server: a load generator that knows nothing of this package.

    python3 -m venv /tmp/guidellm && /tmp/guidellm/bin/pip install guidellm==0.8.1
    PATH="$PATH:/tmp/guidellm/bin" python -m scripts.stress_guidellm

A server of the demo, with its defaults, and eight streams of either endpoint: made-up prompts of 64
tokens, answers of 32. Status 1 where a request failed or was left, or a program was compiled
meanwhile.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from scripts.stress_process import running_server
from scripts.studies.measuring import Report

_COMMAND = flags.DEFINE_string("guidellm", "guidellm", "its command, of an environment of its own")
_STREAMS = flags.DEFINE_integer("streams", 8, "requests at once", lower_bound=1)
_REQUESTS = flags.DEFINE_integer("requests", 100, "of each endpoint", lower_bound=1)
_SECONDS = flags.DEFINE_integer("seconds", 120, "of each endpoint, at most", lower_bound=1)
_RESULTS = flags.DEFINE_string(
    "results", "scripts/studies/server/server.jsonl", "rows go here; '': none"
)

DEMO = Path(__file__).parents[1] / "moejax" / "demo"
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def run(port: int, path: str, report: Path) -> dict[str, Any]:
    """The metrics of one benchmark, as GuideLLM writes them."""
    target = f"http://127.0.0.1:{port}"
    command = [
        _COMMAND.value, "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={target},model=demo,request_format={path}",
        "--profile", f"kind=concurrent,streams={_STREAMS.value}",
        "--constraint", f"kind=max_requests,count={_REQUESTS.value}",
        "--constraint", f"kind=max_duration,seconds={_SECONDS.value}",
        "--tokenizer", f"kind=huggingface_auto,model={DEMO}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
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


def main(argv: list[str]) -> None:
    """Runs both endpoints, prints, appends rows."""
    del argv
    faults = []
    load = f"{_STREAMS.value} streams of 64 and 32 tokens, demo, float32, batches up to 8"
    device = jax.devices("cpu")[0]
    report = Report(device, "", _RESULTS.value, ("jax", "uvicorn", "starlette"))
    with tempfile.TemporaryDirectory() as place, running_server(Path(place) / "log") as server:
        compiled = server.metric("moejax_programs")
        for name, path in ENDPOINTS.items():
            metrics = run(server.port, path, Path(place) / f"{name}.json")
            totals = metrics["request_totals"]
            if totals["errored"] or totals["successful"] != totals["total"]:
                faults.append(f"{name}: {totals}")
            figures = {
                "requests answered": (totals["successful"], "requests"),
                "requests failed or left": (totals["total"] - totals["successful"], "requests"),
                "TTFT p50": (metrics["time_to_first_token_ms"]["successful"]["median"], "ms"),
                "output": (metrics["output_tokens_per_second"]["successful"]["mean"], "tokens/s"),
            }
            for figure, (value, unit) in figures.items():
                what = f"server, GuideLLM 0.8.1, {name}, {figure}: {load}"
                report.add(what, float(f"{value:.6g}"), unit)
        if compiled := server.metric("moejax_programs") - compiled:
            faults.append(f"{compiled:.0f} programs were compiled while clients waited")
    for line in faults:
        print(f"FAULT {line}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    app.run(main)
