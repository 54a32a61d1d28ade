"""Trains the demo model's tokenizer and packs its training and held-out text.

    python -m scripts.demo_training.prepare_data --data=DIR --output=demo_data

`--data` holds `train/`, `valid/` and `eval/` with xz-compressed files: JSONL rows `{"text": ...}`
for books, textbooks, code, math and chinese, WikiText-2 as plain text, and GSM8K as
`{"question": ..., "answer": ...}`. About four minutes on two cores. Writes tokenizer.json,
tokens.xz, streams.json and corpus.json (what was dropped, compression per domain).
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from absl import app, flags, logging

from scripts.demo_training import corpus as corpus_lib
from scripts.demo_training import wikitext
from scripts.demo_training.texts import (
    encode,
    read_rows,
    read_text,
    train_tokenizer,
    training_texts,
    valid_texts,
    wikitext_variants,
)

_DATA = flags.DEFINE_string("data", None, "directory of the source text", required=True)
_OUTPUT = flags.DEFINE_string("output", "demo_data", "directory to write")
_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 4096, "entries of the vocabulary")
_VARIANTS = flags.DEFINE_integer(
    "variants", 4, "copies of WikiText with other rare words filled in"
)
_SEED = flags.DEFINE_integer("seed", 0, "seed of the filled-in words")

# Bytes of each domain that the tokenizer learns from; all of WikiText besides.
_TOKENIZER_SAMPLE = {"books": 6e6, "textbooks": 5e6, "code": 4e6, "math": 3e6, "chinese": 1.5e6}


def render_chat(problem: dict[str, str]) -> str:
    """One GSM8K problem as a ChatML conversation, calculator marks removed."""
    answer = re.sub(r"<<[^>]*>>", "", problem["answer"]).replace("\n#### ", "\nThe answer is ")
    turns = (("user", problem["question"]), ("assistant", answer + "."))
    start, end = corpus_lib.CHAT_START, corpus_lib.CHAT_END
    return "".join(f"{start}{role}\n{text}{end}\n" for role, text in turns)


def main(argv: list[str]) -> None:
    """Reads, cleans, tokenizes, packs."""
    del argv
    data, output = Path(_DATA.value), Path(_OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(_SEED.value)
    held = valid_texts(data)
    for split in ("valid", "test"):
        raw = read_text(data / f"eval/wikitext2.{split}.raw.xz")
        held[f"{split}/wikitext"] = [raw]
        held[f"{split}/wikitext_joined"] = [
            wikitext.joined_form(raw.removesuffix("\n").split("\n"))
        ]
    found = training_texts(data, held)
    train = dict(found.by_domain)
    train["chat"] = [render_chat(p) for p in read_rows(data / "eval/gsm8k.train.jsonl.xz")]
    logging.info(
        "%d articles, %d rare names, %d rare terms, dropped as duplicates: %s",
        len(found.articles),
        len(found.rare.names),
        len(found.rare.terms),
        found.dropped,
    )
    train["wikitext"] = wikitext_variants(
        found.articles, found.words, found.rare, _VARIANTS.value, rng
    )
    train["wikitext_masked"] = ["".join(map(wikitext.file_form, found.articles))]

    def sample() -> Iterator[str]:
        for lines in (train["wikitext"][0].split(" = \n"), train["chat"][:500]):
            yield from lines
        for domain, limit in _TOKENIZER_SAMPLE.items():
            texts = train[domain]  # spread evenly until so many characters are passed
            yield from texts[:: max(1, int(sum(map(len, texts)) / limit))]

    tokenizer = train_tokenizer(sample(), _VOCAB_SIZE.value)
    tokenizer.save(str(output / "tokenizer.json"))
    streams = {name: encode(tokenizer, texts) for name, texts in (train | held).items()}
    corpus_lib.write_corpus(output, corpus_lib.pack_corpus(streams))
    summary = {
        "dropped_documents": found.dropped,
        "bytes_per_token": {n: round(b / len(ids), 3) for n, (ids, b) in streams.items()},
        "tokens": {n: len(ids) for n, (ids, _) in streams.items()},
        "bytes": {n: b for n, (_, b) in streams.items()},
    }
    (output / "corpus.json").write_text(json.dumps(summary, indent=1) + "\n")
    logging.info("%s", json.dumps(summary, indent=1))


if __name__ == "__main__":
    app.run(main)
