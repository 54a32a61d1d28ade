"""The host's cores beside the link: threads that multiply some of a decode step's misses.

How many of m misses they take is a table, made when the experts are loaded by measured rates:
whoever happens to be quicker in a step decides nothing.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moejax.experts.budget import GIB
from moejax.experts.host_worker import Workers, cores
from moejax.experts.pinned_memory import allocate_host_arrays
from moejax.experts.state import HostRows, TierSlots
from moejax.experts.tier_step import TierStep
from moejax.models.config import ModelConfig
from moejax.weights.qtensor import QTensor
from pallas_kernels import host_mailbox as mailbox
from pallas_kernels.cache_plan import Fetch
from pallas_kernels.host_mailbox import MOST, Mailbox

TRIP_S = 25e-6  # a job and its reply beside its products (H100, 24 to 29 us, 2026-11-26)
_JOBS, _ROUNDS = 16, 5  # of a measurement, whose median counts


def num_threads(asked: int) -> int:
    """Threads for `memory.host_threads`: so many, or with -1 all cores but one."""
    return min(asked, cores()) if asked > 0 else max(1, cores() - 1)


def _best_split(fetch_s: float, job_s: Sequence[float]) -> tuple[int, ...]:
    """Chooses how many misses the host takes, so that both end the earliest.

    Args:
      fetch_s: seconds of the link for an expert.
      job_s: seconds of the host for jobs of 0, 1, ... experts.
    """

    def seconds(misses: int, hosted: int) -> float:
        return max(fetch_s * (misses - hosted), (TRIP_S + job_s[hosted]) * (hosted > 0))

    return tuple(
        min(range(misses + 1), key=functools.partial(seconds, misses))
        for misses in range(len(job_s))
    )


class HostCores:
    """Threads that serve the jobs of one tier's steps.

    Attributes:
      split: how many of 0, 1, ... misses they multiply; all 0 until `_use_rates`.
      text: a line that states the rates and the split.
    """

    def __init__(
        self, gate_up: QTensor, down: QTensor, config: ModelConfig, threads: int,
        device: jax.Device, row_of: np.ndarray, biases: Sequence[jax.Array] = (),
    ) -> None:  # fmt: skip
        """Starts threads, as `Workers`.

        Args:
          gate_up: [R, 2F, D], numpy views of the rows in host memory.
          down: [R, D, F], likewise.
          row_of: int32[M, E], the experts' rows.
          biases: [M, E, 2F] and [M, E, D], of which they get copies; none where there are none.
        """
        layout, width = Mailbox(gate_up.num_inputs), config.experts_per_token
        self._num_rows, self.threads = gate_up.words.shape[0], threads
        shapes = [jax.ShapeDtypeStruct((self._num_rows, of.shape[-1]), np.float32) for of in biases]
        self._held = allocate_host_arrays(
            [jax.ShapeDtypeStruct((layout.nbytes,), np.uint8), *shapes], device
        )
        self._mailbox, *copies = (held.views[0] for held in self._held)
        self._mailbox[:], self._reply = 0, layout.reply
        for copy, of in zip(copies, biases, strict=True):
            copy[row_of] = of
        self.split: tuple[int, ...] = (0,) * (width + 1)
        self.text = ""
        self._workers = Workers(threads, self._mailbox, gate_up, down, config.gating, copies)

    @property
    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        """Split and address, as `HostJobs`."""
        address = np.array([self._mailbox.ctypes.data], np.uint64).view(np.int32)
        return np.asarray(self.split, np.int32), address

    @property
    def last_number(self) -> int:
        """Number of the last job."""
        return int(self._mailbox[:4].view(np.int32)[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the mailbox and of biases."""
        return sum(held.array.nbytes for held in self._held)

    @property
    def failures(self) -> int:
        """Whether a step waited in vain for a reply: 0 or 1."""
        at = self._reply + mailbox.LATE
        return int(self._mailbox[at : at + 4].view(np.int32)[0] != 0)

    @property
    def error(self) -> str:
        """The error of `failures`."""
        return (
            "the host's cores gave no answer in 2 seconds, so the tokens of this call are wrong; "
            "every expert is fetched from now on: ask again, or set memory.host_threads=0"
        )

    def _run_jobs(self, experts: int) -> float:
        """Seconds of a job of so many experts, whose rows lie anywhere in the store."""
        rng = np.random.default_rng(experts)
        rows = rng.integers(self._num_rows, size=(_JOBS, experts), dtype=np.int32)
        return self._workers.run_jobs(rows) / _JOBS

    def _use_rates(self, fetch_s: float, job_s: Sequence[float], expert_nbytes: int) -> None:
        """Makes the table, see `_best_split`."""
        width = len(self.split) - 1
        self.split = _best_split(fetch_s, job_s)
        link, host = expert_nbytes / GIB / fetch_s, width * expert_nbytes / GIB / job_s[width]
        table = ", ".join(map(str, self.split[1:]))
        self.text = (
            f"the host's cores ({self.threads} threads, {host:.1f} GiB/s; the link {link:.1f}) "
            f"multiply {table} of 1 to {width} misses of a layer"
        )

    def wake(self) -> None:
        """Has the threads look for jobs: a step is about to be dispatched."""
        self._workers.wake()

    def close(self) -> None:
        """Ends the threads."""
        self._workers.stop()


def job_refusal(config: ModelConfig) -> str | None:
    """Reason why a model's layers fit no job, or None."""
    if config.experts_per_token > MOST or config.model_dim % 32:
        return f"a job has up to {MOST} experts, of a width that 32 divides"
    return None


def measure(host: HostCores, tier: TierStep, pool: TierSlots, expert_nbytes: int) -> TierSlots:
    """Makes the host's table by the rates of the link, and of the host while the link is busy.

    Args:
      pool: an empty tier's, donated: slots that nothing owns are written.

    Returns:
      The pool.
    """
    few, many, width = 4, 20, min(tier.config.experts_per_token, tier.spec.cache.num_slots)

    @functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
    def fetch(pool: TierSlots, rows: HostRows, count: int) -> TierSlots:
        lanes = jnp.arange(width, dtype=jnp.int32)
        for number in range(count):
            jobs = Fetch((number * width + lanes) % rows.gate_up.shape[0], lanes)
            pool = dataclasses.replace(tier, rows=rows).copy_rows(pool, 0, 0, jobs)
        return pool

    least = {}
    for count in (few, many):
        times = []
        for _ in range(4):
            start = time.perf_counter()
            pool = jax.block_until_ready(fetch(pool, tier.rows, count))
            times.append(time.perf_counter() - start)
        least[count] = min(times[1:])
    fetch_s = max(1e-9, (least[many] - least[few]) / ((many - few) * width))
    job_s = [0.0]
    for experts in range(1, len(host.split)):
        times = []
        for _ in range(_ROUNDS):
            pool = fetch(pool, tier.rows, many)
            times.append(host._run_jobs(experts))
            jax.block_until_ready(pool)
        job_s.append(statistics.median(times))
    host._use_rates(fetch_s, job_s, expert_nbytes)
    return pool
