"""Sampling against the logits processors of Hugging Face transformers, and by frequency."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
import transformers
from absl.testing import parameterized
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from moejax.inference.steps import Sampling, _draw, _filtered, _penalized
from tests.host_test_case import HostTestCase

VOCAB_SIZE = 37
SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
# A cumulative mass this near to p may fall on either side: two float32 sums in another order.
MASS_ROUNDING = 1e-5

FILTERED = jax.jit(_filtered)
DRAW = jax.jit(_draw, static_argnames="all_greedy")


def sampling_of(
    rows: int,
    temperature: npt.ArrayLike = 1.0,
    top_k: npt.ArrayLike = 0,
    top_p: npt.ArrayLike = 1.0,
    min_p: npt.ArrayLike = 0.0,
) -> Sampling:
    """Settings of `rows` sequences; each a scalar or one value a row."""

    def full(value: npt.ArrayLike, dtype: type[np.generic]) -> jax.Array:
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (rows,)))

    return Sampling(
        temperature=full(temperature, np.float32),
        top_k=full(top_k, np.int32),
        top_p=full(top_p, np.float32),
        min_p=full(min_p, np.float32),
        repetition_penalty=full(1.0, np.float32),
    )


def random_logits(
    seed: int, rows: int = 4, width: int = VOCAB_SIZE, scale: float = 3.0
) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, width)) * scale).astype(np.float32)


def warped(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Warps logits like transformers' `generate`, in its order.

    The result is float64, shifted so that the best logit is 0, like ours.
    """
    warpers = transformers.LogitsProcessorList()
    if temperature != 1.0:
        warpers.append(transformers.TemperatureLogitsWarper(temperature))
    if top_k:
        warpers.append(transformers.TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(transformers.TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(transformers.MinPLogitsWarper(min_p))
    ids = torch.zeros((len(logits), 1), dtype=torch.long)
    left = warpers(ids, torch.tensor(logits, dtype=torch.float64)).numpy()
    return left - left.max(axis=-1, keepdims=True)


def apply_filter(logits: np.ndarray, **how: Any) -> np.ndarray:
    """`_filtered` on the host."""
    return np.asarray(FILTERED(jnp.asarray(logits), sampling_of(len(logits), **how)))


def top_p_is_clear(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> bool:
    """Whether no cumulative mass lies at p, where the rounding of a sum decides."""
    falling = -np.sort(-warped(logits, temperature, top_k), axis=-1).astype(np.float64)
    probability = np.exp(falling - falling[:, :1])
    mass = np.cumsum(probability / probability.sum(-1, keepdims=True), axis=-1)
    return bool(np.abs(mass - top_p).min() > MASS_ROUNDING)


def min_p_is_clear(logits: np.ndarray, temperature: float, min_p: float) -> bool:
    """Whether no probability lies at the floor."""
    if not min_p:
        return True
    ratio = (logits - logits.max(-1, keepdims=True)).astype(np.float64) / temperature
    return bool(np.abs(ratio - np.log(min_p)).min() > MASS_ROUNDING)


class FilteredTest(HostTestCase):
    @SETTINGS
    @given(
        seed=st.integers(0, 2**31),
        temperature=st.floats(0.05, 4.0),
        top_k=st.integers(0, 2 * VOCAB_SIZE),
        top_p=st.floats(0.01, 0.999),
        min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    )
    @example(seed=0, temperature=1.0, top_k=1, top_p=0.5, min_p=0.0)
    def test_equals_the_warpers_for_any_settings(self, seed, temperature, top_k, top_p, min_p):
        logits = random_logits(seed)
        assume(top_p_is_clear(logits, temperature, top_k, top_p))
        assume(min_p_is_clear(logits, temperature, min_p))
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        np.testing.assert_allclose(apply_filter(logits, **how), warped(logits, **how), rtol=1e-5)

    def test_each_row_has_its_own_settings(self):
        logits = random_logits(seed=5)
        rows = [{"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}]
        columns = {
            name: [row.get(name, off) for row in rows]
            for name, off in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
        }
        found = apply_filter(logits, **columns)
        expected = np.concatenate([warped(logits[i : i + 1], **row) for i, row in enumerate(rows)])
        np.testing.assert_allclose(found, expected, rtol=1e-6)

    def test_everything_off_keeps_every_token(self):
        peaked = np.zeros((1, 5000), np.float32)
        peaked[0, 7] = 30.0  # holds all of float32's mass
        flat = random_logits(seed=1, rows=1, width=5000, scale=0.1)
        for logits in (peaked, flat):
            np.testing.assert_array_equal(apply_filter(logits), logits - logits.max())

    def test_the_best_stays_however_small_top_p_is(self):
        logits = random_logits(seed=10)
        kept = np.isfinite(apply_filter(logits, top_p=1e-50))  # zero in float32
        np.testing.assert_array_equal(kept, logits == logits.max(-1, keepdims=True))

    def test_ties_at_the_edge_of_top_k_all_stay(self):
        logits = np.array([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
        logits = logits.astype(np.float32)
        found = apply_filter(logits, top_k=2)
        np.testing.assert_array_equal(found, warped(logits, top_k=2))
        np.testing.assert_array_equal(np.isfinite(found).sum(-1), [4, 6])

    def test_ties_at_the_edge_of_top_p_all_stay(self):
        # Mass 0.4, then three of 0.2: transformers keeps one of the three that sorting puts first.
        logits = np.log(np.array([[0.2, 0.4, 0.2, 0.2]], np.float32))
        found = np.isfinite(apply_filter(logits, top_p=0.5))
        np.testing.assert_array_equal(found, [[True, True, True, True]])
        kept_by_transformers = np.isfinite(warped(logits, top_p=0.5))
        self.assertTrue(np.all(found >= kept_by_transformers))
        values = logits[found]
        self.assertGreaterEqual(values.min(), logits[kept_by_transformers].min())


class PenalizedTest(HostTestCase):
    @parameterized.parameters(0.5, 1.0, 1.3, 5.0)
    def test_equals_the_processor_of_transformers(self, penalty):
        logits = random_logits(seed=3)
        ids = np.random.default_rng(4).integers(0, VOCAB_SIZE, (len(logits), 9))  # with repeats
        processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
        expected = processor(torch.tensor(ids), torch.tensor(logits)).numpy()
        seen = np.zeros(logits.shape, bool)
        np.put_along_axis(seen, ids, True, axis=1)
        found = _penalized(
            jnp.asarray(logits), jnp.asarray(seen), jnp.full(len(logits), penalty, jnp.float32)
        )
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-6)
        if penalty != 1.0:
            self.assertFalse(np.array_equal(expected, logits))


def keys_of(seeds: Sequence[int]) -> jax.Array:
    """A key a seed."""
    return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))


class DrawTest(HostTestCase):
    @parameterized.parameters(True, False)
    def test_temperature_0_takes_the_best(self, all_greedy):
        logits = random_logits(seed=6)
        how = sampling_of(len(logits), temperature=0.0, top_k=3, top_p=0.2)
        tokens, _ = DRAW(jnp.asarray(logits), keys_of(range(4)), how, all_greedy=all_greedy)
        np.testing.assert_array_equal(tokens, logits.argmax(-1))
        self.assertEqual(tokens.dtype, jnp.int32)

    def test_greedy_takes_the_first_of_equals(self):
        logits = jnp.asarray([[0.0, 2.0, 2.0, 1.0]], jnp.float32)
        tokens, _ = DRAW(logits, keys_of([0]), sampling_of(1, temperature=0.0), all_greedy=True)
        self.assertEqual(int(tokens[0]), int(torch.tensor([0.0, 2.0, 2.0, 1.0]).argmax()))

    def test_greedy_and_sampled_rows_share_a_batch(self):
        logits = np.repeat(random_logits(seed=7, rows=1), 512, axis=0)
        temperature = np.where(np.arange(512) % 2, 1.5, 0.0)
        how = sampling_of(512, temperature=temperature)
        tokens, _ = DRAW(jnp.asarray(logits), keys_of(range(512)), how, all_greedy=False)
        tokens = np.asarray(tokens)
        np.testing.assert_array_equal(tokens[::2], logits[0].argmax())
        self.assertGreater(len(np.unique(tokens[1::2])), 3)

    @parameterized.parameters(
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 6},
        {"temperature": 1.8, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.95, "min_p": 0.1},
    )
    def test_frequencies_are_the_probabilities(self, **how):
        num_draws, width = 20_000, 12
        logits = random_logits(seed=8, rows=1, width=width, scale=1.0)
        kept = warped(logits, **how)[0].astype(np.float64)
        probability = np.exp(kept - kept.max())
        probability /= probability.sum()
        tokens, _ = DRAW(
            jnp.asarray(np.repeat(logits, num_draws, axis=0)),
            keys_of(range(num_draws)),
            sampling_of(num_draws, **how),
            all_greedy=False,
        )
        counts = np.bincount(np.asarray(tokens), minlength=width)
        possible = probability > 0
        self.assertEqual(counts[~possible].sum(), 0)
        expected = num_draws * probability[possible]
        chi_square = np.sum((counts[possible] - expected) ** 2 / expected)
        freedom = possible.sum() - 1
        # Mean + 5 standard deviations of the chi-square distribution; the seeds are fixed.
        self.assertLess(chi_square, freedom + 5 * np.sqrt(2 * freedom))
        if not how.get("top_k"):  # a draw that ignores the temperature is far outside
            shifted = np.exp(logits[0].astype(np.float64) / (how["temperature"] * 0.8))
            shifted *= num_draws / shifted.sum()
            wrong = np.sum((counts - shifted) ** 2 / shifted)
            self.assertGreater(wrong, freedom + 5 * np.sqrt(2 * freedom))

    def test_successive_draws_are_independent(self):
        rows = 4000
        logits = jnp.zeros((rows, 2), jnp.float32)
        how = sampling_of(rows)
        first, keys = DRAW(logits, keys_of(range(rows)), how, all_greedy=False)
        second, _ = DRAW(logits, keys, how, all_greedy=False)
        agreement = np.mean(np.asarray(first) == np.asarray(second))
        self.assertAlmostEqual(agreement, 0.5, delta=5 * 0.5 / np.sqrt(rows))

    def test_a_row_depends_on_its_own_key_and_logits_alone(self):
        logits = random_logits(seed=9, rows=6)
        seeds = [5, 4, 3, 2, 1, 0]
        together, _ = DRAW(
            jnp.asarray(logits), keys_of(seeds), sampling_of(6, temperature=2.0), all_greedy=False
        )
        for row, seed in enumerate(seeds):
            alone, _ = DRAW(
                jnp.asarray(logits[row : row + 1]),
                keys_of([seed]),
                sampling_of(1, temperature=2.0),
                all_greedy=False,
            )
            self.assertEqual(int(alone[0]), int(together[row]))
