"""Attention of one new token to the cache: the kernel beside XLA's slices, products and softmax.

    python -m scripts.studies.kernels.bench_attention \
        --output=scripts/studies/kernels/attention_h200.jsonl
    python -m scripts.studies.kernels.bench_attention --tiles=64x16w4p3,32x32w4p4 \
        --batch=1    # others beside ours

A figure is microseconds a call of a chain of calls, one layer of the cache after the other, whose
layers together are larger than the L2; every sequence stands at the last slot that is looked at.
Bytes are those of keys and values, read once; `pages` is the kernel's time where they lie in pages,
in any order. Results are compared. `--smoke` tries the script on a CPU, the kernel interpreted.
"""

import functools
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from moejax.devices import choose_device
from moejax.models.attention import cached_attention
from moejax.models.config import PAGE
from moejax.models.shapes import SHAPES
from pallas_kernels import decode_attention
from pallas_kernels.decode_attention import AttentionTiles
from scripts.studies.kernels.timing import Chain, Timing, chain_for, read_bandwidth, time_jax
from scripts.studies.measuring import Report

_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file that rows are appended to")
_SMOKE = flags.DEFINE_bool("smoke", False, "tiny shapes on the CPU, to try the script")
_BATCH = flags.DEFINE_multi_integer("batch", [1, 16, 32], "sequences")
_KV = flags.DEFINE_multi_integer("kv", [1024, 4096], "slots that are looked at")
_TILES = flags.DEFINE_list("tiles", [], "tried beside the rule's, as 64x16w4p3: block, splits, ...")
_REPEATS = flags.DEFINE_integer("repeats", 7, "pairs of timed queues; the median is taken")

GUESS_SECONDS = 5e-6  # of the shortest call
MAX_DIFFERENCE = 1e-2  # of the norm; both round weights and results to bfloat16


def by_kernel(
    q: jax.Array, operands: Any, call: int, kv_length: int, tiles: AttentionTiles | None
) -> jax.Array:
    """One launch, or two."""
    keys, values, positions, *pages = operands
    return decode_attention.decode_attention(
        q, keys, values, layer=jnp.int32(call % len(keys)), positions=positions,
        kv_length=kv_length, pages=pages[0] if pages else None, implementation="triton",
        tiles=tiles, interpret=_SMOKE.value,
    )  # fmt: skip


def in_pages(operands: Any, size: int) -> Any:
    """Keys and values in pages of `size` slots, positions, and the table of the pages."""
    keys, values, positions = operands
    layers, batch, num_kv, length, width = keys.shape
    count = batch * length // size
    order = jax.random.permutation(jax.random.key(2), count)

    def pages(cache: jax.Array) -> jax.Array:
        parts = cache.reshape(layers, batch, num_kv, -1, size, width).swapaxes(2, 3)
        return parts.reshape(layers, count, num_kv, size, width)[:, order]

    table = jnp.argsort(order).astype(jnp.int32).reshape(batch, -1)
    return jax.jit(pages)(keys), jax.jit(pages)(values), positions, table


def by_xla(q: jax.Array, operands: Any, call: int, kv_length: int) -> jax.Array:
    """Computes attention as the model does without the kernel."""
    keys, values, positions = operands
    layer = call % len(keys)
    k, v = keys[layer, :, :, :kv_length], values[layer, :, :, :kv_length]
    return cached_attention(q[:, None], k, v, positions[:, None], None)[:, 0]


def parsed(text: str) -> AttentionTiles:
    """Parses `AttentionTiles.describe`, with or without its first letter."""
    found = re.fullmatch(r"s?(\d+)x(\d+)w(\d+)p(\d+)", text)
    if not found:
        raise ValueError(f"tiles {text!r}: not such as 64x16w4p3")
    return AttentionTiles(*map(int, found.groups()))


PLAIN_SHAPES = [name for name, config in SHAPES.items() if config.latent is None]


def measure(report: Report, name: str, batch: int, kv_length: int) -> None:
    """One shape: a row of the kernel beside XLA, and one of each of the asked tiles."""
    config = SHAPES[name]
    num_kv, head_dim = config.num_kv_heads, config.head_dim
    num_bytes = 2 * batch * num_kv * kv_length * head_dim * 2
    chain = chain_for(num_bytes, GUESS_SECONDS + num_bytes / 3e12)
    if _SMOKE.value:
        chain = Chain(2, 2, 1)
    size = (chain.num_slots, batch, num_kv, kv_length, head_dim)
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    make = jax.jit(lambda key: tuple(draw(k, size) for k in jax.random.split(key)))
    keys, values = make(jax.random.key(0))
    q = 2 * draw(jax.random.key(1), (batch, config.num_heads, head_dim))
    operands = (keys, values, jnp.full(batch, kv_length - 1, jnp.int32))
    options: dict[str, str | bool] | None = {} if _SMOKE.value else None

    def timed(call: Any, of: Any, **how: Any) -> Timing:
        bound = functools.partial(call, kv_length=kv_length, **how)
        return time_jax(bound, q, of, chain, _REPEATS.value, options)

    xla, paged = timed(by_xla, operands), in_pages(operands, 16 if _SMOKE.value else PAGE)
    for tiles in (None, *map(parsed, _TILES.value)):
        ours, by_pages = (timed(by_kernel, of, tiles=tiles) for of in (operands, paged))
        if max(of.difference(xla) for of in (ours, by_pages)) > MAX_DIFFERENCE:
            raise RuntimeError(f"{name} batch {batch} kv {kv_length}: the results differ")
        report.add(
            f"attention of {name}, batch {batch}, {kv_length} slots"
            + (f", {tiles.describe()}" if tiles else ""),
            ours.microseconds,
            "us",
            spread=ours.spread,
            gb_per_s=num_bytes / ours.microseconds / 1e3,
            pages=by_pages.microseconds,
            xla=xla.microseconds,
            xla_gb_per_s=num_bytes / xla.microseconds / 1e3,
        )


def main(argv: list[str]) -> None:
    """All shapes; exits with 1 if one failed."""
    del argv
    device = choose_device("cpu" if _SMOKE.value else "gpu")
    jax.config.update("jax_default_device", device)
    report = Report(device, "bfloat16, calls in sequence", _OUTPUT.value)
    if not _SMOKE.value:
        print(f"read bandwidth of a plain sum: {read_bandwidth(2**31) / 1e12:.2f} TB/s")
    failed = []
    for name in PLAIN_SHAPES:
        for batch in [2] if _SMOKE.value else _BATCH.value:
            for kv_length in [48] if _SMOKE.value else _KV.value:
                try:
                    measure(report, name, batch, kv_length)
                except Exception as error:
                    failed.append(f"{name} {batch} {kv_length}: {error!s:.500}")
                    print(f"  FAILED {failed[-1]}", flush=True)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    app.run(main)
