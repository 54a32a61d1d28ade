"""Seconds a matrix and relative errors of the quantizers at real shapes, beside the hqq library.

    python -m scripts.studies.quantizers.bench_quantizers \
        --output=scripts/studies/quantizers/quantizers_h200.jsonl

MiLo INT3 group 64, rank 32, 20 passes, beside the same recipe of the hqq library (HQQ of W - UV,
dequantize, torch.svd_lowrank of what is left, two power iterations), in one run, on the same
matrices: Student-t weights (5 degrees of freedom, deviation 0.02) whose columns have log-normal
scales. Without torch or hqq there is nothing beside. A part that fails prints its error, and the
others go on. `--platform=cpu --small` tries the script.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from moejax.devices import choose_device, enable_compilation_cache
from moejax.models.config import ModelConfig
from moejax.models.shapes import SHAPES
from moejax.quantization.gptq import gptq
from moejax.quantization.grid import Codes, Grid, dequantize, relative_error
from moejax.quantization.hqq import hqq, kernel_hqq
from moejax.quantization.least_squares import least_squares
from moejax.quantization.milo import MiloSettings, milo
from moejax.quantization.rtn import rtn
from scripts.studies.measuring import Report, seconds
from scripts.studies.quantizers.hqq_library import HqqLibrary

_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file that rows are appended to")
_PLATFORM = flags.DEFINE_string("platform", "gpu", "gpu; cpu only tries the script")
_SMALL = flags.DEFINE_bool("small", False, "small matrices, to try the script")
_CACHE = flags.DEFINE_string("cache", "", "persistent compilation cache")
_RANK = flags.DEFINE_integer("rank", 32, "of MiLo's compensators")
_PASSES = flags.DEFINE_integer("passes", 20, "of MiLo")
_REPEATS = flags.DEFINE_integer("repeats", 5, "timed runs of what is short; the median is taken")
_PARTS = flags.DEFINE_list("parts", "quantizers,milo,layers", "which parts to run")
_WHEELS = flags.DEFINE_string("wheels", ".whl", "folder of hqq_src and wheels, if not installed")
_SAMPLE = flags.DEFINE_integer("sample", 8, "experts of a layer that the library quantizes")

GRID = Grid(bits=3, group_size=64, zero_kind="float")

Shape = tuple[int, ...]


@functools.partial(jax.jit, static_argnames=("shape", "deviation"))
def heavy_tailed(seed: jax.Array, shape: Shape, deviation: float = 0.02) -> jax.Array:
    """float32 Student-t (5) weights times log-normal column scales."""
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 7)
    chi = sum(jnp.square(jax.random.normal(key, shape)) for key in keys[:5]) / 5
    columns = jnp.exp(0.3 * jax.random.normal(keys[5], (1,) * (len(shape) - 1) + shape[-1:]))
    spread = deviation / math.sqrt(5 / 3)
    return jax.random.normal(keys[6], shape) / jnp.sqrt(chi) * columns * spread


def matrix(shape: Shape, seed: int = 0, deviation: float = 0.02) -> jax.Array:
    """`heavy_tailed`, finished."""
    return jax.block_until_ready(heavy_tailed(jnp.uint32(seed), shape, deviation))


def solver(weights: jax.Array, u: jax.Array, v: jax.Array, grid: Grid) -> Codes:
    """The kernel as MiLo takes it; interpreted on a CPU."""
    return kernel_hqq(weights, u, v, grid, interpret=_PLATFORM.value == "cpu")


def settings(kernel: bool, tolerance: float = -math.inf) -> MiloSettings:
    """All passes, unless a tolerance is given."""
    return MiloSettings(
        max_rank=_RANK.value,
        max_passes=_PASSES.value,
        tolerance=tolerance,
        solver=solver if kernel else None,
    )


@jax.jit
def codes_error(weights: jax.Array, codes: Codes) -> jax.Array:
    """|W - W'| / |W| of codes, the mean over matrices."""
    return jnp.mean(relative_error(weights, dequantize(codes, GRID)))


@jax.jit
def milo_error(weights: jax.Array, codes: Codes, u: jax.Array, v: jax.Array) -> jax.Array:
    """|W - W' - UV| / |W|, the mean over matrices."""
    product = jnp.matmul(u, v, precision="highest")
    return jnp.mean(relative_error(weights, dequantize(codes, GRID) + product))


def bench_quantizers(report: Report, shape: Shape, library: HqqLibrary | None) -> None:
    """One matrix by each calibration-free quantizer, by GPTQ and by the library's HQQ."""
    weights, name = matrix(shape), "x".join(map(str, shape))
    none = jnp.zeros((shape[0], 0)), jnp.zeros((0, shape[1]))
    runs = {
        "RTN": lambda: rtn(weights, GRID),
        "HQQ, loop": lambda: hqq(weights, GRID),
        "HQQ, kernel": functools.partial(jax.jit(solver, static_argnums=3), weights, *none, GRID),
        "least squares": lambda: least_squares(weights, GRID),
    }
    for label, run in runs.items():
        report.attempt(_bench_codes, f"{label} {name}", weights, run)
    if library is not None:
        tensor = library.tensor(weights)
        library.hqq(tensor)
        took, value = library.timed(lambda: library.hqq(tensor), _REPEATS.value)
        error = library.error(tensor, value)
        report.add(f"HQQ, hqq library {name}", 1e3 * took, "ms", relative_error=error)
    if shape[1] <= 4096:
        report.attempt(_bench_gptq, name, weights)


def _bench_codes(report: Report, label: str, weights: jax.Array, run: Callable[[], Codes]) -> None:
    took = seconds(run, _REPEATS.value)
    report.add(label, 1e3 * took, "ms", relative_error=float(codes_error(weights, run())))


def _bench_gptq(report: Report, name: str, weights: jax.Array) -> None:
    x = matrix((2 * weights.shape[1], weights.shape[1]), seed=9, deviation=1.0)
    hessian = jnp.matmul(x.T, x, precision="highest") * (2 / len(x))
    run = lambda: gptq(weights, hessian, GRID).codes  # noqa: E731
    report.add(
        f"GPTQ {name}, Hessian not counted", 1e3 * seconds(run, 1), "ms",
        relative_error=float(codes_error(weights, run())),
    )  # fmt: skip


def bench_milo(report: Report, shape: Shape, library: HqqLibrary | None) -> None:
    """One matrix by MiLo: the library, then ours with the kernel, with the loop, and stopping."""
    weights, name = matrix(shape, seed=3), "x".join(map(str, shape))
    baseline = {}
    if library is not None:
        tensor = library.tensor(weights)
        library.milo(tensor)
        took, value = library.timed(lambda: library.milo(tensor), 2)
        baseline = {"library_s": took, "library_error": library.error(tensor, value)}
        report.add(f"MiLo {name}, hqq library and svd_lowrank", took, "s", **baseline)
    cases = {
        "kernel": settings(kernel=True),
        "loop": settings(kernel=False),
        "kernel, stopping by eq. 15": dataclasses.replace(settings(kernel=True), tolerance=1e-4),
    }
    for label, chosen in cases.items():
        report.attempt(_bench_milo, f"MiLo {name}, {label}", weights, chosen, baseline)


def _bench_milo(
    report: Report, label: str, weights: jax.Array, chosen: MiloSettings, baseline: dict[str, float]
) -> None:
    run = lambda: milo(weights, GRID, chosen, _RANK.value)  # noqa: E731
    took, result = seconds(run, 3), run()
    error = float(milo_error(weights, result.codes, result.u, result.v))
    extra = {"faster": baseline["library_s"] / took} if baseline else {}
    report.add(
        label, took, "s", passes=int(jnp.max(result.passes)), relative_error=error,
        **baseline, **extra,
    )  # fmt: skip


def layer_stacks(config: ModelConfig) -> dict[str, Shape]:
    """Matrices of one layer that are quantized, stacked by shape: [how many, N, K]."""
    d, f, experts = config.model_dim, config.expert_dim, config.num_experts
    heads, kv_heads = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    return {
        "gate": (experts, f, d),
        "up": (experts, f, d),
        "down": (experts, d, f),
        "q": (1, heads, d),
        "k, v": (2, kv_heads, d),
        "o": (1, d, heads),
    }


def bench_layer(report: Report, name: str, config: ModelConfig, library: HqqLibrary | None) -> None:
    """Every matrix of one layer; the library on some experts of it, all of the attention."""
    ours, theirs, compile_s, chosen = 0.0, 0.0, 0.0, settings(kernel=True)
    for number, (leaf, shape) in enumerate(layer_stacks(config).items()):
        weights = matrix(shape, seed=10 + number)
        run = functools.partial(milo, weights, GRID, chosen, _RANK.value)
        start = time.perf_counter()
        result = jax.block_until_ready(run())
        first, start = time.perf_counter() - start, time.perf_counter()
        result = jax.block_until_ready(run())
        took = time.perf_counter() - start
        ours, compile_s = ours + took, compile_s + max(first - took, 0)
        error = float(milo_error(weights, result.codes, result.u, result.v))
        del result
        beside = {"matrices": shape[0], "relative_error": error}
        if library is not None:
            sample = [library.tensor(w) for w in weights[: _SAMPLE.value]]
            library.milo(sample[0])
            spent, values = library.timed(functools.partial(_milo_of_each, library, sample), 1)
            pairs = zip(sample, values, strict=True)
            error = statistics.mean(library.error(*pair) for pair in pairs)
            whole = spent * shape[0] / len(sample)
            theirs += whole
            beside |= {"library_s": whole, "library_sample": len(sample), "library_error": error}
        report.add(f"MiLo, {name} layer, {leaf} {'x'.join(map(str, shape))}", took, "s", **beside)
    beside = {"compile_s": compile_s}
    if library is not None:
        beside |= {"library_s": theirs, "faster": theirs / ours}
    report.add(f"MiLo, {name}, one whole layer", ours, "s", **beside)
    layers = config.num_layers
    extrapolated = {"library_s": theirs * layers} if library is not None else {}
    report.add(f"MiLo, {name}, {layers} layers extrapolated", ours * layers, "s", **extrapolated)


def _milo_of_each(library: HqqLibrary, sample: list[Any]) -> list[Any]:
    return [library.milo(weights) for weights in sample]


def _library(report: Report) -> HqqLibrary:
    del report
    return HqqLibrary(_RANK.value, _PASSES.value, _WHEELS.value)


def main(argv: list[str]) -> None:
    """Runs the parts, prints the table, writes the rows."""
    del argv
    report = Report(choose_device(_PLATFORM.value), "INT3 group 64", _OUTPUT.value)
    jax.config.update("jax_default_device", report.device)
    enable_compilation_cache(_CACHE.value)
    library = report.attempt(_library)
    shapes = [(14336, 4096), (4096, 14336)]
    models = {"Mixtral-8x7B": SHAPES["Mixtral-8x7B"], "Qwen3-30B-A3B": SHAPES["Qwen3-30B-A3B"]}
    if _SMALL.value:
        shapes = [(96, 128), (64, 192)]
        small = dataclasses.replace(
            models["Mixtral-8x7B"], model_dim=128, expert_dim=64, num_experts=3, num_heads=2,
            num_kv_heads=1, head_dim=64,
        )  # fmt: skip
        models = {"Mixtral-8x7B": small}
    started = time.perf_counter()
    parts: dict[str, list[tuple[Any, ...]]] = {
        "quantizers": [(bench_quantizers, shape, library) for shape in shapes],
        "milo": [(bench_milo, shape, library) for shape in shapes],
        "layers": [(bench_layer, name, config, library) for name, config in models.items()],
    }
    for name in _PARTS.value:
        for part, *arguments in parts[name]:
            report.attempt(part, *arguments)
        print(f"-- {name}: {time.perf_counter() - started:.0f} s since the start", flush=True)
    print(f"\nTable\n{report.table()}")


if __name__ == "__main__":
    app.run(main)
