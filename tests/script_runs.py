"""Runs of the mains under scripts/, each in a process of its own, forked where imports are done.

    done = run_module("scripts.studies.kernels.bench_kernels", "--smoke", f"--out={output}")

Importing JAX and moejax takes longer than most of these runs. One process of each pytest worker
imports them, starts no backend and no thread, and is forked for every run: flags, the environment,
exit status and output are those of a new process.
"""

import atexit
import contextlib
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 300


def run_module(module: str, *arguments: str, **how: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m module` in the repository; `how` is added to the environment."""
    return _run(module, arguments, ROOT, how)


def run_file(path: Path, *arguments: str, cwd: Path, **how: str) -> subprocess.CompletedProcess:
    """Runs `python path` in `cwd`."""
    return _run(str(path), arguments, cwd, how)


def _run(
    what: str, arguments: tuple[str, ...], cwd: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("out", "err")]
        request = {
            "argv": [what, *arguments], "cwd": str(cwd), "environment": environment,
            "files": [str(file) for file in files],
        }  # fmt: skip
        parent = _parent(os.getpid())
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(json.dumps(request) + "\n")
        parent.stdin.flush()
        status = int(parent.stdout.readline())
        out, err = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    return subprocess.CompletedProcess([what, *arguments], status, out, err)


@functools.cache
def _parent(of_process: int) -> subprocess.Popen[str]:
    """The process that is forked; it ends when its stdin is closed, with this one."""
    del of_process  # whose pipes are not shared with forks of it
    import jax

    programs = jax.config.jax_compilation_cache_dir  # where the other tests keep theirs
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.script_runs"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **({"JAX_COMPILATION_CACHE_DIR": programs} if programs else {}),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        },
    )  # fmt: skip
    atexit.register(parent.communicate)
    return parent


def _forked() -> dict | None:
    """In the child the request that it is to serve; in the parent None, after the last one."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            return request
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def _become(request: dict) -> None:
    """The process that was asked for: its streams, folder, environment and arguments."""
    import jax

    for target, name in enumerate((os.devnull, *request["files"])):
        flags = os.O_WRONLY | os.O_CREAT if target else os.O_RDONLY
        opened = os.open(name, flags, 0o600)
        os.dup2(opened, target)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.update(request["environment"])
    if platforms := request["environment"].get("JAX_PLATFORMS"):  # which JAX has read already
        jax.config.update("jax_platforms", platforms)
    tempfile.tempdir = None  # which TMPDIR may have changed
    sys.argv = list(request["argv"])
    signal.alarm(LIMIT_S)  # whose signal ends it


def main() -> None:
    """Imports, and forks for each line of stdin."""
    import jax.experimental.pallas  # noqa: F401

    import moejax.engine  # noqa: F401

    tasks = Path("/proc/self/task")
    num_threads = len(list(tasks.iterdir())) if tasks.exists() else 1
    assert num_threads == 1, f"{num_threads} threads: a fork would have but one of them"
    with warnings.catch_warnings():
        # JAX warns at every fork; none of its threads runs yet.
        warnings.simplefilter("ignore", RuntimeWarning)
        request = _forked()
    if request is None:
        return
    _become(request)
    what = sys.argv[0]
    try:
        if what.endswith(".py"):
            sys.path.insert(0, str(Path(what).parent))
            runpy.run_path(what, run_name="__main__")
        else:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        sys.exit(1)


if __name__ == "__main__":
    main()
