"""Truncated decompositions against float64 numpy and the bound of Eckart and Young."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.quantization.milo import _balanced, _orthonormal, _sketch, _subspace_svd


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


def truncated(matrix, rank):
    """U [..., N, rank] and V [..., rank, K] from random rows in two iterations."""
    return _balanced(*_subspace_svd(jnp.asarray(matrix), _sketch(matrix, rank), 2), rank)


class LowRankTest(parameterized.TestCase):
    @parameterized.parameters(
        (0.1, (64, 200), 1.02), (1, (3, 200, 64), 1.01), (1.5, (64, 200), 1.01)
    )
    def test_near_the_bound(self, decay, shape, share):
        matrix = matrices(shape, decay)
        u, v = truncated(matrix, 16)
        bound = tails(matrix, 16)
        self.assertLessEqual(np.max(error(matrix, u, v) / (share * bound + 1e-6)), 1)
        self.assertGreaterEqual(np.min(error(matrix, u, v) / (bound - 1e-6)), 1)

    def test_singular_values_are_split_evenly_and_descend(self):
        u, v = truncated(matrices((40, 60), 1), 6)
        sigma = 1 / np.arange(1, 7)
        np.testing.assert_allclose(np.linalg.norm(u, axis=0), np.sqrt(sigma), rtol=1e-3)
        np.testing.assert_allclose(np.linalg.norm(v, axis=1), np.sqrt(sigma), rtol=1e-3)
        np.testing.assert_allclose(u.T @ u, np.diag(sigma), atol=1e-4)

    def test_an_earlier_v_is_a_better_start(self):
        matrix = matrices((120, 160), 0.1)
        basis = _sketch(matrix, 12)
        for _ in range(5):
            columns, basis = _subspace_svd(jnp.asarray(matrix), basis, 1)
        warm, cold = _balanced(columns, basis, 12), truncated(matrix, 12)
        bound = tails(matrix, 12)
        self.assertLess(error(matrix, *warm) - bound, 0.5 * (error(matrix, *cold) - bound))

    def test_ranks_that_a_matrix_does_not_have(self):
        matrix = np.zeros((3, 32, 48), np.float32)
        matrix[1, 3, 5] = 2.0
        matrix[2] = matrices((32, 48), 0, seed=1) @ np.diag(np.arange(48) < 4).astype(np.float32)
        u, v = truncated(matrix, 8)
        self.assertTrue(np.all(np.isfinite(u)) and np.all(np.isfinite(v)))
        np.testing.assert_allclose(error(matrix, u, v), 0, atol=2e-5)
        np.testing.assert_array_equal(np.asarray(u[0] @ v[0]), 0)

    def test_orthonormal_columns(self):
        tall = np.random.default_rng(0).normal(size=(2, 300, 20)).astype(np.float32)
        q = np.asarray(_orthonormal(_orthonormal(jnp.asarray(tall))), np.float64)
        np.testing.assert_allclose(
            np.swapaxes(q, -1, -2) @ q, np.broadcast_to(np.eye(20), (2, 20, 20)), atol=3e-5
        )
        # Equal span: projecting changes nothing.
        np.testing.assert_allclose(q @ (np.swapaxes(q, -1, -2) @ tall), tall, atol=1e-3)

    @pytest.mark.slow
    def test_vmap_is_loop(self):
        matrix = jnp.asarray(matrices((3, 40, 60), 1))
        of_rank_6 = functools.partial(truncated, rank=6)
        whole, mapped, one = of_rank_6(matrix), jax.vmap(of_rank_6)(matrix), of_rank_6(matrix[2])
        for a, b, c in zip(whole, mapped, one, strict=True):
            np.testing.assert_allclose(np.abs(a), np.abs(b), atol=1e-3)
            np.testing.assert_allclose(np.abs(a[2]), np.abs(c), atol=1e-3)
