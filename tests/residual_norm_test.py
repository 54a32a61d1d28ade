"""The contract of a residual sum and its norm: reference, interpreted kernel, kernel on a GPU.

Expectations are float64 numpy; the norm is that of the sum that was found, whose own rounding is
checked first.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.models.stacked import rms_norm
from pallas_kernels import residual_norm as package
from pallas_kernels.residual_norm import triton
from tests import slow
from tests.host_test_case import HostTestCase
from tests.kernel_contract import (
    ROUNDOFF,
    UNIT_ROUNDOFF,
    Contract,
    on_device,
    on_host,
    outside,
    tampered,
    ways_of,
    wrong_form,
)


class Shape(NamedTuple):
    """Axes of the operation."""

    num_rows: int
    width: int
    layers: int = 2
    eps: float = 1e-6
    has_delta: bool = True
    zero_centred: bool = False


SHAPES = {
    "qwen3_30b_1": Shape(1, 2048),
    "qwen3_30b_16": Shape(16, 2048, layers=3),
    "mixtral_1": Shape(1, 4096, eps=1e-5),
    "first": Shape(4, 2048, has_delta=False),
    "widest": Shape(2, 8192, layers=1),
    "demo": Shape(3, 256),
    "odd": Shape(5, 200, eps=1e-2),
    "odd_first": Shape(3, 37, has_delta=False),
    "narrow": Shape(2, 1),
    "qwen3_next_1": Shape(1, 2048, zero_centred=True),
    "centred_odd": Shape(5, 200, has_delta=False, zero_centred=True),
}
GPU_SHAPES = SHAPES | {"qwen3_30b_64": Shape(64, 2048, layers=48), "mixtral_64": Shape(64, 4096)}


class Operands(NamedTuple):
    """Arguments of `residual_norm`, on the host."""

    x: np.ndarray
    delta: np.ndarray | None
    scales: np.ndarray
    layer: int


def random_operands(shape: Shape, dtype: str, seed: int) -> Operands:
    """Operands of the last layer; others' scales are NaN, rows differ a thousandfold."""
    rng = np.random.default_rng(seed)
    size = (shape.num_rows, shape.width)
    rows = 10.0 ** rng.uniform(-1.5, 1.5, (shape.num_rows, 1))
    x, delta = (
        (rng.standard_normal(size) * rows * share).astype(jnp.dtype(dtype)) for share in (1, 0.3)
    )
    scales = np.full((shape.layers, shape.width), np.nan, jnp.dtype(dtype))
    scales[-1] = 1 + 0.5 * rng.standard_normal(shape.width)
    return Operands(x, delta if shape.has_delta else None, scales, shape.layers - 1)


def violation(found: Any, of: Operands, shape: Shape) -> str | None:
    """THE check: why `found` is not the operation's value, or None.

    A sum in float32 of two short numbers is rounded once more, which is seen in ties alone. The
    mean of D squares, its root and the quotient are float32; the result is rounded twice, of a
    norm that is centred at zero once, and what is added to one is a float32.
    """
    if reason := wrong_form(found, [of.x.shape] * 2, [of.x.dtype] * 2):
        return reason
    y = np.asarray(found[0]).astype(np.float64)
    short, least = ROUNDOFF[of.x.dtype.name], float(jnp.finfo(of.x.dtype).smallest_subnormal)
    x = of.x.astype(np.float64)
    exact = x if of.delta is None else x + of.delta.astype(np.float64)
    slack = 0 if of.delta is None else short * (1 + 2.0**-12) * np.abs(exact) + least
    if reason := outside("sums", y, exact, slack):
        return reason
    scale = of.scales[of.layer].astype(np.float64)
    quotient = y / np.sqrt((y * y).mean(axis=1, keepdims=True) + shape.eps)
    expected = quotient * (1 + scale if shape.zero_centred else scale)
    in_float32 = UNIT_ROUNDOFF * (np.log2(2 * shape.width) + 12)
    times = 1 if shape.zero_centred else 2
    slack = np.abs(expected) * ((1 + short) ** times * (1 + in_float32) - 1)
    slack += np.abs(quotient) * UNIT_ROUNDOFF * (1 + short) * shape.zero_centred
    slack += 2 * least * np.maximum(1, np.abs(scale))
    return outside("normed values", found[1], expected, slack)


CALL = jax.jit(
    package.residual_norm, static_argnames=("eps", "zero_centred", "implementation", "interpret")
)


def run(call: Any, of: Operands, shape: Shape, **how: Any) -> Any:
    operands = jax.tree.map(jnp.asarray, of[:3])
    how = {"eps": shape.eps, "zero_centred": shape.zero_centred, **how}
    return call(*operands, layer=jnp.int32(of.layer), **how)


_, interpreted, traced_again, on_gpu = ways_of(run, CALL, package.residual_norm)
# Not jitted: XLA may then leave out the rounding of the sum.
in_plain_jnp = functools.partial(run, package.residual_norm, implementation="reference")


def of_x_alone(of: Operands, shape: Shape) -> Any:
    return traced_again(of._replace(delta=np.zeros_like(of.delta)), shape)


def norm_before_the_sum(of: Operands, shape: Shape) -> Any:
    return traced_again(of, shape)[0], of_x_alone(of, shape)[1]


def two_last_places_too_large(of: Operands, shape: Shape) -> Any:
    y, normed = traced_again(of, shape)
    return y, (normed.astype(jnp.float32) * (1 + 2.0**-6)).astype(normed.dtype)


BROKEN = {
    "adds one to the scales": lambda of, shape: traced_again(
        of, shape._replace(zero_centred=not shape.zero_centred)
    ),
    "forgets to add": of_x_alone,
    "norms before the sum": norm_before_the_sum,
    "forgets the layer": lambda of, shape: traced_again(of._replace(layer=0), shape),
    "forgets eps": lambda of, shape: traced_again(of, shape._replace(eps=0.0)),
    "counts the padding": tampered(
        traced_again, triton.pltriton, "load",
        lambda load, ref, *, mask, other: load(ref, mask=mask, other=0.5),
    ),
    "takes the first row": tampered(
        traced_again, triton.pl, "program_id", lambda _, axis: jnp.int32(axis)
    ),
    "loses a bit": two_last_places_too_large,
}  # fmt: skip


CONTRACT = Contract(
    SHAPES, GPU_SHAPES, random_operands, violation, in_plain_jnp, (interpreted,), on_gpu,
    fresh=traced_again, loosest=SHAPES["odd"], broken=BROKEN,
    spoiled=lambda of, shape: (of, shape._replace(eps=0.0)),
)  # fmt: skip


class ContractTest(on_host(CONTRACT)):
    """Rounding, and what else a row does not depend on."""

    @slow.repeats()
    @parameterized.parameters("qwen3_30b_16", "first", "odd", "qwen3_next_1", "centred_odd")
    def test_it_rounds_as_the_model_does(self, name):
        shape = SHAPES[name]
        of = random_operands(shape, "bfloat16", seed=3)
        y, normed = (np.asarray(a) for a in interpreted(of, shape))
        expected = of.x if of.delta is None else jnp.asarray(of.x) + of.delta
        np.testing.assert_array_equal(y, expected)
        how = {"eps": shape.eps, "zero_centred": shape.zero_centred}
        expected = np.asarray(rms_norm(jnp.asarray(y), jnp.asarray(of.scales[-1]), **how))
        steps = normed.view(np.int16).astype(int) - expected.view(np.int16)
        self.assertLessEqual(np.abs(steps).max(), 1)  # of the last place
        self.assertLess((steps != 0).mean(), 0.01)

    def test_a_row_is_the_same_in_any_company(self):
        shape = SHAPES["qwen3_30b_16"]
        of = random_operands(shape, "bfloat16", seed=4)
        row = slice(5, 6)
        alone = of._replace(x=of.x[row], delta=of.delta[row])
        together = interpreted(of, shape)
        for one, all_ in zip(interpreted(alone, shape), together, strict=True):
            np.testing.assert_array_equal(one[0], all_[5])


class RefusalTest(HostTestCase):
    @parameterized.parameters(
        ({"x": jnp.zeros((2, 2, 8), jnp.bfloat16)}, r"x: bfloat16\[2, 2, 8\], not \[N, D\]"),
        ({"x": jnp.zeros((0, 8), jnp.bfloat16)}, r"x: bfloat16\[0, 8\]"),
        ({"delta": jnp.zeros((2, 8))}, "delta: float32"),
        (
            {"delta": jnp.zeros((1, 8), jnp.bfloat16)},
            r"delta: bfloat16\[1, 8\], not bfloat16\[2, 8\]",
        ),
        ({"scales": jnp.zeros((3, 9), jnp.bfloat16)}, r"scales: bfloat16\[3, 9\]"),
        ({"scales": jnp.zeros(8, jnp.bfloat16)}, r"scales: bfloat16\[8\], not bfloat16\[L, 8\]"),
        ({"implementation": "mosaic"}, "none of triton, reference"),
    )
    def test_what_does_not_fit_is_named(self, changed, said):
        x = jnp.zeros((2, 8), jnp.bfloat16)
        how = {"x": x, "delta": x, "scales": x, "layer": 0, "eps": 1e-6, "interpret": True}
        with self.assertRaisesRegex(ValueError, said):
            package.residual_norm(**(how | {"implementation": "triton"} | changed))


@pytest.mark.gpu
class DeviceContractTest(on_device(CONTRACT)):
    """The kernel compiled."""
