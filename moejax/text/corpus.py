"""The texts that perplexity is measured on: a file, or WikiText-2 from the Hub."""

import dataclasses
import gzip
import hashlib
import importlib
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

from moejax.errors import MoejaxError

WIKITEXT2 = "wikitext2"
_HUB_NAME, _HUB_SUBSET = "Salesforce/wikitext", "wikitext-2-raw-v1"
JOINS = ("none", "wikitext")
_READERS: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.decompress, ".gz": gzip.decompress}


@dataclasses.dataclass(frozen=True)
class Text:
    """What is scored, and where it comes from."""

    content: str
    source: str

    @property
    def num_bytes(self) -> int:
        """In UTF-8."""
        return len(self.content.encode())

    @property
    def sha256(self) -> str:
        """Of the UTF-8 bytes."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def load_text(name: str, join: str) -> Text:
    r"""The text of a name.

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
    content = decoded(path, unpacked(path))
    if join == "wikitext":
        content = joined_rows(content)
    if not content.strip():
        raise MoejaxError(f"{path} holds no text")
    return Text(content, path.name)


def joined_rows(content: str) -> str:
    r"""A raw WikiText file as papers score it.

    Its lines are the dataset's rows: a blank one is an empty row, any other keeps its newline;
    rows are joined by "\n\n".
    """
    lines = content.removesuffix("\n").split("\n")
    return "\n\n".join(line + "\n" if line.strip() else "" for line in lines)


def unpacked(path: Path) -> bytes:
    """The bytes of a file, those that .xz or .gz packed.

    Raises:
      MoejaxError: there is none, it cannot be read, or is broken.
    """
    try:
        stored = path.read_bytes()
    except FileNotFoundError as error:
        raise MoejaxError(
            f"there is no text file {path}; name a file, or {WIKITEXT2!r} for WikiText-2 from the "
            "Hub"
        ) from error
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


def decoded(path: Path, content: bytes) -> str:
    """UTF-8 as text; a MoejaxError names the first byte of `path` that is none."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MoejaxError(
            f"{path} is not UTF-8 (byte {error.start} is {content[error.start]:#04x}); convert it"
        ) from error


def _hub_rows() -> list[str]:
    """The test rows; a copy in the cache of `datasets` is taken before the network is asked.

    Raises:
      MoejaxError: `datasets` is not installed, or neither has the rows.
    """
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
