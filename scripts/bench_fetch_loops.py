"""What the parts of `bench_fetch` share: stores, jobs that go round, loops that are timed."""

import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import expert_fetch
from scripts.bench_report import Report

Pools = tuple[jax.Array, ...]
STORE_BYTES = 2**29  # of a pinned store, 10 times the L2 of an H200
MIN_ROWS = 8
LOOP_SECONDS = 20e-3  # of a run, so that the dispatch of the loop, 0.1 ms, is nothing


@dataclasses.dataclass(kw_only=True)
class Bench:
    """What is measured on, and until when."""

    report: Report
    device: jax.Device
    smoke: bool
    repeats: int  # timed runs
    time_limit_s: float
    begun: float = dataclasses.field(default_factory=time.perf_counter)

    def placed(self, arrays: Any, kind: str) -> Any:
        """The arrays in a memory of the device."""
        sharding = jax.sharding.SingleDeviceSharding(self.device, memory_kind=kind)
        return jax.block_until_ready(jax.device_put(arrays, sharding))

    def in_time(self) -> bool:
        """Whether another figure may begin."""
        return time.perf_counter() - self.begun < self.time_limit_s


class Store:
    """A pinned store and a pool of as many slots: INT4 words, an eighth as much of scales."""

    def __init__(self, bench: Bench, num_words: int) -> None:
        """`num_words` of 4 bytes a row, all arrays counted, to within a thousand."""
        words = max(num_words * 8 // 9 // 256, 1) * 256
        total = 2**17 if bench.smoke else STORE_BYTES
        self.num_rows = max(total // (4 * num_words), MIN_ROWS)
        rng = np.random.default_rng(num_words)

        def random(shape: tuple[int, ...], dtype: str) -> np.ndarray:
            count = self.num_rows * int(np.prod(shape)) * np.dtype(dtype).itemsize
            return np.frombuffer(rng.bytes(count), dtype).reshape(self.num_rows, *shape)

        self.on_host = (random((words // 256, 256), "uint32"), random((words // 4,), "uint16"))
        self.hosts: Pools = bench.placed(self.on_host, "pinned_host")
        self.pools: Pools = bench.placed(tuple(map(np.zeros_like, self.on_host)), "device")
        self.job_bytes = sum(host.nbytes for host in self.on_host) // self.num_rows
        if not bench.smoke:
            choice = expert_fetch.choose(self.pools, self.hosts)
            if choice.implementation != "triton":
                sys.exit(f"the fetch does not run on its kernel: {choice.describe()}")

    def jobs(self, i: jax.Array, num_jobs: int) -> tuple[jax.Array, jax.Array]:
        """Rows and slots of iteration i: the next ones, round and round, slots in reverse."""
        src = (i * num_jobs + jnp.arange(num_jobs, dtype=jnp.int32)) % self.num_rows
        return src, self.num_rows - 1 - src

    def check(self, pools: Pools, num_jobs: int, iterations: int) -> None:
        """Raises RuntimeError unless the last iteration's slots hold their rows."""
        src, dst = (np.asarray(x) for x in self.jobs(jnp.int32(iterations - 1), num_jobs))
        for pool, host in zip(pools, self.on_host, strict=True):
            for row, slot in zip(src.tolist(), dst.tolist(), strict=True):
                if not np.array_equal(np.asarray(pool[slot]), host[row]):
                    raise RuntimeError(f"slot {slot} does not hold row {row}")


def microseconds(
    bench: Bench, iteration: Callable[[jax.Array, Any, Any], Any], carry: Any, operands: Any
) -> tuple[float, Any, int]:
    """Median time of an iteration in a jitted loop over a donated carry.

    Returns:
      microseconds; the carry at last; iterations of a run.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def run(carry: Any, operands: Any, count: jax.Array) -> Any:
        return jax.lax.fori_loop(0, count, lambda i, c: iteration(i, c, operands), carry)

    def timed(carry: Any, count: int) -> tuple[float, Any]:
        start = time.perf_counter()
        carry = jax.block_until_ready(run(carry, operands, jnp.int32(count)))
        return time.perf_counter() - start, carry

    _, carry = timed(carry, 2)
    spent, carry = timed(carry, 4)
    count = 2 if bench.smoke else int(min(max(4, LOOP_SECONDS / (spent / 4)), 2000))
    times = []
    for _ in range(bench.repeats):
        spent, carry = timed(carry, count)
        times.append(spent / count)
    return statistics.median(times) * 1e6, carry, count


def rate(num_bytes: int, spent_us: float) -> float:
    """GiB/s."""
    return num_bytes / spent_us * 1e6 / 2**30
