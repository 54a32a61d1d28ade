"""Truncated decompositions against float64 numpy and the bound of Eckart and Young."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moejax.quantization.low_rank import orthonormal, truncated_svd


def matrices(shape, decay, seed=0):
    """Random matrices [..., N, K] in float32 whose singular values fall as 1 / i^decay."""
    rng = np.random.default_rng(seed)
    *lead, n, k = shape
    rank = min(n, k)
    u = np.linalg.qr(rng.normal(size=(*lead, n, rank)))[0]
    v = np.linalg.qr(rng.normal(size=(*lead, k, rank)))[0]
    sigma = 1 / np.arange(1, rank + 1) ** decay
    return ((u * sigma) @ np.swapaxes(v, -1, -2)).astype(np.float32)


def tails(matrix, rank):
    """The least possible error of a rank, in float64 (Eckart and Young)."""
    sigma = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    return np.sqrt(np.sum(sigma[..., rank:] ** 2, axis=-1))


def error(matrix, u, v):
    product = np.asarray(u, np.float64) @ np.asarray(v, np.float64)
    return np.sqrt(np.sum((matrix - product) ** 2, axis=(-2, -1)))


class LowRankTest(parameterized.TestCase):
    @parameterized.parameters((1, 0), (1, 5), (1, 48), (0, 12))
    def test_exact_reaches_the_bound(self, decay, rank):
        matrix = matrices((2, 48, 80), decay)
        u, v = truncated_svd(jnp.asarray(matrix), rank)
        self.assertEqual((u.shape, v.shape), ((2, 48, rank), (2, rank, 80)))
        np.testing.assert_allclose(error(matrix, u, v), tails(matrix, rank), rtol=1e-4, atol=1e-5)

    @parameterized.parameters(
        (0.1, (64, 200), 1.02), (1, (3, 200, 64), 1.01), (1.5, (64, 200), 1.01)
    )
    def test_randomized_is_near_the_bound(self, decay, shape, share):
        matrix = matrices(shape, decay)
        u, v = truncated_svd(jnp.asarray(matrix), 16, "randomized")
        bound = tails(matrix, 16)
        self.assertLessEqual(np.max(error(matrix, u, v) / (share * bound + 1e-6)), 1)
        self.assertGreaterEqual(np.min(error(matrix, u, v) / (bound - 1e-6)), 1)

    @parameterized.parameters("exact", "randomized")
    def test_singular_values_are_split_evenly_and_descend(self, method):
        matrix = matrices((40, 60), 1)
        u, v = truncated_svd(jnp.asarray(matrix), 6, method)
        sigma = 1 / np.arange(1, 7)
        np.testing.assert_allclose(np.linalg.norm(u, axis=0), np.sqrt(sigma), rtol=1e-3)
        np.testing.assert_allclose(np.linalg.norm(v, axis=1), np.sqrt(sigma), rtol=1e-3)
        np.testing.assert_allclose(u.T @ u, np.diag(sigma), atol=1e-4)

    def test_an_earlier_v_is_a_better_start(self):
        matrix = matrices((120, 160), 0.1)
        cold = truncated_svd(jnp.asarray(matrix), 12, "randomized")
        warm = cold
        for _ in range(4):
            warm = truncated_svd(jnp.asarray(matrix), 12, "randomized", start=warm[1])
        bound = tails(matrix, 12)
        self.assertLess(error(matrix, *warm) - bound, 0.5 * (error(matrix, *cold) - bound))

    def test_rows_of_zeros_in_a_start_are_replaced(self):
        matrix = matrices((40, 60), 1)
        start = jnp.zeros((5, 60))
        u, v = truncated_svd(jnp.asarray(matrix), 5, "randomized", start=start)
        self.assertLess(error(matrix, u, v), 1.02 * tails(matrix, 5))

    @parameterized.parameters("exact", "randomized")
    def test_ranks_that_a_matrix_does_not_have(self, method):
        matrix = np.zeros((3, 32, 48), np.float32)
        matrix[1, 3, 5] = 2.0
        matrix[2] = matrices((32, 48), 0, seed=1) @ np.diag(np.arange(48) < 4).astype(np.float32)
        u, v = truncated_svd(jnp.asarray(matrix), 8, method)
        self.assertTrue(np.all(np.isfinite(u)) and np.all(np.isfinite(v)))
        np.testing.assert_allclose(error(matrix, u, v), 0, atol=2e-5)
        np.testing.assert_array_equal(np.asarray(u[0] @ v[0]), 0)

    def test_orthonormal_columns(self):
        tall = np.random.default_rng(0).normal(size=(2, 300, 20)).astype(np.float32)
        q = np.asarray(orthonormal(orthonormal(jnp.asarray(tall))), np.float64)
        np.testing.assert_allclose(
            np.swapaxes(q, -1, -2) @ q, np.broadcast_to(np.eye(20), (2, 20, 20)), atol=3e-5
        )
        # Equal span: projecting changes nothing.
        np.testing.assert_allclose(q @ (np.swapaxes(q, -1, -2) @ tall), tall, atol=1e-3)

    def test_vmap_is_loop(self):
        matrix = jnp.asarray(matrices((3, 40, 60), 1))
        key = jax.random.key(5)
        whole = truncated_svd(matrix, 6, "randomized", key)
        mapped = jax.vmap(lambda m: truncated_svd(m, 6, "randomized", key))(matrix)
        one = truncated_svd(matrix[2], 6, "randomized", key)
        for a, b, c in zip(whole, mapped, one, strict=True):
            np.testing.assert_allclose(np.abs(a), np.abs(b), atol=1e-3)
            np.testing.assert_allclose(np.abs(a[2]), np.abs(c), atol=1e-3)

    def test_what_cannot_be_is_named(self):
        with self.assertRaisesRegex(ValueError, r"max_rank 9 is not in 0\.\.8"):
            truncated_svd(jnp.zeros((8, 20)), 9)
        with self.assertRaisesRegex(ValueError, "method 'qr' is neither"):
            truncated_svd(jnp.zeros((8, 20)), 2, "qr")


if __name__ == "__main__":
    absltest.main()
