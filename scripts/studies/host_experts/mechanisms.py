"""Other ways from a step to the host: XLA's own, and Python's, as bounds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.compute_on import compute_on

from moejax.experts.pinned_memory import host_place
from pallas_kernels.packed import PackedMatrices
from scripts.studies.host_experts import steps
from scripts.studies.measuring import Report, seconds

CALLS, FEW = 16, 8  # in a step; those of an expert, and experts
HOST = jax.memory.Space.Host if hasattr(jax, "memory") else None
DEVICE = jax.memory.Space.Device if hasattr(jax, "memory") else None


def _product(packed: PackedMatrices, row: jax.Array, x: jax.Array) -> jax.Array:
    """Multiplies a packed matrix by [K]; by scalars alone, since constants lie on the device."""
    words, scales, zeros = (
        jax.lax.dynamic_index_in_dim(part, row, keepdims=False) for part in packed.arrays
    )
    outputs, blocks = words.shape[0], x.shape[0] // 256
    words = words.reshape(outputs, blocks, 32)
    scales, zeros = (
        part.astype(jnp.float32).reshape(outputs, blocks, 4) for part in (scales, zeros)
    )
    parts, terms = x.reshape(blocks, 4, 32, 2), []
    for p in range(4):
        dots = [
            jnp.sum(((words >> (16 * h + 4 * p)) & 15).astype(jnp.float32) * part, axis=2)
            for h, part in enumerate((parts[None, :, p, :, 0], parts[None, :, p, :, 1]))
        ]
        sums = jnp.sum(parts[:, p], axis=(1, 2))[None]
        differences = dots[0] + dots[1] - zeros[:, :, p] * sums
        terms.append(jnp.sum(scales[:, :, p] * differences, axis=1))
    return terms[0] + terms[1] + terms[2] + terms[3]


def _expert(packed: steps.Matrices, row: jax.Array, x: jax.Array) -> jax.Array:
    """One expert for one row [D], in plain jnp: what XLA:CPU makes of packed INT4."""
    gate, up = jnp.split(_product(packed[0], row, x), 2)
    return _product(packed[1], row, gate / (1 + jnp.exp(-gate)) * up)


def on_the_cpu(report: Report, store: steps.Store) -> None:
    """An expert by XLA:CPU alone."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        packed = steps.packed([jax.device_put(view[:64], cpu) for view in store.views])
        x, run = jnp.ones(steps.MODEL_DIM), jax.jit(_expert)
        taken = seconds(lambda: run(packed, jnp.int32(5), x), 5)
    report.add("an expert by XLA:CPU", taken * 1e6, "us", gb_s=steps.EXPERT_BYTES / taken / 1e9)


def _chain_us(step: Any, *operands: Any) -> float:
    return seconds(lambda: step(*operands), 5) / CALLS * 1e6


def _base_us() -> float:
    """A call of the chain that stays on the device."""

    def step(x: jax.Array) -> jax.Array:
        for _ in range(CALLS):
            x = jax.lax.optimization_barrier(jnp.sin(x) * 2)
        return x

    return _chain_us(jax.jit(step), jnp.ones((1, steps.MODEL_DIM)))


def compute_on_host(report: Report, store: steps.Store) -> None:
    """`compute_on("device_host")` in a step: its round trip, and an expert from the store."""
    of_0_11: Any = compute_on  # it has other arguments before
    host = of_0_11(compute_type="device_host", out_memory_spaces=HOST)

    def trips(x: jax.Array) -> jax.Array:
        for _ in range(CALLS):
            there = host(lambda y: jnp.sin(y) * 2)(jax.device_put(x, HOST))
            x = jnp.sin(jax.device_put(there, DEVICE))
        return x

    trip = _chain_us(jax.jit(trips), jnp.ones((1, steps.MODEL_DIM))) - _base_us()
    report.add('round trip of compute_on("device_host")', trip, "us")

    # A few rows: whether XLA copies what it is given was not known before.
    place = host_place(report.device)
    few = steps.packed([jax.device_put(view[:FEW], place) for view in store.views])

    def experts(x: jax.Array, hosts: steps.Matrices, row: jax.Array) -> jax.Array:
        for _ in range(FEW):
            there = host(_expert)(hosts, *jax.device_put((row, x), HOST))
            x = jnp.tanh(jax.device_put(there, DEVICE))
        return x

    step = jax.jit(experts)
    taken = seconds(lambda: step(jnp.ones(steps.MODEL_DIM), few, jnp.int32(5)), 3) / FEW
    report.add('an expert by compute_on("device_host")', taken * 1e6, "us")


def callbacks(report: Report, store: steps.Store) -> None:
    """`io_callback` in a step, which Python answers at once."""
    del store
    row = np.zeros((1, steps.MODEL_DIM), np.float32)

    def step(x: jax.Array) -> jax.Array:
        for _ in range(CALLS):
            x = x + io_callback(lambda _: row, jax.ShapeDtypeStruct(row.shape, row.dtype), x)
        return x

    trip = _chain_us(jax.jit(step), jnp.ones(row.shape)) - _base_us()
    report.add("round trip of io_callback", trip, "us")
