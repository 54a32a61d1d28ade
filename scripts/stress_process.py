"""Starts, ends and watches a server's process for the scripts that load it."""

import contextlib
import dataclasses
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

START_S = 600.0  # programs are compiled before it is ready


@dataclasses.dataclass
class Server:
    """A server's process and its metrics."""

    process: subprocess.Popen[bytes]
    port: int

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels; 0 where there is none yet."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{re.escape(name)}({{.*}})? (\S+)$", text, re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for said, value in found if all(one in said for one in wanted))


@contextlib.contextmanager
def running_server(log: Path, *flags: str, tree: str = "") -> Iterator[Server]:
    """A server that is ready; ended by SIGTERM, after which its status must be 0.

    Args:
      log: gets its stderr.
      *flags: of `moejax.serve`.
      tree: folder with the source that runs; "": this one.
    """
    command = [
        sys.executable, "-m", "moejax.serve", "--config.platform=cpu", "--config.dtype=float32",
        "--config.port=0", *flags,
    ]  # fmt: skip
    paths = [path for path in (tree, os.environ.get("PYTHONPATH")) if path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, cwd=tree or None, env=env)
    try:
        started = time.monotonic()
        while not (found := re.search(r"^ready: .*:(\d+)\b", log.read_text(), re.MULTILINE)):
            if process.poll() is not None or time.monotonic() - started > START_S:
                raise RuntimeError(f"the server did not start: {log.read_text()[-500:]}")
            time.sleep(0.1)
        yield Server(process, int(found[1]))
        process.send_signal(signal.SIGTERM)
        if status := process.wait(timeout=60):
            raise RuntimeError(f"the server ended with status {status}: {log.read_text()[-500:]}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextlib.contextmanager
def sampled_rss(pid: int, mib: list[float]) -> Iterator[None]:
    """Appends the resident memory of a process twice a second while the block runs."""
    done, process = threading.Event(), psutil.Process(pid)

    def sample() -> None:
        while not done.wait(0.5):
            mib.append(process.memory_info().rss / 2**20)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def growth_percent(mib: list[float]) -> float:
    """Growth of the last third's median over the first third's, in percent."""
    third = max(1, len(mib) // 3)
    first, last = statistics.median(mib[:third]), statistics.median(mib[-third:])
    return 100 * (last / first - 1)


def percentile(values: list[float], percent: int) -> float:
    """Percentile of the values, by rank; NaN of none."""
    if not values:
        return float("nan")
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]
