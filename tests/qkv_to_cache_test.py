"""The contract of queries and cache from a product: reference, interpreted kernel, on a GPU.

Expectations are float64 numpy; unwritten slots must keep their bits.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.models.kv_cache import KVCache
from moejax.models.rope import rotate
from moejax.models.stacked import rms_norm
from pallas_kernels import qkv_to_cache as package
from pallas_kernels.qkv_to_cache import triton
from tests import slow
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
    ways_of,
    wrong_form,
)


class Shape(NamedTuple):
    """Axes of the operation, and whether heads are normed."""

    batch: int
    num_heads: int
    num_kv: int
    head_dim: int
    length: int  # S
    has_norms: bool = True
    eps: float = 1e-6
    layers: int = 2


SHAPES = {
    "qwen3_30b_1": Shape(1, 32, 4, 128, 20),
    "qwen3_30b_5": Shape(5, 32, 4, 128, 9),
    "mixtral_1": Shape(1, 32, 8, 128, 20, has_norms=False),
    "mixtral_3": Shape(3, 32, 8, 128, 7, has_norms=False, layers=3),
    "demo": Shape(2, 4, 2, 64, 30),
    "group_of_one": Shape(4, 3, 3, 16, 5, eps=1e-2),
    "one_kv": Shape(3, 5, 1, 32, 6, has_norms=False, layers=1),
    "widest": Shape(2, 2, 1, 256, 3),
}
GPU_SHAPES = SHAPES | {
    "qwen3_30b_64": Shape(64, 32, 4, 128, 300, layers=3),
    "mixtral_64": Shape(64, 32, 8, 128, 100, has_norms=False),
}


class Operands(NamedTuple):
    """Arguments of `qkv_to_cache`, on the host."""

    qkv: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    layer: int
    positions: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    q_scales: np.ndarray | None
    k_scales: np.ndarray | None


def random_operands(shape: Shape, dtype: str, seed: int) -> Operands:
    """Operands of the last layer; others' scales are NaN, two of many rows miss the cache."""
    rng = np.random.default_rng(seed)
    s, kind = shape, jnp.dtype(dtype)
    size = (s.layers, s.batch, s.num_kv, s.length, s.head_dim)
    keys, values = (rng.standard_normal(size, dtype=np.float32).astype(kind) for _ in range(2))
    qkv = 3 * rng.standard_normal((s.batch, (s.num_heads + 2 * s.num_kv) * s.head_dim))
    positions = rng.integers(0, s.length, s.batch).astype(np.int32)
    if s.batch > 2:
        positions[:3] = 0, s.length, -1
    angles = rng.uniform(0, 7, (s.batch, s.head_dim // 2)).astype(np.float32)
    scales: list[Any] = [None, None]
    if s.has_norms:
        scales = [np.full((s.layers, s.head_dim), np.nan, kind) for _ in range(2)]
        for of in scales:
            of[-1] = 1 + 0.5 * rng.standard_normal(s.head_dim)
    return Operands(
        qkv.astype(kind), keys, values, s.layers - 1, positions, np.cos(angles), np.sin(angles),
        *scales,
    )  # fmt: skip


def expected_and_tolerance(
    x: np.ndarray, scales: np.ndarray | None, of: Operands, shape: Shape
) -> tuple[np.ndarray, np.ndarray]:
    """float64[B, h, C] of the turned heads x, and how far a right value may be from it.

    A norm is float32 and rounded twice to the dtype, a turn is float32 and rounded once.
    """
    short, least = ROUNDOFF[of.qkv.dtype.name], float(jnp.finfo(of.qkv.dtype).smallest_subnormal)
    x = x.astype(np.float64)
    share = np.float64(0)
    if scales is not None:
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        x = x / np.sqrt(mean_square + shape.eps) * scales[of.layer].astype(np.float64)
        share = (1 + short) ** 2 * (1 + UNIT_ROUNDOFF * (np.log2(2 * shape.head_dim) + 12)) - 1
    first, second = np.split(x, 2, axis=-1)
    cos, sin = (angle.astype(np.float64)[:, None] for angle in (of.cos, of.sin))
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    first, second, cos, sin = (np.abs(part) for part in (first, second, cos, sin))
    terms = np.concatenate([first * cos + second * sin, second * cos + first * sin], axis=-1)
    tolerance = terms * (share + 3 * UNIT_ROUNDOFF) + 4 * least
    return expected, tolerance + short * (np.abs(expected) + tolerance)


def violation(found: Any, of: Operands, shape: Shape) -> str | None:
    """THE check: why `found` is not the operation's value, or None."""
    s = shape
    sizes = ((s.batch, s.num_heads, s.head_dim), of.keys.shape, of.keys.shape)
    if reason := wrong_form(found, sizes, [of.qkv.dtype] * 3):
        return reason
    q, keys, values = (np.asarray(array) for array in found)
    heads = of.qkv.reshape(s.batch, -1, s.head_dim)
    of_q, of_k, of_v = np.split(heads, [s.num_heads, s.num_heads + s.num_kv], axis=1)
    if reason := outside("queries", q, *expected_and_tolerance(of_q, of.q_scales, of, shape)):
        return reason
    expected, tolerance = expected_and_tolerance(of_k, of.k_scales, of, shape)
    kept_keys, kept_values = of.keys.copy(), of.values.copy()
    for b, position in enumerate(of.positions):
        if 0 <= position < s.length:
            new = keys[of.layer, b, :, position]
            if reason := outside(f"keys of sequence {b}", new, expected[b], tolerance[b]):
                return reason
            kept_keys[of.layer, b, :, position] = new
            kept_values[of.layer, b, :, position] = of_v[b]
    for name, now, kept in (("keys", keys, kept_keys), ("values", values, kept_values)):
        if now.tobytes() != kept.tobytes():
            at = tuple(np.argwhere(now.view(np.int16) != kept.view(np.int16))[0])
            return f"{name}{at} are {now[at]}, not {kept[at]}"
    return None


@functools.partial(jax.jit, static_argnames=("eps", "implementation", "interpret"))
def compiled(qkv, keys, values, layer, positions, cos, sin, q_scales, k_scales, eps, **how):
    norms = None if q_scales is None else package.HeadNorms(q_scales, k_scales, eps)
    return package.qkv_to_cache(
        qkv, keys, values, layer=layer, positions=positions, cos=cos, sin=sin, norms=norms, **how
    )


def run(call: Any, of: Operands, shape: Shape, **how: Any) -> Any:
    of = of._replace(layer=np.int32(of.layer))
    return call(*jax.tree.map(jnp.asarray, of), eps=shape.eps, **how)


in_plain_jnp, interpreted, traced_again, on_gpu = ways_of(run, compiled, compiled.__wrapped__)


def with_scales_of_all_layers(of: Operands) -> Operands:
    scales = (np.broadcast_to(x[-1:], x.shape) for x in (of.q_scales, of.k_scales))
    return of._replace(**dict(zip(("q_scales", "k_scales"), scales, strict=True)))


def values_turned_too(of: Operands, shape: Shape) -> Any:
    q, keys, _ = traced_again(of, shape)
    return q, keys, keys


BROKEN = {
    "forgets the layer": lambda of, shape: traced_again(
        with_scales_of_all_layers(of)._replace(layer=0), shape
    ),
    "writes the next slot": lambda of, shape: traced_again(
        of._replace(positions=of.positions + 1), shape
    ),
    "writes what lies outside": lambda of, shape: traced_again(
        of._replace(positions=of.positions.clip(0, shape.length - 1)), shape
    ),
    "norms queries as keys": lambda of, shape: traced_again(
        of._replace(q_scales=of.k_scales, k_scales=of.q_scales), shape
    ),
    "turns the other way": lambda of, shape: traced_again(of._replace(sin=-of.sin), shape),
    "leaves out a head": tampered(traced_again, triton.launch, "triton_call", one_program_fewer),
    "turns values too": values_turned_too,
    "forgets the norms": lambda of, shape: traced_again(
        of._replace(q_scales=None, k_scales=None), shape
    ),
    "forgets eps": lambda of, shape: traced_again(of, shape._replace(eps=0.0)),
}


CONTRACT = Contract(
    SHAPES, GPU_SHAPES, random_operands, violation, in_plain_jnp, (interpreted,), on_gpu,
    fresh=traced_again, loosest=SHAPES["group_of_one"]._replace(eps=1.0), broken=BROKEN,
    spoiled=lambda of, shape: (of._replace(positions=of.positions + 1), shape),
)  # fmt: skip


class ContractTest(on_host(CONTRACT)):
    """Rounding, and what else a sequence does not depend on."""

    @slow.repeats()
    @parameterized.parameters("qwen3_30b_1", "mixtral_1", "demo")
    def test_it_rounds_as_the_model_does(self, name):
        shape = SHAPES[name]
        of = random_operands(shape, "bfloat16", seed=3)
        heads = jnp.asarray(of.qkv).reshape(shape.batch, 1, -1, shape.head_dim)
        q, k, v = jnp.split(heads, [shape.num_heads, shape.num_heads + shape.num_kv], axis=2)
        if shape.has_norms:
            q = rms_norm(q, jnp.asarray(of.q_scales[-1]), shape.eps)
            k = rms_norm(k, jnp.asarray(of.k_scales[-1]), shape.eps)
        q, k = (rotate(x, of.cos[:, None], of.sin[:, None]) for x in (q, k))
        cache = KVCache(jnp.asarray(of.keys), jnp.asarray(of.values))
        cache = cache.write_token(of.layer, k, v, jnp.asarray(of.positions))
        expected = (q[:, 0], cache.keys, cache.values)
        for one, other in zip(interpreted(of, shape), expected, strict=True):
            steps = np.asarray(one).view(np.int16).astype(int) - np.asarray(other).view(np.int16)
            self.assertLessEqual(np.abs(steps).max(), 1)  # of the last place
            self.assertLess((steps != 0).mean(), 0.01)

    @pytest.mark.slow
    def test_a_sequence_is_the_same_in_any_company(self):
        shape = SHAPES["qwen3_30b_5"]
        of = random_operands(shape, "bfloat16", seed=4)
        row = slice(4, 5)
        alone = of._replace(
            qkv=of.qkv[row], keys=of.keys[:, row], values=of.values[:, row],
            positions=of.positions[row], cos=of.cos[row], sin=of.sin[row],
        )  # fmt: skip
        q, keys, values = interpreted(of, shape)
        found = interpreted(alone, shape._replace(batch=1))
        for one, all_ in zip(found, (q[4:], keys[:, 4:], values[:, 4:]), strict=True):
            np.testing.assert_array_equal(one, all_)


class RefusalTest(HostTestCase):
    @parameterized.parameters(
        ({"qkv": np.zeros((2, 100), jnp.bfloat16)}, "C is odd, or H"),
        ({"qkv": np.zeros((2, 256), jnp.bfloat16)}, "H is not positive"),
        ({"qkv": np.zeros(8, jnp.bfloat16)}, r"qkv: bfloat16\[8\], not \[B, \.\]"),
        ({"values": np.zeros((2, 2, 2, 30, 64), np.float16)}, "values: float16"),
        ({"positions": np.zeros(3, np.int32)}, r"positions: int32\[3\]"),
        ({"cos": np.zeros((2, 64), np.float32)}, r"cos: float32\[2, 64\], not float32\[2, 32\]"),
        ({"sin": np.zeros((2, 32), jnp.bfloat16)}, "sin: bfloat16"),
        ({"q_scales": np.zeros((2, 32), jnp.bfloat16)}, "scales of q"),
        ({"k_scales": np.zeros((2, 64), np.float32)}, "scales of k"),
    )
    def test_what_does_not_fit_is_named(self, changed, said):
        of = random_operands(SHAPES["demo"], "bfloat16", seed=9)._replace(**changed)
        with self.assertRaisesRegex(ValueError, said):
            run(compiled.__wrapped__, of, SHAPES["demo"], implementation="triton", interpret=True)


@pytest.mark.gpu
class DeviceContractTest(on_device(CONTRACT)):
    """The kernel compiled."""

    def test_a_donated_cache_is_written_in_place(self):
        shape = GPU_SHAPES["qwen3_30b_64"]
        of = random_operands(shape, "bfloat16", seed=10)
        static = {"eps": shape.eps, "implementation": "triton"}
        call = jax.jit(functools.partial(compiled.__wrapped__, **static), donate_argnums=(1, 2))
        on_device = jax.tree.map(jnp.asarray, of._replace(layer=np.int32(of.layer)))
        memory = call.lower(*on_device).compile().memory_analysis()
        self.assertGreaterEqual(memory.alias_size_in_bytes, 2 * of.keys.nbytes)
        self.assertLess(memory.temp_size_in_bytes, of.keys.nbytes // 8)
        self.assertIsNone(violation(call(*on_device), of, shape))

    @pytest.mark.gpu(gib=36)
    def test_offsets_beyond_32_bits(self):
        shape = Shape(8, 32, 8, 128, 4096, layers=1)
        of = random_operands(shape, "bfloat16", seed=12)
        keys, values = (jnp.zeros((65, *of.keys.shape[1:]), jnp.bfloat16) for _ in range(2))
        self.assertGreater(keys.size, 2**31)
        scales = (np.broadcast_to(x[-1:], (65, 128)) for x in (of.q_scales, of.k_scales))
        far = Operands(of.qkv, keys, values, 64, *of[4:7], *scales)
        q, keys, values = run(compiled, far, shape, implementation="triton")
        blank = np.zeros_like(of.keys)
        found = (q, keys[64:], values[64:])
        self.assertIsNone(violation(found, of._replace(keys=blank, values=blank), shape))
        self.assertFalse(bool(jnp.any(keys[:64])) or bool(jnp.any(values[:64])))
