"""The contract of a residual sum and its norm: reference, interpreted kernel, kernel on a GPU."""

import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.models.norm import rms_norm
from pallas_kernels import residual_norm as package
from pallas_kernels.residual_norm import triton
from tests import gpu_programs, gpu_targets, slow
from tests.broken_kernels import BrokenKernels
from tests.host_test_case import HostTestCase
from tests.residual_norm_contract import (
    DTYPES,
    GPU_SHAPES,
    SHAPES,
    Operands,
    Shape,
    random_operands,
    violation,
)

CALL = jax.jit(
    package.residual_norm, static_argnames=("eps", "zero_centred", "implementation", "interpret")
)


def run(call: Any, of: Operands, shape: Shape, **how: Any) -> Any:
    operands = jax.tree.map(jnp.asarray, of[:3])
    how = {"eps": shape.eps, "zero_centred": shape.zero_centred, **how}
    return call(*operands, layer=jnp.int32(of.layer), **how)


def in_plain_jnp(of: Operands, shape: Shape) -> Any:
    """Not jitted: XLA may then leave out the rounding of the sum."""
    return run(package.residual_norm, of, shape, implementation="reference")


def interpreted(of: Operands, shape: Shape) -> Any:
    return run(CALL, of, shape, implementation="triton", interpret=True)


def traced_again(of: Operands, shape: Shape) -> Any:
    """`interpreted` without the cache of traces, for a kernel that was tampered with."""
    return run(package.residual_norm, of, shape, implementation="triton", interpret=True)


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
    @parameterized.parameters("qwen3_30b_16", "first", "odd", "qwen3_next_1", "centred_odd")
    def test_it_rounds_as_the_model_does(self, name):
        shape = SHAPES[name]
        of = random_operands(shape, "bfloat16", seed=3)
        y, normed = (np.asarray(a) for a in interpreted(of, shape))
        expected = of.x if of.delta is None else jnp.asarray(of.x) + of.delta
        np.testing.assert_array_equal(y, expected)
        how = {"eps": shape.eps, "zero_centred": shape.zero_centred}
        expected = np.asarray(rms_norm(jnp.asarray(y), jnp.asarray(of.scales[-1]), **how))
        steps = normed.view(np.int16).astype(int) - expected.view(np.int16)
        self.assertLessEqual(np.abs(steps).max(), 1)  # of the last place
        self.assertLess((steps != 0).mean(), 0.01)

    def test_a_row_is_the_same_in_any_company(self):
        shape = SHAPES["qwen3_30b_16"]
        of = random_operands(shape, "bfloat16", seed=4)
        row = slice(5, 6)
        alone = of._replace(x=of.x[row], delta=of.delta[row])
        together = interpreted(of, shape)
        for one, all_ in zip(interpreted(alone, shape), together, strict=True):
            np.testing.assert_array_equal(one[0], all_[5])


def forget_to_add(of: Operands, shape: Shape) -> Any:
    """A kernel that leaves the delta out."""
    return traced_again(of._replace(delta=np.zeros_like(of.delta)), shape)


def norm_before_the_sum(of: Operands, shape: Shape) -> Any:
    """A kernel whose norm is that of x."""
    y, _ = traced_again(of, shape)
    return y, traced_again(of._replace(delta=np.zeros_like(of.delta)), shape)[1]


def take_another_layer(of: Operands, shape: Shape) -> Any:
    """A kernel that forgets the layer."""
    return traced_again(of._replace(layer=0), shape)


def forget_eps(of: Operands, shape: Shape) -> Any:
    """A kernel that adds nothing to the mean square."""
    return traced_again(of, shape._replace(eps=0.0))


def count_the_padding(of: Operands, shape: Shape) -> Any:
    """A kernel that divides by the padded width."""
    load = triton.pltriton.load
    with mock.patch.object(
        triton.pltriton, "load", lambda ref, *, mask, other: load(ref, mask=mask, other=0.5)
    ):
        return traced_again(of, shape)


def read_another_row(of: Operands, shape: Shape) -> Any:
    """A kernel whose programs all take the first row."""
    with mock.patch.object(triton.pl, "program_id", lambda axis: jnp.int32(axis)):
        return traced_again(of, shape)


def lose_a_bit(of: Operands, shape: Shape) -> Any:
    """A kernel whose results are two units in the last place too large."""
    y, normed = traced_again(of, shape)
    return y, (normed.astype(jnp.float32) * (1 + 2.0**-6)).astype(normed.dtype)


def centre_at_zero(of: Operands, shape: Shape) -> Any:
    """A kernel that adds one to the scales."""
    return traced_again(of, shape._replace(zero_centred=not shape.zero_centred))


BROKEN = (
    centre_at_zero, forget_to_add, norm_before_the_sum, take_another_layer, forget_eps,
    count_the_padding, read_another_row, lose_a_bit,
)  # fmt: skip


class CheckTest(BrokenKernels, HostTestCase):
    """The check that accepts the kernel refuses every broken one."""

    broken = BROKEN

    def sound(self):
        shape = SHAPES["odd"]
        return traced_again, random_operands(shape, "bfloat16", seed=5), shape

    def violation(self, found, operands, shape):
        return violation(found, operands, shape)

    def test_wrong_dtypes_and_shapes_fail(self):
        shape = SHAPES["odd"]
        of = random_operands(shape, "bfloat16", seed=6)
        y, normed = interpreted(of, shape)
        self.assertIsNotNone(violation((y, normed.astype(jnp.float32)), of, shape))
        self.assertIsNotNone(violation((y[:2], normed), of, shape))


class RefusalTest(HostTestCase):
    @parameterized.parameters(
        ({"x": jnp.zeros((2, 2, 8), jnp.bfloat16)}, r"x is \(2, 2, 8\)"),
        ({"x": jnp.zeros((0, 8), jnp.bfloat16)}, "some rows"),
        ({"delta": jnp.zeros((2, 8))}, "delta float32"),
        ({"delta": jnp.zeros((1, 8), jnp.bfloat16)}, r"delta bfloat16\(1, 8\)"),
        ({"scales": jnp.zeros((3, 9), jnp.bfloat16)}, r"scales are bfloat16\(3, 9\)"),
        ({"scales": jnp.zeros(8, jnp.bfloat16)}, r"scales are bfloat16\(8,\)"),
        ({"implementation": "mosaic"}, "none of triton, reference"),
    )
    def test_what_does_not_fit_is_named(self, changed, said):
        x = jnp.zeros((2, 8), jnp.bfloat16)
        how = {"x": x, "delta": x, "scales": x, "layer": 0, "eps": 1e-6, "interpret": True}
        with self.assertRaisesRegex(ValueError, said):
            package.residual_norm(**(how | {"implementation": "triton"} | changed))


class LoweringTest(HostTestCase):
    """Programs for CUDA, made without a GPU."""

    @parameterized.parameters(
        (1, 2048, True), (64, 4096, True), (3, 8192, False), (3, 200, True), (1, 2048, True, True)
    )
    def test_one_launch_and_nothing_else(self, num_rows, width, has_delta, zero_centred=False):
        program = gpu_programs.norm(num_rows, width, has_delta=has_delta, zero_centred=zero_centred)
        text = program.lower(gpu_targets.GPUS["H100"]).as_text()
        self.assertEqual(re.findall(r"stablehlo\.(\w+)", text), ["custom_call"])
        self.assertIn(f"residual_norm_bfloat16_{width}", text)


@pytest.mark.gpu
class DeviceContractTest(parameterized.TestCase):
    """The kernel compiled."""

    @parameterized.product(name=sorted(GPU_SHAPES), dtype=DTYPES)
    def test_value_is_that_of_float64(self, name, dtype):
        shape = GPU_SHAPES[name]
        of = random_operands(shape, dtype, seed=len(name))
        found = run(CALL, of, shape, implementation="triton")
        self.assertIsNone(violation(found, of, shape))
        again = run(CALL, of, shape, implementation="triton")
        for one, other in zip(found, again, strict=True):
            self.assertEqual(np.asarray(one).tobytes(), np.asarray(other).tobytes())

    def test_a_broken_kernel_fails(self):
        shape = SHAPES["odd"]
        of = random_operands(shape, "bfloat16", seed=8)
        found = run(CALL, of, shape._replace(eps=0.0), implementation="triton")
        self.assertIsNotNone(violation(found, of, shape))


if __name__ == "__main__":
    absltest.main()
