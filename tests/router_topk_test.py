"""The contract of a router's softmax and top-k: reference, kernel interpreted, kernel on a GPU."""

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import router_topk as package
from pallas_kernels.router_topk import triton
from tests import gpu_programs, gpu_targets, slow
from tests.broken_kernels import BrokenKernels
from tests.host_test_case import HostTestCase
from tests.router_topk_contract import (
    GPU_SHAPES,
    SHAPES,
    Shape,
    expected_and_share,
    random_logits,
    violation,
)

CALL = jax.jit(package.top_k, static_argnames=("k", "normalise", "implementation", "interpret"))
Call = Callable[[Any, Shape], Any]


def in_plain_jnp(logits: Any, shape: Shape) -> Any:
    return CALL(logits, k=shape.chosen, normalise=shape.normalise, implementation="reference")


def interpreted(logits: Any, shape: Shape) -> Any:
    return CALL(
        logits, k=shape.chosen, normalise=shape.normalise, implementation="triton", interpret=True
    )


def traced_again(logits: Any, shape: Shape) -> Any:
    """`interpreted` without the cache of traces, for a kernel that was tampered with."""
    how = {"implementation": "triton", "interpret": True}
    return package.top_k(jnp.asarray(logits), shape.chosen, shape.normalise, **how)


def on_device(logits: Any, shape: Shape) -> Any:
    return CALL(logits, k=shape.chosen, normalise=shape.normalise, implementation="triton")


def unusual_rows(num_experts: int) -> np.ndarray:
    """float32[7, E]: what a model should never say."""
    rows = np.random.default_rng(0).standard_normal((7, num_experts), dtype=np.float32)
    rows[0] = np.nan
    rows[1, num_experts // 2] = np.nan
    rows[2] = -np.nan
    rows[3] = -np.inf
    rows[4, -1] = np.inf
    rows[5, 1:] = -np.inf  # all but one
    rows[6] = 0.0  # all equal
    return rows


class UnusualRows:
    """Checks that hosts and devices share."""

    def check_unusual_rows(self, call: Call, shape: Shape) -> None:
        p, weights, ids = (np.asarray(of) for of in call(unusual_rows(shape.num_experts), shape))
        np.testing.assert_array_equal(ids, np.tile(np.arange(shape.chosen, dtype=np.int32), (7, 1)))
        np.testing.assert_array_equal(p[:5], np.nan)
        np.testing.assert_array_equal(weights[:5], np.nan)
        np.testing.assert_array_equal(p[5], np.eye(shape.num_experts)[0])
        np.testing.assert_array_equal(weights[5], np.eye(shape.chosen)[0])
        np.testing.assert_allclose(p[6], 1 / shape.num_experts, rtol=1e-6)
        np.testing.assert_allclose(weights[6], 1 / shape.chosen, rtol=1e-6)


class ContractTest(HostTestCase, UnusualRows):
    """On the host: the reference, and the kernel interpreted.

    The interpreter fills a kernel's outputs with NaN before it runs, so what is not written shows.
    """

    @slow.repeats(lambda call, name: name if call is in_plain_jnp else call)
    @parameterized.product(call=(in_plain_jnp, interpreted), name=sorted(SHAPES))
    def test_value_is_that_of_float64(self, call, name):
        shape = SHAPES[name]
        logits = random_logits(shape, seed=len(name))
        self.assertIsNone(violation(call(logits, shape), logits, shape))

    @slow.where(lambda name: name not in sorted(SHAPES)[:3])
    @parameterized.parameters(sorted(SHAPES))
    def test_the_kernel_is_within_a_millionth_of_the_reference(self, name):
        shape = SHAPES[name]
        logits = random_logits(shape, seed=3)
        found, expected = interpreted(logits, shape), in_plain_jnp(logits, shape)
        for got, wanted in zip(found[:2], expected[:2], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-37)

    @parameterized.product(
        call=(in_plain_jnp, interpreted), shape=(Shape(7, 16, 5), Shape(7, 13, 3))
    )
    def test_rows_without_a_value(self, call, shape):
        self.check_unusual_rows(call, shape)

    @given(logits=st.lists(st.integers(-3, 3), min_size=11, max_size=11), normalise=st.booleans())
    @settings(max_examples=30, deadline=None)
    def test_of_equals_the_lower_id_comes_first(self, logits, normalise):
        shape = Shape(1, 11, 6, normalise)
        row = np.array([logits], np.float32)
        self.assertIsNone(violation(interpreted(row, shape), row, shape))
        expected = sorted(range(11), key=lambda expert: (-logits[expert], expert))
        np.testing.assert_array_equal(interpreted(row, shape)[2][0], expected[:6])

    @slow.repeats()
    @parameterized.parameters("reference", "triton")
    def test_ids_count_from_the_first(self, implementation):
        shape = SHAPES["odd"]
        logits = random_logits(shape, seed=9)
        how = {"implementation": implementation, "interpret": implementation == "triton"}
        found = CALL(logits, k=5, normalise=True, first=jnp.int32(480), **how)
        self.assertEqual(found[2].dtype, jnp.int32)
        self.assertIsNone(violation((*found[:2], found[2] - 480), logits, shape))

    def test_a_row_is_the_same_whatever_stands_beside_it(self):
        shape = SHAPES["qwen3_30b_16"]
        logits = random_logits(shape, seed=4)
        alone = interpreted(logits[5:6], shape._replace(num_tokens=1))
        for one, all_rows in zip(alone, interpreted(logits, shape), strict=True):
            np.testing.assert_array_equal(one[0], all_rows[5])


def choose_the_last_of_equals(logits: Any, shape: Shape) -> Any:
    """A kernel that takes the highest id of equal probabilities."""
    p, weights, ids = traced_again(logits[:, ::-1], shape)
    return p[:, ::-1], weights, shape.num_experts - 1 - ids


def forget_to_normalise(logits: Any, shape: Shape) -> Any:
    """A kernel that returns the probabilities as weights."""
    return traced_again(logits, shape._replace(normalise=False))


def normalise_by_all(logits: Any, shape: Shape) -> Any:
    """A kernel whose chosen weights are those of all experts' sum, but for a rounding."""
    p, _, ids = traced_again(logits, shape)
    return p, jnp.take_along_axis(p, ids, axis=1), ids


def choose_one_again(logits: Any, shape: Shape) -> Any:
    """A kernel that takes no expert out."""
    with mock.patch.object(triton, "TAKEN", np.int32(2**31 - 1)):
        return traced_again(logits, shape)


def count_the_padding(logits: Any, shape: Shape) -> Any:
    """A kernel that reads beyond a row's end."""
    load = triton.pltriton.load
    with mock.patch.object(
        triton.pltriton, "load", lambda ref, *, mask, other: load(ref, mask=mask, other=0.0)
    ):
        return traced_again(logits, shape)


def read_another_row(logits: Any, shape: Shape) -> Any:
    """A kernel whose programs all take the first row."""
    with mock.patch.object(triton.pl, "program_id", lambda axis: jnp.int32(axis)):
        return traced_again(logits, shape)


def round_the_products(logits: Any, shape: Shape) -> Any:
    """A softmax in bfloat16: a loss that no choice shows."""
    p, weights, ids = traced_again(logits, shape)
    return p, weights.astype(jnp.bfloat16).astype(jnp.float32), ids


def lose_a_few_bits(logits: Any, shape: Shape) -> Any:
    """Probabilities that are four millionths off."""
    p, weights, ids = traced_again(logits, shape)
    return p * np.float32(1 + 4e-6), weights, ids


BROKEN = (
    choose_the_last_of_equals, forget_to_normalise, normalise_by_all, choose_one_again,
    count_the_padding, read_another_row, round_the_products, lose_a_few_bits,
)  # fmt: skip


class CheckTest(BrokenKernels, HostTestCase):
    """The check that accepts the kernel refuses every broken one."""

    broken = BROKEN

    def sound(self):
        shape = SHAPES["odd"]
        return traced_again, random_logits(shape, seed=5), shape

    def violation(self, found, operands, shape):
        return violation(found, operands, shape)

    def test_wrong_dtypes_and_shapes_fail(self):
        shape = SHAPES["odd"]
        logits = random_logits(shape, seed=6)
        p, weights, ids = interpreted(logits, shape)
        self.assertIsNotNone(violation((p, weights, ids.astype(jnp.uint32)), logits, shape))
        self.assertIsNotNone(violation((p, weights[:, :4], ids), logits, shape))

    def test_the_tolerance_is_of_float32(self):
        _, share = expected_and_share(random_logits(SHAPES["qwen3_30b_1"], seed=7))
        self.assertBetween(share.max(), 1e-7, 4e-6)


class RefusalTest(HostTestCase):
    @parameterized.parameters(
        ({"k": 9}, r"k 9 is not in 1\.\.8"),
        ({"k": 0}, "k 0"),
        ({"logits": jnp.zeros((2, 8), jnp.bfloat16)}, r"bfloat16\(2, 8\), not float32"),
        ({"logits": jnp.zeros(8)}, r"float32\(8,\)"),
        ({"logits": jnp.zeros((0, 8))}, "some rows"),
        ({"implementation": "mosaic"}, "none of triton, reference"),
    )
    def test_what_does_not_fit_is_named(self, changed, said):
        how = {"logits": jnp.zeros((2, 8)), "k": 2, "normalise": True, "implementation": "triton"}
        with self.assertRaisesRegex(ValueError, said):
            package.top_k(**(how | changed), interpret=True)


class LoweringTest(HostTestCase):
    """Programs for CUDA, made without a GPU."""

    @parameterized.parameters((1, 128, 8), (2048, 128, 8), (4, 8, 2), (5, 60, 5))
    def test_one_launch_and_nothing_else(self, num_tokens, num_experts, chosen):
        program = gpu_programs.router(num_tokens, num_experts, chosen)
        text = program.lower(gpu_targets.GPUS["H100"]).as_text()
        self.assertEqual(re.findall(r"stablehlo\.(\w+)", text), ["custom_call"])
        self.assertIn(f"router_topk_{num_experts}x{chosen}n", text)


@pytest.mark.gpu
class DeviceContractTest(parameterized.TestCase, UnusualRows):
    """The kernel compiled."""

    @parameterized.parameters(sorted(GPU_SHAPES))
    def test_value_is_that_of_float64(self, name):
        shape = GPU_SHAPES[name]
        logits = random_logits(shape, seed=len(name))
        found = on_device(logits, shape)
        self.assertIsNone(violation(found, logits, shape))
        for one, other in zip(found, on_device(logits, shape), strict=True):
            self.assertEqual(np.asarray(one).tobytes(), np.asarray(other).tobytes())

    @parameterized.parameters(sorted(SHAPES))
    def test_is_within_a_millionth_of_the_reference(self, name):
        shape = SHAPES[name]
        logits = random_logits(shape, seed=3)
        with jax.default_device(jax.devices("cpu")[0]):
            expected = in_plain_jnp(logits, shape)
        found = on_device(logits, shape)
        # Where logits are far apart a float32 exponential is only as good as its argument is: each
        # of the two may be off by what the contract allows.
        _, share = expected_and_share(logits)
        allowed = np.maximum(1e-6, 2 * share)
        of_chosen = np.take_along_axis(allowed, np.asarray(expected[2]), axis=1)
        of_weights = of_chosen.max(axis=1, keepdims=True) + of_chosen
        for got, wanted, most in zip(found, expected, (allowed, of_weights), strict=False):
            off = np.abs(np.asarray(got, np.float64) - np.asarray(wanted, np.float64))
            self.assertTrue((off <= most * np.asarray(wanted) + 1e-37).all(), off.max())

    @parameterized.parameters(Shape(7, 16, 5), Shape(7, 13, 3), Shape(7, 128, 8), Shape(7, 8, 2))
    def test_rows_without_a_value(self, *shape):
        self.check_unusual_rows(on_device, Shape(*shape))

    def test_a_broken_kernel_fails(self):
        shape = SHAPES["qwen3_30b_16"]
        logits = random_logits(shape, seed=8)
        found = on_device(logits, shape._replace(normalise=False))
        self.assertIsNotNone(violation(found, logits, shape))


if __name__ == "__main__":
    absltest.main()
