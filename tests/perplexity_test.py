"""Windows, perplexity and likelihoods of pairs, against a loop over transformers."""

import dataclasses
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from absl.testing import parameterized

from moejax import Engine, MoejaxError
from moejax.evaluation.perplexity import LogLikelihood, WindowScore, log_likelihood
from moejax.inference import runner, steps
from moejax.inference.likelihood import _token_windows
from moejax.models.transformer import Transformer, merge_weights, model_definition
from moejax.text.windows import PRESETS, Windowing, windows
from tests import numpy_model, slow, tiny_engine
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import reference_model, write_checkpoint
from tests.models_test import wide_weights
from tests.numpy_model import TINY

BATCH = 2


def random_ids(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, 160, length)


def reference_nats(model: torch.nn.Module, ids: np.ndarray, window: int, stride: int) -> float:
    """One token after the other: token i by the model's answer to its window's tokens before it."""
    inputs = torch.tensor(ids)[None]
    total, begin, next_target = 0.0, 0, 1
    with torch.no_grad():
        while next_target < len(ids):
            answer = model(inputs[:, begin : begin + window]).logits[0].double()
            scores = torch.log_softmax(answer, dim=-1)
            end = min(begin + window, len(ids) - 1)
            for i in range(next_target, end + 1):
                total -= float(scores[i - 1 - begin, ids[i]])
            next_target, begin = end + 1, begin + stride
    return total


class WindowsTest(parameterized.TestCase):
    @parameterized.product(
        num_tokens=(2, 3, 9, 10, 11, 12, 13, 40), how=((9, 9), (9, 1), (9, 4), (1, 1), (64, 16))
    )
    def test_each_token_is_scored_once_after_what_its_window_holds(self, num_tokens, how):
        window, stride = how
        ids = 100 + np.arange(num_tokens)
        shapes, contexts = set(), {}
        for tokens, lengths, targets in windows(ids, Windowing(window, stride), BATCH):
            shapes.add((tokens.shape, targets.shape))
            for row, length, wanted in zip(tokens, lengths, targets, strict=True):
                np.testing.assert_array_equal(wanted[length:], -1)
                for place in np.flatnonzero(wanted >= 0):
                    target = int(wanted[place])
                    self.assertEqual(row[place], target - 1)  # the token before it
                    np.testing.assert_array_equal(np.diff(row[: place + 1]), 1)
                    self.assertNotIn(target, contexts)
                    contexts[target] = place + 1
        self.assertLen(shapes, 1)
        self.assertEqual(sorted(contexts), ids[1:].tolist())
        for target, context in contexts.items():
            index = target - 100
            self.assertBetween(context, min(index, window - stride + 1), window)
        self.assertEqual(contexts[101], 1)

    def test_presets(self):
        self.assertEqual(PRESETS["2048/512"], Windowing(window=2048, stride=512))
        self.assertEqual(PRESETS["2048/2048"], Windowing(window=2048, stride=2048))

    @parameterized.parameters((0, 1, "window=0"), (8, 0, "stride=0"), (8, 9, "from 1 to 8"))
    def test_what_is_no_windowing(self, window, stride, said):
        with self.assertRaisesRegex(MoejaxError, said):
            Windowing(window, stride).check()

    def test_sums_and_faults(self):
        def score(tokens, lengths, targets):
            del tokens, lengths
            return (targets >= 0).sum(axis=1) * math.log(3)

        told: list[dict[int, WindowScore]] = []
        found = log_likelihood(
            np.arange(30), Windowing(8, 4), score, batch_size=3, on_batch=told.append
        )
        self.assertEqual((found.num_scored, found.num_windows), (29, 7))
        self.assertEqual([list(scores) for scores in told], [[0, 1, 2], [3, 4, 5], [6]])
        self.assertEqual([told[0][0].num_scored, told[0][1].num_scored], [8, 4])
        self.assertEqual(told[2][6].num_scored, 1)
        self.assertAlmostEqual(found.perplexity, 3.0)
        self.assertAlmostEqual(found.bits_per_byte(58), 29 * math.log2(3) / 58)
        self.assertEqual(LogLikelihood(1e5, 1, 1).perplexity, math.inf)
        with self.assertRaisesRegex(MoejaxError, "the text has 1 tokens"):
            log_likelihood([4], Windowing(8, 4), score, batch_size=3)
        with self.assertRaisesRegex(MoejaxError, "gives nan nats in the windows from token 0 on"):
            log_likelihood(
                np.arange(9), Windowing(8, 4), lambda *args: np.array([np.nan]), batch_size=3
            )

    def test_windows_that_are_known_are_not_scored_again(self):
        asked = []

        def score(tokens, lengths, targets):
            asked.append((tokens.shape, int((lengths > 0).sum())))
            return np.sin(tokens.sum(axis=1)) + 2 * (targets >= 0).sum(axis=1)

        def measured(known, batch_size):
            told: dict[int, WindowScore] = {}
            how = {"batch_size": batch_size, "known": known, "on_batch": told.update}
            found = log_likelihood(np.arange(50), Windowing(8, 4), score, **how)
            return found, told

        whole, every = measured(None, 3)
        self.assertLen(asked, 4)
        for part in ((0, 1, 2), (0, 1, 2, 3), (5,), tuple(every)):
            asked.clear()
            found, told = measured({i: every[i] for i in part} | {99: WindowScore(1.0, 1)}, 3)
            self.assertEqual(found, whole)  # to the bit
            self.assertEqual(told, {i: of for i, of in every.items() if i not in part})
            self.assertEqual({shape for shape, _ in asked}, {(3, 8)} if told else set())
            self.assertEqual(sum(rows for _, rows in asked), len(told))

    def test_standard_error(self):
        """The delta method on the two sums, by numpy's covariance of windows."""
        scores = [WindowScore(31.0, 8), WindowScore(9.5, 4), WindowScore(14.0, 4),
                  WindowScore(12.25, 4), WindowScore(2.5, 1)]  # fmt: skip
        found = LogLikelihood.of(scores)
        nats, counts = np.array(scores).T
        gradient = np.array([1 / counts.mean(), -nats.mean() / counts.mean() ** 2])
        variance = gradient @ np.cov(nats, counts) @ gradient / len(scores)
        self.assertAlmostEqual(found.stderr, math.sqrt(variance))
        step = 1e-6
        slope = (math.exp(nats.sum() / counts.sum() + step) - found.perplexity) / step
        self.assertAlmostEqual(found.perplexity_stderr, slope * found.stderr, places=3)
        of_equal = LogLikelihood.of([WindowScore(4 * mean, 4) for mean in (1.0, 2.0, 4.0)])
        self.assertAlmostEqual(of_equal.stderr, np.std([1, 2, 4], ddof=1) / math.sqrt(3))
        self.assertIsNone(LogLikelihood.of(scores[:1]).perplexity_stderr)
        self.assertIsNone(LogLikelihood.of([WindowScore(1e5, 1)] * 2).perplexity_stderr)


class TransformersTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.class_folder()
        cls.paths = {name: write_checkpoint(name, folder) for name in ("qwen3", "mixtral")}

    def _engine(self, name: str) -> Engine:
        how = {"dtype": "float32", "platform": "cpu", "progress": False}
        engine = Engine.from_pretrained(self.paths[name], **how)
        config = dataclasses.replace(engine.config, max_positions=2048)
        return Engine(config, engine.weights, device=engine.device)

    def _check(self, engine: Engine, name: str, ids: np.ndarray, windowing: Windowing) -> float:
        found = log_likelihood(ids, windowing, engine.score, batch_size=BATCH)
        nats = reference_nats(reference_model(self.paths[name]), ids, *vars(windowing).values())
        self.assertEqual(found.num_scored, len(ids) - 1)
        expected = math.exp(nats / (len(ids) - 1))
        self.assertLess(abs(found.perplexity / expected - 1), 1e-4)
        return found.perplexity

    @slow.repeats()
    @parameterized.parameters((60, 60), (60, 7))
    def test_small_windows(self, window, stride):
        self._check(self._engine("mixtral"), "mixtral", random_ids(190), Windowing(window, stride))

    def test_a_text_shorter_than_a_window(self):
        self._check(self._engine("mixtral"), "mixtral", random_ids(30), Windowing(60, 60))

    def test_what_does_not_fit_is_refused(self):
        engine = self._engine("mixtral")
        tokens = np.zeros((1, 2049), np.int32)
        with self.assertRaisesRegex(MoejaxError, "windows of 2049 tokens do not fit"):
            engine.score(tokens, np.array([2049]), tokens)
        with self.assertRaisesRegex(MoejaxError, "token id 160 is outside"):
            engine.score(tokens[:, :4], np.array([4]), np.full((1, 4), 160))


class LikelihoodTest(parameterized.TestCase):
    @parameterized.parameters(1, 2 * 29 * 4 * 3, 2**20)
    def test_slices_of_any_size(self, logits_bytes):
        """-1 does not count; a slice that does not divide the positions is filled."""
        weights = wide_weights(TINY)
        rng = np.random.default_rng(5)
        hidden = rng.standard_normal((2, 7, TINY.model_dim)).astype(np.float32)
        targets = rng.integers(-1, TINY.vocab_size, (2, 7))
        normed = numpy_model.rms_norm(
            hidden.astype(np.float64), weights["final_norm"].astype(np.float64), TINY.norm_eps
        )
        logits = normed @ weights["head"].astype(np.float64).T
        scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        picked = np.take_along_axis(scores, np.maximum(targets, 0)[..., None], -1)[..., 0]
        expected = -np.where(targets >= 0, picked, 0).sum(1)

        def nats(weights, hidden, targets):
            model: Transformer = merge_weights(model_definition(TINY), weights)
            return model.negative_log_likelihood(hidden, targets, logits_bytes)

        found = jax.jit(nats)(weights, hidden, jnp.asarray(targets, jnp.int32))
        np.testing.assert_allclose(found, expected, rtol=1e-5)

    def test_logits_are_never_there_at_once(self):
        config = dataclasses.replace(TINY, vocab_size=20_000)
        weights = {name: jnp.zeros(leaf.shape) for name, leaf in wide_weights(config).items()}

        def nats(weights, hidden, targets):
            model: Transformer = merge_weights(model_definition(config), weights)
            return model.negative_log_likelihood(hidden, targets, 2**20)

        hidden, targets = jnp.zeros((2, 100, TINY.model_dim)), jnp.zeros((2, 100), jnp.int32)
        memory = jax.jit(nats).lower(weights, hidden, targets).compile().memory_analysis()
        self.assertLess(memory.temp_size_in_bytes, 4 * 2 * 100 * config.vocab_size / 2)


CONTEXT = 64  # tokens that the models may see


def reference(
    model: torch.nn.Module, context: list[int], continuation: list[int]
) -> tuple[float, bool]:
    """A loop over transformers in float64: each token after what it may see."""
    total, greedy = 0.0, True
    whole = context + continuation
    with torch.no_grad():
        for place in range(len(context), len(whole)):
            seen = whole[max(0, len(whole) - 1 - CONTEXT) : place]
            scores = torch.log_softmax(model(torch.tensor([seen])).logits[0, -1].double(), dim=-1)
            total += float(scores[whole[place]])
            greedy &= int(scores.argmax()) == whole[place]
    return total, greedy


class LikelihoodTransformersTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.class_folder()
        path = write_checkpoint("qwen3", folder)
        how = {"dtype": "float32", "platform": "cpu", "progress": False}
        engine = Engine.from_pretrained(path, **how)
        config = dataclasses.replace(engine.config, max_positions=CONTEXT)
        cls.engine = Engine(config, engine.weights, device=engine.device)
        cls.model = reference_model(path)

    def _greedy(self, context: list[int], length: int) -> list[int]:
        ids = list(context)
        with torch.no_grad():
            for _ in range(length):
                ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(context) :]

    @slow.where(lambda batch_size: batch_size == 1)
    @parameterized.parameters(4, 1)
    def test_each_pair_as_alone(self, batch_size):
        rng = np.random.default_rng(3)

        def tokens(count: int) -> list[int]:
            return rng.integers(0, 160, count).tolist()

        shared, stem = tokens(20), tokens(5)
        pairs = [(tokens(n), tokens(m)) for n, m in ((1, 1), (7, 3), (30, 12), (90, 9))]
        pairs += [(shared, [*stem, last]) for last in tokens(6)]  # one row
        pairs += [(shared, [stem[0]]), (shared + stem[:2], stem[2:4])]
        likely = tokens(10)
        pairs += [(likely, self._greedy(likely, 4)), (likely, [*self._greedy(likely, 3), 7])]
        found = self.engine.scorer.of_tokens(pairs, batch_size=batch_size)
        for pair, scored in zip(pairs, found, strict=True):
            total, greedy = reference(self.model, *pair)
            self.assertAlmostEqual(scored.log_likelihood, total, delta=1e-3)
            self.assertEqual(scored.is_greedy, greedy)
            self.assertEqual(scored.num_tokens, len(pair[1]))
        self.assertTrue(found[-2].is_greedy)
        self.assertFalse(found[-1].is_greedy)

    @pytest.mark.slow
    def test_a_continuation_longer_than_the_context(self):
        ids = np.random.default_rng(5).integers(0, 160, 150).tolist()
        [scored] = self.engine.scorer.of_tokens([([9, 8], ids)], batch_size=2)
        self.assertEqual(scored.num_tokens, 150)
        stream = [8, *ids]
        # By definition: 64 after one, 64 more, and the last 22 with all that the model can see.
        cut = [(stream[:1], stream[1:65]), (stream[64:65], stream[65:129])]
        cut.append((stream[150 - CONTEXT : 129], stream[129:]))
        total = sum(reference(self.model, *pair)[0] for pair in cut)
        self.assertAlmostEqual(scored.log_likelihood, total, delta=1e-2)
        windows = list(_token_windows(ids, 8, CONTEXT))
        self.assertEqual(windows, cut)

    def test_a_number_of_tokens_compiles_the_layers_once(self):
        """However many tokens a continuation has, and however many share a row."""
        ids = list(range(1, 60))
        own = Engine(self.engine.config, self.engine.weights, device=self.engine.device)
        with mock.patch.object(steps, "run_chunk", wraps=steps.run_chunk) as traced:
            for length in (1, 9, 40):
                own.scorer.of_tokens([(ids[:-length], ids[-length:])], batch_size=1)
            own.scorer.of_tokens([(ids, [7]), (ids, [8])], batch_size=1)
        traced.assert_called_once()
        names = [name for name, _ in own._runner.programs.history]
        self.assertEqual((names.count("_hidden_chunk"), names.count("_look_up")), (1, 4))

    def test_windows_of_several_chunks(self):
        rng = np.random.default_rng(4)
        pairs = [(rng.integers(0, 160, n).tolist(), rng.integers(0, 160, m).tolist())
                 for n, m in ((40, 20), (3, 50), (60, 2))]  # fmt: skip
        with mock.patch.object(runner, "MAX_PREFILL_LENGTH", 16):
            found = self.engine.scorer.of_tokens(pairs, batch_size=2)
        for pair, scored in zip(pairs, found, strict=True):
            self.assertAlmostEqual(scored.log_likelihood, reference(self.model, *pair)[0], 2)

    @parameterized.parameters(
        (([], [1]), "pair 0 has a context without tokens"),
        (([1], []), "pair 0 has a continuation without tokens"),
        (([1], [160]), "token id 160 is outside the vocabulary of 160"),
    )
    def test_what_is_refused(self, pair, said):
        with self.assertRaisesRegex(MoejaxError, said):
            self.engine.scorer.of_tokens([pair])

    def test_texts_need_a_tokenizer(self):
        with self.assertRaisesRegex(MoejaxError, "no tokenizer.json"):
            self.engine.loglikelihood([("a", "b")])
        with self.assertRaisesRegex(MoejaxError, "needs a bos or eos"):
            self.engine.loglikelihood([("", "b")])


class TokenRulesTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.class_folder()
        cls.engine = tiny_engine.load_tiny_engine(folder, eos_ids=(3,))
        cls.scorer = cls.engine.scorer

    def _pieces(self, ids: list[int]) -> list[str]:
        return [self.engine.tokenizer.decode([i]) for i in ids]

    @parameterized.parameters(
        ("x.", " y", ["x", "."], [" ", "y"]),
        ("x. ", "y", ["x", "."], [" ", "y"]),  # the space goes with what follows
        ("x.\n", "y", ["x", "."], ["y"]),  # as does any white space; this one is no token
        ("a", "hx", ["a"], ["x"]),  # "ah" is one token: what is left is scored
    )
    def test_the_boundary(self, context, continuation, first, rest):
        found = self.scorer._encode_pair(context, continuation)
        self.assertEqual(tuple(map(self._pieces, found)), (first, rest))

    def test_an_empty_context_is_eos(self):
        self.assertEqual(self.scorer._encode_pair("", "y")[0], [3])
        piece = self.engine.tokenizer.decode([3])
        context, rest = self.scorer._encode_pair("", f"{piece}y")  # it brings its own
        self.assertEqual((context, self._pieces(rest)), ([3], ["y"]))

    @pytest.mark.slow
    def test_texts_are_their_tokens(self):
        pairs = [("the quick ", "brown"), ("", "fox jumps"), ("a lazy dog", " over")]
        tokens = [self.scorer._encode_pair(*pair) for pair in pairs]
        for a, b in zip(
            self.engine.loglikelihood(pairs), self.scorer.of_tokens(tokens), strict=True
        ):
            self.assertEqual(a, b)
        text = "the quick brown fox " * 40  # beyond the context of 256
        [whole, nothing] = self.scorer.of_whole_texts([text, ""])
        ids = self.engine.tokenizer.encode(text)
        self.assertEqual((whole.num_tokens, nothing), (len(ids), (0.0, True, 0)))
        [pair] = self.scorer.of_tokens([([3], ids)])
        self.assertAlmostEqual(whole.log_likelihood, pair.log_likelihood)
