"""Operands of the packed products against float64, their invariants, and what a kernel is for."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import layout, packed, target
from pallas_kernels.packed import LowRank, PackedMatrices
from tests import packed_operands
from tests.host_test_case import HostTestCase
from tests.packed_operands import Form, Terms, random_matrices, random_terms, seed

FORMS = (
    Form(2, 32),
    Form(3, 64, "integer", "float32"),
    Form(4, 128, "symmetric"),
    Form(8, 0, "float", "float32"),
    Form(3, 48, "symmetric"),  # groups that are no power of two
    Form(16, dtype="bfloat16"),
    Form(16, dtype="float16"),
    Form(3, 32, apart="own"),
    Form(4, 64, apart="shared"),
    Form(8, 0, dtype="float32", apart="own"),
)


def matrices(form: Form, inputs: int = 300, used: tuple[int, ...] = (0, 1, 2)) -> PackedMatrices:
    rng = np.random.default_rng(seed(f"{form}{inputs}"))
    return random_matrices(rng, form, num_slots=3, shape=(20, inputs), used=used)


def low_rank(form: Form, used: tuple[int, ...] = (0, 1, 2)) -> tuple[PackedMatrices, LowRank]:
    weights = matrices(Form(3))
    terms = Terms(form, (2, 0, 5), max_rank=5, first_row=8)
    return weights, random_terms(np.random.default_rng(seed(str(form))), terms, weights, used)


class ValuesTest(HostTestCase):
    """In float32, where code - zero and its product with a scale are rounded once each."""

    @parameterized.product(form=FORMS, inputs=(288, 300, 800))
    def test_dequantize(self, form, inputs):
        weights = matrices(form, inputs)
        weights.check()
        slots = jnp.asarray([[2, 0]], jnp.int32)
        found = jax.jit(packed.dequantize)(weights, slots)
        self.assertEqual(found.dtype, jnp.float32)
        self.assertEqual(found.shape, (1, 2, 20, inputs))
        for place, slot in enumerate((2, 0)):
            expected = packed_operands.values(weights, slot)
            np.testing.assert_allclose(found[0, place], expected, rtol=2e-7, atol=1e-7)

    def test_other_slots_are_not_read(self):
        weights = matrices(FORMS[0], used=(1,))
        found = jax.jit(packed.dequantize)(weights, jnp.int32(1))
        np.testing.assert_array_less(np.abs(found), 1)  # NaN is not less
        self.assertTrue(np.isnan(jax.jit(packed.dequantize)(weights, jnp.int32(0))).all())

    @parameterized.product(form=(Form(3), Form(4), Form(8, 128), Form(16, dtype="bfloat16")))
    def test_factors(self, form):
        weights, terms = low_rank(form, used=(0, 2))
        terms.check(weights)
        factors = jax.jit(jax.vmap(packed.low_rank_factors, in_axes=(None, 0)))
        u, v = factors(terms, jnp.asarray([2, 1, 0], jnp.int32))
        self.assertEqual(u.shape, (3, 5, 12))
        self.assertEqual(v.shape, (3, 5, 300))
        for place, slot in enumerate((2, 1, 0)):
            rank = int(terms.rank[slot])
            np.testing.assert_array_equal(u[place, rank:], 0)
            np.testing.assert_array_equal(v[place, rank:], 0)
            product = np.asarray(u[place]).astype(np.float64).T @ np.asarray(v[place])
            with_terms = packed_operands.dense(weights, slot, (terms,))
            expected = (with_terms - packed_operands.values(weights, slot))[8:]
            np.testing.assert_allclose(product, expected, rtol=1e-6, atol=1e-7)

    @parameterized.parameters(jnp.bfloat16, jnp.float16)
    def test_plain(self, dtype):
        values = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 40)), dtype)
        weights = packed.plain(values)
        weights.check()
        self.assertEqual((weights.num_slots, weights.num_outputs, weights.num_inputs), (2, 3, 40))
        found = packed.dequantize(weights, jnp.int32(1))
        np.testing.assert_array_equal(found, values[1].astype(jnp.float32))


class ExpectationTest(parameterized.TestCase):
    """The words that contracts draw are those that `layout` packs."""

    @parameterized.product(bits=layout.BITS, inputs=(32, 256, 300, 800))
    def test_words(self, bits, inputs):
        codes = np.random.default_rng(inputs).integers(0, 2**bits, (5, inputs)).astype(np.uint8)
        words = packed_operands.pack(codes, packed_operands.WIDTHS[bits])
        np.testing.assert_array_equal(words, layout.pack(codes, bits))
        np.testing.assert_array_equal(
            packed_operands.unpack(words, packed_operands.WIDTHS[bits], inputs), codes
        )


class DescriptionTest(parameterized.TestCase):
    @parameterized.parameters(
        (FORMS[0], "int2g32 float", "float", 10, 20 * (20 * 4 + 10 * 2 * 2)),
        (FORMS[1], "int3g64 integer", "integer", 5, 20 * (30 * 4 + 5 * (4 + 1))),
        (FORMS[2], "int4g128 symmetric", "symmetric", 3, 20 * (40 * 4 + 3 * 2)),
        (FORMS[3], "int8grow float", "float", 1, 20 * (80 * 4 + 2 * 4)),
        (FORMS[5], "bfloat16", "none", 0, 20 * 300 * 2),
        (FORMS[7], "int3p21g32 float", "float", 10, 20 * (30 * 4 + 10 * 2 * 2)),
        (FORMS[8], "int4p22g64 float", "float", 5, 20 * (40 * 4 + 5 * 2 * 2)),
        (FORMS[9], "int8p224grow float", "float", 1, 20 * (80 * 4 + 2 * 4)),
    )
    def test_of_matrices(self, form, text, zero_kind, groups, nbytes):
        weights = matrices(form)
        self.assertEqual(weights.describe(), text)
        self.assertEqual(weights.zero_kind, zero_kind)
        self.assertEqual(weights.num_groups, groups)
        self.assertEqual(weights.slot_nbytes, nbytes)

    def test_static_fields_stay_through_jit(self):
        weights, terms = low_rank(Form(3))
        same, same_terms = jax.jit(lambda *trees: trees)(weights, terms)
        self.assertEqual(same.describe(), weights.describe())
        self.assertEqual((same_terms.first_row, same_terms.num_rows), (8, 12))
        same_terms.check(same)


class InvariantsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"bits": 5}, "bits 5 is none of 2, 3, 4, 8, 16"),
        ({"num_inputs": 330}, r"words are uint32\(3, 20, 30\), not uint32\(3, 20, 33\)"),
        ({"group_size": 0}, "group_size 0 is not in 1..300"),
        ({"group_size": 301}, "group_size 301 is not in 1..300"),
        ({"group_size": 32}, r"scales have shape \(3, 20, 5\), expected \(3, 20, 10\)"),
        ({"words": np.zeros((3, 20, 30), np.int32)}, "words are int32"),
        ({"scales": None}, "scales are not float16, float32 or uint8"),
        ({"scales": np.zeros((3, 20, 5))}, "scales are not float16, float32 or uint8"),
        ({"zeros": np.zeros((3, 20, 5), np.float32)}, "zeros are float32, not float16 or uint8"),
        ({"zeros": np.zeros((3, 20, 4), np.float16)}, r"zeros have shape \(3, 20, 4\)"),
    )
    def test_packed(self, change, said):
        weights = matrices(Form(3))
        weights.check()
        with self.assertRaisesRegex(ValueError, said):
            dataclasses.replace(weights, **change).check()

    @parameterized.parameters(
        ({"words": np.zeros((3, 20, 300), np.float32)}, "float32, not bfloat16 or float16"),
        ({"num_inputs": 299}, r"plain matrices of 299 inputs: \(3, 20, 300\)"),
        ({"scales": np.ones((3, 20, 1), np.float16)}, "no scales and no zeros"),
        ({"zeros": np.ones((3, 20, 1), np.uint8)}, "no scales and no zeros"),
    )
    def test_plain(self, change, said):
        with self.assertRaisesRegex(ValueError, said):
            dataclasses.replace(matrices(Form(16, dtype="float16")), **change).check()

    @parameterized.parameters(
        ({"bits": 8}, "matrices of 8 bits are not stored as 2 planes that lie apart"),
        ({"bits": 2}, "matrices of 2 bits are not stored as 2 planes that lie apart"),
        ({"zeros": None}, "matrices with refinements have symmetric zeros, not float"),
        ({"num_inputs": 330}, r"a refinement's words are uint32\(\d, 20, 20\), not"),
        ({"words": np.zeros((2, 20, 20), np.uint32)}, r"words are uint32\(2, 20, 20\), not"),
        ({"scales": np.zeros((2, 20, 5), np.float16), "zeros": np.zeros((2, 20, 5), np.float16)},
         r"a refinement's slots are int32\(3,\), not int32\[2\]"),
    )  # fmt: skip
    def test_refinements(self, change, said):
        weights = matrices(Form(4, apart="shared"))
        weights.check()
        with self.assertRaisesRegex(ValueError, said):
            dataclasses.replace(weights, **change).check()

    @parameterized.parameters(
        ({"first_row": 9}, "rows 9..21 of 20"),
        ({"first_row": -1}, "rows -1..11 of 20"),
        ({"start": np.zeros(2, np.int32)}, r"start is int32\(2,\)"),
        ({"rank": np.zeros(3, np.float32)}, r"rank is float32\(3,\)"),
        ({"u": matrices(Form(3), 12)}, "u has 3 slots, expected one pool"),
        ({"v": matrices(Form(3))}, "v has 3 slots, expected one pool"),
    )
    def test_low_rank(self, change, said):
        weights, terms = low_rank(Form(3))
        with self.assertRaisesRegex(ValueError, said):
            dataclasses.replace(terms, **change).check(weights)

    def test_pools_of_other_sizes(self):
        weights, terms = low_rank(Form(16, dtype="float16"))
        other = dataclasses.replace(terms.v, words=terms.v.words[:, 1:])
        with self.assertRaisesRegex(ValueError, "pools of 7 and 6 rows"):
            dataclasses.replace(terms, v=other).check(weights)
        with self.assertRaisesRegex(ValueError, "v has 300 inputs, expected 288"):
            terms.check(matrices(Form(3), 288))


class TargetTest(absltest.TestCase):
    def devices(self, *devices: SimpleNamespace) -> None:
        self.enter_context(mock.patch.object(jax, "local_devices", lambda: list(devices)))

    def test_a_cpu(self):
        self.devices(SimpleNamespace(platform="cpu"))
        self.assertEqual(target.current_target(), target.Target("cpu", None))
        self.assertEqual(target.current_target().describe(), "cpu")

    def test_an_nvidia_gpu(self):
        self.devices(SimpleNamespace(platform="gpu", compute_capability="12.0", core_count=188))
        self.assertEqual(target.current_target(), target.Target("gpu", (12, 0), 188))
        self.assertEqual(target.current_target().describe(), "gpu sm_120")

    def test_a_gpu_without_a_capability(self):
        self.devices(SimpleNamespace(platform="gpu"))
        self.assertEqual(target.current_target().describe(), "gpu")

    def test_a_choice_names_what_refused(self):
        choice = target.Choice("reference", {"mosaic": "sm_80", "triton": "K=5"})
        self.assertEqual(choice.describe(), "reference (mosaic: sm_80; triton: K=5)")
        self.assertEqual(target.Choice("mosaic", {}).describe(), "mosaic")
