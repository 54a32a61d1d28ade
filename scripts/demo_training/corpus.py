"""Packed token streams: one array of 16-bit ids, and a table that says where each stream lies.

On disk: `tokens.xz` (the ids, little endian) and `streams.json` (`Stream` fields by name). Training
streams are named by domain; held-out ones begin with `valid/` or `test/` and carry the number of
text bytes that they encode, the denominator of bits per byte.
"""

import dataclasses
import json
import lzma
from pathlib import Path

import numpy as np

from moejax.errors import MoejaxError

END_OF_TEXT, CHAT_START, CHAT_END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"
SPECIAL_TOKENS = (END_OF_TEXT, CHAT_START, CHAT_END, UNKNOWN)  # ids 0, 1, 2, 3
END_OF_TEXT_ID, CHAT_END_ID, UNKNOWN_ID = 0, 2, 3


@dataclasses.dataclass(frozen=True)
class Stream:
    """Where one token stream lies in the packed array, and what it encodes."""

    start: int  # first token
    length: int  # tokens
    num_bytes: int  # UTF-8 bytes of the encoded text, separators not counted


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Packed tokens uint16[N] and the streams in them."""

    tokens: np.ndarray
    streams: dict[str, Stream]

    def stream(self, name: str) -> np.ndarray:
        """Tokens uint16 of one stream; MoejaxError if there is none of that name."""
        if name not in self.streams:
            raise MoejaxError(f"no stream {name!r} in the corpus; it has {sorted(self.streams)}")
        found = self.streams[name]
        return self.tokens[found.start : found.start + found.length]

    def train_names(self) -> list[str]:
        """Names of the training streams."""
        return [name for name in self.streams if "/" not in name]


# Two-byte elements: low bytes predict low bytes (lp, pb); one window over the whole file.
_FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 2, "lp": 1, "pb": 1, "dict_size": 128 << 20}
]


def pack_corpus(streams: dict[str, tuple[np.ndarray, int]]) -> Corpus:
    """Concatenates `name -> (token ids, text bytes)` into one corpus."""
    table, start = {}, 0
    for name, (ids, num_bytes) in streams.items():
        table[name] = Stream(start, len(ids), num_bytes)
        start += len(ids)
    return Corpus(np.concatenate([ids for ids, _ in streams.values()]).astype(np.uint16), table)


def write_corpus(directory: Path, corpus: Corpus) -> None:
    """Writes `tokens.xz` and `streams.json` into an existing directory."""
    data = corpus.tokens.astype("<u2").tobytes()
    (directory / "tokens.xz").write_bytes(lzma.compress(data, lzma.FORMAT_XZ, filters=_FILTERS))
    table = {name: dataclasses.asdict(stream) for name, stream in corpus.streams.items()}
    (directory / "streams.json").write_text(json.dumps(table, indent=1) + "\n")


def read_corpus(directory: Path) -> Corpus:
    """Reads what `write_corpus` wrote; MoejaxError when it is not there or not whole."""
    try:
        table = json.loads((directory / "streams.json").read_text())
        with lzma.open(directory / "tokens.xz") as file:
            tokens = np.frombuffer(file.read(), "<u2").astype(np.uint16)
    except (OSError, EOFError, lzma.LZMAError, json.JSONDecodeError) as error:
        raise MoejaxError(f"cannot read a packed corpus in {directory}: {error}") from error
    streams = {name: Stream(**fields) for name, fields in table.items()}
    expected = sum(stream.length for stream in streams.values())
    if expected != len(tokens):
        raise MoejaxError(f"{directory} holds {len(tokens)} tokens, its table says {expected}")
    return Corpus(tokens, streams)
