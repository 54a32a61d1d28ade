"""Texts for perplexity: a file, or WikiText-2 from the Hub."""

import dataclasses
import gzip
import hashlib
import importlib
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moejax.errors import MoejaxError

if TYPE_CHECKING:
    from moejax.text.tokenizer import Tokenizer

WIKITEXT2 = "wikitext2"
_HUB_NAME, _HUB_SUBSET = "Salesforce/wikitext", "wikitext-2-raw-v1"
JOINS = ("none", "wikitext")
_READERS: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.decompress, ".gz": gzip.decompress}


@dataclasses.dataclass(frozen=True)
class Text:
    """A text to score, and its source."""

    content: str
    source: str

    @property
    def num_bytes(self) -> int:
        """Bytes in UTF-8."""
        return len(self.content.encode())

    @property
    def sha256(self) -> str:
        """Hash of the UTF-8 bytes."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def load_text(name: str, join: str) -> Text:
    r"""Loads the text of a name.

    Args:
      name: "wikitext2", the test rows of WikiText-2 as papers join them, `"\n\n".join(rows)`; or a
        UTF-8 file, plain or packed (.xz, .gz).
      join: "none", a file is scored as it stands; "wikitext", its lines are taken for WikiText's
        rows and joined in that way.

    Raises:
      MoejaxError: the file is missing, empty, broken or not UTF-8; WikiText-2 cannot be had.
    """
    if name == WIKITEXT2 and not Path(name).exists():
        return Text("\n\n".join(_hub_rows()), f"{_HUB_NAME} {_HUB_SUBSET} test, rows joined")
    path = Path(name)
    more = f", or {WIKITEXT2!r} for WikiText-2 from the Hub"
    content = read_text(path, more)
    if join == "wikitext":
        content = joined_rows(content)
    if not content.strip():
        raise MoejaxError(f"{path} holds no text")
    return Text(content, path.name)


@dataclasses.dataclass(frozen=True)
class TokenizedText:
    """A text as tokens."""

    ids: list[int]
    bos: str | None  # the special token that the tokenizer put first
    tokenizer_sha256: str


def encode(tokenizer: "Tokenizer", directory: Path, text: Text, *, special: bool) -> TokenizedText:
    """Encodes a text, and records the tokens put before it."""
    ids = tokenizer.encode(text.content, add_special_tokens=special)
    bos = None
    if special and (added := tokenizer.encode("", add_special_tokens=True)) and ids:
        bos = tokenizer.decode(added[:1], skip_special_tokens=False) if ids[0] == added[0] else None
    sha256 = hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
    return TokenizedText(ids, bos, sha256)


def beginning(
    tokenizer: "Tokenizer", stream: TokenizedText, text: Text, num_tokens: int
) -> tuple[TokenizedText, Text]:
    """First `num_tokens` tokens, and the text that they spell."""
    ids = stream.ids[:num_tokens]
    spelt = Text(tokenizer.decode(ids), f"{text.source}, the first {num_tokens} tokens")
    return dataclasses.replace(stream, ids=ids), spelt


def joined_rows(content: str) -> str:
    r"""Joins a raw WikiText file like papers score it.

    The lines are the dataset's rows: a blank one is an empty row, any other keeps its newline; rows
    are joined by "\n\n".
    """
    lines = content.removesuffix("\n").split("\n")
    return "\n\n".join(line + "\n" if line.strip() else "" for line in lines)


def read_text(path: Path, more: str = "") -> str:
    """Reads a UTF-8 file, unpacking .xz and .gz; MoejaxError if it cannot.

    `more`: what to name in place of a file that is not there.
    """
    content = _unpacked(path, more)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MoejaxError(
            f"{path} is not UTF-8 (byte {error.start} is {content[error.start]:#04x}); convert it"
        ) from error


def _unpacked(path: Path, more: str) -> bytes:
    try:
        stored = path.read_bytes()
    except FileNotFoundError as error:
        raise MoejaxError(f"there is no text file {path}; name a file{more}") from error
    except OSError as error:
        raise MoejaxError(f"cannot read {path}: {error.strerror}") from error
    read = _READERS.get(path.suffix)
    if read is None:
        return stored
    try:
        return read(stored)
    except (lzma.LZMAError, OSError, EOFError, zlib.error) as error:
        raise MoejaxError(
            f"{path} is no whole {path.suffix} file ({error}); copy it again"
        ) from error


def json_lines(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the place of each line that is not blank, for errors, and its object.

    Raises:
      MoejaxError: a line is not a JSON object.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise MoejaxError(f"{where} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise MoejaxError(f"{where} is no JSON object: {line.strip()[:60]}")
        yield where, row


def _hub_rows() -> list[str]:
    """Loads the test rows, from the cache of `datasets` before the network."""
    mend = "give a file instead: --config.text=FILE (and --config.join=wikitext for the raw one)"
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise MoejaxError(
            f"{WIKITEXT2} needs the package datasets (pip install '.[evaluation]' in a clone of "
            f"this repository); or {mend}"
        ) from error
    try:
        rows = datasets.load_dataset(_HUB_NAME, _HUB_SUBSET, split="test")["text"]
    except Exception as error:  # of many kinds: offline, no such cache, a proxy's answer
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MoejaxError(
            f"{WIKITEXT2} is not in the cache and cannot be had from the Hub ({reason}); {mend}"
        ) from error
    return list(rows)
