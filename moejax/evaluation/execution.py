"""Runs a program that a model wrote, in a subprocess with limits.

The limits keep a bad program from filling memory, disk or time, and from the commonest accidents;
they are no prison. A program can still read what its user can read: run this where nothing is to
be lost and no network is, such as a container started with `--network=none`.
"""

import contextlib
import dataclasses
import enum
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 10.0  # of the clock, HumanEval's own is 3 on a machine with nothing else to do
MEMORY_BYTES = 2**30
FILE_BYTES = 2**20
_PASSED = 7  # exit status of a program that reached its end; an early exit(0) is no success

# Runs in the new process, before the program: limits first, then what could reach outside it.
_GUARD = f"""
import os, resource, sys
def limit(kind, value):
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
limit(resource.RLIMIT_CPU, {int(SECONDS) + 1})
limit(resource.RLIMIT_FSIZE, {FILE_BYTES})
limit(resource.RLIMIT_CORE, 0)
limit(resource.RLIMIT_NOFILE, 32)
if sys.platform == "linux":
    limit(resource.RLIMIT_AS, {MEMORY_BYTES})
source = open(sys.argv[1], encoding="utf-8").read()
_exit = os._exit
for name in ("system", "popen", "fork", "forkpty", "kill", "killpg", "execv", "execve", "spawnv",
             "posix_spawn", "remove", "unlink", "rmdir", "removedirs", "rename", "replace",
             "truncate", "chmod", "chown", "chroot", "setuid", "symlink", "link"):
    if hasattr(os, name):
        setattr(os, name, None)
for name in ("socket", "_socket", "subprocess", "multiprocessing", "ctypes", "shutil", "resource"):
    sys.modules[name] = None
os._exit = None
sys.argv = ["program"]
try:
    exec(compile(source, "program", "exec"), {{"__name__": "program"}})
except BaseException as error:
    sys.stderr.write(f"{{type(error).__name__}}: {{error}}"[:2000])
    sys.stderr.flush()
    _exit(1)
_exit({_PASSED})
"""


class Verdict(enum.Enum):
    """How a program ended."""

    PASSED = "passed"  # it ran to its end
    FAILED = "failed"  # it raised, exited early or was ended by a limit
    TIMED_OUT = "timed out"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A verdict, and the last line of what the program said on stderr."""

    verdict: Verdict
    said: str


def run_program(source: str, *, seconds: float = SECONDS) -> Outcome:
    """Runs Python source in a new process group and an empty folder, which are gone afterwards.

    Args:
      source: of a whole program; it passes if nothing is raised until its end.
      seconds: of the clock, after which all of its processes are killed.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        program, said = Path(folder) / "program.py", Path(folder) / "stderr"
        program.write_text(source, encoding="utf-8", errors="replace")
        with said.open("wb") as stderr:  # a file, so that its size is limited too
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", "-c", _GUARD, str(program)],
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return Outcome(Verdict.TIMED_OUT, f"no end after {seconds:g} s")
        finally:
            _end(process)
        lines = said.read_bytes()[-2000:].decode(errors="replace").strip().splitlines()
    passed = process.returncode == _PASSED
    return Outcome(Verdict.PASSED if passed else Verdict.FAILED, lines[-1] if lines else "")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kills what is left of a process and of those that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
