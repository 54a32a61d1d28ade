"""Attention of a prompt's chunk to the cache: the kernel beside XLA, cuDNN and JAX's Mosaic kernel.

    python -m scripts.studies.kernels.bench_chunk_attention \
        --output=scripts/studies/kernels/chunk_attention_h200.jsonl
    python -m scripts.studies.kernels.bench_chunk_attention --others= \
        --tiles=128x64w8p2,128x128w8p2,64x64w4p3    # others beside ours

The first figure is Triton's: microseconds a chunk, of a chain of calls; a row is printed as soon
as it is measured. The chunk's first token stands at `--offset`. Operations are those of the scores
that are seen.

`mosaic` is our other kernel; `xla` is what the model runs without either, in pieces as long as
`longest_chunk` allows; `cudnn` is two calls, of the chunk to itself and to the slots before it,
joined by their sums, since JAX's cuDNN has no causal mask for queries that begin at an offset; it
copies the slots to the order that it wants. `shipped` is JAX's own kernel, `attention_mgpu` of
`jax.experimental.pallas.ops.gpu`, in float16, which has no offset. Results are compared. `--smoke`
tries the script on a CPU, Triton interpreted.
"""

import functools
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from moejax.devices import choose_device
from moejax.inference.chunking import kv_bucket, longest_chunk
from moejax.models.attention import cached_attention
from moejax.models.shapes import SHAPES
from pallas_kernels.chunk_attention import ChunkTiles, chunk_attention
from scripts.studies.kernels.timing import Chain, Timing, time_jax
from scripts.studies.measuring import Report

_OUTPUT = flags.DEFINE_string("output", "", "JSON Lines file that rows are appended to")
_SMOKE = flags.DEFINE_bool("smoke", False, "tiny shapes on the CPU, to try the script")
_SHAPES = flags.DEFINE_list("shapes", ["Qwen3-30B-A3B", "Mixtral-8x7B"], "names of `moejax.models`")
_BATCH = flags.DEFINE_multi_integer("batch", [1, 4], "sequences")
_CHUNK = flags.DEFINE_multi_integer("chunk", [1024, 2048, 4096], "tokens of each")
_OFFSET = flags.DEFINE_multi_integer("offset", [0, 8192, 31744], "tokens before them")
_OTHERS = flags.DEFINE_list(
    "others", ["mosaic", "xla", "cudnn", "shipped"], "what is timed beside ours"
)
_TILES = flags.DEFINE_list("tiles", [], "tried beside the rule's, as 128x64w8p3: rows, slots, ...")
_REPEATS = flags.DEFINE_integer("repeats", 3, "pairs of timed queues; the median is taken")

MAX_TOKENS = 4096  # of a call
XLA_TOKENS = 1024  # of a call by XLA, which takes the same time for each piece
CACHE_LENGTH = 36 * 1024
GUESS_RATE = 3e14  # operations a second
MAX_DIFFERENCE = 1e-2  # of the norm; all round weights and results to 16 bits


def by_kernel(
    q: jax.Array, operands: Any, call: int, by: str = "triton", tiles: ChunkTiles | None = None
) -> jax.Array:
    """One launch."""
    keys, values, starts = operands
    lengths = jnp.full_like(starts, q.shape[1])
    return chunk_attention(
        q, keys, values, layer=jnp.int32(call % len(keys)), starts=starts, lengths=lengths,
        kv_length=keys.shape[3], implementation=by, tiles=tiles, interpret=_SMOKE.value,
    )  # fmt: skip


def by_xla(q: jax.Array, operands: Any, call: int, piece: int, seen: int) -> jax.Array:
    """Pieces one after the other, each as the model computes it without the kernel."""
    keys, values, starts = operands
    slots = kv_bucket(seen, keys.shape[3])
    k, v = (cache[call % len(keys), :, :, :slots] for cache in (keys, values))

    def attended(first: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(q, first, piece, axis=1)
        positions = starts[:, None] + first + jnp.arange(piece, dtype=jnp.int32)
        return cached_attention(part, k, v, positions, None)

    found = jax.lax.map(attended, jnp.arange(0, q.shape[1], piece, dtype=jnp.int32))
    return jnp.moveaxis(found, 0, 1).reshape(q.shape)


def by_cudnn(q: jax.Array, operands: Any, call: int, offset: int) -> jax.Array:
    """The chunk to itself and to the slots before it, joined."""
    keys, values, starts = operands

    def read(first: int, size: int) -> list[jax.Array]:
        found = (cache[call % len(keys), :, :, first : first + size] for cache in (keys, values))
        return [of.swapaxes(1, 2) for of in found]

    attend: Any = functools.partial(
        jax.nn.dot_product_attention, q, implementation="cudnn", return_residual=True
    )
    own, own_sums = attend(*read(offset, q.shape[1]), is_causal=True)
    if not offset:
        return own
    # The slots are a static bucket, as in the model; how many are seen, the device knows.
    slots = kv_bucket(offset, keys.shape[3])
    before, sums = attend(*read(0, slots), key_value_seq_lengths=starts)
    share = jax.nn.sigmoid(own_sums - sums)[..., None]
    joined = own.astype(jnp.float32) * share + before.astype(jnp.float32) * (1 - share)
    return joined.astype(q.dtype)


def by_shipped(q: jax.Array, operands: Any, call: int) -> jax.Array:
    """JAX's own Mosaic kernel, of a chunk at offset 0."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    keys, values, _ = operands
    k, v = (
        cache[call % len(keys), :, :, : q.shape[1]].swapaxes(1, 2).astype(jnp.float16)
        for cache in (keys, values)
    )
    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=128, max_concurrent_steps=2, causal=True
    )
    return attention_mgpu.attention(q.astype(jnp.float16), k, v, config)


def parsed(text: str) -> ChunkTiles:
    """Parses `ChunkTiles.describe`, with or without its letters."""
    found = re.fullmatch(r"r?(\d+)[xs](\d+)w(\d+)p(\d+)", text)
    if not found:
        raise ValueError(f"tiles {text!r}: not such as 128x64w8p3")
    return ChunkTiles(*map(int, found.groups()))


def measure(
    report: Report, name: str, batch: int, chunk: int, offset: int, length: int
) -> list[str]:
    """Adds the kernel's row beside the others, and of each asked tiles; returns what failed."""
    config = SHAPES[name]
    num_heads, head_dim = config.num_heads, config.head_dim
    size = (2, batch, config.num_kv_heads, length, head_dim)
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    make = jax.jit(lambda key: tuple(draw(k, size) for k in jax.random.split(key)))
    keys, values = make(jax.random.key(0))
    q = draw(jax.random.key(1), (batch, chunk, num_heads, head_dim))
    operands = (keys, values, jnp.full(batch, offset, jnp.int32))
    operations = 4 * batch * num_heads * head_dim * chunk * (offset + (chunk + 1) / 2)
    # The shipped kernel has no factor on scores.
    scaled_q = (q.astype(jnp.float32) * float(head_dim) ** -0.5).astype(q.dtype)

    def timed(call: Any, x: jax.Array = q, slower: float = 1, **how: Any) -> Timing:
        rounds = 1 if _SMOKE.value else round(1e-3 * GUESS_RATE / (operations * slower))
        chain = Chain(2, 2, max(1, rounds))
        bound = functools.partial(call, **how)
        return time_jax(bound, x, operands, chain, _REPEATS.value, {} if _SMOKE.value else None)

    where = f"attention of {name}, batch {batch}, chunk {chunk} at {offset}"
    ours = timed(by_kernel)
    others: dict[str, Any] = {
        "mosaic": lambda: timed(by_kernel, by="mosaic"),
        "xla": lambda: timed(
            by_xla, slower=10, seen=offset + chunk,
            piece=min(chunk, longest_chunk(config, batch, length)),
        ),
        "cudnn": lambda: timed(by_cudnn, offset=offset),
        "shipped": lambda: timed(by_shipped, x=scaled_q),
    }  # fmt: skip
    unfit = {"xla": batch * chunk > XLA_TOKENS * batch, "shipped": offset > 0}
    if _SMOKE.value:  # they need a GPU
        unfit |= dict.fromkeys(("mosaic", "cudnn", "shipped"), True)
    failed: list[str] = []
    beside: dict[str, Any] = {}
    for other in _OTHERS.value:
        if unfit.get(other):
            continue
        try:
            found = others[other]()
        except Exception as error:  # ours is measured all the same
            failed.append(f"{where}: {other}: {error!s:.200}")
            print(f"  FAILED {failed[-1]}", flush=True)
            continue
        beside[other] = found.microseconds
        if (apart := ours.difference(found)) > MAX_DIFFERENCE:
            raise RuntimeError(f"{where}: ours and {other} differ by {apart:.3g}")
    for tiles in (None, *map(parsed, _TILES.value)):
        found = timed(by_kernel, tiles=tiles) if tiles else ours
        if found.difference(ours) > MAX_DIFFERENCE:
            raise RuntimeError(f"{where}, {tiles}: the results differ")
        report.add(
            where + (f", {tiles.describe()}" if tiles else ""), found.microseconds, "us",
            spread=found.spread, tflops=operations / found.microseconds / 1e6, **beside,
        )  # fmt: skip
    return failed


def main(argv: list[str]) -> None:
    """All shapes; exits with 1 if one failed."""
    del argv
    device = choose_device("cpu" if _SMOKE.value else "gpu")
    jax.config.update("jax_default_device", device)
    report = Report(device, "bfloat16, calls in sequence", _OUTPUT.value)
    sizes = [
        (batch, chunk, offset, CACHE_LENGTH)
        for batch in _BATCH.value
        for chunk in _CHUNK.value
        for offset in _OFFSET.value
        if batch * chunk <= MAX_TOKENS
    ]
    failed = []
    for name in _SHAPES.value:
        for size in [(1, 32, 40, 80)] if _SMOKE.value else sizes:
            try:
                failed += measure(report, name, *size)
            except Exception as error:
                failed.append(f"{name} {size}: {error!s:.500}")
                print(f"  FAILED {failed[-1]}", flush=True)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    app.run(main)
