"""Times tile configurations of one kernel and says which is best, for the table in its tiles.py.

    python -m scripts.studies.kernels.tune_tiles --op=dense --shape=4096x14336 --bits=3 --m=1,16 \
        --implementation=mosaic --tiles=pallas_kernels.mosaic_decode.tiles:StreamTiles \
        --grid="row_tiles=1,2;warps_n=1,2;warps_k=4,8;depth=2,3" --out=tiles.jsonl
    python -m scripts.studies.kernels.tune_tiles --op=gate_up --shape=qwen3-30b --m=1 \
        --implementation=triton \
        --tiles=pallas_kernels.grouped_dequant_matmul.tiles:TritonTiles --grid="block_n=32,64,128"

Every combination of --grid is tried; fields that it leaves out keep the class's default or, where
it has none, the heuristic's value given by --base. Without --grid the class's module must have
`candidates(num_rows, num_inputs, num_outputs, bits)`. A result that differs from float64 (dense)
or from the reference (grouped) is out, whatever its time. The heuristic (tiles=None) is timed
first and last: what lies between its two figures is noise.
"""

import dataclasses
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from moejax.devices import choose_device, enable_compilation_cache
from moejax.files.result_rows import describe_device, today
from pallas_kernels.dequant_matmul import dequant_matmul
from pallas_kernels.gating import SWIGLU
from pallas_kernels.grouped_dequant_matmul import combine
from pallas_kernels.grouped_dequant_matmul.api import PRODUCT
from pallas_kernels.target import current_target
from scripts.studies.kernels.data import (
    ASKED_DENSE,
    ASKED_MOE,
    DENSE,
    ERROR_LIMIT,
    MOE,
    SMOKE_DENSE,
    SMOKE_MOE,
    Dense,
    Moe,
    Sample,
    dense_sample,
    random_rows,
)
from scripts.studies.kernels.dense import Product
from scripts.studies.kernels.grouped import Layer, make_assignments
from scripts.studies.kernels.running import Bench
from scripts.studies.kernels.timing import Call, Chain, read_bandwidth, time_jax
from scripts.studies.measuring import Report

OPERATIONS = ("dense", "gate_up", "down")
_OP = flags.DEFINE_enum("op", "dense", OPERATIONS, "which call")
_SHAPE = flags.DEFINE_string("shape", "4096x14336", "a dense shape, or a model of grouped calls")
_BITS = flags.DEFINE_integer("bits", 3, "of dense weights; a model has its own")
_M = flags.DEFINE_list("m", ["1"], "rows of x, or tokens")
_IMPLEMENTATION = flags.DEFINE_string("implementation", "mosaic", "whose tiles")
_TILES = flags.DEFINE_string("tiles", "", "module:Class of the tile dataclass")
_GRID = flags.DEFINE_string("grid", "", 'such as "block_n=32,64;num_warps=4,8"; "": candidates()')
_BASE = flags.DEFINE_string("base", "", "fields that the grid leaves out, in the same form")
_REPETITIONS = flags.DEFINE_integer("repetitions", 7, "pairs of queues a configuration")
_LIMIT = flags.DEFINE_float("time_limit_s", 540, "stops cleanly before it")
_OUT = flags.DEFINE_string("out", "", "JSON Lines file that the best configurations are added to")
_CACHE = flags.DEFINE_string("cache", "", "persistent compilation cache")
_SMOKE = flags.DEFINE_bool("smoke", False, "tiny shapes and the reference, on a CPU")


class Task(NamedTuple):
    """One call to tune."""

    label: str
    facts: dict[str, int]  # what `candidates` is asked with
    x: jax.Array
    operands: Any
    chain: Chain
    call: Callable[[Any], Call]  # of a tile configuration, or None for the heuristic
    error: Callable[[np.ndarray], float]  # of the first call's output


class Result(NamedTuple):
    """A configuration that is right."""

    microseconds: float
    spread: float
    tiles: Any  # None: the heuristic


def parse_grid(text: str) -> dict[str, list[Any]]:
    """Values by field; numbers, true, false and none are read as such.

    Raises:
      ValueError: a part that is not field=value,value.
    """
    fields: dict[str, list[Any]] = {}
    for part in filter(None, text.split(";")):
        name, sign, values = part.partition("=")
        if not sign or not values:
            raise ValueError(f"{part!r} is not field=value,value")
        fields[name.strip()] = [_value(value.strip()) for value in values.split(",")]
    return fields


def _value(text: str) -> Any:
    try:
        return {"true": True, "false": False, "none": None}[text.lower()]
    except KeyError:
        return int(text)


def configurations(kind: type, grid: str, base: str, facts: dict[str, int]) -> list[Any]:
    """All tile configurations to try.

    Raises:
      ValueError: a field that the class does not have, or one without a value.
    """
    if not grid:
        module = sys.modules[kind.__module__]
        if not hasattr(module, "candidates"):
            raise ValueError(f"{module.__name__} has no candidates(): give --grid")
        return list(module.candidates(**facts))
    given = {name: values[:1] for name, values in parse_grid(base).items()} | parse_grid(grid)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := given.keys() - fields:
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}; it has {[*fields]}")
    for name, field in fields.items():
        no_default = field.default is field.default_factory is dataclasses.MISSING
        if name not in given and no_default:
            raise ValueError(f"{kind.__name__}.{name} has no default: give it in --grid or --base")
    combinations = itertools.product(*given.values())
    return [kind(**dict(zip(given, values, strict=True))) for values in combinations]


def dense_task(bench: Bench, shape: Dense, m: int) -> Task:
    """One product."""
    product = Product(bench, shape, _BITS.value)
    x, chain = random_rows(m, (m, shape.num_inputs)), product.chain(m)

    def call_with(tiles: Any) -> Call:
        def call(x: jax.Array, weights: Any, i: int) -> jax.Array:
            slot = jnp.int32(i % chain.num_slots)
            implementation = _IMPLEMENTATION.value
            return dequant_matmul(x, weights, slot=slot, implementation=implementation, tiles=tiles)

        return call

    facts = {"num_rows": m, "num_inputs": shape.num_inputs, "num_outputs": shape.num_outputs}
    sample = dense_sample(x, product.weights, 0)
    label = product.label(m)
    facts["bits"] = _BITS.value
    return Task(label, facts, x, product.weights, chain, call_with, sample.error)


def grouped_task(layer: Layer, op: str, num_tokens: int) -> Task:
    """One of the two products of a MoE layer."""
    moe, bench = layer.moe, layer.bench
    assignments, distinct = make_assignments(bench, moe, num_tokens)
    shape: tuple[int, ...] = (num_tokens, moe.model_dim)
    stack = layer.gate_up
    if op == "down":
        shape, stack = (num_tokens, moe.width, moe.expert_dim), layer.down
    x = random_rows(num_tokens, shape)

    def call_with(tiles: Any, implementation: str = _IMPLEMENTATION.value) -> Call:
        def call(x: jax.Array, held: Any, i: int) -> jax.Array:
            stack, own = held[0], held[1][i]
            given = x, own, [stack], [()], tiles, current_target()
            if op == "gate_up":
                return PRODUCT[implementation](*given, gating=SWIGLU)
            return combine(PRODUCT[implementation](*given), own.tier == 0, own.weight, x.dtype)

        return call

    operands = (stack, assignments)
    reference = jax.jit(lambda x, held: call_with(None, "reference")(x, held, 0))(x, operands)
    expected = np.asarray(reference).astype(np.float64)
    expected = expected.reshape(-1, expected.shape[-1])
    sample = Sample(np.arange(expected.shape[0]), np.arange(expected.shape[1]), expected)
    num_bytes = distinct * stack.slot_nbytes
    operations = 2.0 * num_tokens * moe.width * stack.num_inputs * stack.num_outputs
    guess = bench.chain(stack.slot_nbytes, num_bytes, operations)
    rounds = max(1, round(guess.num_rounds * guess.num_calls / len(assignments)))
    return Task(
        label=f"{op} | {moe.name} {stack.describe()} | T {num_tokens}",
        facts={
            "num_rows": num_tokens * moe.width, "num_inputs": stack.num_inputs,
            "num_outputs": stack.num_outputs, "bits": moe.bits,
        },
        x=x,
        operands=operands,
        chain=Chain(len(assignments), len(assignments), rounds),
        call=call_with,
        error=lambda y: sample.error(y.reshape(-1, *expected.shape).sum(axis=0)),  # parts of K
    )  # fmt: skip


def tune(task: Task, tried: Sequence[Any], repetitions: int, deadline: float) -> list[Result]:
    """Times the configurations, the heuristic first and last; wrong ones are out.

    Returns:
      The right ones, in the order of trying.
    """
    results: list[Result] = []
    longest = 0.0  # seconds that a configuration has taken
    for tiles in (None, *tried, None):
        start = time.monotonic()
        if deadline - start < longest:
            print(f"  stopped after {len(results)} of {len(tried) + 2} configurations: time is up")
            break
        try:
            call = task.call(tiles)
            timing = time_jax(call, task.x, task.operands, task.chain, repetitions)
        except Exception as error:
            print(f"  {_describe(tiles):70s} refused: {type(error).__name__} {error!s:.120}")
            continue
        finally:
            longest = max(longest, 1.2 * (time.monotonic() - start))
        found = task.error(np.asarray(timing.first))
        said = "" if found <= ERROR_LIMIT else "  WRONG"
        if timing.microseconds <= 0:  # on a busy CPU
            said = "  NOISE"
        print(
            f"  {_describe(tiles):70s} {timing.microseconds:9.2f} us +- {timing.spread:.2f}, "
            f"error {found:.2g}{said}",
            flush=True,
        )
        if not said:
            results.append(Result(timing.microseconds, timing.spread, tiles))
    return results


def _describe(tiles: Any) -> str:
    return "heuristic" if tiles is None else repr(tiles)


def report(task: Task, results: Sequence[Result], device: jax.Device, out: str) -> None:
    """Prints the line for the table of measured tiles, and keeps the figures."""
    tuned = [result for result in results if result.tiles is not None]
    heuristic = [result.microseconds for result in results if result.tiles is None]
    if not tuned:
        print(f"{task.label}: no configuration is right")
        return
    best = min(tuned, key=lambda result: result.microseconds)
    when = f"{describe_device(device)}, jax {jax.__version__}, {today()}"
    beside = " and ".join(f"{us:.2f}" for us in heuristic) or "not measured"
    print(f"{task.label}, best of {len(tuned)}:")
    print(f"    # {when}: {best.microseconds:.2f} us, heuristic {beside}")
    facts = task.facts
    names = ("bits", "num_rows", "num_outputs", "num_inputs")  # bits, M, N, K, as in the tables
    key = (device.device_kind, *(facts[name] for name in names))
    print(f"    {key}: {best.tiles!r},", flush=True)
    if out:
        row = {
            "what": task.label,
            **facts,
            "implementation": _IMPLEMENTATION.value,
            "tiles": {type(best.tiles).__name__: dataclasses.asdict(best.tiles)},
            "us": best.microseconds,
            "heuristic_us": heuristic,
            "device": describe_device(device),
            "jax": jax.__version__,
            "date": today(),
        }
        with Path(out).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def tasks(bench: Bench) -> Iterator[Task]:
    """Tasks that the flags name."""
    smoke, name = _SMOKE.value, _SHAPE.value
    shapes: list[Dense | Moe] = [*DENSE, *ASKED_DENSE, *MOE, *ASKED_MOE]
    if smoke:
        shapes = [*SMOKE_DENSE, *SMOKE_MOE]
    found = {shape.name: shape for shape in shapes}
    shape = found.get(name)
    if (_OP.value == "dense") != isinstance(shape, Dense) or shape is None:
        raise app.UsageError(f"{_OP.value} of {name!r}: the shapes are {', '.join(found)}")
    layer = Layer(bench, shape) if isinstance(shape, Moe) else None
    for m in map(int, _M.value):
        if layer is not None:
            yield grouped_task(layer, _OP.value, m)
        elif isinstance(shape, Dense):
            yield dense_task(bench, shape, m)


def main(argv: list[str]) -> None:
    """Tunes what the flags ask for."""
    del argv
    start = time.monotonic()
    if _SMOKE.value:
        jax.config.update("jax_platforms", "cpu")
    device = choose_device("cpu" if _SMOKE.value else "gpu")
    enable_compilation_cache(_CACHE.value)
    module, _, name = _TILES.value.partition(":")
    if not name:
        raise app.UsageError("--tiles is module:Class")
    kind = getattr(importlib.import_module(module), name)
    deadline = start + _LIMIT.value
    bench = Bench(
        report=Report(device, "", ""),
        target=current_target(),
        implementations=(),
        deadline=deadline,
        smoke=_SMOKE.value,
        bandwidth=read_bandwidth(2**22 if _SMOKE.value else 2**32),
        rate=6e14,
    )
    for task in tasks(bench):
        tried = configurations(kind, _GRID.value, _BASE.value, task.facts)
        print(f"{task.label}: {len(tried)} configurations", flush=True)
        repetitions = 2 if _SMOKE.value else _REPETITIONS.value
        report(task, tune(task, tried, repetitions, deadline), device, _OUT.value)


if __name__ == "__main__":
    app.run(main)
