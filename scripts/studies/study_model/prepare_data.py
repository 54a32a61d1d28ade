"""Packs the study's training and held-out text with the parent's tokenizer.

    python -m scripts.studies.study_model.prepare_data --data=DIR --parent=PARENT \
        --output=OUT  # hub

`--data` is laid out as for `scripts.demo_training.prepare_data`, `--parent` holds tokenizer.json.
Writes tokens.xz, streams.json and corpus.json (tokens, bytes, dropped documents). A document that
shares a line of 100 characters with any held-out text is dropped.
"""

import json
from pathlib import Path

import numpy as np
import tokenizers
from absl import app, flags

from moejax.files.whole import write_json
from scripts.demo_training import corpus as corpus_lib
from scripts.demo_training import wikitext
from scripts.demo_training.texts import (
    encode,
    read_text,
    training_texts,
    valid_texts,
    wikitext_variants,
)

_DATA = flags.DEFINE_string("data", None, "directory of the source text", required=True)
_PARENT = flags.DEFINE_string("parent", None, "directory of the parent", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "directory to write", required=True)
_MOST_TOKENS = flags.DEFINE_integer("most_tokens", 12_000_000, "of a training stream")
_SEED = flags.DEFINE_integer("seed", 0, "seed of WikiText's filled-in words")


def held_out(data: Path) -> dict[str, list[str]]:
    """Documents of the held-out streams."""
    held = valid_texts(data)
    raw = read_text(data / "eval/wikitext2.test.raw.xz")
    held["test/wikitext"] = [wikitext.joined_form(raw.removesuffix("\n").split("\n"))]
    return held


def training(data: Path, held: dict[str, list[str]]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Documents of the training streams, and how many were dropped of each."""
    found = training_texts(data, held)
    rng = np.random.default_rng(_SEED.value)
    joined = wikitext_variants(found.articles, found.words, found.rare, 1, rng)
    return found.by_domain | {"wikitext": joined}, found.dropped


def main(argv: list[str]) -> None:
    """Reads, cleans, tokenizes, packs."""
    del argv
    data, output = Path(_DATA.value), Path(_OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(_PARENT.value) / "tokenizer.json"))
    held = held_out(data)
    train, dropped = training(data, held)
    streams = {}
    for name, texts in (train | held).items():
        ids, num_bytes = encode(tokenizer, texts)
        if name in train and len(ids) > _MOST_TOKENS.value:
            num_bytes = round(num_bytes * _MOST_TOKENS.value / len(ids))
            ids = ids[: _MOST_TOKENS.value]
        streams[name] = (ids, num_bytes)
    corpus_lib.write_corpus(output, corpus_lib.pack_corpus(streams))
    summary = {
        "dropped_documents": dropped,
        "tokens": {name: len(ids) for name, (ids, _) in streams.items()},
        "bytes": {name: num_bytes for name, (_, num_bytes) in streams.items()},
    }
    write_json(output / "corpus.json", summary)
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    app.run(main)
