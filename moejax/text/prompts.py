"""Prompts from the command line: texts and files, checked."""

import sys
from collections.abc import Sequence
from pathlib import Path

from moejax.errors import MoejaxError


def read_prompts(texts: Sequence[str], files: Sequence[str]) -> list[str]:
    """Returns the texts, then each file's whole text without a byte order mark.

    Args:
      files: paths; "-" is standard input.

    Raises:
      MoejaxError: a file cannot be read, or a text or a file is empty or not UTF-8.
    """
    if not all(texts):
        raise MoejaxError("an empty prompt: --prompt needs a text")
    return [*(valid_text(text, "--prompt") for text in texts), *map(_whole_text, files)]


def _whole_text(file: str) -> str:
    name = "standard input (prompt file -)" if file == "-" else f"prompt file {Path(file)}"
    try:
        if file == "-":
            if sys.stdin is None:
                raise MoejaxError(f"{name} is closed")
            found = sys.stdin.buffer.read()
        else:
            found = Path(file).read_bytes()
        text = found.decode("utf-8-sig")
    except OSError as error:
        raise MoejaxError(f"{name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MoejaxError(f"{name} is not UTF-8 at byte {error.start}") from error
    if not text:
        raise MoejaxError(f"{name} is empty")
    return text


def valid_text(text: str, what: str) -> str:
    """Returns the text, or raises MoejaxError if the shell passed invalid bytes.

    Invalid bytes arrive as lone surrogates; `what` is the text's name in the error.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MoejaxError(f"{what} is not UTF-8 at character {error.start}") from error
    return text
