"""How long a checkpoint's experts take from its files to pinned host memory.

    python -m scripts.bench_host_store --gib=20 --device_gib=3

Writes a random Hugging Face checkpoint in bfloat16 with Qwen3-30B-A3B's experts, a tensor a matrix,
and opens it under a budget that leaves its experts in host memory. The files were just written:
they come from the page cache as far as that holds them; what reading alone takes is measured too.
`--gib=0.3 --device_gib=0.42 --device=cpu` tries the script.
"""

import tempfile
import time
from pathlib import Path

import jax
from absl import app, flags

from moejax.checkpoints import open_checkpoint
from moejax.devices import choose_device
from moejax.experts.budget import Limits
from moejax.experts.load import open_memory
from scripts.bench_report import Report
from scripts.random_checkpoints import write_random

_GIB = flags.DEFINE_float("gib", 20, "of the checkpoint")
_DEVICE_GIB = flags.DEFINE_float("device_gib", 3, "of device memory that it is given")
_HOST_GIB = flags.DEFINE_float("host_gib", 0, "of host memory; 0: what is needed")
_WHERE = flags.DEFINE_string("device", "gpu", "gpu; cpu only tries the script")
_SCRATCH = flags.DEFINE_string("scratch", None, "where the checkpoint is written for a while")
_FILE = flags.DEFINE_string("out", "", "JSON Lines file that rows are appended to")
BLOCK = 2**24


def read_files(directory: Path) -> tuple[int, float]:
    """Bytes and seconds of reading all files once, by one thread."""
    start, total = time.perf_counter(), 0
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while part := file.read(BLOCK):
                total += len(part)
    return total, time.perf_counter() - start


def main(argv: list[str]) -> None:
    """Writes, opens, prints."""
    del argv
    device = choose_device(_WHERE.value)
    report = Report(device, f"{_GIB.value:g} GiB of Qwen3-30B-A3B's experts, bf16", _FILE.value)
    with tempfile.TemporaryDirectory(dir=_SCRATCH.value) as scratch:
        directory = Path(scratch) / "model"
        start = time.perf_counter()
        write_random(directory, _GIB.value, alike=True)
        print(f"written in {time.perf_counter() - start:.1f} s", flush=True)
        total, spent = read_files(directory)
        report.add("files read by one thread", spent, "s", gib_per_s=total / spent / 2**30)
        limits = Limits(device_gib=_DEVICE_GIB.value, host_gib=_HOST_GIB.value)
        start = time.perf_counter()
        _, memory, budget = open_memory(
            open_checkpoint(str(directory)), limits, dtype="bfloat16", device=device, batch=1,
            context=512, chunk=128, progress=False,
        )  # fmt: skip
        if memory is None:
            raise SystemExit(f"--device_gib={_DEVICE_GIB.value:g} holds the whole model")
        jax.block_until_ready(memory.store.row_of)
        spent = time.perf_counter() - start
        nbytes = sum(
            leaf.nbytes for leaf in jax.tree.leaves((memory.store.gate_up, memory.store.down))
        )
        report.add("from files to pinned host memory, dense weights on the device", spent, "s",
                   host_gib=nbytes / 2**30, gib_per_s=nbytes / spent / 2**30,
                   planned_host_gib=budget.total_host / 2**30)  # fmt: skip
        memory.close()


if __name__ == "__main__":
    app.run(main)
