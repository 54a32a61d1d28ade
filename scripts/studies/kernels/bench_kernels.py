"""Packed products against cuBLAS and unpack-then-cuBLAS, in one run.

    python -m scripts.studies.kernels.bench_kernels --shapes=4096x14336,14336x4096 --bits=16,3,4,2 \
        --out=scripts/studies/kernels/kernels_h200.jsonl
    python -m scripts.studies.kernels.bench_kernels --only=grouped --shapes=qwen3-30b --m=1,16,64
    python -m scripts.studies.kernels.bench_kernels --only=grouped --m=1,4,16 \
        --shapes=gpt-oss-120b,gpt-oss-120b-mxfp4 --implementations=mosaic,triton
    python -m scripts.studies.kernels.bench_kernels --only=planes --implementations=mosaic
    python -m scripts.studies.kernels.bench_kernels --only=attention --m=1,16,32
    python -m scripts.studies.kernels.bench_kernels --only=compensator \
        --shapes=4096x4096,4096x14336 --m=1,16,64 --ranks=64,512,1024
    python -m scripts.studies.kernels.bench_kernels \
        --smoke      # tries the script on a CPU, in seconds

Each figure is the median of microseconds a call, in chains that XLA captures in CUDA graphs, with
weights rotated past the L2. A row says bytes and operations, the bounds that follow from the plain
sum and the large cuBLAS product of this run, the relative error against float64. What is wrong gets
no figure.

The run fails (exit code 1, the reasons printed last) when a kernel of ours fails, is wrong, or when
`choose` gives another implementation than the device should have. It stops before --time_limit_s;
rows are written as they come.
"""

import sys
import time

import jax
from absl import app, flags

from moejax.devices import choose_device, enable_compilation_cache
from pallas_kernels.target import current_target
from scripts.studies.kernels.attention import bench_attention
from scripts.studies.kernels.data import (
    ASKED_DENSE,
    ASKED_MOE,
    DENSE,
    MOE,
    RANK,
    SMOKE_DENSE,
    SMOKE_MOE,
)
from scripts.studies.kernels.dense import bench_compensator, bench_dense
from scripts.studies.kernels.grouped import bench_grouped
from scripts.studies.kernels.planes import bench_planes
from scripts.studies.kernels.running import IMPLEMENTATIONS, Bench, OutOfTime
from scripts.studies.kernels.timing import compute_rate, empty_call, read_bandwidth
from scripts.studies.measuring import Report

SECTIONS = ("dense", "grouped", "compensator", "planes", "attention")
_SHAPE_NAMES = [shape.name for shape in (*DENSE, *ASKED_DENSE)]
_SHAPE_NAMES += [model.name for model in (*MOE, *ASKED_MOE)]

_ONLY = flags.DEFINE_list("only", list(SECTIONS[:3]), f"of {', '.join(SECTIONS)}")
_SHAPES = flags.DEFINE_list("shapes", [], f"of {', '.join(_SHAPE_NAMES)}; none: all")
_BITS = flags.DEFINE_list("bits", ["16", "3", "4", "2"], "of dense weights: 2, 3, 4, 8, 16 (bf16)")
_M = flags.DEFINE_list("m", [], "rows of x, tokens of a layer, or sequences; none: the table's")
_RANKS = flags.DEFINE_list("ranks", [str(RANK)], "of compensators")
_IMPLEMENTATIONS = flags.DEFINE_list(
    "implementations", [], f"of {', '.join(IMPLEMENTATIONS)}; none: all but the reference"
)
_TILES = flags.DEFINE_list(
    "tiles", [], "tried beside the rule's: of attention 64x16w4p3, of products of many rows 128k"
)
_EXPECT = flags.DEFINE_string(
    "expect", "auto", "what choose() should give; auto: mosaic on sm_90, triton on other GPUs"
)
_OUT = flags.DEFINE_string("out", "", "JSON Lines file that rows are appended to")
_LIMIT = flags.DEFINE_float("time_limit_s", 540, "stops cleanly before it")
_REPETITIONS = flags.DEFINE_integer("repetitions", 11, "pairs of queues; at least 10 for a record")
_CACHE = flags.DEFINE_string("cache", "", "persistent compilation cache")
_SMOKE = flags.DEFINE_bool("smoke", False, "tiny shapes and the reference, on a CPU")

DENSE_ROWS = (1, 4, 16, 64, 1024, 4096, 32, 256)  # those with a bar first
COMPENSATOR_ROWS = (1, 16)
PLANES_ROWS = (1, 4, 16, 64, 1024)
ATTENTION_BATCHES = (1, 16, 32)
SMOKE_IMPLEMENTATIONS = ("reference", "cublas", "unpack")


def make_bench(start: float) -> Bench:
    """Measures the ceilings.

    Args:
      start: `time.monotonic` when the process began.
    """
    smoke = _SMOKE.value
    device = choose_device("cpu" if smoke else "gpu")
    names = _IMPLEMENTATIONS.value or [n for n in IMPLEMENTATIONS if n != "reference"]
    if unknown := set(names) - set(IMPLEMENTATIONS):
        raise app.UsageError(f"unknown implementations: {', '.join(sorted(unknown))}")
    bench = Bench(
        report=Report(device, "", _OUT.value),
        target=current_target(),
        implementations=SMOKE_IMPLEMENTATIONS if smoke else names,
        expect=_EXPECT.value,
        repetitions=2 if smoke else _REPETITIONS.value,
        deadline=start + _LIMIT.value,
        longest=0.0 if smoke else 15.0,
        smoke=smoke,
        bandwidth=read_bandwidth(2**22 if smoke else 2**32),
        rate=compute_rate(128 if smoke else 8192),
    )
    bench.add("ceiling | read bandwidth of a plain sum", bench.bandwidth / 1e12, "TB/s")
    bench.add("ceiling | large bf16 product", bench.rate / 1e12, "TFLOP/s")
    bench.add("ceiling | a call that does nothing", empty_call(bench.repetitions), "us")
    return bench


def run_sections(bench: Bench) -> None:
    """Runs the sections that the flags name.

    Raises:
      OutOfTime: before the time limit.
    """
    dense, models = (SMOKE_DENSE, SMOKE_MOE) if bench.smoke else (DENSE, MOE)
    asked, rows = _SHAPES.value, [int(m) for m in _M.value]
    if asked:
        dense, models = (*dense, *ASKED_DENSE), (*models, *ASKED_MOE)
    known = {shape.name for shape in dense} | {model.name for model in models}
    if unknown := set(asked) - known:
        raise app.UsageError(f"unknown shapes: {', '.join(sorted(unknown))}")
    dense_rows = (1, 4) if bench.smoke else DENSE_ROWS
    products = [shape for shape in dense if not asked or shape.name in asked]
    if "dense" in _ONLY.value:
        bits = [int(bits) for bits in _BITS.value]
        bench_dense(bench, products, bits, rows or dense_rows, _TILES.value)
    if "grouped" in _ONLY.value:
        bench_grouped(bench, [moe for moe in models if not asked or moe.name in asked], rows)
    if "compensator" in _ONLY.value:
        ranks = [int(rank) for rank in _RANKS.value]
        for shape in products if asked else dense[:1]:
            bench_compensator(bench, shape, rows or COMPENSATOR_ROWS, ranks)
    if "planes" in _ONLY.value:
        layers = [moe for moe in models if not asked or moe.name in asked]
        bench_planes(bench, products, layers, rows or (dense_rows if bench.smoke else PLANES_ROWS))
    if "attention" in _ONLY.value:
        bench_attention(bench, rows or ATTENTION_BATCHES, _TILES.value)


def main(argv: list[str]) -> None:
    """Measures, prints, writes, and says what went wrong."""
    del argv
    start = time.monotonic()
    if unknown := set(_ONLY.value) - set(SECTIONS):
        raise app.UsageError(f"unknown sections: {', '.join(sorted(unknown))}")
    if _SMOKE.value:
        jax.config.update("jax_platforms", "cpu")
    enable_compilation_cache(_CACHE.value)
    bench = make_bench(start)
    print(f"{bench.target.describe()}, jax {jax.__version__}", flush=True)
    try:
        run_sections(bench)
    except OutOfTime as reason:
        print(f"stopped: {reason}")
    print(f"{len(bench.figures)} rows in {time.monotonic() - start:.0f} s")
    if bench.problems:
        print(f"{len(bench.problems)} problems:")
        for problem in bench.problems:
            print(f"  {problem}")
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
