"""Fetches from pinned host memory: one launch of J jobs, beside DMA.

    python scripts/bench_fetch.py --output=scripts/results/fetch_h200.jsonl

Three questions, each a part:
  * link: what does the link give? `jax.device_put` of pinned arrays of the same sizes (DMA, with
    the host's dispatch), and of 1 GiB.
  * fetch: what does the kernel take for J jobs of each size inside a jitted loop, and for jobs that
    are all skipped (a launch, nothing else)? Beside it XLA's way, a slice of the host array that is
    put on the device and inserted, one job after another.
  * tiles: how many programs, how large a block?

Every figure is a median; rows and slots change from one iteration to the next, stores and weights
are larger than the L2, and what was fetched is compared bit for bit. `--smoke` tries the script on
a CPU by the reference.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import app, flags

from moejax.devices import choose_device
from pallas_kernels import expert_fetch
from pallas_kernels.expert_fetch import CopyTiles
from pallas_kernels.expert_fetch.tiles import default_tiles
from scripts.bench_fetch_loops import Bench, Pools, Store, microseconds, rate
from scripts.bench_report import Report

_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file that rows are appended to")
_SMOKE = flags.DEFINE_bool("smoke", False, "tiny shapes on the CPU, to try the script")
_PARTS = flags.DEFINE_list("parts", "link,fetch,tiles", "which parts to run")
_SIZES = flags.DEFINE_multi_float("mb", [2.4, 5.0, 20.0, 80.0], "megabytes of a job")
_JOBS = flags.DEFINE_multi_integer("jobs", [1, 2, 4, 8], "jobs of a launch")
_REPEATS = flags.DEFINE_integer("repeats", 10, "timed runs; the median is taken")
_TIME_LIMIT = flags.DEFINE_float("time_limit_s", 540.0, "no part begins a figure after so long")

TILES = tuple(
    CopyTiles(programs, block, 4)
    for programs in (16, 32, 64, 128, 256)
    for block in (4096, 16384, 32768)
)


def _sizes(bench: Bench) -> Iterator[tuple[float, int]]:
    """Megabytes of a job and its words."""
    for megabytes in [0.01, 0.03] if bench.smoke else _SIZES.value:
        if bench.in_time():
            yield megabytes, round(megabytes * 1e6 / 4)


def link(bench: Bench) -> None:
    """DMA of whole arrays, dispatched from the host."""
    on_device = jax.sharding.SingleDeviceSharding(bench.device, memory_kind="device")
    sizes = [*_sizes(bench), (2**30 / 1e6, 2**28)][: 2 if bench.smoke else None]
    for megabytes, words in sizes:
        host = bench.placed(np.ones(words, np.uint32), "pinned_host")
        for num_jobs in (1, 4):
            times = []
            for _ in range(bench.repeats + 1):
                start = time.perf_counter()
                copies = [jax.device_put(host, on_device) for _ in range(num_jobs)]
                jax.block_until_ready(copies)
                times.append((time.perf_counter() - start) * 1e6)
                del copies
            spent = statistics.median(times[1:])
            what = f"device_put of {num_jobs} x {megabytes:.4g} MB from pinned memory"
            bench.report.add(what, spent, "us", gib_per_s=rate(num_jobs * host.nbytes, spent))


def xla_fetch(pools: Pools, hosts: Pools, src: jax.Array, dst: jax.Array) -> Pools:
    """What XLA makes of the same jobs without the kernel."""
    for job in range(src.shape[0]):
        rows = [
            jax.device_put(jax.lax.dynamic_index_in_dim(host, src[job]), jax.memory.Space.Device)
            for host in hosts
        ]
        pools = tuple(
            jax.lax.dynamic_update_slice_in_dim(pool, row, dst[job], 0)
            for pool, row in zip(pools, rows, strict=True)
        )
    return pools


def fetch(bench: Bench) -> None:
    """The kernel in a loop."""
    for megabytes, words in _sizes(bench):
        store = Store(bench, words)
        for num_jobs in _JOBS.value:
            if num_jobs > store.num_rows or not bench.in_time():
                continue

            def jobs(i: jax.Array, num_jobs: int = num_jobs, store: Store = store) -> Any:
                return store.jobs(i, num_jobs)

            def kernel(i: jax.Array, pools: Pools, hosts: Pools, jobs: Any = jobs) -> Pools:
                return expert_fetch.fetch(pools, hosts, *jobs(i))

            def skipped(i: jax.Array, pools: Pools, hosts: Pools, jobs: Any = jobs) -> Pools:
                src, dst = jobs(i)
                return expert_fetch.fetch(pools, hosts, -1 - src, dst)

            spent, store.pools, count = microseconds(bench, kernel, store.pools, store.hosts)
            store.check(store.pools, num_jobs, count)
            empty, store.pools, _ = microseconds(bench, skipped, store.pools, store.hosts)
            beside = {"gib_per_s": rate(num_jobs * store.job_bytes, spent), "all_skipped": empty}
            bench.report.add(f"fetch of {num_jobs} x {megabytes:.4g} MB", spent, "us", **beside)
        bench.report.attempt(slices_by_xla, bench, store, megabytes)


def slices_by_xla(report: Report, bench: Bench, store: Store, megabytes: float) -> None:
    """One job without the kernel."""

    def by_xla(i: jax.Array, pools: Pools, hosts: Pools) -> Pools:
        return xla_fetch(pools, hosts, *store.jobs(i, 1))

    spent, store.pools, count = microseconds(bench, by_xla, store.pools, store.hosts)
    store.check(store.pools, 1, count)
    gib = rate(store.job_bytes, spent)
    report.add(f"slice by XLA of 1 x {megabytes:.4g} MB", spent, "us", gib_per_s=gib)


def tiles(bench: Bench) -> None:
    """Programs and blocks, for 8 small jobs, 4 large ones, and one."""
    for megabytes, num_jobs in ((2.4, 1), (2.4, 8), (20.0, 4)):
        if bench.smoke or not bench.in_time():
            return
        store = Store(bench, round(megabytes * 1e6 / 4))
        for choice in TILES:
            if not bench.in_time():
                return

            def copy(
                i: jax.Array, pools: Pools, hosts: Pools, choice: CopyTiles = choice,
                store: Store = store, num_jobs: int = num_jobs,
            ) -> Pools:  # fmt: skip
                return expert_fetch.fetch(pools, hosts, *store.jobs(i, num_jobs), tiles=choice)

            spent, store.pools, count = microseconds(bench, copy, store.pools, store.hosts)
            store.check(store.pools, num_jobs, count)
            what = f"fetch of {num_jobs} x {megabytes} MB by {choice.num_programs} programs"
            gib = rate(num_jobs * store.job_bytes, spent)
            bench.report.add(f"{what}, blocks of {choice.block_bytes}", spent, "us", gib_per_s=gib)


def main(argv: list[str]) -> None:
    """Runs the parts that were asked for; exits with 1 if one failed."""
    del argv
    device = choose_device("cpu" if _SMOKE.value else "gpu")
    jax.config.update("jax_default_device", device)
    about = f"blocks of {default_tiles().block_bytes} unless said"
    bench = Bench(
        report=Report(device, about, _OUTPUT.value),
        device=device,
        smoke=_SMOKE.value,
        repeats=2 if _SMOKE.value else _REPEATS.value,
        time_limit_s=_TIME_LIMIT.value,
    )
    parts = {"link": link, "fetch": fetch, "tiles": tiles}
    failed = []
    for name in _PARTS.value:
        print(f"{name}:", flush=True)
        try:
            parts[name](bench)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error!s:.500}")
            print(f"  FAILED {failed[-1]}", flush=True)
    if not bench.in_time():
        print(f"stopped after {_TIME_LIMIT.value:.0f} s: some figures are missing")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    app.run(main)
