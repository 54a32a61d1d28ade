"""The contract of chunk attention: reference, kernel interpreted on a CPU, compiled on a GPU.

Expectations are float64 numpy, one head at a time; the tolerance follows from the dtype.
"""

import contextlib
import math
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels import chunk_attention as package
from pallas_kernels.chunk_attention import mosaic, tiles, triton
from pallas_kernels.target import Target, target_of
from tests import slow
from tests.gpu_targets import leaf
from tests.host_test_case import HostTestCase
from tests.kernel_contract import (
    ROUNDOFF,
    UNIT_ROUNDOFF,
    Contract,
    on_device,
    on_host,
    one_program_fewer,
    outside,
    tampered,
    wrong_form,
)

# Tolerance of a sequence's result in the Euclidean norm: roundings of weights and result.
NORM_ERROR = {"bfloat16": 3e-3, "float16": 3e-3 / 8}


class Shape(NamedTuple):
    """Axes of the operation, and what is looked at."""

    chunk: int  # T
    num_heads: int
    num_kv: int
    head_dim: int
    length: int  # S
    starts: tuple[int, ...]  # of B sequences
    lengths: tuple[int, ...]
    window: int | None = None
    kv_length: int = 0  # 0: S
    layers: int = 2
    has_sinks: bool = False

    @property
    def batch(self) -> int:
        return len(self.starts)

    @property
    def slots(self) -> int:
        return self.kv_length or self.length


# Shapes that a CPU can interpret: real heads, short caches; few lengths are multiples of a block.
SHAPES = {
    "qwen3_30b": Shape(40, 32, 4, 128, 200, (0, 90), (40, 33)),
    "mixtral": Shape(50, 32, 8, 128, 150, (100,), (50,)),
    "demo": Shape(64, 4, 2, 64, 512, (0, 400, 77), (64, 64, 64), kv_length=500),
    "first": Shape(150, 4, 1, 64, 150, (0,), (150,)),
    "unequal": Shape(70, 8, 2, 64, 300, (0, 130, 41, 230, 9), (70, 1, 0, 70, 37)),
    "window": Shape(90, 8, 2, 64, 400, (300, 0, 40), (90, 90, 50), window=70),
    "narrow_window": Shape(200, 2, 1, 32, 400, (200,), (190,), window=5),
    "window_of_one": Shape(33, 4, 4, 16, 80, (40, 0), (33, 20), window=1),
    "group_of_five": Shape(45, 10, 2, 16, 70, (20,), (45,)),
    "wide": Shape(20, 4, 2, 256, 90, (61, 7), (20, 20)),
    "sinks": Shape(40, 6, 2, 64, 160, (100, 0), (40, 21), window=30, has_sinks=True),
    "one_token": Shape(1, 4, 2, 32, 40, (0, 39), (1, 1)),
}
GPU_SHAPES = {
    "qwen3_30b": Shape(512, 32, 4, 128, 4096, (0, 3000), (512, 400), layers=3),
    "qwen3_30b_long": Shape(64, 32, 4, 128, 32768, (32000,), (64,), layers=1),
    "mixtral": Shape(300, 32, 8, 128, 2048, (1748, 0), (300, 300)),
    "mixtral_window": Shape(300, 32, 8, 128, 2048, (1748, 5), (300, 200), window=1000),
    "qwen3_next": Shape(256, 16, 2, 256, 2048, (1500,), (256,)),
    "whole_blocks": Shape(256, 8, 1, 128, 1024, (768, 512), (256, 256), layers=1),
} | {name: SHAPES[name] for name in SHAPES if name not in ("qwen3_30b", "mixtral")}


class Operands(NamedTuple):
    """Arguments of `chunk_attention`, on the host."""

    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    layer: int
    starts: np.ndarray
    lengths: np.ndarray
    sinks: np.ndarray | None = None


def random_operands(shape: Shape, dtype: str, seed: int) -> Operands:
    """Fresh operands of the last layer; NaN in every layer and slot that may not be read.

    Scores are of order 2, so that some weights are large and most are small.
    """
    rng = np.random.default_rng(seed)
    s = shape

    def normal(*size: int) -> np.ndarray:
        return rng.standard_normal(size, dtype=np.float32)

    size = (s.layers, s.batch, s.num_kv, s.length, s.head_dim)
    caches = [np.full(size, np.nan, jnp.dtype(dtype)) for _ in range(2)]
    for b, (start, live) in enumerate(zip(s.starts, s.lengths, strict=True)):
        first = 0 if s.window is None else max(0, start - s.window + 1)
        for cache in caches:
            if live:
                drawn = normal(s.num_kv, start + live - first, s.head_dim)
                cache[-1, b, :, first : start + live] = drawn.astype(cache.dtype)
    q = (2 * normal(s.batch, s.chunk, s.num_heads, s.head_dim)).astype(jnp.dtype(dtype))
    numbers = [np.array(of, np.int32) for of in (s.starts, s.lengths)]
    sinks = 2 + normal(s.layers, s.num_heads) if s.has_sinks else None
    return Operands(q, *caches, s.layers - 1, *numbers, sinks)


def expected_and_tolerance(of: Operands, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """float64[B, T, H, C] of the formula, and how far a right kernel's value may be from it.

    A score is a float32 sum of C products, off by some 4 sqrt(C) u sum |q k|, which changes a
    weight by that share, and the sum of weights too; weights are rounded to the dtype, summed in
    float32, and the result is rounded to the dtype.
    """
    dtype = of.q.dtype.name
    expected, tolerance = np.zeros(of.q.shape), np.zeros(of.q.shape)
    group, width = shape.num_heads // shape.num_kv, shape.head_dim
    for b, h in np.ndindex(shape.batch, shape.num_heads):
        live, start = shape.lengths[b], shape.starts[b]
        end = start + live
        where = (of.layer, b, h // group, slice(end))
        k, v = (np.nan_to_num(a[where].astype(np.float64)) for a in (of.keys, of.values))
        q = of.q[b, :live, h].astype(np.float64) / np.sqrt(width)
        ahead = start + np.arange(live)[:, None] - np.arange(end)[None]
        seen = (ahead >= 0) & (ahead < (shape.window or end + 1))
        scores = np.where(seen, q @ k.T, -np.inf)
        sink = -np.inf if of.sinks is None else float(of.sinks[of.layer, h])
        top = np.maximum(scores.max(axis=1, initial=-np.inf, keepdims=True), sink)
        weights = np.exp(scores - top)
        weights /= weights.sum(axis=1, keepdims=True) + np.exp(sink - top)
        expected[b, :live, h] = weights @ v
        sizes = np.where(seen, 4 * np.sqrt(width) * (np.abs(q) @ np.abs(k).T), 0)
        score_error = sizes.max(axis=1, initial=0) + 8 * np.abs(q @ k.T).max(axis=1, initial=0)
        share = ROUNDOFF[dtype] + UNIT_ROUNDOFF * (2 * score_error + 4 * np.sqrt(end) + 16)
        tolerance[b, :live, h] = share[:, None] * (weights @ np.abs(v))
    tolerance += ROUNDOFF[dtype] * (np.abs(expected) + tolerance)
    return expected, tolerance + float(jnp.finfo(dtype).smallest_subnormal)


def violation(found: Any, of: Operands, shape: Shape) -> str | None:
    """THE check: why `found` is not the operation's value, or None."""
    expected, tolerance = expected_and_tolerance(of, shape)
    if reason := wrong_form([found], [expected.shape], [of.q.dtype]):
        return reason
    if reason := outside("values", found, expected, tolerance):
        return reason
    for b, live in enumerate(shape.lengths):
        if np.any(np.asarray(found)[b, live:] != 0):
            return f"padding of sequence {b} is not 0"
        error = np.asarray(found)[b, :live].astype(np.float64) - expected[b, :live]
        share = np.linalg.norm(error) / max(np.linalg.norm(expected[b, :live]), 1e-30)
        if share > NORM_ERROR[of.q.dtype.name]:
            return f"sequence {b} is {share:.3g} of its norm off"
    return None


SMALL = tiles.ChunkTiles(rows=16, block=32, num_warps=4, num_stages=2)
LARGE = tiles.ChunkTiles(rows=128, block=64, num_warps=8, num_stages=3)
STATIC = ("kv_length", "window", "scale", "implementation", "tiles", "interpret")
CALL = jax.jit(package.chunk_attention, static_argnames=STATIC)


def run(call: Any, of: Operands, shape: Shape, **how: Any) -> jax.Array:
    return call(
        of.q, of.keys, of.values, layer=np.int32(of.layer), starts=of.starts, lengths=of.lengths,
        kv_length=shape.slots, window=shape.window, sinks=of.sinks, **how,
    )  # fmt: skip


def in_plain_jnp(of: Operands, shape: Shape) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        return run(CALL, of, shape, implementation="reference")


def interpreted(of: Operands, shape: Shape, chosen: Any = None) -> jax.Array:
    return run(CALL, of, shape, implementation="triton", interpret=True, tiles=chosen)


def in_small_tiles(of: Operands, shape: Shape) -> jax.Array:
    return interpreted(of, shape, SMALL)


def traced_again(of: Operands, shape: Shape) -> jax.Array:
    """`in_small_tiles` without the cache of traces, for a kernel that was tampered with."""
    call = package.chunk_attention
    return run(call, of, shape, implementation="triton", interpret=True, tiles=SMALL)


def compiled(of: Operands, shape: Shape, chosen: Any = None) -> jax.Array:
    return run(CALL, of, shape, implementation="triton", tiles=chosen)


def finite(of: Operands) -> Operands:
    """The operands with large numbers for NaN: Mosaic multiplies a block's unseen slots by 0."""
    keys, values = (
        np.where(np.isnan(a.astype(np.float32)), 1e4, a).astype(a.dtype) for a in of[1:3]
    )
    return of._replace(keys=keys, values=values)


def by_mosaic(of: Operands, shape: Shape) -> jax.Array:
    return run(CALL, finite(of), shape, implementation="mosaic")


class Sums:
    """Stands in for sums in registers, which JAX's interpreter does not have."""

    def __init__(self, value: Any, dtype: Any = None):
        self.value = value if dtype is None else jnp.zeros(value, dtype)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.value

    @staticmethod
    def init(value: jax.Array) -> "Sums":
        return Sums(value)


def add_product(sums: Sums, left: Any, right: Any) -> None:
    left = left if isinstance(left, jax.Array) else left[...]
    sums.value = sums.value + jnp.dot(left, right[...], preferred_element_type=jnp.float32)


def changed_sums(change: Any) -> Any:
    def run_state(sums: Sums) -> jax.Array:
        change(sums)
        return sums.value

    return run_state


def mosaic_interpreted(of: Operands, shape: Shape) -> jax.Array:
    with contextlib.ExitStack() as stack:
        for owner, name, new in (
            (mosaic.plgpu, "WGMMAAccumulatorRef", Sums), (mosaic.plgpu, "wgmma", add_product),
            (mosaic.pl, "run_scoped", lambda change, sums: change(sums)),
            (mosaic.pl, "run_state", changed_sums),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, new))
        return run(
            package.chunk_attention, finite(of), shape, implementation="mosaic", interpret=True
        )


def moved(by: int) -> Any:
    """The kernel of a chunk that is said to stand elsewhere."""
    return lambda of, shape: traced_again(of._replace(starts=of.starts + by), shape)


def swapped(of: Operands, shape: Shape) -> tuple[Operands, Shape]:
    return of._replace(keys=of.values, values=of.keys), shape


# Broken in one thing each.
BROKEN = {
    "forgets the layer": lambda of, shape: traced_again(of._replace(layer=0), shape),
    "misses the newest token": moved(-1),
    "sees a slot beyond the position": moved(1),
    "forgets the window": lambda of, shape: traced_again(of, shape._replace(window=None)),
    "forgets the padding": lambda of, shape: traced_again(
        of._replace(lengths=np.full_like(of.lengths, shape.chunk)), shape
    ),
    "swaps keys and values": lambda of, shape: traced_again(*swapped(of, shape)),
    "takes the next head": lambda of, shape: traced_again(
        of._replace(q=np.roll(of.q, 1, axis=2)), shape
    ),
    "takes unseen scores for zero": tampered(traced_again, triton, "UNSEEN", 0.0),
    "leaves out a kv head": tampered(traced_again, triton.launch, "triton_call", one_program_fewer),
    "forgets sinks": lambda of, shape: traced_again(of._replace(sinks=None), shape),
    "relies on a weight of zero": tampered(
        traced_again, triton.pltriton, "load", lambda load, ref, **_: load(ref)
    ),
}  # fmt: skip
CONTRACT = Contract(
    SHAPES, GPU_SHAPES, random_operands, violation, in_plain_jnp, (interpreted, in_small_tiles),
    compiled, fresh=traced_again, loosest=SHAPES["sinks"], broken=BROKEN, spoiled=swapped,
)  # fmt: skip


class ContractTest(on_host(CONTRACT)):
    """Operands are NaN where nothing may be read."""

    @slow.repeats()
    @parameterized.parameters((16, 16), (128, 128), (32, 64))
    def test_tiles_do_not_change_the_value(self, rows, block):
        shape = SHAPES["window"]
        of = random_operands(shape, "bfloat16", seed=1)
        found = interpreted(of, shape, tiles.ChunkTiles(rows, block, 4, 2))
        self.assertIsNone(violation(found, of, shape))

    @pytest.mark.slow
    def test_the_same_bits_every_time_and_in_any_company(self):
        shape = SHAPES["unequal"]
        of = random_operands(shape, "bfloat16", seed=2)
        together = np.asarray(interpreted(of, shape))
        for b in (0, 3):
            row = slice(b, b + 1)
            alone = of._replace(
                q=of.q[row], keys=of.keys[:, row], values=of.values[:, row],
                starts=of.starts[row], lengths=of.lengths[row],
            )  # fmt: skip
            np.testing.assert_array_equal(interpreted(alone, shape)[0], together[b])

    def test_a_prompt_in_chunks_is_the_prompt_at_once(self):
        shape = SHAPES["first"]
        of = random_operands(shape, "bfloat16", seed=3)
        whole = np.asarray(interpreted(of, shape, SMALL)).astype(np.float32)
        for start in (0, 50, 100):
            part = of._replace(
                q=of.q[:, start : start + 50], starts=of.starts + start, lengths=of.starts + 50
            )
            found = np.asarray(interpreted(part, shape, SMALL)).astype(np.float32)
            np.testing.assert_allclose(found, whole[:, start : start + 50], rtol=0.01, atol=0.01)


class RefusalTest(HostTestCase):
    @parameterized.parameters(
        ({"kv_length": 41}, "kv_length 41 is not in 1..40"),
        ({"window": 0}, "window 0"),
        ({"scale": 0.0}, "scale 0.0 is not positive"),
        ({"starts": np.zeros(3, np.int32)}, r"starts: int32\[3\], not int32\[2\]"),
        ({"sinks": np.zeros(4)}, r"sinks: float64\[4\], not \[2, 4\]"),
        ({"lengths": np.zeros(2, np.int64)}, "lengths: int64"),
        ({"implementation": "cudnn"}, "none of mosaic, triton, reference"),
        ({"tiles": tiles.ChunkTiles(24, 16, 4, 2)}, "no powers of two"),
        ({"tiles": tiles.ChunkTiles(16, 8, 4, 2)}, "fewer than 16"),
    )
    def test_what_does_not_fit_is_named(self, changed, said):
        of = random_operands(SHAPES["one_token"], "bfloat16", seed=9)
        how = {"layer": 0, "starts": of.starts, "lengths": of.lengths, "kv_length": 40}
        how |= {"implementation": "triton", "interpret": True} | changed
        with self.assertRaisesRegex(ValueError, said):
            package.chunk_attention(of.q, of.keys, of.values, **how)

    @parameterized.product(
        capability=((8, 0), (8, 6), (9, 0), (12, 0)), head_dim=(16, 64, 128, 256), chunk=(1, 1024)
    )
    def test_tiles_fit_shared_memory(self, capability, head_dim, chunk):
        found = tiles.default_tiles(8 * chunk, head_dim, 2, Target("gpu", capability))
        found.check()
        held = found.rows + 2 * found.num_stages * found.block
        most = tiles.SHARED_BYTES.get(capability, tiles.LEAST_SHARED_BYTES)
        self.assertLessEqual(2 * held * head_dim, most)


# Shapes that both the interpreter and Mosaic take; a warpgroup has a tile of 64 tokens of a head.
MOSAIC_SHAPES = {
    "first": Shape(128, 4, 2, 64, 128, (0,), (128,)),
    "unequal": Shape(72, 6, 2, 64, 304, (100, 0, 230), (72, 0, 30)),
    "window": Shape(64, 2, 1, 128, 512, (400,), (64,), window=150),
    "group_of_one": Shape(136, 1, 1, 128, 400, (256,), (130,)),
    "sinks": Shape(64, 3, 1, 64, 256, (128,), (50,), window=70, has_sinks=True),
    "wide": Shape(16, 2, 1, 256, 144, (120,), (16,)),
}


class MosaicTest(HostTestCase):
    @slow.repeats()
    @parameterized.parameters(sorted(MOSAIC_SHAPES))
    def test_value_is_that_of_float64(self, name):
        if jax.__version_info__ < (0, 11, 2):
            self.skipTest("jax interprets Mosaic kernels from 0.11.2 on")
        shape = MOSAIC_SHAPES[name]
        of = random_operands(shape, "bfloat16", len(name))
        self.assertIsNone(violation(mosaic_interpreted(of, shape), of, shape))

    @slow.repeats()
    @parameterized.parameters((1024, 8, 128, None), (64, 4, 128, 1000), (1024, 2, 256, None))
    def test_it_is_one_launch(self, chunk, num_kv, head_dim, window):
        """The program for Hopper, made without a GPU."""
        target = Target("gpu", (9, 0))
        cache = leaf(2, 2, num_kv, 4096, head_dim, dtype="bfloat16")
        q = leaf(2, chunk, 32, head_dim, dtype="bfloat16")
        numbers = [leaf(*size, dtype="int32") for size in ((), (2,), (2,))]

        def call(*operands: Any) -> jax.Array:
            return mosaic.chunk_attention_mosaic(
                *operands, kv_length=4096, window=window, scale=0.1, target=target
            )

        sinks = [leaf(2, 32, dtype="bfloat16")] if window else []
        traced = jax.jit(call).trace(q, cache, cache, *numbers, *sinks)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        self.assertEqual(text.count("stablehlo.custom_call"), 1)
        self.assertEqual(text.count("stablehlo.convert"), len(sinks))
        held = mosaic.WARPGROUPS * mosaic.TOKENS + 2 * math.prod(mosaic._sizes(head_dim))
        self.assertLessEqual(2 * held * head_dim, tiles.SHARED_BYTES[9, 0])

    @parameterized.parameters(
        ({"chunk": 20}, "T=20 is no multiple of 8"), ({"length": 75}, "S=75 is no multiple"),
        ({"head_dim": 32}, "C=32 is none of 64, 128, 256"),
    )  # fmt: skip
    def test_refusals(self, changed, said):
        shape = MOSAIC_SHAPES["first"]._replace(starts=(0,), lengths=(8,), **changed)
        of = random_operands(shape, "bfloat16", 1)
        reason = package.OPERATION.refusal(
            "mosaic", of.q, of.keys, shape.head_dim, target=Target("gpu", (9, 0))
        )
        self.assertIn(said, reason)


ON_MOSAIC = CONTRACT._replace(
    gpu_shapes={
        name: of for name, of in (GPU_SHAPES | MOSAIC_SHAPES).items()
        if of.chunk % 8 == of.length % 8 == 0 and of.head_dim in mosaic.WIDTHS
    },
    compiled=by_mosaic, loosest=MOSAIC_SHAPES["sinks"],
)  # fmt: skip


@pytest.mark.gpu
class MosaicDeviceTest(on_device(ON_MOSAIC)):
    """The Mosaic kernel compiled; on Hopper."""

    def setUp(self):
        super().setUp()
        if target_of(jax.devices()[0]).capability != (9, 0):
            self.skipTest("wgmma is Hopper's")


@pytest.mark.gpu
class DeviceContractTest(on_device(CONTRACT)):
    """The kernel compiled."""

    @parameterized.product(name=sorted(GPU_SHAPES), chosen=(SMALL, LARGE))
    def test_tiles_do_not_change_the_value(self, name, chosen):
        shape = GPU_SHAPES[name]
        if chosen == LARGE and shape.head_dim > 128:
            self.skipTest("more than shared memory holds")
        of = random_operands(shape, "bfloat16", seed=len(name))
        self.assertIsNone(violation(compiled(of, shape, chosen), of, shape))

    @pytest.mark.gpu(gib=24)
    def test_offsets_beyond_32_bits(self):
        shape = Shape(64, 32, 8, 128, 4096, (500,) * 8, (64,) * 8, layers=1)
        of = random_operands(shape, "bfloat16", seed=12)

        @jax.jit
        def stacked(layer: jax.Array) -> jax.Array:
            rest = jnp.full((64, *layer.shape[1:]), jnp.nan, layer.dtype)
            return jnp.concatenate([rest, layer])

        keys, values = stacked(of.keys), stacked(of.values)
        self.assertGreater(keys.size, 2**31)
        found = CALL(
            of.q, keys, values, layer=np.int32(64), starts=of.starts, lengths=of.lengths,
            kv_length=shape.slots, implementation="triton",
        )  # fmt: skip
        self.assertIsNone(violation(found, of, shape))
