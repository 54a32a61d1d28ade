"""Times loading a Hugging Face directory against restoring the same weights from Orbax.

    python -m scripts.bench_load --checkpoint=demo
    python -m scripts.bench_load --random_gib=2 --dtype=bfloat16

The files are read once before, so the page cache is warm. The default for `--dtype` is "auto":
float32 on a CPU, the file's own elsewhere. Needs the space of the loaded form in `--scratch`.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
from absl import app, flags, logging

from moejax.checkpoints import load_orbax, open_checkpoint, save_orbax
from scripts.random_checkpoints import write_random

_CHECKPOINT = flags.DEFINE_string("checkpoint", "demo", "directory or name")
_RANDOM_GIB = flags.DEFINE_float("random_gib", None, "a random bfloat16 model of this size instead")
_DTYPE = flags.DEFINE_string("dtype", "auto", "float32, bfloat16, float16 or auto")
_REPEATS = flags.DEFINE_integer("repeats", 3, "the median of these is printed")
_SCRATCH = flags.DEFINE_string("scratch", None, "where the Orbax directory is written for a while")


def median_seconds(action: Callable[[], object]) -> float:
    """Median time of an action whose result is waited for, after one run to warm up."""
    seconds = []
    for _ in range(_REPEATS.value + 1):
        start = time.perf_counter()
        jax.block_until_ready(action())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def main(argv: list[str]) -> None:
    """Prints one line for each way."""
    del argv
    logging.set_verbosity(logging.WARNING)  # Orbax reports every step
    device = jax.devices()[0]
    with tempfile.TemporaryDirectory(dir=_SCRATCH.value) as scratch:
        name = _CHECKPOINT.value
        if _RANDOM_GIB.value:
            name = str(Path(scratch) / "random")
            write_random(Path(name), _RANDOM_GIB.value)
        checkpoint = open_checkpoint(name)

        def load() -> dict[str, jax.Array]:
            return checkpoint.load(dtype=_DTYPE.value, device=device, progress=False)

        weights = load()
        gib = sum(weight.nbytes for weight in weights.values()) / 2**30
        orbax = Path(scratch) / "orbax"
        start = time.perf_counter()
        save_orbax(orbax, checkpoint.config, weights)
        save_seconds = time.perf_counter() - start
        dtype = weights["embed"].dtype
        del weights
        print(f"{name}: {gib:.3f} GiB as {dtype} on {device.device_kind}, JAX {jax.__version__}")
        for way, seconds in (
            ("Hugging Face load", median_seconds(load)),
            ("Orbax restore", median_seconds(lambda: load_orbax(orbax, device=device)[1])),
            ("Orbax save (once)", save_seconds),
        ):
            print(f"{way:<18} {seconds:8.3f} s {gib / seconds:8.2f} GiB/s")


if __name__ == "__main__":
    app.run(main)
