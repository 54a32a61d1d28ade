"""Trains the demo model's tokenizer and packs its training and held-out text.

    python -m scripts.demo_training.prepare_data --data=DIR --output=demo_data

`--data` holds `train/`, `valid/` and `eval/` with xz-compressed files: JSONL rows `{"text": ...}`
for books, textbooks, code, math and chinese, WikiText-2 as plain text, and GSM8K as
`{"question": ..., "answer": ...}`. About four minutes on two cores. Writes tokenizer.json,
tokens.xz, streams.json and corpus.json (what was dropped, compression per domain).
"""

import collections
import json
import lzma
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
from absl import app, flags, logging
from tokenizers import decoders, models, pre_tokenizers, trainers

from scripts.demo_training import corpus as corpus_lib
from scripts.demo_training import wikitext

_DATA = flags.DEFINE_string("data", None, "directory of the source text", required=True)
_OUTPUT = flags.DEFINE_string("output", "demo_data", "directory to write")
_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 4096, "entries of the vocabulary")
_VARIANTS = flags.DEFINE_integer(
    "variants", 4, "copies of WikiText with other rare words filled in"
)
_SEED = flags.DEFINE_integer("seed", 0, "seed of the filled-in words")

DOMAINS = ("books", "textbooks", "code", "math", "chinese")
# Bytes of each domain that the tokenizer learns from; all of WikiText besides.
_TOKENIZER_SAMPLE = {"books": 6e6, "textbooks": 5e6, "code": 4e6, "math": 3e6, "chinese": 1.5e6}
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


def render_chat(problem: dict[str, str]) -> str:
    """One GSM8K problem as a ChatML conversation, calculator marks removed."""
    answer = re.sub(r"<<[^>]*>>", "", problem["answer"]).replace("\n#### ", "\nThe answer is ")
    turns = (("user", problem["question"]), ("assistant", answer + "."))
    start, end = corpus_lib.CHAT_START, corpus_lib.CHAT_END
    return "".join(f"{start}{role}\n{text}{end}\n" for role, text in turns)


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


def take_bytes(texts: list[str], limit: float) -> Iterator[str]:
    """Texts spread evenly over the list until `limit` characters are passed."""
    mean = sum(map(len, texts)) / len(texts)
    yield from texts[:: max(1, int(len(texts) * mean / limit))]


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


def main(argv: list[str]) -> None:
    """Reads, cleans, tokenizes, packs."""
    del argv
    data, output = Path(_DATA.value), Path(_OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(_SEED.value)
    held = {
        f"valid/{d}": [r["text"] for r in read_rows(data / f"valid/{d}.jsonl.xz")] for d in DOMAINS
    }
    for split in ("valid", "test"):
        raw = read_text(data / f"eval/wikitext2.{split}.raw.xz")
        held[f"{split}/wikitext"] = [raw]
        held[f"{split}/wikitext_joined"] = [
            wikitext.joined_form(raw.removesuffix("\n").split("\n"))
        ]
    forbidden = long_lines(text for texts in held.values() for text in texts)

    train: dict[str, list[str]] = {}
    dropped: dict[str, int] = {}
    for domain in DOMAINS:
        texts = [row["text"] for row in read_rows(data / f"train/{domain}.jsonl.xz")]
        train[domain] = [text for text in texts if not (long_lines([text]) & forbidden)]
        dropped[domain] = len(texts) - len(train[domain])
    train["chat"] = [render_chat(p) for p in read_rows(data / "eval/gsm8k.train.jsonl.xz")]
    source = read_text(data / "train/wikitext2.train.tokens.xz")
    articles = wikitext.split_articles(source)
    clean = [a for a in articles if not (long_lines(a) & forbidden)]
    dropped["wikitext"] = len(articles) - len(clean)
    known = collections.Counter(source.split())
    rare = wikitext.find_rare_words(known, train["books"] + train["textbooks"])
    logging.info(
        "%d articles, %d rare names, %d rare terms, dropped as duplicates: %s",
        len(clean),
        len(rare.names),
        len(rare.terms),
        dropped,
    )
    train["wikitext"] = wikitext_variants(clean, known, rare, _VARIANTS.value, rng)
    train["wikitext_masked"] = ["".join(map(wikitext.file_form, clean))]

    def sample() -> Iterator[str]:
        for lines in (
            train["wikitext"][0].split(" = \n"),
            train["chat"][:500],
        ):
            yield from lines
        for domain, limit in _TOKENIZER_SAMPLE.items():
            yield from take_bytes(train[domain], limit)

    tokenizer = train_tokenizer(sample(), _VOCAB_SIZE.value)
    tokenizer.save(str(output / "tokenizer.json"))
    streams = {name: encode(tokenizer, texts) for name, texts in (train | held).items()}
    corpus_lib.write_corpus(output, corpus_lib.pack_corpus(streams))
    summary = {
        "dropped_documents": dropped,
        "bytes_per_token": {n: round(b / len(ids), 3) for n, (ids, b) in streams.items()},
        "tokens": {n: len(ids) for n, (ids, _) in streams.items()},
        "bytes": {n: b for n, (_, b) in streams.items()},
    }
    (output / "corpus.json").write_text(json.dumps(summary, indent=1) + "\n")
    logging.info("%s", json.dumps(summary, indent=1))


if __name__ == "__main__":
    app.run(main)
