"""Source texts read, cleaned and encoded; a tokenizer trained on them."""

import collections
import json
import lzma
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from scripts.demo_training import corpus as corpus_lib
from scripts.demo_training import wikitext

DOMAINS = ("books", "textbooks", "code", "math", "chinese")
# Qwen's split, but digits go in pairs with the space before them (years are two tokens, not five).
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LONG_LINE = 100  # characters; a shared line this long marks a document as a duplicate


def read_text(path: Path) -> str:
    """Text of an xz file, newlines as they are."""
    return lzma.open(path, "rt", encoding="utf-8", newline="").read()


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a JSONL file; only the newline ends a row."""
    return [json.loads(line) for line in read_text(path).split("\n") if line]


def long_lines(texts: Iterable[str]) -> set[str]:
    """Stripped lines of at least `_LONG_LINE` characters."""
    return {
        stripped
        for text in texts
        for line in text.split("\n")
        if len(stripped := line.strip()) >= _LONG_LINE
    }


class TrainingTexts(NamedTuple):
    """Documents to train on, without those that share a long line with held-out text."""

    by_domain: dict[str, list[str]]  # documents of each of `DOMAINS`
    articles: list[list[str]]  # WikiText's, each its lines
    words: collections.Counter[str]  # of all of WikiText's training text, and how often each
    rare: wikitext.RareWords  # words that may fill its gaps
    dropped: dict[str, int]  # documents left out, by domain and of "wikitext"


def valid_texts(data: Path) -> dict[str, list[str]]:
    """Held-out documents of each domain, by the name of their stream."""
    return {
        f"valid/{d}": [row["text"] for row in read_rows(data / f"valid/{d}.jsonl.xz")]
        for d in DOMAINS
    }


def training_texts(data: Path, held: Mapping[str, Iterable[str]]) -> TrainingTexts:
    """Reads the documents to train on; `held`: held-out ones, by stream."""
    forbidden = long_lines(text for texts in held.values() for text in texts)
    by_domain: dict[str, list[str]] = {}
    dropped: dict[str, int] = {}
    for domain in DOMAINS:
        texts = [row["text"] for row in read_rows(data / f"train/{domain}.jsonl.xz")]
        by_domain[domain] = [text for text in texts if not (long_lines([text]) & forbidden)]
        dropped[domain] = len(texts) - len(by_domain[domain])
    source = read_text(data / "train/wikitext2.train.tokens.xz")
    articles = wikitext.split_articles(source)
    clean = [article for article in articles if not (long_lines(article) & forbidden)]
    dropped["wikitext"] = len(articles) - len(clean)
    words = collections.Counter(source.split())
    rare = wikitext.find_rare_words(words, by_domain["books"] + by_domain["textbooks"])
    return TrainingTexts(by_domain, clean, words, rare, dropped)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE; special tokens take ids 0 to 3, then the 256 bytes, then the merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(corpus_lib.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> tuple[np.ndarray, int]:
    """Documents ended by the end-of-text token, as ids, and their bytes."""
    parts: list[np.ndarray] = []
    for i in range(0, len(texts), 64):
        parts.extend(
            np.array([*encoding.ids, corpus_lib.END_OF_TEXT_ID], np.uint16)
            for encoding in tokenizer.encode_batch(texts[i : i + 64])
        )
    return np.concatenate(parts), sum(len(text.encode()) for text in texts)


def wikitext_variants(
    articles: list[list[str]],
    known: collections.Counter[str],
    rare: wikitext.RareWords,
    num_variants: int,
    rng: np.random.Generator,
) -> list[str]:
    """Whole copies of the training text, alternately in file form and in joined form."""
    variants = []
    for i in range(num_variants):
        order = rng.permutation(len(articles))
        filled = [wikitext.spell_out(articles[j], rare, known, rng) for j in order]
        if i % 2:
            variants.append(wikitext.joined_form([line for lines in filled for line in lines]))
        else:
            variants.append("".join(map(wikitext.file_form, filled)))
    return variants
