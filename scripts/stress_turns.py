"""One client's request of many long answers, and the short ones of another meanwhile.

    python -m scripts.stress_turns                     # the demo: n=128, 500 tokens each
    python -m scripts.stress_turns --answers=32 --results=

A server of its own process, whose limits on answers are raised so far that the long request is
taken. Its client is at 127.0.0.2, the other at 127.0.0.1: that one asks for eight tokens, again and
again, each time a second after its last answer, until the long request has ended.
"""

import contextlib
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import jax
from absl import app, flags

from scripts.stress_process import Server, running_server
from scripts.studies.measuring import Report

_ANSWERS = flags.DEFINE_integer("answers", 128, "n of the long request", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 500, "of each of its answers", lower_bound=1)
_MAX_BATCH = flags.DEFINE_integer("max_batch", 8, "of the server")
_FIFO = flags.DEFINE_float(
    "fifo_s", None, "of the first short answer where rows came first in, first out; a baseline"
)
_RESULTS = flags.DEFINE_string(
    "results", "scripts/studies/server/server.jsonl", "rows go here; '': none"
)

TIMEOUT_S = 900.0


def ask(server: Server, address: str, body: Mapping[str, object]) -> float:
    """Seconds until a client of an address has its whole answer."""
    started = time.monotonic()
    connection = http.client.HTTPConnection(
        "127.0.0.1", server.port, timeout=TIMEOUT_S, source_address=(address, 0)
    )
    with contextlib.closing(connection):
        text = json.dumps({"prompt": "The history of", "temperature": 0, **body})
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        said = response.read()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {said[:300]!r}")
    return time.monotonic() - started


def main(argv: list[str]) -> None:
    """Measures, prints, appends rows."""
    del argv
    limits = (
        f"--config.max_answers={_ANSWERS.value}", f"--config.queue_limit={2 * _ANSWERS.value}",
        f"--config.max_batch={_MAX_BATCH.value}",
    )  # fmt: skip
    short = {"max_tokens": 8, "ignore_eos": True}
    long = {"n": _ANSWERS.value, "max_tokens": _TOKENS.value, "ignore_eos": True}
    took: list[float] = []
    whole: list[float] = []
    with tempfile.TemporaryDirectory() as place, running_server(Path(place) / "log", *limits) as of:
        alone = ask(of, "127.0.0.1", short)
        thread = threading.Thread(target=lambda: whole.append(ask(of, "127.0.0.2", long)))
        thread.start()
        time.sleep(1.0)
        while thread.is_alive():
            took.append(ask(of, "127.0.0.1", short))
            time.sleep(1.0)
        thread.join()
    figures = {
        "alone": alone,
        "beside the long request, the first": took[0],
        "beside it, median": statistics.median(took),
        "beside it, at most": max(took),
        "the long request": whole[0],
    }
    print(f"short answers meanwhile: {len(took)}")
    load = f"n={_ANSWERS.value} of {_TOKENS.value} tokens, demo, float32"
    load += f", batches up to {_MAX_BATCH.value}; 8 tokens of another client"
    device = jax.devices("cpu")[0]
    report = Report(device, "", _RESULTS.value, ("jax", "uvicorn", "starlette"))
    for name, figure in figures.items():
        has_baseline = name.endswith("the first") and _FIFO.value is not None
        beside = {"first in, first out": _FIFO.value} if has_baseline else {}
        report.add(f"server in turns, {name}: {load}", float(f"{figure:.4g}"), "s", **beside)


if __name__ == "__main__":
    app.run(main)
