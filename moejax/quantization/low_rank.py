"""Truncated singular value decompositions of batches of matrices."""

import functools

import jax
import jax.numpy as jnp

OVERSAMPLE = 8  # columns of the sketch beyond the rank that is wanted
POWER_ITERATIONS = 2  # from a random start


@functools.partial(jax.jit, static_argnames=("max_rank", "method"))
def truncated_svd(
    matrix: jax.Array,
    max_rank: int,
    method: str = "exact",
    key: jax.Array | None = None,
    start: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Best product U V of a rank, singular values split evenly (MiLo eq. 11-12).

    Args:
      matrix: float32[..., N, K].
      max_rank: r, 0..min(N, K).
      method: "exact" by LAPACK or cuSOLVER; "randomized" by subspace iteration (Halko, Martinsson
        and Tropp 2011, algorithm 4.4), some products with the matrix and a decomposition of r + 8
        squared. Values below a thousandth of the largest drown in float32.
      key: for the random start; None gives equal numbers in every call.
      start: [..., R, K], rows whose span is near that of V, such as an earlier V: one iteration
        suffices. Only "randomized" uses it.

    Returns:
      U float32[..., N, r] and V float32[..., r, K], components in descending order.

    Raises:
      ValueError: an unknown method, or a rank that the matrix cannot have.
    """
    smallest = min(matrix.shape[-2:])
    if not 0 <= max_rank <= smallest:
        raise ValueError(f"max_rank {max_rank} is not in 0..{smallest}, the matrix's ranks")
    if method == "exact":
        u, sigma, v = jnp.linalg.svd(matrix, full_matrices=False)
        root = jnp.sqrt(sigma[..., :max_rank])
        return u[..., :max_rank] * root[..., None, :], root[..., None] * v[..., :max_rank, :]
    if method != "randomized":
        raise ValueError(f"method {method!r} is neither exact nor randomized")
    basis = sketch(matrix, max_rank, key, start)
    u, v = subspace_svd(matrix, basis, POWER_ITERATIONS if start is None else 1)
    return balanced(u, v, max_rank)


def sketch(
    matrix: jax.Array, max_rank: int, key: jax.Array | None = None, start: jax.Array | None = None
) -> jax.Array:
    """Start rows of `subspace_svd`: those of `start`, random ones in place of zeros.

    Args:
      matrix: float32[..., N, K], for its shape.
      max_rank: of the wanted approximation.
      key: a typed PRNG key.
      start: [..., R, K] or None.

    Returns:
      float32[..., min(max_rank + OVERSAMPLE, N, K), K] of unit length.
    """
    *lead, num_rows, num_inputs = matrix.shape
    width = min(max_rank + OVERSAMPLE, num_rows, num_inputs)
    key = jax.random.key(0) if key is None else key
    rows = jnp.broadcast_to(jax.random.normal(key, (width, num_inputs)), (*lead, width, num_inputs))
    rows = rows / _norms(rows)
    if start is not None:
        given = start[..., :width, :].astype(jnp.float32)
        norms = _norms(given)
        some = norms > 0
        given = given / jnp.where(some, norms, 1.0)
        count = given.shape[-2]
        given = jnp.where(some, given, rows[..., :count, :])
        rows = jnp.concatenate([given, rows[..., count:, :]], axis=-2)
    return rows


def subspace_svd(
    matrix: jax.Array, basis: jax.Array, iterations: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Approximate leading singular triplets by subspace iteration.

    Args:
      matrix: float32[..., N, K].
      basis: float32[..., R, K], the rows of `sketch`; R at most N and K.
      iterations: int32, of A^T A on the basis before the final projection.

    Returns:
      float32[..., N, R] with orthonormal columns, and float32[..., R, K], rows orthogonal, as long
      as their singular values, which descend. Their product is the projection of the matrix on the
      columns. Directions that the matrix does not have are zero.
    """
    matmul = functools.partial(jnp.matmul, precision="highest")  # TF32 loses the smaller values

    def iterate(_: jax.Array, basis: jax.Array) -> jax.Array:
        left = orthonormal(matmul(matrix, _turned(basis)))
        return _turned(orthonormal(_turned(matmul(_turned(left), matrix))))

    basis = jax.lax.fori_loop(0, iterations, iterate, basis)
    # The second pass mends what the first leaves of a badly conditioned product.
    left = orthonormal(orthonormal(matmul(matrix, _turned(basis))))
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


def orthonormal(columns: jax.Array) -> jax.Array:
    """Orthonormalises columns, unless they are nearly dependent (Cholesky QR).

    A shift keeps dependent columns from failing: they come back shorter, zeros as zeros
    (Fukaya et al. 2020). QR of LAPACK and cuSOLVER is ten times slower for tall matrices.

    Args:
      columns: float32[..., N, R].
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
