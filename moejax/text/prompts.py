"""Prompts from the command line and from callers."""

import operator
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moejax.errors import MoejaxError

if TYPE_CHECKING:
    from moejax.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


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


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Makes a list of prompts from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        listed: list[Any] = list(prompts)
    except TypeError as error:
        raise MoejaxError(f"a prompt is text or a list of token ids ({error})") from error
    if listed and all(isinstance(item, int | np.integer) for item in listed):
        return [listed]
    return listed


def token_ids_of(
    prompt: Prompt, tokenizer: "Tokenizer | None", vocab_size: int, *, add_special_tokens: bool
) -> list[int]:
    """Encodes a prompt, a text or token ids; without a tokenizer texts are refused.

    Raises:
      MoejaxError: the prompt has no tokens, or is not a prompt.
    """
    if not isinstance(prompt, str):
        try:
            ids = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise MoejaxError(f"a prompt is text or a list of token ids ({error})") from error
    elif tokenizer is None:
        raise MoejaxError("this checkpoint has no tokenizer.json: give token ids, or add the file")
    else:
        ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    if not ids:
        raise MoejaxError("an empty prompt: give at least one token")
    check_tokens(np.asarray(ids), vocab_size)
    return ids


def check_tokens(ids: np.ndarray, vocab_size: int) -> None:
    """Raises MoejaxError for token ids outside 0..V - 1."""
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise MoejaxError(f"token id {wrong.flat[0]} is outside the vocabulary of {vocab_size}")


def check_length(length: int, longest: int, what: str = "") -> None:
    """Raises MoejaxError if a context is too short for so many tokens, described by `what`."""
    if length > longest:
        raise MoejaxError(f"{what}{length} tokens do not fit the model's context of {longest}")
