"""The attention that tokens receive, by blocks, against all weights at once in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moejax.policies.dymoe import attention_received, importance_nbytes
from tests import slow


def exact_attention(q, k, positions, active, window, sinks=-np.inf):
    """float64 weights [B, H, T, S] of the queries that are no padding, and who sees whom.

    `sinks` [H] join each head's softmax.
    """
    num_keys, group = k.shape[1], q.shape[2] // k.shape[2]
    keys = np.repeat(np.float64(k), group, axis=2)
    scores = np.einsum("bthc,bshc->bhts", np.float64(q), keys) / math.sqrt(q.shape[3])
    key = np.arange(num_keys)
    sees = (key <= positions[..., None]) & active[..., None]
    if window:
        sees &= key > positions[..., None] - window
    powers = np.exp(scores - scores.max()) * sees[:, None]
    total = powers.sum(axis=-1) + np.exp(np.float64(sinks) - scores.max()).reshape(1, -1, 1)
    return powers / np.maximum(total, 1e-300)[..., None], sees


class AttentionTest(parameterized.TestCase):
    @slow.repeats()
    @parameterized.product(
        block=(1, 3, None), aggregation=("mean", "sum", "last_query"), window=(None, 4)
    )
    def test_equation_1_by_blocks(self, block, aggregation, window):
        rng = np.random.default_rng(8)
        q = rng.standard_normal((2, 7, 4, 8)).astype(np.float32)
        k = rng.standard_normal((2, 9, 2, 8)).astype(np.float32)
        positions = np.stack([np.arange(7), np.arange(7) + 2]).astype(np.int32)
        active = np.arange(7)[None] < np.array([[5], [7]])
        weights, sees = exact_attention(q, k, positions, active, window)
        per_head = weights.sum(axis=2)  # [B, H, S]
        if aggregation == "last_query":
            per_head = np.stack([weights[0, :, 4], weights[1, :, 6]])
        if aggregation == "mean":
            per_head = per_head / np.maximum(sees.sum(axis=1), 1)[:, None]
        found = attention_received(
            q, k, positions, active, aggregation=aggregation, sliding_window=window, block=block
        )
        np.testing.assert_allclose(found, per_head.mean(axis=1), rtol=1e-5, atol=1e-7)
        if aggregation == "sum":  # each active query gives away 1
            np.testing.assert_allclose(found.sum(axis=1), [5, 7], rtol=1e-5)

    def test_sinks_take_attention_that_no_token_receives(self):
        rng = np.random.default_rng(10)
        q = rng.standard_normal((2, 6, 4, 8)).astype(np.float32)
        k = rng.standard_normal((2, 6, 2, 8)).astype(np.float32)
        sinks = rng.normal(0, 3, 4).astype(np.float32)
        positions = np.tile(np.arange(6, dtype=np.int32), (2, 1))
        active = np.arange(6)[None] < np.array([[4], [6]])
        weights, _ = exact_attention(q, k, positions, active, 3, sinks)
        expected = weights.sum(axis=2).mean(axis=1)
        found = attention_received(
            q, k, positions, active, aggregation="sum", sliding_window=3, sinks=sinks, block=4
        )
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
        self.assertLess(found.sum(), 0.9 * active.sum())

    def test_a_long_prompt_never_has_all_its_weights(self):
        q = jax.ShapeDtypeStruct((1, 8192, 16, 64), jnp.bfloat16)
        k = jax.ShapeDtypeStruct((1, 8192, 4, 64), jnp.bfloat16)
        positions = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
        active = jax.ShapeDtypeStruct((1, 8192), jnp.bool_)
        memory = jax.jit(attention_received).lower(q, k, positions, active).compile()
        whole = 4 * 16 * 8192**2
        self.assertLess(memory.memory_analysis().temp_size_in_bytes, whole / 8)

    # The last: chunks shorter than the cache, a block that does not divide them.
    @parameterized.parameters(
        (1, 256, 256, 8, 2), (4, 64, 256, 8, 2), (1, 64, 64, 1, 1), (1, 16, 512, 4, 1),
        (2, 1024, 4096, 32, 4), (1, 200, 4096, 64, 4),
    )  # fmt: skip
    def test_its_bytes_are_bounded(self, batch, length, num_keys, heads, kv_heads):
        q = jax.ShapeDtypeStruct((batch, length, heads, 32), jnp.float32)
        k = jax.ShapeDtypeStruct((batch, kv_heads, num_keys, 32), jnp.float32)
        positions = jax.ShapeDtypeStruct((batch, length), jnp.int32)
        active = jax.ShapeDtypeStruct((batch, length), jnp.bool_)

        def of_cache(q, k, positions, active):
            return attention_received(q, k.swapaxes(1, 2), positions, active)

        program = jax.jit(of_cache).lower(q, k, positions, active).compile()
        found = program.memory_analysis().temp_size_in_bytes
        bound = importance_nbytes(
            batch=batch, length=length, num_keys=num_keys, num_heads=heads,
            num_kv_heads=kv_heads, head_dim=32, itemsize=4, platform="cpu",
        )  # fmt: skip
        self.assertLessEqual(found, bound)
        self.assertLess(bound, 2 * found)
