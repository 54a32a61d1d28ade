"""Conversation on the terminal, or from piped lines: each line is a turn."""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from moejax.errors import MoejaxError, print_stderr
from moejax.text.chat_template import ChatSettings
from moejax.text.prompts import valid_text

if TYPE_CHECKING:
    from moejax.inference.generation import Chunk
    from moejax.text.tokenizer import Tokenizer

HELP = (
    "/help      print these commands",
    "/reset     forget the conversation, but for the system prompt",
    "/think     let the model think before it answers, where its template knows of it",
    "/no_think  the opposite",
    "/exit      end; so does Ctrl-D. Ctrl-C ends an answer, and at the prompt the conversation",
)
COMMANDS = tuple(line.split()[0] for line in HELP)

# Answers a prompt: prints the text and adds the chunks to the list while they come.
Answer = Callable[[str, list["Chunk"]], None]


@dataclasses.dataclass(frozen=True)
class _Turns:
    """Source of the user's words."""

    lines: Iterator[str]  # one per turn, without line ends
    is_terminal: bool  # whether somebody types them


def read_turns() -> _Turns | None:
    """Reads the lines of standard input; None if there are none.

    If nobody types them the first is read at once, so that a mistake is reported before a model is
    loaded.
    """
    if sys.stdin is None:  # the caller closed it
        return None
    if sys.stdin.isatty():
        return _Turns(_typed_lines(), True)
    lines = _piped_lines()
    first = next(lines, None)
    return None if first is None else _Turns(itertools.chain([first], lines), False)


def converse(turns: _Turns, tokenizer: "Tokenizer", chat: ChatSettings, answer: Answer) -> None:
    """Answers every turn with the whole conversation in view, until the lines end.

    Ctrl-C ends an answer; its text so far stays in the conversation. A turn without an answer,
    because of Ctrl-C or an error, is forgotten. Where nobody types, both end the run. `chat` are
    the first settings that render prompts.
    """
    if turns.is_terminal:
        print_stderr("/help lists the commands; end with Ctrl-D")
    messages: list[dict[str, str]] = []
    for line in turns.lines:
        word = line.strip()
        if word == "/exit":
            return
        if word == "/reset":
            messages = []
        elif word in ("/think", "/no_think"):
            chat = dataclasses.replace(chat, thinking=word == "/think")
            print_stderr(*thinking_remarks(chat, tokenizer))
        elif word == "/help":
            print_stderr(*HELP)
        elif word.startswith("/") and word[1:].replace("_", "").isalpha():
            print_stderr(f"there is no command {word}: {', '.join(COMMANDS)}")
        elif word:
            messages.append({"role": "user", "content": line})
            said: list[Chunk] = []
            try:
                rendered = chat.messages(messages)
                answer(tokenizer.apply_chat_template(rendered, **chat.variables()), said)
            except KeyboardInterrupt:
                if not turns.is_terminal:
                    raise
                print(flush=True)
                print_stderr("interrupted; Ctrl-C once more, or Ctrl-D, ends the conversation")
            except MoejaxError as error:
                if not turns.is_terminal:
                    raise
                print_stderr(f"error: {error}")
            if text := "".join(chunk.text for chunk in said):
                messages.append({"role": "assistant", "content": text})
            else:
                messages.pop()


def thinking_remarks(chat: ChatSettings, tokenizer: "Tokenizer") -> list[str]:
    """A remark if a setting of thinking has no effect on the model's template."""
    template = tokenizer.chat_template or ""
    return [
        f"the model's chat template has no {name}: the setting changes nothing"
        for name in chat.variables()
        if name not in template
    ]


def _typed_lines() -> Iterator[str]:
    with contextlib.suppress(ImportError):  # gives `input` a line editor and a history
        import readline  # noqa: F401
    while True:
        try:
            if sys.stdout.isatty():
                line = input("> ")
            else:  # the prompt is not part of what is kept of stdout
                print("> ", end="", file=sys.stderr, flush=True)
                line = input()
        except EOFError:
            print(file=sys.stderr)
            return
        try:
            yield valid_text(line, "the line") if line else line
        except MoejaxError as error:
            print_stderr(f"error: {error}")


def _piped_lines() -> Iterator[str]:
    """Yields the lines that are not blank."""
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise MoejaxError(f"standard input is not UTF-8 in line {number}") from error
        if text.strip():
            yield text
