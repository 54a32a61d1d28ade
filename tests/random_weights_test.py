"""Random weights of a benchmark's shapes: how wide they are, and the bytes that a step reads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.benchmarking.measuring import floor_bytes
from moejax.benchmarking.random_weights import Packing, expert_terms_nbytes, random_weights
from moejax.models.config import weight_shapes
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.models.shapes import SHAPES
from moejax.weights.qtensor import QTensor, dense
from tests.host_test_case import HostTestCase
from tests.numpy_model import TINY
from tests.packed_weights import num_bytes

CONFIG = dataclasses.replace(
    TINY, model_dim=128, expert_dim=64, mlp_dim=64, num_heads=4, num_kv_heads=2, head_dim=32
)


class WeightsTest(HostTestCase):
    @parameterized.parameters(
        *((2, zero_kind) for zero_kind in ("float", "integer", "symmetric")),
        (3, "float"), (3, "symmetric"), (4, "integer"), (4, "symmetric"),
        (8, "float"), (8, "integer"), (16, "float"),
    )  # fmt: skip
    @pytest.mark.slow
    def test_they_are_as_wide_as_their_inputs_ask(self, bits, zero_kind):
        packing = Packing(
            bits=bits, group_size=32, zero_kind=zero_kind, attention_bits=bits, head_bits=bits
        )
        weights = random_weights(CONFIG, packing, jax.devices("cpu")[0])
        for name, shape in weight_shapes(CONFIG).items():
            leaf = weights[name]
            self.assertEqual(leaf.shape, shape)
            is_packed = bits != 16 and name.endswith(("gate_up", "down", "proj", "head"))
            self.assertEqual(isinstance(leaf, QTensor), is_packed, name)
            if name.endswith("norm"):
                continue
            values = np.asarray(dense(leaf, jnp.float32)).astype(np.float64)
            expected = 1.0 if name == "embed" else shape[-1] ** -0.5
            # An asymmetric grid has its zero half a code off the middle: 3 of 2.25 at two bits.
            spread = np.sqrt(np.mean(np.square(values)))
            self.assertBetween(spread / expected, 0.85, 1.3, name)
            if leaf.ndim == 3:
                self.assertFalse(np.array_equal(values[0], values[-1]) and len(values) > 1, name)

    @pytest.mark.slow
    def test_bytes_of_packed_weights_are_those_of_the_arrays(self):
        packing = Packing(bits=3, group_size=32, attention_bits=4)
        weights = random_weights(CONFIG, packing, jax.devices("cpu")[0])
        total = sum(map(num_bytes, weights.values())) - num_bytes(weights["embed"])
        experts = num_bytes(weights["moe.gate_up"]) + num_bytes(weights["moe.down"])
        sizes = {name: num_bytes(leaf) for name, leaf in weights.items()}
        floor = functools.partial(floor_bytes, CONFIG, sizes, itemsize=2)
        every = floor(experts_nbytes=experts, positions=0, batch=1)
        self.assertEqual(every, total)
        two = floor(experts_nbytes=experts / 8, positions=0, batch=1)
        self.assertEqual(two, total - experts + experts / 8)
        cache = floor(experts_nbytes=experts / 8, positions=15, batch=3) - two
        self.assertEqual(
            cache, 3 * 5 * 2 * 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim
        )

    RANKS = Packing(bits=3, attention_bits=4, group_size=32, dense_rank=96, expert_rank=8)

    def test_compensators_are_of_every_packed_matrix(self):
        weights = jax.eval_shape(lambda: random_weights(CONFIG, self.RANKS, jax.devices("cpu")[0]))
        rows = {
            "attention.qkv_proj": [(0, 128, 96), (128, 64, 64), (192, 64, 64)],
            "attention.o_proj": [(0, 128, 96)],
            "mlp.gate_up": [(0, 64, 64), (64, 64, 64)],
            "mlp.down": [(0, 128, 64)],
            "moe.gate_up": [(0, 64, 8), (64, 64, 8)],
            "moe.down": [(0, 128, 8)],
        }
        for name, leaf in weights.items():
            terms = leaf.terms if isinstance(leaf, QTensor) else ()
            found = [(t.first_row, t.num_rows, t.max_rank) for t in terms]
            self.assertEqual(found, rows.get(name, []), name)
            for term in terms:
                self.assertEqual(term.v.shape[0], term.start.size * term.max_rank)
        terms = jax.tree.leaves([weights[name].compensators for name in EXPERT_LEAVES])
        self.assertEqual(num_bytes(terms), expert_terms_nbytes(CONFIG, self.RANKS))

    def test_compensators_have_no_output_in_common(self):
        """One that all inputs share would send all tokens to the same experts."""
        leaf = random_weights(CONFIG, self.RANKS, jax.devices("cpu")[0])["attention.o_proj"]
        (terms,) = leaf.terms
        u, v = (
            np.asarray(of.dequantize(jnp.float32))[: terms.max_rank] for of in (terms.u, terms.v)
        )
        of_ones = np.linalg.norm(u.T @ v @ np.full(v.shape[1], v.shape[1] ** -0.5))
        self.assertBetween(of_ones, 0, 3 * (terms.max_rank / u.shape[1]) ** 0.5)

    def test_compensators_of_experts_that_are_published_together(self):
        found = expert_terms_nbytes(SHAPES["gpt-oss-20b"], Packing(bits=3, expert_rank=16))
        codes = 24 * 32 * 16 * 3 * (2880 + 2880) * 3 / 8  # in INT3, beside scales
        self.assertBetween(found / codes, 1, 1.1)
