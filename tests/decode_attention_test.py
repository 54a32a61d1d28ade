"""The contract of decode attention: reference, kernel interpreted on a CPU, compiled on a GPU.

Expectations are float64 numpy, one head at a time; the tolerance follows from the dtype.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.models import attention
from pallas_kernels import decode_attention as package
from pallas_kernels.decode_attention import Latent, tiles, triton
from pallas_kernels.target import Target
from tests import slow
from tests.host_test_case import HostTestCase
from tests.kernel_contract import (
    ROUNDOFF,
    UNIT_ROUNDOFF,
    Contract,
    check_broken,
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

    batch: int
    num_heads: int
    num_kv: int
    head_dim: int
    length: int  # S
    kv_length: int
    window: int | None = None
    layers: int = 2
    more_dim: int = 0  # of a second part of queries and keys, the first part being the values


# Shapes that a CPU can interpret: real heads, short caches; no length is a multiple of a block.
SHAPES = {
    "qwen3_30b_1": Shape(1, 32, 4, 128, 300, 300),
    "qwen3_30b_4": Shape(4, 32, 4, 128, 100, 90),
    "mixtral_1": Shape(1, 32, 8, 128, 150, 150),
    "mixtral_32": Shape(32, 32, 8, 128, 30, 30, layers=1),
    "demo": Shape(2, 4, 2, 64, 512, 500),
    "window": Shape(3, 8, 2, 64, 200, 200, window=70),
    "window_of_one": Shape(2, 4, 4, 16, 40, 33, window=1),
    "group_of_one": Shape(2, 3, 3, 32, 70, 70),
    "group_of_five": Shape(2, 10, 2, 16, 70, 64),
    "group_of_twenty": Shape(1, 20, 1, 32, 70, 70),
    "one_slot": Shape(2, 4, 2, 16, 8, 1),
    "deepseek_v2_lite_2": Shape(2, 16, 1, 512, 70, 66, more_dim=64),
    "latent": Shape(3, 6, 2, 32, 90, 81, window=40, more_dim=16),
}
GPU_SHAPES = {
    "qwen3_30b_1": Shape(1, 32, 4, 128, 4096, 1024),
    "qwen3_30b_16": Shape(16, 32, 4, 128, 1024, 1024),
    "qwen3_30b_32": Shape(32, 32, 4, 128, 1024, 1000),
    "mixtral_1": Shape(1, 32, 8, 128, 4096, 4096),
    "mixtral_4_window": Shape(4, 32, 8, 128, 2048, 2048, window=1000),
    "mixtral_32": Shape(32, 32, 8, 128, 700, 700),
    "demo": Shape(2, 4, 2, 64, 512, 500, layers=7),
    "wide": Shape(2, 16, 1, 256, 600, 600),
    "group_of_five": Shape(2, 10, 2, 16, 70, 64),
    "group_of_sixty_four": Shape(2, 64, 1, 256, 300, 300),
    "one_slot": Shape(2, 4, 2, 16, 8, 1),
    "qwen3_next_1": Shape(1, 16, 2, 256, 4096, 4096, layers=3),
    "deepseek_v2_lite_1": Shape(1, 16, 1, 512, 4096, 4096, more_dim=64),
    "deepseek_v2_lite_16": Shape(16, 16, 1, 512, 1024, 1000, more_dim=64),
    "latent": Shape(3, 6, 2, 32, 90, 81, window=40, more_dim=16),
}


class Operands(NamedTuple):
    """Arguments of `decode_attention`, on the host."""

    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray | Latent
    layer: int
    positions: np.ndarray


def random_operands(shape: Shape, dtype: str, seed: int, poisoned: bool = True) -> Operands:
    """Fresh operands of the last layer; ragged positions, the first and the last slot among them.

    Scores are of order 2, so that some weights are large and most are small.

    Args:
      shape: axes.
      dtype: of all.
      seed: of the values.
      poisoned: NaN in every layer and slot that the operation may not read.
    """
    rng = np.random.default_rng(seed)
    s = shape

    def normal(*size: int) -> np.ndarray:
        return rng.standard_normal(size, dtype=np.float32).astype(jnp.dtype(dtype))

    positions = rng.integers(0, s.kv_length, s.batch).astype(np.int32)
    positions[0], positions[s.batch // 2] = 0, s.kv_length - 1  # of one sequence: the last
    fill = np.nan if poisoned else 1e4
    widths = (s.head_dim, s.more_dim or s.head_dim)
    caches = tuple(
        np.full((s.layers, s.batch, s.num_kv, s.length, width), fill, jnp.dtype(dtype))
        for width in widths
    )
    for b, position in enumerate(positions):
        first, end = seen_slots(position, s.kv_length, s.window)
        for cache, width in zip(caches, widths, strict=True):
            cache[-1, b, :, first:end] = normal(s.num_kv, end - first, width)

    def queries(width: int) -> np.ndarray:
        drawn = normal(s.batch, s.num_heads, width).astype(np.float32)
        return (2 * drawn).astype(jnp.dtype(dtype))

    keys, values = caches
    q = queries(s.head_dim)
    if s.more_dim:
        return Operands(q, keys, Latent(queries(s.more_dim), values), s.layers - 1, positions)
    return Operands(q, keys, values, s.layers - 1, positions)


def parts_of(operands: Operands, shape: Shape, b: int, h: int) -> tuple[np.ndarray, ...]:
    """float64 q [C (+ P)], k [S, C (+ P)] and v [S, C] of a head's seen slots."""
    first, end = seen_slots(operands.positions[b], shape.kv_length, shape.window)
    where = (operands.layer, b, h // (shape.num_heads // shape.num_kv), slice(first, end))
    q, k = operands.q[b, h].astype(np.float64), operands.keys[where].astype(np.float64)
    if not isinstance(operands.values, Latent):
        return q, k, operands.values[where].astype(np.float64)
    more_q, more_k = operands.values.q[b, h], operands.values.keys[where]
    whole = [np.concatenate(pair, axis=-1) for pair in ((q, more_q), (k, more_k))]
    return *(a.astype(np.float64) for a in whole), k


def seen_slots(position: int, kv_length: int, window: int | None) -> tuple[int, int]:
    """The first slot that a token sees, and the end."""
    first = 0 if window is None else max(0, int(position) - window + 1)
    return first, min(int(position) + 1, kv_length)


def expected_and_tolerance(operands: Operands, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """float64[B, H, C] of the formula, and how far a right kernel's value may be from it.

    A score is a float32 sum of C products, off by some 4 sqrt(C) u sum |q k|, which changes a
    weight by that share, and the sum of weights too; weights are rounded to the dtype, summed in
    float32, and the result is rounded to the dtype.
    """
    dtype = operands.q.dtype.name
    expected = np.zeros(operands.q.shape)
    tolerance = np.zeros(operands.q.shape)
    for b, h in np.ndindex(expected.shape[:2]):
        q, k, v = parts_of(operands, shape, b, h)
        q = q / np.sqrt(len(q))
        scores = k @ q
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        expected[b, h] = weights @ v
        score_error = 4 * np.sqrt(len(q)) * (np.abs(k) @ np.abs(q)) + 8 * np.abs(scores)
        share = ROUNDOFF[dtype] + UNIT_ROUNDOFF * (2 * score_error.max() + 4 * np.sqrt(len(k)) + 16)
        tolerance[b, h] = share * (weights @ np.abs(v))
    tolerance += ROUNDOFF[dtype] * (np.abs(expected) + tolerance)
    return expected, tolerance + float(jnp.finfo(dtype).smallest_subnormal)


def violation(found: Any, operands: Operands, shape: Shape) -> str | None:
    """THE check: why `found` is not the operation's value, or None."""
    expected, tolerance = expected_and_tolerance(operands, shape)
    if reason := wrong_form([found], [expected.shape], [operands.q.dtype]):
        return reason
    if reason := outside("values", found, expected, tolerance):
        return reason
    error = np.abs(np.asarray(found).astype(np.float64) - expected)
    norms = [np.linalg.norm(e) / np.linalg.norm(x) for e, x in zip(error, expected, strict=True)]
    if max(norms) > NORM_ERROR[operands.q.dtype.name]:
        return f"sequence {np.argmax(norms)} is {max(norms):.3g} of its norm off"
    return None


SPLIT = tiles.AttentionTiles(block=16, splits=4, num_warps=4, num_stages=2)
WHOLE = tiles.AttentionTiles(block=32, splits=1, num_warps=4, num_stages=2)
STATIC = ("kv_length", "window", "scale", "implementation", "tiles", "interpret")
CALL = jax.jit(package.decode_attention, static_argnames=STATIC)
CACHED = jax.jit(attention.cached_attention, static_argnums=4)


def run(call: Any, of: Operands, shape: Shape, **how: Any) -> jax.Array:
    return call(
        of.q, of.keys, of.values, layer=np.int32(of.layer), positions=of.positions,
        kv_length=shape.kv_length, window=shape.window, **how,
    )  # fmt: skip


def in_plain_jnp(of: Operands, shape: Shape) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        return run(CALL, of, shape, implementation="reference")


def interpreted(of: Operands, shape: Shape, chosen: Any = None) -> jax.Array:
    return run(CALL, of, shape, implementation="triton", interpret=True, tiles=chosen)


def in_parts(of: Operands, shape: Shape) -> jax.Array:
    return interpreted(of, shape, SPLIT)


def in_one_part(of: Operands, shape: Shape) -> jax.Array:
    return interpreted(of, shape, WHOLE)


def traced_again(of: Operands, shape: Shape) -> jax.Array:
    """`in_parts` without the cache of traces, for a kernel that was tampered with."""
    call = package.decode_attention
    return run(call, of, shape, implementation="triton", interpret=True, tiles=SPLIT)


def all_but_combining(call: Any, body: Any, *, name: str, **how: Any) -> Any:
    """A launch of one split too few."""
    change = call if "combine" in name else functools.partial(one_program_fewer, call)
    return change(body, name=name, **how)


def parts_in_bfloat16(call: Any, body: Any, *, name: str, **how: Any) -> Any:
    """A launch whose parts are rounded: a subtle loss."""
    launched = call(body, name=name, **how)
    if "combine" in name:
        return launched
    return lambda *args: [part.astype(jnp.bfloat16).astype(jnp.float32) for part in launched(*args)]


def with_scale_of_the_first_part(of: Operands, shape: Shape) -> jax.Array:
    how = {"implementation": "triton", "interpret": True, "tiles": SPLIT}
    return run(package.decode_attention, of, shape, scale=float(shape.head_dim) ** -0.5, **how)


# Of any operands; by what the kernel gets wrong.
BROKEN = {
    "forgets the layer": lambda of, shape: traced_again(of._replace(layer=0), shape),
    "misses the newest token": lambda of, shape: traced_again(
        of._replace(positions=of.positions - 1), shape
    ),
    "sees a slot beyond the position": lambda of, shape: traced_again(
        of._replace(positions=of.positions + 1), shape
    ),
    "forgets the window": lambda of, shape: traced_again(of, shape._replace(window=None)),
}
BROKEN_OF_VALUES = {
    "swaps keys and values": lambda of, shape: traced_again(
        of._replace(keys=of.values, values=of.keys), shape
    ),
    "takes the next head": lambda of, shape: traced_again(
        of._replace(q=np.roll(of.q, 1, axis=1)), shape
    ),
    "leaves out a split": tampered(traced_again, triton.launch, "triton_call", all_but_combining),
    "relies on a weight of zero": tampered(
        traced_again, triton.pltriton, "load", lambda load, ref, **_: load(ref)
    ),
    "rounds its parts": tampered(traced_again, triton.launch, "triton_call", parts_in_bfloat16),
}
BROKEN_OF_LATENTS = {
    "scores by the latents alone": lambda of, shape: traced_again(
        of._replace(values=of.values._replace(q=0 * of.values.q)), shape
    ),
    "scales by the first part": with_scale_of_the_first_part,
}


def compiled(of: Operands, shape: Shape, chosen: Any = None) -> jax.Array:
    return run(CALL, of, shape, implementation="triton", tiles=chosen)


CONTRACT = Contract(
    SHAPES, GPU_SHAPES, random_operands, violation, in_plain_jnp, (interpreted, in_parts), compiled,
    fresh=traced_again, loosest=SHAPES["window"], broken=BROKEN | BROKEN_OF_VALUES,
    spoiled=lambda of, shape: (of._replace(keys=of.values, values=of.keys), shape),
)  # fmt: skip


class ContractTest(on_host(CONTRACT)):
    """Operands are NaN where nothing may be read."""

    @slow.repeats()
    @parameterized.parameters((16, 1), (16, 8), (64, 2), (32, 64))
    def test_tiles_do_not_change_the_value(self, block, splits):
        shape = SHAPES["window"]
        of = random_operands(shape, "bfloat16", seed=1)
        found = interpreted(of, shape, tiles.AttentionTiles(block, splits, 4, 2))
        self.assertIsNone(violation(found, of, shape))

    @slow.repeats()
    @parameterized.parameters(in_one_part, in_parts)
    def test_the_same_bits_every_time_and_in_any_company(self, call):
        shape = SHAPES["qwen3_30b_4"]
        of = random_operands(shape, "bfloat16", seed=2)
        together = np.asarray(call(of, shape))
        self.assertEqual(together.tobytes(), np.asarray(call(of, shape)).tobytes())
        for b in range(shape.batch):
            row = slice(b, b + 1)
            alone = Operands(
                of.q[row], of.keys[:, row], of.values[:, row], of.layer, of.positions[row]
            )
            np.testing.assert_array_equal(call(alone, shape._replace(batch=1))[0], together[b])

    @slow.where(lambda window: window != 3)
    @parameterized.product(call=(in_plain_jnp, in_one_part, in_parts), window=(None, 3, 9))
    def test_positions_beyond_the_cache_are_as_in_cached_attention(self, call, window):
        shape = Shape(4, 4, 2, 16, 40, 40, window)
        of = random_operands(shape, "bfloat16", seed=3, poisoned=False)
        rng = np.random.default_rng(3)
        keys, values = (rng.standard_normal(of.keys.shape).astype(of.q.dtype) for _ in range(2))
        positions = np.array([38, 40, 45, 1000], np.int32)
        of = of._replace(keys=keys, values=values, positions=positions)
        found = np.asarray(call(of, shape)).astype(np.float32)
        expected = CACHED(
            of.q[:, None], keys[of.layer], values[of.layer], positions[:, None], window
        )
        expected = np.asarray(expected)[:, 0].astype(np.float32)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        self.assertEqual(np.isnan(found).any(), window is not None)
        np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)

    @pytest.mark.slow
    def test_a_broken_kernel_of_latents_fails(self):
        check_broken(
            self, CONTRACT, SHAPES["latent"],
            {name: BROKEN[name] for name in BROKEN if "newest" not in name} | BROKEN_OF_LATENTS,
        )  # fmt: skip


class RefusalTest(HostTestCase):
    @parameterized.parameters(
        ({"kv_length": 9}, "kv_length 9 is not in 1..8"),
        ({"kv_length": 0}, "kv_length 0"),
        ({"window": 0}, "window 0"),
        ({"positions": np.zeros(3, np.int32)}, r"positions: int32\[3\], not int32\["),
        ({"implementation": "mosaic"}, "none of triton, reference"),
        ({"tiles": tiles.AttentionTiles(24, 1, 4, 2)}, "no powers of two"),
        ({"tiles": tiles.AttentionTiles(8, 1, 4, 2)}, "less than 16"),
    )
    def test_what_does_not_fit_is_named(self, changed, said):
        of = random_operands(SHAPES["one_slot"], "bfloat16", seed=9)
        how = {"layer": 0, "positions": of.positions, "kv_length": 1, "interpret": True}
        how |= {"implementation": "triton"} | changed
        with self.assertRaisesRegex(ValueError, said):
            package.decode_attention(of.q, of.keys, of.values, **how)

    def test_latents_that_do_not_fit_are_named(self):
        of = random_operands(SHAPES["latent"], "bfloat16", seed=9)
        wrong = of._replace(values=of.values._replace(keys=of.keys))
        with self.assertRaisesRegex(ValueError, r"latent keys: bfloat16\["):
            run(package.decode_attention, wrong, SHAPES["latent"], implementation="reference")

    @parameterized.parameters(
        (1, 4, 1024, 16), (1, 4, 4096, 32), (1, 4, 40, 1), (16, 4, 4096, 2), (32, 4, 4096, 1),
        (1, 8, 4096, 16), (16, 8, 4096, 1), (32, 8, 1024, 1),
    )  # fmt: skip
    def test_splits_fill_the_device(self, batch, num_kv, kv_length, splits):
        target = Target("gpu", (9, 0), 132)
        found = tiles.default_tiles(batch * num_kv, 16, kv_length, 128, 2, target)
        found.check()
        self.assertEqual(found.splits, splits)


@pytest.mark.gpu
class DeviceContractTest(on_device(CONTRACT)):
    """The kernel compiled."""

    @parameterized.product(name=sorted(GPU_SHAPES), chosen=(SPLIT, WHOLE))
    def test_tiles_do_not_change_the_value(self, name, chosen):
        for dtype in ROUNDOFF:
            of = random_operands(GPU_SHAPES[name], dtype, seed=len(name))
            found = compiled(of, GPU_SHAPES[name], chosen)
            self.assertIsNone(violation(found, of, GPU_SHAPES[name]))

    @pytest.mark.gpu(gib=24)
    def test_offsets_beyond_32_bits(self):
        shape = Shape(8, 32, 8, 128, 4096, 600, layers=1)
        of = random_operands(shape, "bfloat16", seed=12)

        @jax.jit
        def stacked(layer: jax.Array) -> jax.Array:
            rest = jnp.full((64, *layer.shape[1:]), jnp.nan, layer.dtype)
            return jnp.concatenate([rest, layer])

        keys, values = stacked(of.keys), stacked(of.values)
        self.assertGreater(keys.size, 2**31)
        for chosen in (None, SPLIT):
            found = CALL(
                of.q, keys, values, layer=np.int32(64), positions=of.positions,
                kv_length=shape.kv_length, implementation="triton", tiles=chosen,
            )  # fmt: skip
            self.assertIsNone(violation(found, of, shape))

    def test_equals_the_interpreted_kernel(self):
        shape = SHAPES["qwen3_30b_4"]
        of = random_operands(shape, "bfloat16", seed=10)
        with jax.default_device(jax.devices("cpu")[0]):
            expected = np.asarray(interpreted(of, shape, SPLIT)).astype(np.float64)
        found = run(CALL, of, shape, implementation="triton", tiles=SPLIT)
        _, tolerance = expected_and_tolerance(of, shape)
        error = np.abs(np.asarray(found).astype(np.float64) - expected)
        np.testing.assert_array_less(error, 2 * tolerance)
