"""Prompts as the command line gives them."""

from collections.abc import Sequence
from pathlib import Path

from moejax.errors import MoejaxError


def read_prompts(texts: Sequence[str], files: Sequence[str]) -> list[str]:
    """The texts, then the whole text of each file, line ends included.

    Raises:
      MoejaxError: a file cannot be read, or a text or a file is not UTF-8.
    """
    return [*map(_valid_text, texts), *(_whole_text(Path(file)) for file in files)]


def _whole_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise MoejaxError(f"prompt file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MoejaxError(f"prompt file {path} is not UTF-8 at byte {error.start}") from error


def _valid_text(text: str) -> str:
    """The text, unless the shell handed over bytes that are none (here lone surrogates)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MoejaxError(f"--prompt is not UTF-8 at character {error.start}") from error
    return text
