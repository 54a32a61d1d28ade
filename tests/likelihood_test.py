"""Log-likelihoods of continuations: against transformers, token rules, windows, no retrace."""

import dataclasses

import numpy as np
import pytest
import torch
from absl.testing import parameterized

from moejax import Engine, MoejaxError
from moejax.inference.likelihood import _token_windows
from tests import slow, tiny_engine
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import reference_model, write_checkpoint

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


class TransformersTest(FolderTestCase):
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
