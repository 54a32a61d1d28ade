"""Prompts as the command line and callers give them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.errors import MoejaxError

Prompt = str | Sequence[int]


def read_prompts(texts: Sequence[str], files: Sequence[str]) -> list[str]:
    """The texts, then the whole text of each file, line ends included, a byte order mark not.

    Raises:
      MoejaxError: a file cannot be read, or a text or a file is empty or not UTF-8.
    """
    return [*map(_valid_text, texts), *(_whole_text(Path(file)) for file in files)]


def _whole_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise MoejaxError(f"prompt file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MoejaxError(f"prompt file {path} is not UTF-8 at byte {error.start}") from error
    if not text:
        raise MoejaxError(f"prompt file {path} is empty")
    return text


def _valid_text(text: str) -> str:
    """The text, unless it is empty or the shell handed over bytes that are none.

    Such bytes are lone surrogates here.
    """
    if not text:
        raise MoejaxError("an empty prompt: --prompt needs a text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MoejaxError(f"--prompt is not UTF-8 at character {error.start}") from error
    return text


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        listed: list[Any] = list(prompts)
    except TypeError as error:
        raise MoejaxError(f"a prompt is text or a list of token ids ({error})") from error
    if listed and all(isinstance(item, int | np.integer) for item in listed):
        return [listed]
    return listed
