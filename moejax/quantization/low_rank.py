"""Truncated singular value decompositions by subspace iteration.

columns, rows = subspace_svd(matrix, sketch(matrix, rank), 3)
u, v = balanced(columns, rows, rank)
... = subspace_svd(similar_matrix, rows, 1)
"""

import functools

import jax
import jax.numpy as jnp

OVERSAMPLE = 8  # columns of the sketch beyond the rank that is wanted


def sketch(matrix: jax.Array, max_rank: int) -> jax.Array:
    """Random rows of unit length that `subspace_svd` of a matrix [..., N, K] starts from.

    float32[..., min(max_rank + OVERSAMPLE, N, K), K], the same in every call.
    """
    *lead, num_rows, num_inputs = matrix.shape
    width = min(max_rank + OVERSAMPLE, num_rows, num_inputs)
    rows = jax.random.normal(jax.random.key(0), (width, num_inputs))
    rows = jnp.broadcast_to(rows, (*lead, width, num_inputs))
    return rows / _norms(rows)


def subspace_svd(
    matrix: jax.Array, basis: jax.Array, iterations: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Approximate leading singular triplets (Halko, Martinsson and Tropp 2011, algorithm 4.4).

    Args:
      matrix: float32[..., N, K].
      basis: float32[..., R, K], rows of `sketch` or near the leading right singular vectors.
      iterations: int32, of A^T A on the basis before the final projection.

    Returns:
      float32[..., N, R] with orthonormal columns, and float32[..., R, K], rows orthogonal, as long
      as their singular values, which descend. Their product is the projection of the matrix on the
      columns. Directions that the matrix does not have are zero; values below a thousandth of the
      largest drown in float32.
    """
    matmul = functools.partial(jnp.matmul, precision="highest")  # TF32 loses the smaller values

    def iterate(_: jax.Array, basis: jax.Array) -> jax.Array:
        left = _orthonormal(matmul(matrix, _turned(basis)))
        return _turned(_orthonormal(_turned(matmul(_turned(left), matrix))))

    basis = jax.lax.fori_loop(0, iterations, iterate, basis)
    # The second pass mends what the first leaves of a badly conditioned product.
    left = _orthonormal(_orthonormal(matmul(matrix, _turned(basis))))
    right = matmul(_turned(left), matrix)
    _, rotation = jnp.linalg.eigh(matmul(right, _turned(right)))
    rotation = rotation[..., ::-1]
    return matmul(left, rotation), matmul(_turned(rotation), right)


def balanced(u: jax.Array, v: jax.Array, max_rank: int) -> tuple[jax.Array, jax.Array]:
    """Leading components of `subspace_svd`, singular values split evenly (MiLo eq. 12)."""
    u, v = u[..., :max_rank], v[..., :max_rank, :]
    sigma = _norms(v)
    root = jnp.sqrt(sigma)
    v = v / jnp.where(sigma > 0, root, 1.0)
    return u * _turned(root), v


def _orthonormal(columns: jax.Array) -> jax.Array:
    """Orthonormalises columns float32[..., N, R], unless they are nearly dependent (Cholesky QR).

    A shift keeps dependent columns from failing: they come back shorter, zeros as zeros
    (Fukaya et al. 2020). QR of LAPACK and cuSOLVER is ten times slower for tall matrices.
    """
    gram = jnp.matmul(_turned(columns), columns, precision="highest")
    trace = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
    shift = trace * 1e-6 + jnp.finfo(jnp.float32).tiny
    eye = jnp.eye(gram.shape[-1], dtype=jnp.float32).reshape(
        (1,) * (gram.ndim - 2) + gram.shape[-2:]
    )
    factor = jnp.linalg.cholesky(gram + shift * eye, symmetrize_input=False)
    # The small inverse and a product: solving for the tall columns is slow on CPU and GPU alike.
    eye = jnp.broadcast_to(eye, factor.shape)
    inverse = jax.lax.linalg.triangular_solve(factor, eye, left_side=True, lower=True)
    return jnp.matmul(columns, _turned(inverse), precision="highest")


def _turned(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _norms(rows: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(rows), axis=-1, keepdims=True))
