"""Programs of peers: run in time, with the device memory that the driver counts meanwhile."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax

from moejax.files.result_rows import describe_device

GRACE_S = 15.0  # from SIGTERM to SIGKILL
POLL_MS = 50
NOT_RUN = "not run"  # workload and unit of what could not run


class NotRunError(Exception):
    """A program that failed; the text is its last words."""


class OutOfTimeError(Exception):
    """The time that is left does not suffice; nothing is wrong with the program."""


class Figure(NamedTuple):
    """Tokens a second of one workload."""

    workload: str  # `prefill(...)` or `decode(...)`
    tokens_per_s: float  # of all sequences together
    more: dict[str, float | str]  # numbers and texts beside it
    about: str = ""  # of its row; "": the case's


def prefill(tokens: int, sequences: int = 1) -> str:
    """Workload: prompts of so many tokens each, read."""
    return f"prefill of {tokens}" if sequences == 1 else f"prefill of {sequences} x {tokens}"


def decode(context: int, sequences: int = 1) -> str:
    """Workload: tokens after prompts of so many tokens."""
    return f"decode after {context}, {sequences} sequence{'s' * (sequences > 1)}"


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of one peer."""

    peer: str  # its name
    about: str  # shape, bits and flags, as rows say them
    # that it may take where files are cached; a call with less left does not begin it
    seconds: float
    measure: "Callable[[Place], list[Figure]]"  # runs it. Raises NotRunError, or OutOfTimeError.
    others: tuple[str, ...] = ()  # shape, bits and flags of further rows, which the same run makes

    @property
    def names(self) -> tuple[str, ...]:
        """Names in rows."""
        return tuple(f"{self.peer} | {about}" for about in (self.about, *self.others))


class Ran(NamedTuple):
    """Output of a program, and its peak of device memory; None without a driver."""

    stdout: str
    stderr: str
    peak_gib: float | None


@dataclasses.dataclass
class Place:
    """Where files and logs go, and how long programs may take."""

    files: Path  # folder of random weights, tens of GiB
    logs: Path  # folder of what programs print
    end: float  # `time.monotonic()` at which all must have ended
    each_s: float = 500  # seconds after which a program counts as failed

    def run(
        self, words: Sequence[str], env: Mapping[str, str] | None = None, log: str = "program"
    ) -> Ran:
        """Runs a program to its end.

        Raises:
          NotRunError: it failed, or took longer than `each_s`.
          OutOfTimeError: `end` came first.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        out, err = self.logs / f"{log}.out", self.logs / f"{log}.err"
        left = self.end - time.monotonic()
        if left <= 0:
            raise OutOfTimeError
        with device_memory() as memory, out.open("w") as stdout, err.open("w") as stderr:
            process = start(words, env, stdout, stderr)
            try:
                status = process.wait(min(left, self.each_s))
            except subprocess.TimeoutExpired:
                if left < self.each_s:
                    raise OutOfTimeError from None
                raise NotRunError(f"took more than {self.each_s:.0f} s") from None
            finally:
                stop(process)
        if status:
            raise NotRunError(last_words(err, out) or f"status {status}")
        return Ran(out.read_text(errors="replace"), err.read_text(errors="replace"), memory.peak)

    def random_files(self, name: str, *flags: str) -> Path:
        """Random weights of that name, written where they are not there."""
        path = self.files / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"part-{name}")
            module = "scripts.studies.peers.random_files"
            self.run([sys.executable, "-m", module, *flags, f"--out={part}"], log="random_files")
            part.replace(path)
        return path


def start(
    words: Sequence[str],
    env: Mapping[str, str] | None,
    stdout: int | IO[Any],
    stderr: int | IO[Any],
) -> "subprocess.Popen[str]":
    """Starts a program in a session of its own, so that its children end with it."""
    try:
        return subprocess.Popen(
            list(words), env={**os.environ, **(env or {})}, start_new_session=True, text=True,
            stdout=stdout, stderr=stderr,
        )  # fmt: skip
    except OSError as error:
        raise NotRunError(f"{words[0]} cannot be started: {error.strerror}") from error


def stop(process: "subprocess.Popen[str]") -> None:
    """Ends a program and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if number == signal.SIGTERM:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    process.wait()


_ERROR = re.compile(r"error|failed|refused|exception|cannot|unsupported|out of memory", re.I)


def last_words(*logs: Path) -> str:
    """Last line that names an error, else the last line."""
    for log in logs:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        lines = [line for line in lines if line]
        if lines:
            return next((line for line in reversed(lines) if _ERROR.search(line)), lines[-1])[:300]
    return ""


class DeviceMemory:
    """Memory in use on the first GPU that programs see, polled, above what was in use before."""

    def __init__(self) -> None:
        self._least, self._most = float("inf"), 0.0

    def read(self, lines: Iterator[str]) -> None:
        """Reads numbers of MiB, one a line, to the end."""
        for line in lines:
            with contextlib.suppress(ValueError):
                value = float(line)
                self._least, self._most = min(self._least, value), max(self._most, value)

    @property
    def peak(self) -> float | None:
        """GiB above the least seen; None if nothing was."""
        return (self._most - self._least) / 1024 if self._most else None


@contextlib.contextmanager
def device_memory() -> Iterator[DeviceMemory]:
    """Polls the driver by nvidia-smi, the first time before the block; without it nothing."""
    memory = DeviceMemory()
    words = _ask_driver("memory.used", "csv,noheader,nounits")
    try:
        first = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        memory.read(iter(first.splitlines()))
        poll = subprocess.Popen([*words, f"--loop-ms={POLL_MS}"], stdout=subprocess.PIPE, text=True)
    except (OSError, subprocess.CalledProcessError):
        yield memory
        return
    assert poll.stdout is not None
    thread = threading.Thread(target=memory.read, args=(poll.stdout,))
    thread.start()
    try:
        yield memory
    finally:
        poll.terminate()
        poll.wait()
        thread.join()


def _ask_driver(what: str, form: str) -> list[str]:
    """Command that asks for a figure of the first GPU that programs see."""
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return ["nvidia-smi", f"--query-gpu={what}", f"--format={form}", f"--id={card}"]


def device_name(platform: str) -> str:
    """The GPU's name as the driver says it, or the CPU's."""
    if platform == "cpu":
        return describe_device(jax.devices("cpu")[0])
    words = _ask_driver("name", "csv,noheader")
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
