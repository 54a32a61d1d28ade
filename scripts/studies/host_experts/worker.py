"""The library of `worker.cpp`: compiled for this machine, and its calls."""

import ctypes
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

FLAGS = (
    "-O3 -std=c++17 -march=native -fPIC -shared -pthread -fno-math-errno -fno-trapping-math "
    "-fassociative-math -fno-signed-zeros -ffinite-math-only"
)
MAILBOX_BYTES = 131072
REPLY = 65536  # byte at which replies begin, `kReply`
Arrays = Sequence[int]  # addresses of words, scales and zeros of gate_up, then of down


class Library:
    """Calls of the compiled library; none of them holds the interpreter's lock."""

    def __init__(self, folder: Path) -> None:
        """Compiles by g++ into a folder; CalledProcessError if that fails."""
        source, built = Path(__file__).with_name("worker.cpp"), folder / "libhost_experts.so"
        start = time.perf_counter()
        subprocess.run(["g++", *FLAGS.split(), str(source), "-o", str(built)], check=True)
        self.compile_s = time.perf_counter() - start
        self._library = ctypes.CDLL(str(built))
        self._library.start_workers.restype = ctypes.c_void_p
        self._library.run_jobs.restype = ctypes.c_double
        self._library.read_bytes.restype = ctypes.c_double

    def start(self, count: int, mailbox: int, arrays: Arrays, dims: tuple[int, int]) -> int:
        """Starts threads that serve the mailbox at an address until `stop`."""
        pointers = (ctypes.c_void_p * 6)(*arrays)
        return self._library.start_workers(
            count, ctypes.c_void_p(mailbox), pointers, *map(ctypes.c_int64, dims)
        )

    def stop(self, workers: int) -> None:
        """Ends them; they must be idle."""
        self._library.stop_workers(ctypes.c_void_p(workers))

    def run_jobs(self, mailbox: int, rows: np.ndarray) -> float:
        """Posts a job for each of int32[jobs, experts] from here; returns seconds in all."""
        rows = np.ascontiguousarray(rows, np.int32)
        pointer = rows.ctypes.data_as(ctypes.c_void_p)
        return self._library.run_jobs(ctypes.c_void_p(mailbox), *rows.shape, pointer)

    def read_bytes(self, address: int, num_bytes: int, count: int) -> float:
        """Reads memory by some threads; returns seconds."""
        return self._library.read_bytes(ctypes.c_void_p(address), ctypes.c_int64(num_bytes), count)


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
