"""Products with packed weights against float64 numpy, and what they leave alone."""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moejax.models import expert_products, moe
from moejax.weights import linear as ops
from moejax.weights.qtensor import QTensor, Weight
from pallas_kernels.op import Operation
from pallas_kernels.target import Choice, Target
from tests import numpy_model, slow
from tests.host_test_case import HostTestCase
from tests.numpy_model import TINY, assert_near
from tests.packed_weights import SPECS, draw

NUM_TOKENS, NUM_EXPERTS, WIDTH, LAYER = 2, 6, 2, 1
IDS = np.array([[0, 3], [4, 3]])  # experts 1, 2 and 5 have no rows
UNUSED = np.array([1, 2, 5])


BY_REFERENCE = ops.Kernels(implementation="reference")
H200 = Target("gpu", (9, 0))
FITS = sorted(name for name, spec in SPECS.items() if spec.bits and not spec.permuted)


LINEAR = jax.jit(ops.linear, static_argnames=("layer", "out_dtype", "kernels"))


def rng_of(name: str) -> np.random.Generator:
    return np.random.default_rng([ord(character) for character in name])


class LinearTest(HostTestCase):
    @slow.repeats()
    @parameterized.parameters(sorted(SPECS))
    def test_linear_and_matrix(self, name):
        rng = rng_of(name)
        weight, values = draw(rng, (3, 20, 24), SPECS[name])
        x = rng.standard_normal((2, 4, 24)).astype(np.float32)
        matrix, y = jax.jit(
            lambda x, w: (ops.matrix(w, (1,), x.dtype), ops.linear(x, w, 1))
        )(x, weight)  # fmt: skip
        assert_near(matrix, values[1])
        assert_near(y, np.einsum("btk,nk->btn", x.astype(np.float64), values[1]))

    @slow.repeats()
    @parameterized.parameters("fp8", "int3_permuted", "int2_int8_ranks", "int4_symmetric")
    def test_a_large_matrix_is_taken_in_blocks_of_rows(self, name):
        rng = rng_of(name)
        weight, values = draw(rng, (300, 24), SPECS[name])
        x = rng.standard_normal((3, 2, 24)).astype(np.float32)
        with mock.patch.object(ops, "BLOCK_BYTES", 1):  # two blocks of 128, and what is left
            lowered = jax.jit(lambda x, w: ops.product(x, w)).lower(x, weight)
        self.assertIn("stablehlo.while", lowered.as_text())
        found = lowered.compile()(x, weight)
        assert_near(found, np.einsum("abk,nk->abn", x.astype(np.float64), values))

    @slow.repeats()
    @parameterized.parameters(sorted(SPECS))
    def test_rows(self, name):
        rng = rng_of(name)
        weight, values = draw(rng, (23, 24), SPECS[name])
        ids = rng.integers(0, 23, (2, 40))
        found = jax.jit(lambda w, i: ops.take_rows(w, i, jnp.dtype("float32")))(
            weight, jnp.asarray(ids, jnp.int32)
        )
        assert_near(found, values[ids])

    def test_fp8_blocks_of_a_matrix_of_more_than_one(self):
        rng = np.random.default_rng(1)
        weight, values = draw(rng, (2, 150, 140), SPECS["fp8"])
        ids, f32 = np.array([0, 127, 128, 149], np.int32), jnp.dtype("float32")
        matrix, rows = jax.jit(
            lambda w: (ops.matrix(w, (1,), f32), ops.take_rows(w[0], jnp.asarray(ids), f32))
        )(weight)
        assert_near(matrix, values[1])
        assert_near(rows, values[0, ids])

    def test_a_plain_weight_passes_as_it_is(self):
        weight = jnp.ones((2, 3, 4), jnp.bfloat16)
        self.assertIs(ops.matrix(weight, (), jnp.dtype("float32")), weight)
        rows = ops.take_rows(weight[0], jnp.asarray([1, 2]), jnp.dtype("float32"))
        self.assertEqual((rows.shape, rows.dtype), ((2, 4), jnp.bfloat16))
        self.assertIsNone(ops.packing(weight))


class KernelTest(HostTestCase):
    """The way to `pallas_kernels`, walked with its reference."""

    @slow.repeats()
    @parameterized.product(name=FITS, rows=((2, 4), (1,)))
    def test_linear_and_product_equal_float64(self, name, rows):
        rng = rng_of(name)
        weight, values = draw(rng, (3, 20, 24), SPECS[name])
        x = rng.standard_normal((*rows, 24)).astype(np.float32)

        def run(x, w):
            linear = ops.linear(x, w, 1, kernels=BY_REFERENCE)
            return linear, ops.product(x, w[2], kernels=BY_REFERENCE)

        lowered = jax.jit(run).lower(x, weight)
        self.assertIn("_kernel_product", lowered.as_text())
        found = lowered.compile()(x, weight)
        for y, matrix in zip(found, values[1:], strict=True):
            assert_near(y, np.einsum("...k,nk->...n", x.astype(np.float64), matrix))

    def test_a_row_by_a_plain_matrix_is_a_sum_on_a_gpu(self):
        rng = np.random.default_rng(2)
        weight = jnp.asarray(rng.standard_normal((40, 24)), jnp.bfloat16)
        x = jnp.asarray(rng.standard_normal((1, 1, 24)), jnp.bfloat16)
        f32, gpu = jnp.dtype("float32"), Target("gpu", (9, 0))
        two = jnp.tile(x, (2, 1, 1))
        for rows, target, is_sum in (
            (x, gpu, True),
            (two, gpu, False),
            (x, Target("cpu", None), False),
        ):
            product = functools.partial(ops.product, kernels=ops.Kernels(target))
            lowered = jax.jit(product, static_argnums=2).lower(rows, weight, f32)
            self.assertEqual("dot_general" not in lowered.as_text(), is_sum)
            found = lowered.compile()(rows, weight)
            exact = np.asarray(rows, np.float64) @ np.asarray(weight, np.float64).T
            assert_near(found, exact)

    def test_the_dtype_of_the_result_is_the_one_asked_for(self):
        rng = np.random.default_rng(2)
        weight, values = draw(rng, (2, 20, 24), SPECS["int3_ranks"])
        x = jnp.asarray(rng.standard_normal((4, 24)), jnp.bfloat16)
        found = LINEAR(x, weight, 0, jnp.dtype("float32"), BY_REFERENCE)
        self.assertEqual(found.dtype, jnp.float32)
        assert_near(found, np.asarray(x).astype(np.float64) @ values[0].T)
        half = jax.eval_shape(lambda: ops.linear(x, weight, 0, kernels=BY_REFERENCE))
        self.assertEqual(half.dtype, jnp.bfloat16)

    def test_layers_share_one_function(self):
        weight, _ = draw(np.random.default_rng(2), (3, 20, 24), SPECS["int3_ranks"])
        x = jnp.ones((4, 24))
        text = jax.jit(
            lambda x, w: [ops.linear(x, w, layer, kernels=BY_REFERENCE) for layer in range(3)]
        ).lower(x, weight).as_text()  # fmt: skip
        self.assertEqual(text.count("func.func private @_kernel_product"), 1)
        self.assertEqual(text.count("call @_kernel_product"), 3)

    @slow.repeats()
    @parameterized.parameters(
        ("fp8", "FP8 in blocks"),
        ("int4_permuted", "permuted (act-order)"),
        ("int3_permuted", "permuted (act-order)"),
    )
    def test_what_no_kernel_takes_is_dequantized_and_says_why(self, name, reason):
        rng = rng_of(name)
        weight, values = draw(rng, (3, 20, 24), SPECS[name])
        x = rng.standard_normal((4, 24)).astype(np.float32)
        choice = ops._choose_product(4, jnp.dtype("bfloat16"), weight, BY_REFERENCE)
        self.assertEqual(choice.implementation, ops.DEQUANTIZED)
        self.assertIn(reason, choice.describe())
        found = LINEAR(x, weight, 1, kernels=BY_REFERENCE)
        assert_near(found, x.astype(np.float64) @ values[1].T)

    def test_factors_in_float32_are_refused(self):
        weight, _ = draw(np.random.default_rng(0), (2, 20, 24), SPECS["int3_ranks"])
        (terms,) = weight.compensators
        wide = dataclasses.replace(terms, v=terms.v.astype(jnp.float32))
        wide = dataclasses.replace(weight, compensators=(wide,))
        self.assertIsNone(ops.kernel_refusal(weight))
        self.assertIn("a low-rank factor is float32", ops.kernel_refusal(wide))

    def test_where_every_kernel_refuses_it_is_dequantized(self):
        weight, _ = draw(np.random.default_rng(0), (2, 20, 24), SPECS["int3"])
        for kernels, dtype, reason in (
            (ops.NO_KERNELS, "bfloat16", "no target was named"),
            (ops.Kernels(Target("cpu", None)), "bfloat16", "cpu"),
            (ops.Kernels(H200), "float32", "x is float32"),
        ):
            choice = ops._choose_product(4, jnp.dtype(dtype), weight, kernels)
            self.assertEqual(choice.implementation, ops.DEQUANTIZED)
            self.assertIn(reason, choice.describe())
        plain = ops._choose_product(4, jnp.dtype("bfloat16"), jnp.ones((2, 3)), ops.Kernels(H200))
        self.assertEqual(plain.implementation, ops.PLAIN)

    def test_plain_matrices_of_a_stack_run_in_place_where_a_kernel_is_as_fast(self):
        bf16 = jnp.dtype("bfloat16")
        stack = jax.ShapeDtypeStruct((2, 1024, 256), bf16)
        for kernel, num_rows, expected in (
            ("mosaic", 4, "mosaic"), ("mosaic", 1024, "mosaic"),
            ("triton", 4, "triton"), ("triton", 1024, ops.PLAIN), ("reference", 4, ops.PLAIN),
        ):  # fmt: skip
            with mock.patch.object(Operation, "choose", return_value=Choice(kernel, {})):
                choice = ops._choose_product(num_rows, bf16, stack, ops.Kernels(H200))
            self.assertEqual(choice.implementation, expected)
        router = jax.ShapeDtypeStruct((2, 128, 256), bf16)
        for kernel, num_rows, expected in (
            ("mosaic", 1024, "mosaic"), ("triton", 1024, "triton"), ("mosaic", 4, "triton"),
            ("reference", 1024, ops.PLAIN),
        ):  # fmt: skip
            with mock.patch.object(Operation, "choose", return_value=Choice(kernel, {})):
                choice = ops._choose_product(
                    num_rows, bf16, router, ops.Kernels(H200), always_kernel=True
                )
            self.assertEqual(choice.implementation, expected)
        found = ops._choose_product(4, bf16, stack, ops.Kernels(Target("gpu", (8, 0))))
        self.assertEqual(found.implementation, "triton")
        for weight, kernels, dtype in (
            (jax.ShapeDtypeStruct((1024, 256), bf16), ops.Kernels(H200), bf16),  # no stack
            (jax.ShapeDtypeStruct((2, 7, 256), bf16), ops.Kernels(H200), bf16),  # few outputs
            (stack, ops.Kernels(Target("cpu", None)), bf16),
            (stack, ops.NO_KERNELS, bf16),
            (stack, BY_REFERENCE, bf16),
        ):
            choice = ops._choose_product(4, jnp.dtype(dtype), weight, kernels)
            self.assertEqual(choice, Choice(ops.PLAIN, {}))
        wide = jax.ShapeDtypeStruct((2, 1024, 256), jnp.float32)
        choice = ops._choose_product(4, wide.dtype, wide, ops.Kernels(H200))
        self.assertEqual(choice.implementation, ops.PLAIN)
        self.assertIn("float32", choice.describe())

    def test_no_stack_is_copied_on_its_way(self):
        weight, _ = draw(np.random.default_rng(0), (2, 6, 32, 64), SPECS["int4_symmetric"])
        lowered = jax.jit(ops.operands).lower(weight)
        memory = lowered.compile().memory_analysis()
        self.assertEqual(memory.temp_size_in_bytes, 0)


FORMS = {"row": "row", "block": "block", "grouped": "grouped_kernel"}


def run_experts(
    impl: str, x: jax.Array, routing: moe.Routing, gate_up: Weight, down: Weight
) -> jax.Array:
    if impl == "dense":
        return moe._experts_dense(x, routing, gate_up, down, LAYER)
    stacks, form = expert_products.ExpertStacks(gate_up, down, LAYER), FORMS[impl]
    mask = jnp.ones(len(x), bool)
    with mock.patch.object(moe, "STEP_BYTES", {"block": 2**12}):
        return moe._experts_in_pairs(x, routing, stacks, mask, form, "reference")


RUN = jax.jit(run_experts, static_argnames="impl")


def operands(
    name: str, num_experts: int = NUM_EXPERTS, model_dim: int = 24, expert_dim: int = 16
) -> tuple[tuple[Any, ...], np.ndarray]:
    """Operands of a form of experts, and their result."""
    rng = rng_of(name)
    gate_up, wide_gate_up = draw(rng, (2, num_experts, 2 * expert_dim, model_dim), SPECS[name])
    down, wide_down = draw(rng, (2, num_experts, model_dim, expert_dim), SPECS[name])
    x = rng.standard_normal((NUM_TOKENS, model_dim)).astype(np.float32)
    weights = rng.dirichlet(np.ones(WIDTH), NUM_TOKENS).astype(np.float32)
    routing = moe.Routing(
        jnp.zeros((NUM_TOKENS, num_experts)), jnp.asarray(weights), jnp.asarray(IDS, jnp.int32)
    )
    expected = numpy_model.experts(
        x.astype(np.float64), IDS, weights.astype(np.float64), wide_gate_up[LAYER], wide_down[LAYER]
    )
    return (jnp.asarray(x), routing, gate_up, down), expected


class ExpertsTest(HostTestCase):
    @slow.repeats()
    @parameterized.parameters(FITS)
    def test_grouped_equals_float64(self, name):
        args, expected = operands(name)
        assert_near(RUN("grouped", *args), expected)

    def test_grouped_leaves_padding_alone(self):
        (x, routing, gate_up, down), expected = operands("int3_ranks")
        stacks, mask = (
            expert_products.ExpertStacks(gate_up, down, LAYER),
            jnp.asarray([True, False]),
        )
        found = jax.jit(moe._experts_in_pairs, static_argnums=(4, 5))(
            x.at[1].set(jnp.nan), routing, stacks, mask, "grouped_kernel", "reference"
        )
        assert_near(found[:1], expected[:1])
        np.testing.assert_array_equal(found[1], 0)

    def test_grouped_refuses_what_is_permuted(self):
        args, _ = operands("int3_permuted")
        with self.assertRaisesRegex(ValueError, r"refuses: .*permuted \(act-order\)"):
            RUN("grouped", *args)

    @slow.repeats()
    @parameterized.parameters("row", "block", "grouped")
    def test_an_expert_without_rows_is_not_read(self, impl):
        (x, routing, gate_up, down), expected = operands("int3_ranks")

        def spoiled(weight: QTensor) -> QTensor:
            scales = weight.scales.at[:, UNUSED].set(jnp.nan).at[0].set(jnp.nan)
            return weight.__class__(**{**vars(weight), "scales": scales})

        assert_near(RUN(impl, x, routing, spoiled(gate_up), spoiled(down)), expected)

    @slow.repeats()
    @parameterized.parameters(("row", 2 * 2), ("block", 2 * 2), ("dense", 64))
    def test_no_expert_is_dequantized_that_is_not_used(self, impl, num_at_once):
        args, _ = operands("int3", num_experts=64, model_dim=64, expert_dim=64)
        compiled = RUN.lower(impl, *args).compile()
        expert_bytes = 4 * 3 * 64 * 64
        temporary = compiled.memory_analysis().temp_size_in_bytes
        # The dense form, which does take a whole layer, shows that the figure tells.
        self.assertEqual(temporary < 4 * num_at_once * expert_bytes, True, temporary)
        self.assertEqual(temporary > 32 * expert_bytes, impl == "dense", temporary)

    def test_packed_experts_run_grouped_where_a_kernel_serves(self):
        (_, _, *experts), _ = operands("int3_ranks")
        bf16 = jnp.dtype("bfloat16")
        kernels = ops.Kernels(H200)
        choice = Choice("mosaic", {})
        for num_tokens in (1, 4000):
            with mock.patch.object(Operation, "choose", return_value=choice) as choose:
                impl = moe.default_expert_impl(num_tokens, TINY, bf16, "gpu", experts, kernels)
            self.assertEqual(impl, "grouped_kernel")
            x, width, gate_up_tiers, down_tiers, low_rank, *_ = choose.call_args.args
            target = choose.call_args.kwargs["target"]
            self.assertEqual((x.shape, x.dtype), ((num_tokens, TINY.model_dim), bf16))
            self.assertEqual((width, target), (TINY.experts_per_token, H200))
            self.assertEqual(
                [t.words.shape[:2] for t in (*gate_up_tiers, *down_tiers)], [(12, 32), (12, 24)]
            )
            self.assertEqual([len(terms) for terms in low_rank], [1, 1])
        plain = [jax.ShapeDtypeStruct(weight.shape, bf16) for weight in experts]
        ampere = ops.Kernels(Target("gpu", (8, 0)))
        for num_tokens, expected in ((1, "grouped_kernel"), (32, "grouped_kernel"), (33, "block")):
            impl = moe.default_expert_impl(num_tokens, TINY, bf16, "gpu", plain, ampere)
            self.assertEqual(impl, expected)
        wide = [jax.ShapeDtypeStruct(weight.shape, jnp.float32) for weight in experts]
        found = moe.default_expert_impl(1, TINY, jnp.dtype("float32"), "gpu", wide, ampere)
        self.assertEqual(found, "block")
