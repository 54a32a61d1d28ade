"""QTensor, Compensator and Fp8Tensor against float64 numpy, their bytes and their checks."""

import dataclasses
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import strategies as st

from moejax.weights.qtensor import ZERO_KINDS, Fp8Tensor, dense, from_codes
from tests import slow
from tests.packed_weights import SPECS, draw, num_bytes


def random_parts(rng, lead, rows, inputs, bits, group_size, zero_kind):
    """Codes, and scales and zeros that float16 holds exactly."""
    groups = -(-inputs // group_size)
    codes = rng.integers(0, 2**bits, (*lead, rows, inputs)).astype(np.uint8)
    scales = rng.normal(size=(*lead, rows, groups)).astype(np.float16).astype(np.float32)
    zeros = rng.uniform(0, 2**bits - 1, (*lead, rows, groups))
    zeros = np.round(zeros) if zero_kind == "integer" else zeros.astype(np.float16)
    return codes, scales, zeros.astype(np.float32)


def dequantized(codes, scales, zeros, bits, group_size, zero_kind):
    """The definition, in float64, one input at a time."""
    result = np.zeros(codes.shape)
    for k in range(codes.shape[-1]):
        g = k // group_size
        zero = 2 ** (bits - 1) if zero_kind == "symmetric" else zeros[..., g].astype(np.float64)
        result[..., k] = (codes[..., k].astype(np.float64) - zero) * scales[..., g].astype(
            np.float64
        )
    return result


def random_tensor(rng, lead, rows, inputs, bits=3, group_size=64, zero_kind="float"):
    codes, scales, zeros = random_parts(rng, lead, rows, inputs, bits, group_size, zero_kind)
    parts = (jnp.asarray(x) for x in (codes, scales, zeros))
    return from_codes(*parts, bits=bits, group_size=group_size, zero_kind=zero_kind)


class QTensorTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
    @hypothesis.given(
        bits=st.sampled_from([2, 3, 4, 8]),
        group_size=st.sampled_from([32, 64, 128, 0]),
        zero_kind=st.sampled_from(ZERO_KINDS),
        scale_dtype=st.sampled_from([np.float16, np.float32]),
        rows=st.integers(1, 9),
        inputs=st.integers(1, 300),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_dequantize_is_the_definition(
        self, bits, group_size, zero_kind, scale_dtype, rows, inputs, seed
    ):
        group_size = min(group_size or inputs, inputs)
        rng = np.random.default_rng(seed)
        parts = random_parts(rng, (), rows, inputs, bits, group_size, zero_kind)
        expected = dequantized(*parts, bits, group_size, zero_kind)
        tensor = from_codes(
            *parts, bits=bits, group_size=group_size, zero_kind=zero_kind, scale_dtype=scale_dtype
        )
        self.assertEqual(tensor.shape, (rows, inputs))
        self.assertEqual(tensor.zero_kind, zero_kind)
        # numpy leaves: the same code as on the device, without compiling every shape.
        np.testing.assert_array_equal(tensor.codes(), parts[0])
        np.testing.assert_allclose(tensor.dequantize(), expected, rtol=1e-6, atol=1e-5)

    @parameterized.parameters(
        (2, 64, "float", 2 + 32 / 64),
        (3, 64, "float", 3 + 32 / 64),
        (3, 64, "integer", 3 + 24 / 64),
        (3, 64, "symmetric", 3 + 16 / 64),
        (4, 128, "symmetric", 4 + 16 / 128),
        (8, 2048, "float", 8 + 32 / 2048),
    )
    def test_bits_per_weight_count_everything(self, bits, group_size, zero_kind, expected):
        rng = np.random.default_rng(0)
        tensor = random_tensor(rng, (2,), 8, 2048, bits, group_size, zero_kind)
        self.assertEqual(tensor.nbytes, sum(np.asarray(x).nbytes for x in jax.tree.leaves(tensor)))
        self.assertEqual(8 * tensor.nbytes / math.prod(tensor.shape), expected)

    @slow.where(lambda name: name not in ("int2_int8_ranks", "int3_permuted", "fp8"))
    @parameterized.parameters(*SPECS)
    def test_every_kind_is_its_definition_whole_and_matrix_by_matrix(self, name):
        rows, inputs = (130, 200) if name == "fp8" else (6, 40)
        tensor, expected = draw(np.random.default_rng(1), (2, 3, rows, inputs), SPECS[name])
        tensor.check()
        self.assertEqual(tensor.nbytes, num_bytes(tensor))
        close = {"rtol": 1e-6, "atol": 1e-6 * np.abs(expected).max()}
        np.testing.assert_allclose(jax.jit(lambda t: t.dequantize())(tensor), expected, **close)
        one = jax.jit(lambda t, i, j: t[i, j].dequantize())
        for i, j in ((1, 2), (0, 1)):
            np.testing.assert_allclose(one(tensor, i, j), expected[i, j], **close)

    def test_dense_of_a_plain_array_is_itself(self):
        array = jnp.ones((2, 3))
        self.assertIs(dense(array, jnp.bfloat16), array)
        tensor = random_tensor(np.random.default_rng(3), (), 4, 64)
        self.assertEqual(dense(tensor, jnp.bfloat16).dtype, jnp.bfloat16)

    @parameterized.named_parameters(
        ("words", {"words": jnp.zeros((4, 5), jnp.uint32)}, "words has shape"),
        ("scales", {"scales": jnp.zeros((4, 2), jnp.bfloat16)}, "scales is bfloat16"),
        ("zeros", {"zeros": jnp.zeros((4, 3), jnp.float16)}, "zeros has shape"),
        ("zero_dtype", {"zeros": jnp.zeros((4, 2), jnp.float32)}, "zeros is float32"),
        ("layout", {"layout": "planes-v0"}, "layout is 'planes-v0', this version reads"),
        ("permutation", {"permutation": jnp.zeros(99, jnp.int32)}, "permutation has shape"),
        ("group", {"group_size": 101}, "group_size 101"),
    )
    def test_check_names_what_is_wrong(self, changes, said):
        tensor = random_tensor(np.random.default_rng(4), (), 4, 100)
        tensor.check()
        with self.assertRaisesRegex(ValueError, said):
            dataclasses.replace(tensor, **changes).check()


class CompensatorTest(parameterized.TestCase):
    def tensor(self):
        """Four matrices [6, 40] of ragged ranks with terms on all rows."""
        return draw(np.random.default_rng(5), (4, 6, 40), SPECS["int3_ranks"])[0]

    def test_rank_zero_everywhere_changes_nothing(self):
        tensor = self.tensor()
        [compensator] = tensor.compensators
        none = jnp.zeros(4, jnp.int32)
        empty = dataclasses.replace(
            compensator, u=compensator.u[:0], v=compensator.v[:0], start=none, rank=none, max_rank=0
        )
        bare = dataclasses.replace(tensor, compensators=())
        tensor = dataclasses.replace(tensor, compensators=(empty,))
        np.testing.assert_array_equal(tensor.dequantize(), bare.dequantize())

    @parameterized.parameters(
        ({"first_row": 4}, "rows 4..10 of 6"),
        ({"num_rows": 2}, "factors of 6 rows and 40 inputs, expected 2"),
        ({"start": jnp.zeros(3, jnp.int32)}, "start is int32"),
        ({"v": jnp.zeros((99, 40), jnp.bfloat16)}, "factors of shapes"),
    )
    def test_check(self, changes, said):
        tensor = self.tensor()
        broken = dataclasses.replace(tensor.compensators[0], **changes)
        with self.assertRaisesRegex(ValueError, said):
            dataclasses.replace(tensor, compensators=(broken,)).check()

    def test_permutation_and_compensators_exclude_each_other(self):
        tensor = self.tensor()
        identity = jnp.tile(jnp.arange(40, dtype=jnp.int32)[None], (4, 1))
        with self.assertRaisesRegex(ValueError, "exclude"):
            dataclasses.replace(tensor, permutation=identity).check()


class Fp8TensorTest(parameterized.TestCase):
    def test_check(self):
        values = jnp.zeros((130, 64), jnp.float8_e4m3fn)
        with self.assertRaisesRegex(ValueError, r"scales have shape \(1, 1\), expected \(2, 1\)"):
            Fp8Tensor(values=values, scales=jnp.ones((1, 1))).check()
        with self.assertRaisesRegex(ValueError, "values are float32"):
            Fp8Tensor(values=jnp.zeros((128, 64)), scales=jnp.ones((1, 1))).check()
