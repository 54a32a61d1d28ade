"""MiLo and milo+: Algorithm 1 against numpy, its stop, ranks, the order of errors."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  safetensors reads bfloat16 with it
import numpy as np
import pytest
import torch
from absl.testing import parameterized

from moejax.quantization import milo as milo_module
from moejax.quantization.factors import factor_grid, quantize_factor, zero_factor
from moejax.quantization.grid import Grid, dequantize
from moejax.quantization.hqq import hqq
from moejax.quantization.milo import MiloSettings, milo
from moejax.quantization.rtn import rtn
from tests.numpy_model import relative_error

GRID = Grid(bits=3, group_size=64, zero_kind="float")


def weights_of(shape, seed=0):
    rng = np.random.default_rng(seed)
    columns = np.exp(0.5 * rng.normal(size=shape[-1]))
    return jnp.asarray((0.03 * rng.normal(size=shape) * columns).astype(np.float32))


def approximation(result):
    return dequantize(result.codes, GRID) + result.factors[-1].u @ result.factors[-1].v


def errors_of(weights, result):
    return np.asarray(relative_error(weights, approximation(result)))


def folded(program, known):
    """Minima of groups, outside of loops, that depend on no variable of `known`; extends it."""
    found = []
    for eqn in program.eqns:
        depends = [v in known for v in eqn.invars if not hasattr(v, "val")]
        if eqn.primitive.name == "jit":
            inner = eqn.params["jaxpr"].jaxpr
            pairs = zip(inner.invars, eqn.invars, strict=True)
            given = {own for own, v in pairs if not hasattr(v, "val") and v in known}
            found += folded(inner, given)
            pairs = zip(eqn.outvars, inner.outvars, strict=True)
            known |= {v for v, own in pairs if not hasattr(own, "val") and own in given}
            continue
        if any(depends):
            known.update(eqn.outvars)
        elif eqn.primitive.name == "reduce_min":
            found.append(eqn)
    return found


# Programs are compiled once a shape and setting: tests share these.
PAPER, PLUS = MiloSettings(max_rank=4), MiloSettings(max_rank=4, base="least_squares", refit=True)
LOOSE = {  # a larger share than the paper's, so that small matrices stop at different passes
    kind: dataclasses.replace(settings, max_rank=6, max_passes=12, tolerance=3e-3)
    for kind, settings in (("paper", PAPER), ("plus", PLUS))
}


class MiloTest(parameterized.TestCase):
    def test_algorithm_1_by_hand(self):
        weights = weights_of((64, 192))

        def exact(matrix, basis, iterations):
            u, sigma, v = jnp.linalg.svd(matrix, full_matrices=False)
            size = len(basis)
            return u[:, :size], sigma[:size, None] * v[:size]

        with mock.patch.object(milo_module, "_subspace_svd", exact):
            settings = MiloSettings(max_rank=6, max_passes=5)
            got = milo(weights, GRID, settings, 6)
        product, wanted = np.zeros(weights.shape), []
        for _ in range(5):
            codes = hqq(jnp.asarray(np.asarray(weights) - product.astype(np.float32)), GRID)
            missed = np.asarray(weights, np.float64) - np.asarray(dequantize(codes, GRID))
            u, sigma, v = np.linalg.svd(missed, full_matrices=False)
            product = (u[:, :6] * sigma[:6]) @ v[:6]
            wanted.append(np.linalg.norm(missed - product))
        np.testing.assert_allclose(got.errors, wanted, rtol=2e-3)
        np.testing.assert_allclose(
            errors_of(weights, got) * np.linalg.norm(weights), min(wanted), rtol=2e-3
        )

    @pytest.mark.slow
    def test_equals_the_recipe_of_its_authors(self):
        # hqq (shown equal to the library elsewhere) and torch.svd_lowrank, 20 passes. The order
        # of single small matrices is chance: exact decompositions differ by 1 % too.
        weights = jnp.stack([weights_of((64, 256), seed) for seed in range(4)])
        got = milo(weights, GRID, PAPER, 4)
        product = np.zeros(weights.shape, np.float32)
        torch.manual_seed(0)
        for _ in range(20):
            codes = hqq(weights - jnp.asarray(product), GRID)
            missed = np.asarray(weights - dequantize(codes, GRID))
            parts = [torch.svd_lowrank(torch.tensor(m), q=4, niter=2) for m in missed]
            product = np.stack([((u * sigma) @ v.T).numpy() for u, sigma, v in parts])
        norms = np.linalg.norm(np.asarray(weights), axis=(-2, -1))
        theirs = np.linalg.norm(missed - product, axis=(-2, -1)) / norms
        np.testing.assert_allclose(errors_of(weights, got), theirs, rtol=0.02)
        np.testing.assert_allclose(errors_of(weights, got).mean(), theirs.mean(), rtol=0.008)
        # Figure 10: the error falls, but for small steps back.
        for errors, count in zip(np.asarray(got.errors), np.asarray(got.passes), strict=True):
            self.assertGreater(count, 7)
            steps = errors[1:count] / errors[: count - 1]
            self.assertLess(steps.max(), 1 + 4e-3)
            self.assertLess(errors[count - 1], 0.95 * errors[0])

    @parameterized.parameters(3, 8)
    def test_a_factor_of_zeros_is_known(self, bits):
        for shape in ((2, 4, 96), (3, 200)):
            got = zero_factor(shape, bits)
            wanted = quantize_factor(jnp.zeros(shape), bits, fitted=True)
            jax.tree.map(np.testing.assert_array_equal, got, wanted)
            assert [part.dtype for part in got] == [part.dtype for part in wanted]

    def test_no_quantizer_of_constants_is_left_for_xla_to_fold(self):
        weights = jnp.zeros((2, 64, 192))
        program = jax.make_jaxpr(lambda w: milo(w, GRID, PLUS, 4))(weights).jaxpr
        assert folded(program, set(program.invars)) == []

    @parameterized.parameters("paper", "plus")
    def test_stops_by_equation_15_and_returns_the_best_pass(self, kind):
        weights = jnp.stack([weights_of((48, 128), s) for s in range(4)])
        got = milo(weights, GRID, LOOSE[kind], 4)
        norms = np.linalg.norm(weights, axis=(-2, -1))
        passes = np.asarray(got.passes)
        self.assertGreater(len(set(passes.tolist())), 1)
        for errors, count, error, norm in zip(
            np.asarray(got.errors), passes, errors_of(weights, got), norms, strict=True
        ):
            means = {t: np.mean(errors[t - 2 : t + 1]) for t in range(2, count)}
            falls = [(means[t - 1] - means[t]) / means[t - 1] for t in range(3, count)]
            self.assertTrue(all(fall >= 3e-3 for fall in falls[:-1]))
            self.assertTrue(count == 12 or falls[-1] < 3e-3)
            self.assertTrue(np.all(errors[:count] > 0) and np.all(errors[count:] == 0))
            np.testing.assert_allclose(error * norm, errors[:count].min(), rtol=1e-4)

    @parameterized.parameters("paper", "plus")
    @pytest.mark.slow
    def test_ranks_are_data(self, kind):
        weights = jnp.stack([weights_of((48, 128), s) for s in range(4)])
        ranks = np.asarray([0, 3, 6, 1], np.int32)
        got = milo(weights, GRID, LOOSE[kind], jnp.asarray(ranks))
        used = np.arange(6)[None] < ranks[:, None]
        np.testing.assert_array_equal(np.any(np.asarray(got.factors[-1].u) != 0, axis=-2), used)
        np.testing.assert_array_equal(np.any(np.asarray(got.factors[-1].v) != 0, axis=-1), used)
        # A matrix does not see its neighbours' ranks.
        alike = milo(weights, GRID, LOOSE[kind], 3)
        np.testing.assert_allclose(alike.errors[1], got.errors[1], rtol=1e-4)
        base = dequantize(milo_module.BASES[LOOSE[kind].base](weights[0], GRID), GRID)
        alone = relative_error(weights[0], base)
        np.testing.assert_allclose(errors_of(weights, got)[0], alone, rtol=1e-5)
        if kind == "plus":  # the factors are what their codes stand for
            grids = factor_grid(3, 48), factor_grid(3, 128)
            codes = got.factors[-1]
            np.testing.assert_array_equal(
                dequantize(codes.u_codes, grids[0]), got.factors[-1].u.swapaxes(1, 2)
            )
            np.testing.assert_array_equal(dequantize(codes.v_codes, grids[1]), got.factors[-1].v)

    @parameterized.parameters("paper", "plus")
    @pytest.mark.slow
    def test_vmap_is_loop_and_zeros_are_safe(self, kind):
        weights = jnp.stack([weights_of((48, 128), s) for s in range(3)] + [jnp.zeros((48, 128))])
        whole = milo(weights, GRID, LOOSE[kind], 6)
        for leaf in jax.tree.leaves(whole):
            self.assertTrue(np.all(np.isfinite(leaf)))
        zero = dequantize(whole.codes, GRID)[3] + whole.factors[-1].u[3] @ whole.factors[-1].v[3]
        np.testing.assert_array_equal(zero, 0)
        mapped = jax.vmap(lambda w: milo(w, GRID, LOOSE[kind], 6))(weights)
        np.testing.assert_allclose(mapped.errors[:, :3], whole.errors[:, :3], rtol=2e-3)

    def test_solver_takes_the_place_of_the_base(self):
        weights = weights_of((48, 128))
        via = lambda w, u, v, grid: rtn(w - jnp.matmul(u, v, precision="highest"), grid)  # noqa: E731
        settings = MiloSettings(max_rank=4, max_passes=3, solver=via)
        got = milo(weights, GRID, settings, 4)
        base = milo(weights, GRID, MiloSettings(max_rank=4, max_passes=3, base="rtn"), 4)
        np.testing.assert_array_equal(got.codes.codes, base.codes.codes)
