"""Times a sum over the GPUs of a host by `peer_sum` beside XLA's psum, in one program of many.

    python -m scripts.studies.several_gpus.sums --output=sums.jsonl

Each program is a chain of a small product and a sum, as a decode step has two sums a layer; a sum's
time is that of the chain less that of the chain without sums. Bars and predictions come first.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.peer_sum import mailboxes_of, peer_sum
from scripts.studies.measuring import Report

_OUTPUT = flags.DEFINE_string("output", "", "file of rows to append to")
_DEVICES = flags.DEFINE_integer("devices", 2, "GPUs of this host")

WIDTH, CHAIN, ROUNDS = 2048, 96, 30
ROWS = (1, 4, 16, 64)  # tokens of a step
BARS = {1: 8.0, 64: 20.0}  # us of a sum; the issue's, and level with XLA's
PREDICTED = {1: "4 to 6", 64: "8 to 12"}  # one way over NVLink, twice the bytes, a launch

Sum = Callable[[jax.Array, jax.Array], jax.Array]


def sums(mesh: jax.sharding.Mesh) -> dict[str, Sum]:
    """Returns what is timed, of float32[N] of a device."""
    axis = mesh.axis_names[0]
    return {
        "none": lambda x, peers: jax.lax.optimization_barrier(x),
        "psum": lambda x, peers: jax.lax.psum(x, axis),
        "peer_sum": functools.partial(
            peer_sum, axis=axis, dtype=jnp.float32, implementation="triton"
        ),
    }


def chain(mesh: jax.sharding.Mesh, add: Sum, length: int) -> Any:
    """float32[P, N] -> float32[P, N]: by turns a product with each device's numbers, and a sum."""
    split = PartitionSpec(mesh.axis_names[0])

    def run(x: jax.Array, own: jax.Array, peers: jax.Array) -> jax.Array:
        x, own = x[0], own[0]
        for _ in range(length):
            x = add(jnp.tanh(x) * own, peers)
        return x[None]

    inside = jax.shard_map(
        run, mesh=mesh, in_specs=(split, split, split), out_specs=split, check_vma=False
    )
    return jax.jit(inside)


def expected(x: np.ndarray, own: np.ndarray, length: int) -> np.ndarray:
    """Runs the chain in float64; every device has the sum after the first turn."""
    found = x.astype(np.float64)
    for _ in range(length):
        found = np.broadcast_to((np.tanh(found) * own).sum(0), found.shape)
    return found


def microseconds(run: Callable[[], jax.Array]) -> float:
    """Returns the median time of a call."""
    jax.block_until_ready(run())
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def main(argv: list[str]) -> None:
    """Checks and times each size, and says go or no go."""
    del argv
    devices = jax.devices()[: _DEVICES.value]
    count = len(devices)
    print(f"predicted, us: {PREDICTED}; bars: {BARS}", flush=True)
    mesh = jax.sharding.Mesh(np.asarray(devices), ("devices",))
    split = NamedSharding(mesh, PartitionSpec("devices"))
    if (mailboxes := mailboxes_of(mesh)) is None:
        sys.exit("error: these devices do not reach each other's memory")
    report = Report(devices[0], f"{count} GPUs", _OUTPUT.value)
    rng, verdict = np.random.default_rng(0), True
    for rows in ROWS:
        shape = (count, rows * WIDTH)
        x, own = (rng.uniform(0.5, 1, shape).astype(np.float32) for _ in range(2))
        on_device = [jax.device_put(part, split) for part in (x, own)]
        took = {}
        for name, add in sums(mesh).items():
            run, short = chain(mesh, add, CHAIN), chain(mesh, add, 3)
            if name != "none":
                found = np.asarray(short(*on_device, mailboxes.peers))
                error = np.abs(found - expected(x, own, 3)).max()
                same = bool((found == found[:1]).all())
                report.add(f"{name}, {rows} rows, largest difference from float64", error, "")
                print(f"{name}, {rows} rows: all devices alike: {same}", flush=True)
                if not same or not error < 1e-5:
                    print("NO GO: wrong, so not timed", flush=True)
                    return
            took[name] = microseconds(functools.partial(run, *on_device, mailboxes.peers))
            if name != "none":
                each = (took[name] - took["none"]) / CHAIN
                report.add(f"{name}, {rows} rows of {WIDTH} float32", each, "us")
                if name == "peer_sum" and rows in BARS:
                    verdict &= each <= BARS[rows]
    print("GO" if verdict else "NO GO", flush=True)


if __name__ == "__main__":
    app.run(main)
