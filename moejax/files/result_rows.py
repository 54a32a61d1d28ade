"""Measured results as rows of JSON, one per line, so that runs can be compared."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moejax.errors import MoejaxError
from moejax.files.whole import append

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One figure, with all that is needed to measure it again."""

    what: str  # the quantity and its subject, such as "TPOT, demo, float32, batch 1"
    figure: float
    unit: str  # "ms", "tokens/s", "GB/s", "x" (a ratio) ...
    baseline: Mapping[str, float | str]  # the quantity of the systems compared, by name; or a word
    device: str  # the chip, and how much of it (`describe_device`)
    versions: Mapping[str, str]  # of the packages that matter (`package_versions`)
    date: str  # the day, ISO 8601
    command: str  # what to type to measure it again (`command_line`)


def append_rows(path: Path, rows: Iterable[ResultRow]) -> None:
    """Appends rows to a JSON Lines file, creating it if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append(path, "".join(map(_line, rows)))


def check_rows(path: Path) -> None:
    """Raises MoejaxError if a file holds anything but rows of `append_rows`."""
    if not path.is_file():
        return
    try:
        if read_rows(path) and not path.read_bytes().endswith(b"\n"):
            raise ValueError("the last row is not whole")
    except (ValueError, TypeError, RecursionError) as error:
        raise MoejaxError(
            f"output {path} is there and holds no rows of results, to which more could be appended "
            f"({error}); name another file"
        ) from error


def _line(row: ResultRow) -> str:
    return json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n"


def read_rows(path: Path) -> list[ResultRow]:
    """Reads the rows that `append_rows` wrote, oldest first."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [ResultRow(**json.loads(line)) for line in lines]


def describe_device(device: "jax.Device") -> str:
    """Names an accelerator, or a CPU's model and the cores this process may use."""
    if device.platform != "cpu":
        return device.device_kind
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu_model()}, {cores} cores"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def package_versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of installed distributions."""
    versions = {"python": platform.python_version()}
    return versions | {name: importlib.metadata.version(name) for name in packages}


def command_line(argv: Sequence[str] | None = None) -> str:
    """Command of this process, as typed in the repository's root."""
    program, *arguments = sys.argv if argv is None else argv
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if argv is None and module is not None:
        return shlex.join(["python", "-m", module.name.removesuffix(".__main__"), *arguments])
    path = Path(program)
    if path.name.split(" ")[0] == "moejax":  # the command that pip installs
        return shlex.join([*path.name.split(" "), *arguments])
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return shlex.join(["python", str(path), *arguments])


def today() -> str:
    """Today's date, ISO 8601, in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
