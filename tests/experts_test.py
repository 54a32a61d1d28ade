"""Routing against float64 numpy, and the ways to run experts against it and each other."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moejax.models import expert_products, moe
from moejax.models.config import ModelConfig
from moejax.weights.linear import linear
from tests import numpy_model, slow
from tests.host_test_case import HostTestCase
from tests.numpy_model import TINY, assert_near


def route(x: jax.Array, router: jax.Array, config: ModelConfig) -> moe.Routing:
    logits = linear(x, router[None], 0, jnp.dtype(jnp.float32))
    return moe.routing_of(logits, config)


class RouteTest(HostTestCase):
    @parameterized.product(width=(1, 2, 5), normalized=(True, False))
    def test_equals_float64(self, width, normalized):
        config = dataclasses.replace(TINY, experts_per_token=width, norm_topk_prob=normalized)
        rng = np.random.default_rng(4)
        x, router = rng.standard_normal((20, 12)), rng.standard_normal((5, 12))
        x, router = x.astype(np.float32), router.astype(np.float32)
        found = route(jnp.asarray(x), jnp.asarray(router), config)
        probabilities, weights, ids = numpy_model.route(
            x.astype(np.float64), router.astype(np.float64), config
        )
        assert_near(found.probabilities, probabilities)
        assert_near(found.weights, weights)
        np.testing.assert_array_equal(found.ids, ids)
        self.assertEqual(found.ids.dtype, jnp.int32)

    def test_softmax_is_float32_whatever_the_input(self):
        x = jnp.ones((1, 12), jnp.bfloat16)
        router = jnp.asarray(np.diag(np.arange(12))[:5] * 0.01, jnp.bfloat16)
        found = route(x, router, TINY)
        expected, _, _ = numpy_model.route(
            np.ones((1, 12)), np.asarray(router).astype(np.float64), TINY
        )
        assert_near(found.probabilities, expected)

    def test_of_equals_the_lower_id_comes_first(self):
        found = route(jnp.ones((1, 12)), jnp.zeros((5, 12)), TINY)
        np.testing.assert_array_equal(found.ids, [[0, 1]])
        np.testing.assert_allclose(found.weights, [[0.5, 0.5]])


FORMS = {"row": "row", "block": "block_in_cache", "grouped": "grouped_kernel"}


def run_experts(
    impl: str,
    x: jax.Array,
    routing: moe.Routing,
    gate_up: jax.Array,
    down: jax.Array,
    layer: int,
    mask: jax.Array,
) -> jax.Array:
    """One of the ways, as `SparseMoe` calls it."""
    if impl == "dense":
        return moe._experts_dense(x, routing, gate_up, down, layer)
    # Grouped takes plain weights of half precision; float32 is refused.
    stacks, form = expert_products.ExpertStacks(gate_up, down, layer), FORMS[impl]
    return moe._experts_in_pairs(x, routing, stacks, mask, form, "reference")


RUN = jax.jit(run_experts, static_argnames=("impl", "layer"))
WAYS = ("dense", "row", "block", "grouped")
NUM_TOKENS, NUM_EXPERTS, LAYER = 9, 5, 1  # 9 tokens of 2 experts: no block of 8 divides 18
TOKEN = np.arange(NUM_TOKENS)
ROUTINGS = {
    "drawn": np.random.default_rng(5).permuted(np.tile(np.arange(5), (9, 1)), axis=1)[:, :2],
    "one_expert_owns_all_rows": np.full((NUM_TOKENS, 2), 3),
    "the_last_expert_owns_half": np.stack([np.full(NUM_TOKENS, 4), TOKEN % 4], axis=1),
    "the_first_expert_is_empty": np.stack([np.full(NUM_TOKENS, 1), 2 + TOKEN % 3], axis=1),
}


class ExpertsTest(HostTestCase):
    def _operands(self, ids: np.ndarray, dtype: str = "float32") -> tuple[Any, ...]:
        rng = np.random.default_rng(6)
        ids = np.asarray(ids)
        x = jnp.asarray(rng.standard_normal((len(ids), 24)), dtype)
        weights = rng.dirichlet(np.ones(ids.shape[1]), len(ids)).astype(np.float32)
        routing = moe.Routing(
            jnp.zeros((len(ids), NUM_EXPERTS), jnp.float32),
            jnp.asarray(weights),
            jnp.asarray(ids, jnp.int32),
        )
        gate_up = jnp.asarray(0.3 * rng.standard_normal((2, NUM_EXPERTS, 32, 24)), dtype)
        down = jnp.asarray(0.3 * rng.standard_normal((2, NUM_EXPERTS, 24, 16)), dtype)
        return x, routing, gate_up, down

    def _expected(self, x, routing, gate_up, down) -> np.ndarray:
        def wide(array: jax.Array) -> np.ndarray:
            return np.asarray(array).astype(np.float64)

        return numpy_model.experts(
            wide(x), np.asarray(routing.ids), wide(routing.weights),
            wide(gate_up[LAYER]), wide(down[LAYER]),
        )  # fmt: skip

    @parameterized.product(impl=WAYS, name=sorted(ROUTINGS), dtype=("float32", "bfloat16"))
    def test_every_way_equals_float64(self, impl, name, dtype):
        operands = self._operands(ROUTINGS[name], dtype)
        if (impl, dtype) == ("grouped", "float32"):
            with self.assertRaisesRegex(ValueError, "it is float32, not bfloat16"):
                RUN(impl, *operands, layer=LAYER, mask=jnp.ones(NUM_TOKENS, bool))
            return
        found = RUN(impl, *operands, layer=LAYER, mask=jnp.ones(NUM_TOKENS, bool))
        assert_near(found, self._expected(*operands), dtype)

    def test_padding_yields_zero_and_touches_nothing(self):
        x, routing, gate_up, down = self._operands(ROUTINGS["drawn"])
        expected = self._expected(x, routing, gate_up, down)
        mask = np.arange(NUM_TOKENS) % 3 != 0  # the last token is padding too
        x = jnp.where(jnp.asarray(mask)[:, None], x, jnp.nan)
        found = RUN("block", x, routing, gate_up, down, layer=LAYER, mask=jnp.asarray(mask))
        assert_near(found, np.where(mask[:, None], expected, 0))
        nothing = RUN(
            "block", x, routing, gate_up, down, layer=LAYER, mask=jnp.zeros(NUM_TOKENS, bool)
        )
        np.testing.assert_array_equal(nothing, 0)

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(
        ids=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=9, max_size=9),
        mask=st.lists(st.booleans(), min_size=9, max_size=9),
    )
    @example(ids=[(e % 5, e % 5) for e in range(9)], mask=[True] * 9)
    def test_blocks_serve_any_assignment(self, ids, mask):
        operands = self._operands(np.asarray(ids))
        found = RUN("block", *operands, layer=LAYER, mask=jnp.asarray(mask))
        expected = np.where(np.asarray(mask)[:, None], self._expected(*operands), 0)
        assert_near(found, expected)

    @slow.repeats()
    @parameterized.parameters(1, 3, 150)
    def test_blocks_of_other_sizes(self, num_tokens):
        ids = np.random.default_rng(7).integers(0, NUM_EXPERTS, (num_tokens, 2))
        operands = self._operands(ids)
        found = RUN("block", *operands, layer=LAYER, mask=jnp.ones(num_tokens, bool))
        assert_near(found, self._expected(*operands))

    @parameterized.parameters((1, 8, 8), (64, 8, 8), (72, 8, 16), (4096, 8, 512), (10**6, 8, 512))
    def test_block_size(self, num_rows, num_experts, expected):
        self.assertEqual(expert_products.block_size(num_rows, num_experts), expected)
