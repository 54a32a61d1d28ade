"""A MoE layer some of whose experts are in host memory: read in place, or fetched first.

    python -m scripts.bench_host_rows --output=scripts/results/fetch_h200.jsonl

One token (`--tokens` for more) of a layer of Qwen3-30B-A3B INT4 and Mixtral-8x7B INT3. Of its
experts so many are missing on the device, and the layer runs in three ways:
  * resident: all of them are slots of a pool;
  * fetched: one launch of `expert_fetch` copies the missing ones to slots, then the layer runs;
  * in place: the missing ones are a second tier, rows of a pinned host store, which the product
    reads itself; nothing is copied.
Every figure is the median of runs of a jitted loop of several layers, each with experts of its
own, which change from one iteration to the next. Values are compared bit for bit. `--smoke` tries
the script on a CPU, by the reference.
"""

import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from moejax.devices import choose_device
from pallas_kernels import expert_fetch
from pallas_kernels.grouped_dequant_matmul import OPERATION, Assignments, moe_layer
from pallas_kernels.packed import PackedMatrices
from scripts.bench_fetch_loops import Bench, microseconds, rate
from scripts.bench_kernels_data import MOE, SMOKE_MOE, Moe, random_rows, random_stack
from scripts.bench_report import Report

_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file that rows are appended to")
_SMOKE = flags.DEFINE_bool("smoke", False, "a tiny shape on the CPU, to try the script")
_TOKENS = flags.DEFINE_multi_integer("tokens", [1], "of a layer, each with experts of its own")
_KERNELS = flags.DEFINE_list("implementations", "mosaic,triton", "of the product")
_REPEATS = flags.DEFINE_integer("repeats", 10, "timed runs; the median is taken")
_TIME_LIMIT = flags.DEFINE_float("time_limit_s", 300.0, "no figure is begun later")

LAYERS = 8  # of an iteration, so that what a loop costs, about 0.2 ms an iteration, is shared
Stacks = tuple[PackedMatrices, PackedMatrices]


class Layer(NamedTuple):
    """Rows of the host, and the same on the device."""

    moe: Moe
    host: Stacks
    device: Stacks

    @property
    def expert_nbytes(self) -> int:
        """Of a row."""
        return sum(stack.slot_nbytes for stack in self.device)


def make_layer(bench: Bench, moe: Moe) -> Layer:
    """All experts of as many layers as there are slots for."""
    stack = functools.partial(random_stack, slots=4 * moe.num_experts, bits=moe.bits)
    device = (
        stack(jnp.uint32(1), rows=2 * moe.expert_dim, inputs=moe.model_dim),
        stack(jnp.uint32(2), rows=moe.model_dim, inputs=moe.expert_dim),
    )
    return Layer(moe, bench.placed(device, "pinned_host"), bench.placed(device, "device"))


def extended(leaf: jax.Array, number: int, front: bool = False) -> jax.Array:
    """With so many slots of zeros behind, or in front."""
    zeros = jnp.zeros((number, *leaf.shape[1:]), leaf.dtype)
    return jnp.concatenate([zeros, leaf] if front else [leaf, zeros])


def report_layer(bench: Bench, layer: Layer, num_tokens: int, implementation: str) -> None:
    """The rows of a layer for each number of missing experts."""
    moe, width = layer.moe, layer.moe.width
    x = random_rows(num_tokens, (num_tokens, moe.model_dim))
    gate_up = layer.device[0]
    pairs = num_tokens * width
    num_layers = 1 if bench.smoke else LAYERS
    weight = jnp.full((num_tokens, width), 1 / width, jnp.float32)

    def slots(i: jax.Array) -> jax.Array:
        first = i * pairs % gate_up.num_slots
        return (first + jnp.arange(pairs, dtype=jnp.int32)) % gate_up.num_slots

    def run(
        y: jax.Array, i: jax.Array, tiers: list[PackedMatrices], downs: list[PackedMatrices],
        tier: jax.Array, further: jax.Array | int = 0,
    ) -> jax.Array:  # fmt: skip
        slot = slots(i).reshape(num_tokens, width) + further
        shape = (num_tokens, width)
        assignments = Assignments(jnp.broadcast_to(tier, shape), slot, weight)
        inputs = x + 0 * y  # x, once the layer before is through
        return moe_layer(inputs, assignments, tiers, downs, implementation=implementation)

    def timed(one: Any, carry: Any) -> tuple[float, Any, int]:
        """Microseconds of a layer, its last value, and which number it had."""

        def layers(i: jax.Array, carry: Any, held: Any) -> Any:
            for number in range(num_layers):
                carry = one(i * num_layers + number, carry, held)
            return carry

        spent, carry, count = microseconds(bench, layers, carry, operands)
        return spent / num_layers, carry, count * num_layers - 1

    def resident(i: jax.Array, y: jax.Array, held: Any) -> jax.Array:
        (gate_up, down), _ = held
        return run(y, i, [gate_up], [down], jnp.int32(0))

    operands = (layer.device, layer.host)
    shifted = jax.tree.map(lambda leaf: extended(leaf, 1, front=True), layer.device)
    alone, _, _ = timed(resident, jnp.zeros_like(x))
    about = f"layer of {moe.name} {gate_up.describe()}, {num_tokens} tokens, {implementation}"
    for missing in sorted({1, width // 2, width}):
        if not bench.in_time():
            return
        is_missing = (jnp.arange(width, dtype=jnp.int32) < missing).astype(jnp.int32)

        def in_place(i: jax.Array, y: jax.Array, held: Any, tier: Any = is_missing) -> jax.Array:
            (gate_up, down), (host_gate_up, host_down) = held
            # On the device each expert is a slot further: a product of the wrong tier shows.
            further = jnp.where(tier == 0, 1, 0)
            return run(y, i, [gate_up, host_gate_up], [down, host_down], tier, further)

        def fetched(i: jax.Array, carry: Any, held: Any, missing: int = missing) -> Any:
            pools, y = carry
            rows = slots(i).reshape(num_tokens, width)[:, :missing].reshape(-1)
            # To slots of their own, which hold zeros at first: what is not fetched shows.
            own = gate_up.num_slots + jnp.arange(rows.size, dtype=jnp.int32)
            pools = expert_fetch.fetch(pools, held[1], rows, own)
            places = (
                own.reshape(num_tokens, missing) - slots(i).reshape(num_tokens, width)[:, :missing]
            )
            further = jnp.zeros((num_tokens, width), jnp.int32).at[:, :missing].set(places)
            return pools, run(y, i, [pools[0]], [pools[1]], jnp.int32(0), further)

        operands = (shifted, layer.host)
        spent, found, last = timed(in_place, jnp.zeros_like(x))
        operands = (layer.device, layer.host)
        pools = jax.tree.map(lambda leaf: extended(leaf, pairs), layer.device)
        fetch, (_, other), other_last = timed(fetched, (pools, jnp.zeros_like(x)))
        for name, value, number in (("place", found, last), ("slots", other, other_last)):
            wanted = jax.jit(resident)(jnp.int32(number), jnp.zeros_like(x), operands)
            if np.asarray(value).tobytes() != np.asarray(wanted).tobytes():
                raise RuntimeError(f"{about}: {missing} missing, from {name}: other values")
        moved = num_tokens * missing * layer.expert_nbytes
        bench.report.add(
            f"{about}, {missing} of {width} experts missing, read in place", spent, "us",
            fetched_first=fetch, all_resident=alone, gib_per_s=rate(moved, spent),
            fetched_gib_per_s=rate(moved, fetch),
        )  # fmt: skip


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the rows; exits with 1 if a part failed."""
    del argv
    device = choose_device("cpu" if _SMOKE.value else "gpu")
    jax.config.update("jax_default_device", device)
    bench = Bench(
        report=Report(device, "loop of layers, experts change", _OUTPUT.value),
        device=device, smoke=_SMOKE.value, repeats=2 if _SMOKE.value else _REPEATS.value,
        time_limit_s=_TIME_LIMIT.value,
    )  # fmt: skip
    failed = []
    for moe in SMOKE_MOE if _SMOKE.value else MOE:
        layer = make_layer(bench, moe)
        x = jax.ShapeDtypeStruct((1, moe.model_dim), jnp.bfloat16)
        best = OPERATION.choose(x, moe.width, [layer.device[0]], [layer.device[1]], ())
        print(f"{moe.name}: {best.describe()}", flush=True)
        for name in ["reference"] if _SMOKE.value else _KERNELS.value:
            for num_tokens in _TOKENS.value:
                try:
                    report_layer(bench, layer, num_tokens, name)
                except Exception as error:
                    failed.append(f"{moe.name} by {name}: {type(error).__name__}: {error!s:.500}")
                    print(f"  FAILED {failed[-1]}", flush=True)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    app.run(main)
