"""The contract of queries and cache from a product: reference, interpreted kernel, on a GPU."""

import functools
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.models.kv_cache import KVCache
from moejax.models.norm import rms_norm
from moejax.models.rope import rotate
from pallas_kernels import qkv_to_cache as package
from pallas_kernels.qkv_to_cache import triton
from tests import gpu_programs, gpu_targets, slow
from tests.broken_kernels import BrokenKernels
from tests.host_test_case import HostTestCase
from tests.qkv_to_cache_contract import (
    DTYPES,
    GPU_SHAPES,
    SHAPES,
    Operands,
    Shape,
    random_operands,
    violation,
)


@functools.partial(jax.jit, static_argnames=("eps", "implementation", "interpret"))
def compiled(qkv, keys, values, layer, positions, cos, sin, q_scales, k_scales, eps, **how):
    norms = None if q_scales is None else package.HeadNorms(q_scales, k_scales, eps)
    return package.qkv_to_cache(
        qkv, keys, values, layer=layer, positions=positions, cos=cos, sin=sin, norms=norms, **how
    )


def run(call: Any, of: Operands, shape: Shape, **how: Any) -> Any:
    of = of._replace(layer=np.int32(of.layer))
    return call(*jax.tree.map(jnp.asarray, of), eps=shape.eps, **how)


def in_plain_jnp(of: Operands, shape: Shape) -> Any:
    return run(compiled, of, shape, implementation="reference")


def interpreted(of: Operands, shape: Shape) -> Any:
    return run(compiled, of, shape, implementation="triton", interpret=True)


def traced_again(of: Operands, shape: Shape) -> Any:
    """`interpreted` without the cache of traces, for a kernel that was tampered with."""
    return run(compiled.__wrapped__, of, shape, implementation="triton", interpret=True)


class ContractTest(HostTestCase):
    """On the host: the reference, and the kernel interpreted."""

    @slow.repeats(
        lambda call, name, dtype: (name, dtype) if call is in_plain_jnp else (call, dtype)
    )
    @parameterized.product(call=(in_plain_jnp, interpreted), name=sorted(SHAPES), dtype=DTYPES)
    def test_value_is_that_of_float64(self, call, name, dtype):
        shape = SHAPES[name]
        of = random_operands(shape, dtype, seed=len(name))
        self.assertIsNone(violation(call(of, shape), of, shape))

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


def write_another_layer(of: Operands, shape: Shape) -> Any:
    """A kernel that forgets the layer."""
    scales = (np.broadcast_to(x[-1:], x.shape) for x in (of.q_scales, of.k_scales))
    return traced_again(of._replace(layer=0)._replace(**dict(zip(of._fields[-2:], scales,
                                                                 strict=True))), shape)  # fmt: skip


def write_the_next_slot(of: Operands, shape: Shape) -> Any:
    """A kernel that is one slot off."""
    return traced_again(of._replace(positions=of.positions + 1), shape)


def write_what_lies_outside(of: Operands, shape: Shape) -> Any:
    """A kernel that moves a write into the cache."""
    return traced_again(of._replace(positions=of.positions.clip(0, shape.length - 1)), shape)


def swap_the_scales(of: Operands, shape: Shape) -> Any:
    """A kernel that norms queries as keys."""
    return traced_again(of._replace(q_scales=of.k_scales, k_scales=of.q_scales), shape)


def turn_the_other_way(of: Operands, shape: Shape) -> Any:
    """A kernel with the sign of an angle wrong."""
    return traced_again(of._replace(sin=-of.sin), shape)


def leave_out_a_head(of: Operands, shape: Shape) -> Any:
    """A kernel that launches one program too few for each sequence: the last head of values."""
    call = triton.launch.triton_call

    def launch(body: Any, *, grid: tuple[int, int], **how: Any) -> Any:
        return call(body, grid=(grid[0], grid[1] - 1), **how)

    with mock.patch.object(triton.launch, "triton_call", launch):
        return traced_again(of, shape)


def turn_values_too(of: Operands, shape: Shape) -> Any:
    """A kernel that takes values for keys."""
    q, keys, _ = traced_again(of, shape)
    return q, keys, keys


def forget_the_norm(of: Operands, shape: Shape) -> Any:
    """A kernel without norms."""
    return traced_again(of._replace(q_scales=None, k_scales=None), shape)


def forget_eps(of: Operands, shape: Shape) -> Any:
    """A kernel that adds nothing to the mean square."""
    return traced_again(of, shape._replace(eps=0.0))


BROKEN = (
    write_another_layer, write_the_next_slot, write_what_lies_outside, swap_the_scales,
    turn_the_other_way, leave_out_a_head, turn_values_too, forget_the_norm, forget_eps,
)  # fmt: skip


class CheckTest(BrokenKernels, HostTestCase):
    """The check that accepts the kernel refuses every broken one."""

    broken = BROKEN

    def sound(self):
        shape = SHAPES["group_of_one"]._replace(eps=1.0)
        return traced_again, random_operands(shape, "bfloat16", seed=5), shape

    def violation(self, found, operands, shape):
        return violation(found, operands, shape)

    def test_wrong_dtypes_and_shapes_fail(self):
        shape = SHAPES["demo"]
        of = random_operands(shape, "bfloat16", seed=6)
        q, keys, values = interpreted(of, shape)
        self.assertIsNotNone(violation((q.astype(jnp.float32), keys, values), of, shape))
        self.assertIsNotNone(violation((q, keys[:1], values), of, shape))


class RefusalTest(HostTestCase):
    @parameterized.parameters(
        ({"qkv": np.zeros((2, 100), jnp.bfloat16)}, "B or C differ"),
        ({"qkv": np.zeros((2, 256), jnp.bfloat16)}, "H is not positive"),
        ({"qkv": np.zeros(8, jnp.bfloat16)}, r"qkv is \(8,\)"),
        ({"values": np.zeros((2, 2, 2, 30, 64), np.float16)}, "values float16"),
        ({"positions": np.zeros(3, np.int32)}, r"int32\(3,\)"),
        ({"cos": np.zeros((2, 64), np.float32)}, r"cos is float32\(2, 64\)"),
        ({"sin": np.zeros((2, 32), jnp.bfloat16)}, "sin is bfloat16"),
        ({"q_scales": np.zeros((2, 32), jnp.bfloat16)}, "scales of q"),
        ({"k_scales": np.zeros((2, 64), np.float32)}, "scales of k"),
    )
    def test_what_does_not_fit_is_named(self, changed, said):
        of = random_operands(SHAPES["demo"], "bfloat16", seed=9)._replace(**changed)
        with self.assertRaisesRegex(ValueError, said):
            run(compiled.__wrapped__, of, SHAPES["demo"], implementation="triton", interpret=True)

    def test_an_unknown_implementation_is_named(self):
        of = random_operands(SHAPES["demo"], "bfloat16", seed=9)
        with self.assertRaisesRegex(ValueError, "none of triton, reference"):
            run(compiled.__wrapped__, of, SHAPES["demo"], implementation="mosaic")


class LoweringTest(HostTestCase):
    """Programs for CUDA, made without a GPU."""

    @parameterized.parameters((1, 4, True), (64, 4, True), (16, 8, False))
    def test_one_launch_that_writes_the_cache_in_place(self, batch, num_kv, has_norms):
        program = gpu_programs.writing(batch, num_kv, has_norms=has_norms)
        text = program.lower(gpu_targets.GPUS["H100"]).as_text()
        self.assertEqual(re.findall(r"stablehlo\.(\w+)[ (]", text), ["custom_call"])
        self.assertIn(f"qkv_to_cache_bfloat16_32_{num_kv}x128", text)
        first = 7 if has_norms else 5
        for output in (1, 2):
            alias = rf"output_tuple_indices = \[{output}\],\s+operand_index = {first + output - 1},"
            self.assertRegex(text, alias)


@pytest.mark.gpu
class DeviceContractTest(parameterized.TestCase):
    """The kernel compiled."""

    @parameterized.product(name=sorted(GPU_SHAPES), dtype=DTYPES)
    def test_value_is_that_of_float64(self, name, dtype):
        shape = GPU_SHAPES[name]
        of = random_operands(shape, dtype, seed=len(name))
        found = run(compiled, of, shape, implementation="triton")
        self.assertIsNone(violation(found, of, shape))
        again = run(compiled, of, shape, implementation="triton")
        for one, other in zip(found, again, strict=True):
            self.assertEqual(np.asarray(one).tobytes(), np.asarray(other).tobytes())

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


if __name__ == "__main__":
    absltest.main()
