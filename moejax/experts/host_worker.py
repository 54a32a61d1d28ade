"""The library of `host_worker.cpp`: compiled for this machine, and its calls."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.devices import user_cache
from moejax.errors import MoejaxError
from moejax.weights.qtensor import QTensor
from pallas_kernels.gating import SWIGLU, Gating
from pallas_kernels.host_mailbox import Mailbox

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-O3", "-std=c++17", "-march=native", "-fPIC", "-shared", "-pthread", "-fno-math-errno",
    "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros", "-ffinite-math-only", "-w",
)  # fmt: skip
_KINDS = {"float16": 1, "float32": 2, "uint8": 3}  # of arrays; 0: there is none
_EXPONENTS = 4  # kind of MXFP4's scales
LEAST_CORES = 4
_BLOCK = 256  # codes that share words


class _Gating(ctypes.Structure):
    """`Gating` of the library."""

    _fields_ = [(name, ctypes.c_float) for name in ("alpha", "limit", "offset")]


class _Form(ctypes.Structure):
    """`Matrices` of the library."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("words", "scales", "zeros", "biases")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs")),
        *((name, ctypes.c_int32) for name in ("bits", "group", "scale_kind", "zero_kind")),
    ]


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine_refusal() -> str | None:
    """Reason why this machine's cores cannot multiply experts, or None."""
    if cores() < LEAST_CORES:
        return f"it has {cores()} cores, and {LEAST_CORES} are needed"
    if _cpu_facts() is None:
        return "its cores are no x86-64 with AVX2"
    if not any(map(shutil.which, _COMPILERS)):
        return f"it has no C++ compiler ({', '.join(_COMPILERS)}): install one"
    return None


def _cpu_facts() -> str | None:
    """Instruction sets of the cores; None where AVX2 is not among them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    known = {"avx2", "fma", "f16c"} <= set(flags.split())
    return flags if known and platform.machine() == "x86_64" else None


def form_refusal(matrices: object) -> str | None:
    """Reason why the library cannot multiply [S, N, K] of some form, or None."""
    if not isinstance(matrices, QTensor) or matrices.refinements:
        return "they are not in INT2, INT3, INT4, INT8 or MXFP4 in one piece"
    if matrices.compensators:
        return "they have low-rank compensators"
    if matrices.permutation is not None:
        return "their inputs are permuted"
    inputs, group = matrices.num_inputs, matrices.group_size
    divides = group % 32 == 0 and (_BLOCK % group == 0 or group % _BLOCK == 0)
    if inputs % 32 or not (divides or group >= inputs):
        return f"rows of {inputs} in groups of {group} are not cut at multiples of 32"
    return None


def _form(m: QTensor, biases: np.ndarray | None) -> _Form:
    """Describes matrices whose arrays are numpy's."""

    def of(array: Any) -> tuple[int, int]:
        return (0, 0) if array is None else (array.ctypes.data, _KINDS.get(str(array.dtype), 0))

    (words, _), (scales, scale_kind), (zeros, zero_kind) = map(of, (m.words, m.scales, m.zeros))
    return _Form(
        words, scales, zeros, of(biases)[0], m.words.shape[1], m.num_inputs, m.bits, m.group_size,
        _EXPONENTS if m.is_mxfp4 else scale_kind, zero_kind,
    )  # fmt: skip


class Workers:
    """Threads of the compiled library that serve a mailbox; they sleep while no step runs.

    No call holds the interpreter's lock.
    """

    def __init__(
        self, count: int, mailbox: np.ndarray, gate_up: QTensor, down: QTensor,
        gating: Gating = SWIGLU, biases: Sequence[np.ndarray] = (),
    ) -> None:  # fmt: skip
        """Compiles the library, unless it is there, and starts threads.

        Args:
          mailbox: uint8[`Mailbox.nbytes`].
          gate_up: [S, 2F, D], of numpy arrays that stay where they are.
          down: [S, D, F], likewise.
          biases: float32[S, 2F] and [S, D], likewise, or none.

        Raises:
          MoejaxError: there is no compiler, or it fails.
        """
        self._library = library = ctypes.CDLL(str(_built(user_cache("host"))))
        library.start_workers.restype, library.run_jobs.restype = ctypes.c_void_p, ctypes.c_double
        if mailbox.ctypes.data % 64:
            raise ValueError("the mailbox begins at no multiple of 64 bytes")
        self.mailbox, self._address = mailbox, ctypes.c_void_p(mailbox.ctypes.data)
        self._reply = ctypes.c_int64(Mailbox(gate_up.num_inputs).reply)
        forms = (_Form * 2)(*map(_form, (gate_up, down), biases or (None, None)))
        limit = np.finfo(np.float32).max if gating.limit is None else gating.limit
        how = _Gating(gating.alpha, limit, gating.up_offset)
        self._workers: int | None = library.start_workers(
            count, self._address, self._reply, forms, how
        )

    def wake(self) -> None:
        """Has them look for jobs: called when a step is dispatched."""
        if self._workers is not None:
            self._library.wake_workers(ctypes.c_void_p(self._workers))

    def run_jobs(self, rows: np.ndarray) -> float:
        """Posts a job for each of int32[jobs, experts] from here; returns seconds in all."""
        rows = np.ascontiguousarray(rows, np.int32)
        self.wake()
        pointer = rows.ctypes.data_as(ctypes.c_void_p)
        return self._library.run_jobs(self._address, self._reply, *rows.shape, pointer)

    def stop(self) -> None:
        """Ends them once they are idle; may be repeated."""
        workers, self._workers = self._workers, None
        if workers is not None:
            self._library.stop_workers(ctypes.c_void_p(workers))


def _built(folder: Path) -> Path:
    """The compiled library in a folder; another one for each source and machine."""
    source = Path(__file__).with_suffix(".cpp")
    facts = (source.read_text(), *_FLAGS, _cpu_facts() or "")
    built = folder / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"
    if built.exists():
        return built
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise MoejaxError(f"memory.host_threads: no C++ compiler ({', '.join(_COMPILERS)}) is here")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / built.name
            command = [compiler, *_FLAGS, str(source), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = (done.stderr.strip().splitlines() or ["no message"])[0]
                raise MoejaxError(f"memory.host_threads: {compiler} failed: {said}")
            made.rename(built)
    except OSError as error:
        raise MoejaxError(f"memory.host_threads: {folder} cannot be written ({error})") from error
    return built
