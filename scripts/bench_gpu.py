"""Measures every GPU row again: a list of jobs, one at a time on each card.

    python -m scripts.bench_gpu results/                        # all; rows go to results/*.jsonl
    python -m scripts.bench_gpu results/ --part=models --part=memory
    python -m scripts.bench_gpu results/ --cards=0,1 --seconds=540     # and again, for the rest
    python -m scripts.bench_gpu results/ --list                 # what there is, what is finished

Cards share a host, not their links or memory. What ended well is noted in results/finished.json and
not run again; logs are in results/logs, compiled programs in results/programs, so that a job that
was interrupted goes on quickly. A job that fails does not stop the others.
`python -m scripts.merge_rows results/` brings the rows to where documents are made from.
"""

import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from absl import app, flags

from scripts.gpu_jobs import PARTS, Job, jobs

_PART = flags.DEFINE_multi_enum("part", [], list(PARTS), "parts; []: all")
_ONLY = flags.DEFINE_multi_string("only", [], "jobs whose name has one of these; []: all")
_CARDS = flags.DEFINE_list("cards", ["0"], "indices of the cards that measure")
_SECONDS = flags.DEFINE_float("seconds", 0, "in which all must end; 0: as long as it takes")
_EACH = flags.DEFINE_float("seconds_each", 600, "after which a job is interrupted")
_PYTHON = flags.DEFINE_string("python", sys.executable, "that runs the jobs")
_LIST = flags.DEFINE_bool("list", False, "say which jobs there are, and run none")
_PATIENCE = 20.0  # seconds from an interrupt to the end by force


@dataclasses.dataclass
class Place:
    """A folder of rows, and what is finished there."""

    folder: Path

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @property
    def finished(self) -> dict[str, float]:
        """Seconds of the jobs that ended well, by name."""
        try:
            return json.loads((self.folder / "finished.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}

    def finish(self, name: str, seconds: float) -> None:
        """Notes one; whole or not at all."""
        with self._lock:
            found = self.finished | {name: round(seconds, 1)}
            part = self.folder / "finished.json.part"
            part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            part.replace(self.folder / "finished.json")


def chosen(parts: list[str], only: list[str]) -> list[Job]:
    """Jobs by part and name.

    Raises:
      SystemExit: there are none.
    """
    found = [
        job
        for job in jobs()
        if (not parts or job.part in parts) and (not only or any(word in job.name for word in only))
    ]
    if not found:
        sys.exit(f"error: no job of {parts or 'any part'} has {only} in its name; see --list")
    return found


def order(waiting: list[Job], cards: int) -> list[Job]:
    """Longest first, so that cards end together; on one card as they are listed."""
    return waiting if cards == 1 else sorted(waiting, key=lambda job: -job.seconds)


def environment(job: Job, card: str, total_mib: float) -> dict[str, str]:
    """Environment of a job's process: which card, and how much of it."""
    given = dict(os.environ, CUDA_VISIBLE_DEVICES=card, PYTHONUNBUFFERED="1")
    if job.memory:
        share = job.memory if job.memory < 1 else 1024 * job.memory / total_mib
        if share >= 1:
            raise ValueError(f"{job.name} needs {job.memory:g} GiB, the card has {total_mib:g} MiB")
        given["XLA_CLIENT_MEM_FRACTION"] = f"{share:.4f}"
    return given


def total_mib(card: str) -> float:
    """Reads the memory of a card.

    Raises:
      SystemExit: there is no such card, or no driver.
    """
    query = ("--query-gpu=memory.total", "--format=csv,noheader,nounits", f"--id={card}")
    try:
        done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, check=True)
        return float(done.stdout.strip())
    except (OSError, subprocess.CalledProcessError, ValueError):
        sys.exit(f"error: nvidia-smi knows no GPU {card}: give those that there are as --cards")


def run(job: Job, place: Place, card: str, mib: float, end: float) -> str:
    """Runs a job on a card; in words, how it ended."""
    rows = str(place.folder)
    words = [_PYTHON.value, *job.arguments(rows, f"{rows}/programs")]
    log = place.folder / "logs" / (job.name.replace(" ", "_").replace(",", "") + ".txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    try:
        given = environment(job, card, mib)
    except ValueError as error:
        return str(error)
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=given)
        try:
            status = process.wait(max(1.0, min(started + _EACH.value, end) - started))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # rows are written as they come
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return f"interrupted after {time.monotonic() - started:.0f} s"
    seconds = time.monotonic() - started
    if status:
        return f"failed with {status} after {seconds:.0f} s: {log}"
    place.finish(job.name, seconds)
    return f"{seconds:.0f} s"


def work(card: str, waiting: "queue.Queue[Job]", place: Place, end: float) -> None:
    """Runs job after job on a card, while there is time for the next one."""
    mib = total_mib(card)
    while True:
        try:
            job = waiting.get_nowait()
        except queue.Empty:
            return
        if time.monotonic() + job.seconds > end:
            print(f"card {card} | {job.name} | left: no time for {job.seconds:.0f} s", flush=True)
            continue
        print(f"card {card} | {job.name} | begins", flush=True)
        print(f"card {card} | {job.name} | {run(job, place, card, mib, end)}", flush=True)


def main(argv: list[str]) -> None:
    """Runs what is asked for and not finished."""
    if len(argv) != 2:
        sys.exit("error: give the folder of rows: python -m scripts.bench_gpu results/")
    place, end = Place(Path(argv[1])), time.monotonic() + (_SECONDS.value or float("inf"))
    finished, wanted = place.finished, chosen(_PART.value, _ONLY.value)
    if _LIST.value:
        for job in wanted:
            state = f"finished in {finished[job.name]:g} s" if job.name in finished else "to be run"
            print(f"{job.part} | {job.name} | about {job.seconds:g} s | {state}")
        return
    place.folder.mkdir(parents=True, exist_ok=True)
    if threading.current_thread() is threading.main_thread():
        # Started in the background of a shell it would ignore interrupts, and so would its jobs.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    waiting: queue.Queue[Job] = queue.Queue()
    unfinished = [job for job in wanted if job.name not in finished]
    for job in order(unfinished, len(_CARDS.value)):
        waiting.put(job)
    workers = [
        threading.Thread(target=work, args=(card, waiting, place, end)) for card in _CARDS.value
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    left = [job.name for job in wanted if job.name not in place.finished]
    print(f"{len(wanted) - len(left)} of {len(wanted)} jobs are finished")
    if left:
        sys.exit(f"error: not finished: {'; '.join(left)}; run the same command again to go on")


if __name__ == "__main__":
    app.run(main)
