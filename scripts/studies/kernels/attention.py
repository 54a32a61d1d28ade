"""Attention of one new token to the cache: the kernel beside XLA's slices, products and softmax.

Calls take one layer of the cache after the other, whose layers together are larger than the L2;
every sequence stands at the last slot that is looked at. Bytes are those of keys and values, read
once; `pages` is the kernel's time where they lie in pages, in any order. Results are compared.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moejax.models.attention import cached_attention
from moejax.models.config import PAGE
from moejax.models.shapes import SHAPES
from pallas_kernels import decode_attention
from pallas_kernels.decode_attention import AttentionTiles
from scripts.studies.kernels.running import Bench
from scripts.studies.kernels.timing import Chain, Timing, chain_for, time_jax

GUESS_SECONDS = 5e-6  # of the shortest call
MAX_DIFFERENCE = 1e-2  # of the norm; both round weights and results to bfloat16
PLAIN_SHAPES = [name for name, config in SHAPES.items() if config.latent is None]
SLOTS = (1024, 4096)


def parsed(text: str) -> AttentionTiles:
    """Parses `AttentionTiles.describe`, with or without its first letter."""
    found = re.fullmatch(r"s?(\d+)x(\d+)w(\d+)p(\d+)", text)
    if not found:
        raise ValueError(f"tiles {text!r}: not such as 64x16w4p3")
    return AttentionTiles(*map(int, found.groups()))


def bench_attention(bench: Bench, batches: Sequence[int], tiles: Sequence[str]) -> None:
    """Every shape: a row of the kernel beside XLA, and one of each of the asked tiles."""
    for name in PLAIN_SHAPES:
        for batch in batches:
            for slots in (48,) if bench.smoke else SLOTS:
                what = f"attention of {name}, batch {batch}, {slots} slots"
                part = functools.partial(_measure, bench, what, name, batch, slots, tiles)
                bench.attempt(what, part, ours=True)


def _measure(
    bench: Bench, what: str, name: str, batch: int, kv_length: int, asked: Sequence[str]
) -> None:
    config = SHAPES[name]
    num_kv, head_dim = config.num_kv_heads, config.head_dim
    num_bytes = 2 * batch * num_kv * kv_length * head_dim * 2
    chain = chain_for(num_bytes, GUESS_SECONDS + num_bytes / 3e12)
    if bench.smoke:
        chain = Chain(2, 2, 1)
    size = (chain.num_slots, batch, num_kv, kv_length, head_dim)
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    make = jax.jit(lambda key: tuple(draw(k, size) for k in jax.random.split(key)))
    keys, values = make(jax.random.key(0))
    q = 2 * draw(jax.random.key(1), (batch, config.num_heads, head_dim))
    operands = (keys, values, jnp.full(batch, kv_length - 1, jnp.int32))

    def timed(call: Any, of: Any, **how: Any) -> Timing:
        bound = functools.partial(call, kv_length=kv_length, **how)
        return time_jax(bound, q, of, chain, bench.repetitions, {} if bench.smoke else None)

    xla, paged = timed(_by_xla, operands), _in_pages(operands, 16 if bench.smoke else PAGE)
    for tiles in (None, *map(parsed, asked)):
        ours, by_pages = (
            timed(_by_kernel, of, tiles=tiles, interpret=bench.smoke) for of in (operands, paged)
        )
        if max(of.difference(xla) for of in (ours, by_pages)) > MAX_DIFFERENCE:
            raise RuntimeError("the results differ")
        said = f"{what}, {tiles.describe()}" if tiles else what
        bench.add(
            f"{said}, bfloat16, calls in sequence", ours.microseconds, "us", spread=ours.spread,
            gb_per_s=num_bytes / ours.microseconds / 1e3, pages=by_pages.microseconds,
            xla=xla.microseconds, xla_gb_per_s=num_bytes / xla.microseconds / 1e3,
        )  # fmt: skip


def _by_kernel(
    q: jax.Array, operands: Any, call: int, kv_length: int, tiles: AttentionTiles | None,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """One launch, or two."""
    keys, values, positions, *pages = operands
    return decode_attention.decode_attention(
        q, keys, values, layer=jnp.int32(call % len(keys)), positions=positions,
        kv_length=kv_length, pages=pages[0] if pages else None, implementation="triton",
        tiles=tiles, interpret=interpret,
    )  # fmt: skip


def _in_pages(operands: Any, size: int) -> Any:
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


def _by_xla(q: jax.Array, operands: Any, call: int, kv_length: int) -> jax.Array:
    """Computes attention as the model does without the kernel."""
    keys, values, positions = operands
    layer = call % len(keys)
    k, v = keys[layer, :, :, :kv_length], values[layer, :, :, :kv_length]
    return cached_attention(q[:, None], k, v, positions[:, None], None)[:, 0]
