"""Prompts of a file, or of a length, as token ids."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moejax.errors import MoejaxError
from moejax.text.corpus import json_lines, read_text
from moejax.text.prompts import valid_text

if TYPE_CHECKING:
    from moejax.text.tokenizer import Tokenizer

Message = dict[str, str]
HUMAN = ("human", "user")  # who speaks first in ShareGPT's conversations


@dataclasses.dataclass(frozen=True)
class _RawPrompt:
    """One prompt as a file has it."""

    text: str = ""  # to be continued; "" where there are messages
    messages: tuple[Message, ...] = ()  # for the model's chat template
    # whether the message's text may stand alone where the model has no template
    plain: bool = False


@dataclasses.dataclass(frozen=True)
class PromptFile:
    """The prompts of a file, in its order."""

    prompts: list[_RawPrompt]
    source: str  # the file's name
    num_skipped: int  # conversations in which nobody asks


@dataclasses.dataclass(frozen=True)
class TokenizedPrompts:
    """Token ids of every prompt."""

    prompts: list[list[int]]  # none empty
    about: str  # where they are from, for people
    num_cut: int = 0  # those that were cut at their end

    def batches(self, size: int) -> list[list[list[int]]]:
        """The prompts in batches of so many, in their order; the last one may be smaller."""
        return [self.prompts[i : i + size] for i in range(0, len(self.prompts), size)]


def read_prompt_file(path: Path, split: str) -> PromptFile:
    """Reads prompts: a JSON list (ShareGPT), JSON Lines, or text.

    Args:
      path: .json, .jsonl or any text; packed or not (.xz, .gz).
      split: of a text, "lines" or "paragraphs".

    Raises:
      MoejaxError: the file is missing, broken or holds no prompt; the text names the entry.
    """
    if not path.is_file():
        raise MoejaxError(f"there is no prompt file {path}")
    text = read_text(path)
    kind = path.with_suffix("").suffix if path.suffix in (".xz", ".gz") else path.suffix
    if kind == ".json":
        found = [_entry(f"{path}, entry {i}", entry) for i, entry in enumerate(_list(path, text))]
    elif kind == ".jsonl":
        found = [_entry(where, row) for where, row in json_lines(path, text)]
    else:
        parts = text.split("\n") if split == "lines" else text.replace("\r", "").split("\n\n")
        found = [_RawPrompt(part.strip()) for part in parts if part.strip()]
    prompts = [prompt for prompt in found if prompt is not None]
    if not prompts:
        raise MoejaxError(f"{path} holds no prompt")
    return PromptFile(prompts, path.name, len(found) - len(prompts))


def _list(path: Path, text: str) -> list[Any]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MoejaxError(f"{path} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise MoejaxError(f"{path} is no list of conversations, as ShareGPT's JSON is")
    return entries


def _entry(where: str, entry: Any) -> _RawPrompt | None:
    """The prompt of an object; None of a conversation in which nobody asks."""
    if not isinstance(entry, dict):
        raise MoejaxError(f"{where} is no JSON object: {str(entry)[:60]}")
    if "id" in entry:
        where = f"{where} (id {entry['id']})"
    for name in ("prompt", "text"):
        if name in entry:
            if not isinstance(entry[name], str) or not entry[name].strip():
                raise MoejaxError(f"{where}: {name} must be a text")
            return _RawPrompt(valid_text(entry[name], where))
    if "messages" in entry:
        return _RawPrompt(messages=_messages(where, entry["messages"]))
    if "conversations" not in entry:
        raise MoejaxError(f"{where} has no prompt, text, messages or conversations")
    return _first_human_turn(where, entry["conversations"])


def _messages(where: str, messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise MoejaxError(f"{where}: messages must be a list")
    for i, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            raise MoejaxError(f"{where}: message {i} needs a role and a content, both texts")
    return tuple({"role": m["role"], "content": valid_text(m["content"], where)} for m in messages)


def _first_human_turn(where: str, turns: Any) -> _RawPrompt | None:
    if not isinstance(turns, list):
        raise MoejaxError(f"{where}: conversations must be a list of turns")
    for i, turn in enumerate(turns):
        fields = turn if isinstance(turn, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("from", "value")):
            raise MoejaxError(f'{where}: turn {i} needs "from" and "value", both texts')
        if fields["from"] in HUMAN and fields["value"].strip():
            message = {"role": "user", "content": valid_text(fields["value"], where)}
            return _RawPrompt(messages=(message,), plain=True)
    return None


def _encoded(prompt: _RawPrompt, tokenizer: "Tokenizer") -> list[int]:
    """Token ids of one prompt, through the chat template where it has messages."""
    if not prompt.messages:
        return tokenizer.encode(prompt.text)
    if prompt.plain and tokenizer.chat_template is None:
        return tokenizer.encode(prompt.messages[0]["content"])
    text = tokenizer.apply_chat_template(prompt.messages)
    return tokenizer.encode(text, add_special_tokens=False)


def of_file(
    file: PromptFile, tokenizer: "Tokenizer", *, num_prompts: int, longest: int
) -> TokenizedPrompts:
    """The first prompts of a file (0: all), each cut at its end to `longest` tokens.

    Raises:
      MoejaxError: there are fewer, or one is empty.
    """
    if num_prompts > len(file.prompts):
        raise MoejaxError(f"num_prompts={num_prompts}, but {file.source} holds {len(file.prompts)}")
    chosen = file.prompts[: num_prompts or len(file.prompts)]
    whole = [_encoded(prompt, tokenizer) for prompt in chosen]
    for i, ids in enumerate(whole):
        if not ids:
            raise MoejaxError(f"{file.source}: prompt {i} has no token")
    about = f"{len(whole)} prompts of {file.source}"
    if any(prompt.messages for prompt in chosen) and tokenizer.chat_template is not None:
        about += " through the chat template"
    if file.num_skipped:
        about += f" ({file.num_skipped} entries without a human turn left out)"
    num_cut = sum(len(ids) > longest for ids in whole)
    return TokenizedPrompts([ids[:longest] for ids in whole], about, num_cut)


def of_text(
    text: str, tokenizer: "Tokenizer", *, num_prompts: int, length: int, name: str
) -> TokenizedPrompts:
    """Prompts of one length, at even distances in a text that is begun again where it ends."""
    ids = np.asarray(tokenizer.encode(text, add_special_tokens=False))
    starts = np.arange(num_prompts) * len(ids) // num_prompts
    rows = ids[(starts[:, None] + np.arange(length)) % len(ids)]
    return TokenizedPrompts(rows.tolist(), f"{num_prompts} prompts of {length} tokens of {name}")


def at_random(vocab_size: int, *, num_prompts: int, length: int, seed: int) -> TokenizedPrompts:
    """Prompts of random tokens."""
    rows = np.random.default_rng(seed).integers(0, vocab_size, (num_prompts, length))
    return TokenizedPrompts(rows.tolist(), f"{num_prompts} prompts of {length} random tokens")
