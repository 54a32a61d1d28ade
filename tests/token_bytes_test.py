"""Bytes of a token at most, beside what tokenizers make of texts."""

import sys
import threading
import time
import unicodedata
from pathlib import Path

import hypothesis
import tokenizers
from absl.testing import absltest, parameterized
from hypothesis import strategies
from tokenizers import decoders, models, normalizers, pre_tokenizers

from moejax.text.token_bytes import most_token_bytes
from moejax.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[1] / "moejax/demo"


def byte_level(*normal: normalizers.Normalizer, longest: str = "ĠĠĠĠ") -> tokenizers.Tokenizer:
    """All bytes, and one long token of merges."""
    vocab = {one: i for i, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [(longest[:i], longest[i]) for i in range(1, len(longest))]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    found = tokenizers.Tokenizer(models.BPE(vocab, merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normal:
        found.normalizer = normalizers.Sequence(list(normal))
    return found


def sentencepiece() -> tokenizers.Tokenizer:
    """Makes a tokenizer of Llama's form: written spaces, bytes for unknown characters."""
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3}
    vocab |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    model = models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    found = tokenizers.Tokenizer(model)
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    found.normalizer = normalizers.Sequence(steps)
    found.decoder = decoders.ByteFallback()
    return found


def limit(tokenizer: tokenizers.Tokenizer) -> int | None:
    return most_token_bytes(tokenizer.to_str())


class LimitTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=100, deadline=None, database=None)
    @hypothesis.given(strategies.text(max_size=60))
    def test_no_text_has_fewer_tokens(self, text):
        size = len(text.encode())
        for one, most in zip(ALL, LIMITS, strict=True):
            assert most is not None
            self.assertGreaterEqual(len(one.encode(text).ids) * most, size)

    def test_values(self):
        self.assertEqual(limit(byte_level()), 4)
        self.assertEqual(limit(byte_level(normalizers.NFC())), 12)
        self.assertEqual(limit(sentencepiece()), 6)
        self.assertEqual(limit(tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))), 23)

    def test_nfc_shrinks_by_three_at_most(self):
        """Each character, and each one that is made of others, by Python's own tables."""
        most = 0.0
        for point in range(sys.maxunicode + 1):
            if 0xD800 <= point < 0xE000:
                continue
            for text in (chr(point), unicodedata.normalize("NFD", chr(point))):
                short = unicodedata.normalize("NFC", text)
                most = max(most, len(text.encode()) / len(short.encode()))
        self.assertEqual(most, 3.0)

    def test_what_may_leave_text_out_has_no_limit(self):
        removing = byte_level()
        splits = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
        removing.pre_tokenizer = pre_tokenizers.Sequence(splits)
        stripping = byte_level()
        stripping.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
        words = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        lacking = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
        lacking.pre_tokenizer = pre_tokenizers.ByteLevel()
        shorter = byte_level(normalizers.Replace("ab", "a"))
        others = [byte_level(one) for one in (normalizers.NFKC(), normalizers.Strip())]
        for one in (removing, stripping, words, lacking, shorter, *others):
            self.assertIsNone(limit(one))


class EncodeTest(absltest.TestCase):
    def test_equals_the_librarys_own_and_lets_other_threads_run(self):
        tokenizer = Tokenizer.from_directory(DEMO)
        assert tokenizer is not None
        own = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        text = "the quick brown fox, 1234 <|im_end|> " * 20_000
        expected = own.encode(text).ids
        with Pauses() as pauses:
            found = tokenizer.encode(text)
        self.assertEqual(found, expected)
        self.assertLess(max(pauses[1:]), 0.5 * pauses[0], f"{pauses[0]} s in all")


class Pauses:
    """Seconds between turns of another thread; the first is that of the whole block."""

    def __enter__(self) -> list[float]:
        self._pauses, self._done = [0.0], threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        self._started = time.perf_counter()
        return self._pauses

    def __exit__(self, *exception: object) -> None:
        self._pauses[0] = time.perf_counter() - self._started
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.perf_counter()
        while not self._done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            self._pauses.append(now - last)
            last = now


ALL = (byte_level(), byte_level(normalizers.NFC()), sentencepiece())
LIMITS = tuple(map(limit, ALL))
