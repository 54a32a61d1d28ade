"""The contract of a router's softmax and top-k: reference, kernel interpreted, kernel on a GPU.

Expectations are float64 numpy; the choice is that of `jax.lax.top_k` of the probabilities found.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import router_topk as package
from pallas_kernels.router_topk import triton
from tests import slow
from tests.host_test_case import HostTestCase
from tests.kernel_contract import (
    UNIT_ROUNDOFF,
    Contract,
    on_device,
    on_host,
    outside,
    tampered,
    ways_of,
    wrong_form,
)

TINY = float(np.finfo(np.float32).tiny)  # below it, a GPU may take zero


class Shape(NamedTuple):
    """Axes of the operation, and what is done with the weights."""

    num_tokens: int
    num_experts: int
    chosen: int
    normalise: bool = True
    deviation: float = 2.0  # of the logits


SHAPES = {
    "qwen3_30b_1": Shape(1, 128, 8),
    "qwen3_30b_16": Shape(16, 128, 8, deviation=8.0),
    "mixtral_1": Shape(1, 8, 2),
    "mixtral_4": Shape(4, 8, 2),
    "demo": Shape(3, 32, 4, normalise=False),
    "odd": Shape(7, 60, 5),
    "odd_raw": Shape(5, 97, 6, normalise=False),
    "all_chosen": Shape(3, 12, 12),
    "one_of_one": Shape(2, 1, 1),
    "one_of_many": Shape(3, 65, 1),
    "most": Shape(2, 1024, 32),
    "far_apart": Shape(6, 64, 8, deviation=60.0),
}
GPU_SHAPES = SHAPES | {
    "qwen3_30b_2048": Shape(2048, 128, 8),
    "mixtral_1000": Shape(1000, 8, 2),
    "many_rows": Shape(70001, 16, 2),
}


def random_logits(shape: Shape, seed: int) -> np.ndarray:
    """float32[N, E]; every other row has equal logits, among them the largest and the smallest."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((shape.num_tokens, shape.num_experts), dtype=np.float32)
    logits *= np.float32(shape.deviation)
    coarse = np.round(logits[::2])
    largest = coarse.max(axis=1, keepdims=True)
    logits[::2] = np.where(rng.random(coarse.shape) < 0.1, largest, coarse)
    return logits


def expected_and_share(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64[N, E] of the softmax, and how far, as a share of it, a right value may be.

    The difference from the largest logit is rounded once, which changes its exponential by that
    much; exponential and division are good to 2 units in the last place (4 roundoffs) each,
    and a sum of E terms in a tree to log2 E roundoffs, plus its terms' own.
    """
    wide = logits.astype(np.float64)
    below = wide - wide.max(axis=1, keepdims=True)
    exps = np.exp(below)
    expected = exps / exps.sum(axis=1, keepdims=True)
    own = np.abs(below) + 4
    of_sum = (expected * own).sum(axis=1, keepdims=True) + np.log2(2 * logits.shape[1])
    return expected, UNIT_ROUNDOFF * (own + of_sum + 4)


def violation(found: Any, logits: np.ndarray, shape: Shape) -> str | None:
    """THE check: why `found` is not the operation's value of finite logits, or None."""
    num_tokens, num_experts, k = shape[:3]
    sizes = ((num_tokens, num_experts), (num_tokens, k), (num_tokens, k))
    if reason := wrong_form(found, sizes, ("float32", "float32", "int32")):
        return reason
    p, weights, ids = (np.asarray(of) for of in found)
    expected, share = expected_and_share(logits)
    if reason := outside("probabilities", p, expected, share * expected + TINY):
        return reason
    if (wrong := ids != chosen_of(p, k)).any():
        row = int(np.argwhere(wrong)[0, 0])
        return f"row {row} chose {ids[row]}, not {chosen_of(p, k)[row]}"
    raw = np.take_along_axis(p, ids, axis=1).astype(np.float64)
    if not shape.normalise:
        return None if (weights == raw).all() else "the weights are not the probabilities"
    wanted = raw / raw.sum(axis=1, keepdims=True)
    # The sum is rounded k - 1 times, the quotient is good to 2 units in the last place.
    return outside("weights", weights, wanted, UNIT_ROUNDOFF * (k + 4) * wanted + TINY)


def chosen_of(probabilities: np.ndarray, k: int) -> np.ndarray:
    """int32[N, k] of `jax.lax.top_k` on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(jax.lax.top_k(jnp.asarray(probabilities), k)[1])


CALL = jax.jit(package.top_k, static_argnames=("k", "normalise", "implementation", "interpret"))


def run(call: Any, logits: Any, shape: Shape, **how: Any) -> Any:
    return call(jnp.asarray(logits), k=shape.chosen, normalise=shape.normalise, **how)


in_plain_jnp, interpreted, traced_again, on_gpu = ways_of(run, CALL, package.top_k)


def unusual_rows(num_experts: int) -> np.ndarray:
    """float32[7, E]: what a model should never say."""
    rows = np.random.default_rng(0).standard_normal((7, num_experts), dtype=np.float32)
    rows[0] = np.nan
    rows[1, num_experts // 2] = np.nan
    rows[2] = -np.nan
    rows[3] = -np.inf
    rows[4, -1] = np.inf
    rows[5, 1:] = -np.inf  # all but one
    rows[6] = 0.0  # all equal
    return rows


class UnusualRows:
    """Checks that hosts and devices share."""

    def check_unusual_rows(self, call: Any, shape: Shape) -> None:
        p, weights, ids = (np.asarray(of) for of in call(unusual_rows(shape.num_experts), shape))
        np.testing.assert_array_equal(ids, np.tile(np.arange(shape.chosen, dtype=np.int32), (7, 1)))
        np.testing.assert_array_equal(p[:5], np.nan)
        np.testing.assert_array_equal(weights[:5], np.nan)
        np.testing.assert_array_equal(p[5], np.eye(shape.num_experts)[0])
        np.testing.assert_array_equal(weights[5], np.eye(shape.chosen)[0])
        np.testing.assert_allclose(p[6], 1 / shape.num_experts, rtol=1e-6)
        np.testing.assert_allclose(weights[6], 1 / shape.chosen, rtol=1e-6)


def changed(change: Callable[..., Any]) -> Callable[[Any, Shape], Any]:
    """The kernel, and `change` of its results."""
    return lambda logits, shape: change(*traced_again(logits, shape))


def choose_the_last_of_equals(logits: Any, shape: Shape) -> Any:
    p, weights, ids = traced_again(logits[:, ::-1], shape)
    return p[:, ::-1], weights, shape.num_experts - 1 - ids


BROKEN = {
    "chooses the last of equals": choose_the_last_of_equals,
    "forgets to normalise": lambda logits, shape: traced_again(
        logits, shape._replace(normalise=False)
    ),
    "normalises by all": changed(
        lambda p, _, ids: (p, jnp.take_along_axis(p, ids, axis=1), ids)
    ),
    "chooses one again": tampered(traced_again, triton, "TAKEN", np.int32(2**31 - 1)),
    "counts the padding": tampered(
        traced_again, triton.pltriton, "load",
        lambda load, ref, *, mask, other: load(ref, mask=mask, other=0.0),
    ),
    "takes the first row": tampered(
        traced_again, triton.pl, "program_id", lambda _, axis: jnp.int32(axis)
    ),
    "rounds its products": changed(
        lambda p, weights, ids: (p, weights.astype(jnp.bfloat16).astype(jnp.float32), ids)
    ),
    "is four millionths off": changed(
        lambda p, weights, ids: (p * np.float32(1 + 4e-6), weights, ids)
    ),
}  # fmt: skip
CONTRACT = Contract(
    SHAPES, GPU_SHAPES, lambda shape, _, seed: random_logits(shape, seed), violation, in_plain_jnp,
    (interpreted,), on_gpu, fresh=traced_again, loosest=SHAPES["odd"], broken=BROKEN,
    spoiled=lambda logits, shape: (logits, shape._replace(normalise=False)), dtypes=("float32",),
)  # fmt: skip


class ContractTest(on_host(CONTRACT), UnusualRows):
    """Near the reference, rows without a value, equal logits, ids."""

    @slow.where(lambda name: name not in sorted(SHAPES)[:3])
    @parameterized.parameters(sorted(SHAPES))
    def test_the_kernel_is_within_a_millionth_of_the_reference(self, name):
        shape = SHAPES[name]
        logits = random_logits(shape, seed=3)
        found, expected = interpreted(logits, shape), in_plain_jnp(logits, shape)
        for got, wanted in zip(found[:2], expected[:2], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-37)

    @parameterized.product(
        call=(in_plain_jnp, interpreted), shape=(Shape(7, 16, 5), Shape(7, 13, 3))
    )
    def test_rows_without_a_value(self, call, shape):
        self.check_unusual_rows(call, shape)

    @given(logits=st.lists(st.integers(-3, 3), min_size=11, max_size=11), normalise=st.booleans())
    @settings(max_examples=30, deadline=None)
    def test_of_equals_the_lower_id_comes_first(self, logits, normalise):
        shape = Shape(1, 11, 6, normalise)
        row = np.array([logits], np.float32)
        self.assertIsNone(violation(interpreted(row, shape), row, shape))
        expected = sorted(range(11), key=lambda expert: (-logits[expert], expert))
        np.testing.assert_array_equal(interpreted(row, shape)[2][0], expected[:6])

    @slow.repeats()
    @parameterized.parameters("reference", "triton")
    def test_ids_count_from_the_first(self, implementation):
        shape = SHAPES["odd"]
        logits = random_logits(shape, seed=9)
        how = {"implementation": implementation, "interpret": implementation == "triton"}
        found = CALL(logits, k=5, normalise=True, first=jnp.int32(480), **how)
        self.assertEqual(found[2].dtype, jnp.int32)
        self.assertIsNone(violation((*found[:2], found[2] - 480), logits, shape))

    @pytest.mark.slow
    def test_a_row_is_the_same_whatever_stands_beside_it(self):
        shape = SHAPES["qwen3_30b_16"]
        logits = random_logits(shape, seed=4)
        alone = interpreted(logits[5:6], shape._replace(num_tokens=1))
        for one, all_rows in zip(alone, interpreted(logits, shape), strict=True):
            np.testing.assert_array_equal(one[0], all_rows[5])

    def test_the_tolerance_is_of_float32(self):
        _, share = expected_and_share(random_logits(SHAPES["qwen3_30b_1"], seed=7))
        self.assertBetween(share.max(), 1e-7, 4e-6)


class RefusalTest(HostTestCase):
    @parameterized.parameters(
        ({"k": 9}, r"k 9 is not in 1\.\.8"),
        ({"k": 0}, "k 0"),
        (
            {"logits": jnp.zeros((2, 8), jnp.bfloat16)},
            r"logits: bfloat16\[2, 8\], not float32\[N, E\]",
        ),
        ({"logits": jnp.zeros(8)}, r"float32\[8\]"),
        ({"logits": jnp.zeros((0, 8))}, r"float32\[0, 8\]"),
        ({"implementation": "mosaic"}, "none of triton, reference"),
    )
    def test_what_does_not_fit_is_named(self, changed, said):
        how = {"logits": jnp.zeros((2, 8)), "k": 2, "normalise": True, "implementation": "triton"}
        with self.assertRaisesRegex(ValueError, said):
            package.top_k(**(how | changed), interpret=True)


@pytest.mark.gpu
class DeviceContractTest(on_device(CONTRACT), UnusualRows):
    """The kernel compiled."""

    @parameterized.parameters(Shape(7, 16, 5), Shape(7, 13, 3), Shape(7, 128, 8), Shape(7, 8, 2))
    def test_rows_without_a_value(self, *shape):
        self.check_unusual_rows(on_gpu, Shape(*shape))
