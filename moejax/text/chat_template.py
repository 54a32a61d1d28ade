"""Chat templates: Jinja sources of a checkpoint, rendered by a process with limits."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moejax.errors import MoejaxError
from moejax.files.small import read_file
from moejax.models.hf.config import read_json
from moejax.text import chat_worker

_MOST_BYTES = 1_000_000  # of a template; published ones have up to 20,000
# A text repeats its messages once, if at all; more is for the words around them.
_MOST_COPIES, _MOST_AROUND = 4, 1_000_000
_START_S = 60.0
_WALL_S = 10.0  # of a template that waits, or on a machine that does; see `chat_worker.CPU_S`

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclasses.dataclass(frozen=True)
class ChatSettings:
    """Settings that render a conversation's prompts, beside its messages."""

    system: str = ""  # the system prompt of conversations that begin without one; "": none
    # `enable_thinking` of templates such as Qwen3's, or gpt-oss' `reasoning_effort`, a text; None:
    # the template's default
    thinking: bool | str | None = None

    def messages(self, given: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        """Messages, with the system prompt first unless they have their own."""
        if self.system and (not given or given[0].get("role") != "system"):
            return [{"role": "system", "content": self.system}, *given]
        return list(given)

    def variables(self) -> dict[str, Any]:
        """Variables of the template."""
        if self.thinking is None:
            return {}
        name = "reasoning_effort" if isinstance(self.thinking, str) else "enable_thinking"
        return {name: self.thinking}


def checked_messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Checks the messages of a conversation and converts them for templates.

    MoejaxError if there is no message, or one lacks a known role or a text.
    """
    if isinstance(given, str | Mapping) or not given:
        raise MoejaxError("messages must be a list with at least one message")
    found = []
    for i, message in enumerate(given):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            raise MoejaxError(f"messages[{i}]: role {role!r} is none of {', '.join(ROLES)}")
        if not isinstance(content := message.get("content"), str):
            raise MoejaxError(f"messages[{i}]: content must be a text, not {content!r}")
        found.append({"role": ROLES[role], "content": content})
    return found


def find_chat_template(directory: Path) -> str | None:
    """Reads chat_template.jinja, else the template in tokenizer_config.json, else None.

    MoejaxError if a file is broken, or its named templates hold no default.
    """
    jinja_path, json_path = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if jinja_path.exists() or jinja_path.is_symlink():
        try:
            return read_file(jinja_path, _MOST_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MoejaxError(f"cannot read {jinja_path}: {error}") from error
    has_json = json_path.exists() or json_path.is_symlink()
    template = read_json(json_path).get("chat_template") if has_json else None
    if template is None or isinstance(template, str):
        return template
    if not isinstance(template, list) or not all(map(_is_named_template, template)):
        raise MoejaxError(
            f"{json_path}: chat_template must be a text, or a list of objects with the texts "
            "name and template"
        )
    named = {entry["name"]: entry["template"] for entry in template}
    if "default" not in named:
        raise MoejaxError(f"{json_path}: no default among the chat templates {sorted(named)}")
    return named["default"]


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(entry.get(field), str) for field in ("name", "template")
    )


class ChatRenderer:
    """Renders conversations in a separate process, which starts with the first.

    A template that takes more than `chat_worker` allows ends that process, never this one; the next
    conversation starts another. Methods may be called by any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def render(
        self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """Renders a conversation to text, like transformers.

        Args:
          variables: further variables of the template; JSON values.

        Raises:
          MoejaxError: the template is broken, refuses the messages, or takes too much time or
            memory.
        """
        given = {"messages": list(messages), "tools": None, "documents": None, **variables}
        try:
            content = json.dumps(given)
            most = _MOST_COPIES * len(content) + _MOST_AROUND
            request = json.dumps({"template": template, "variables": given, "most": most})
        except (TypeError, ValueError, RecursionError) as error:
            said = f"the chat template takes values as JSON has them: {error}"
            raise MoejaxError(said) from error
        with self._lock:
            if self._worker is None:
                self._worker = _Worker()
            try:
                answer = self._worker.ask(request.encode())
            except MoejaxError:
                self._worker.end()
                self._worker = None
                raise
        if "error" in answer:
            raise MoejaxError(f"the chat template failed: {answer['error']}")
        return answer["text"]


class _Worker:
    """Handle of a `chat_worker` process."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        # Not from its folder, in which modules have names like those of other packages.
        command = [sys.executable, "-P", chat_worker.__file__, str(theirs.fileno())]
        none = subprocess.DEVNULL
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    pass_fds=[theirs.fileno()], stdin=none, stdout=none, stderr=none,
                    start_new_session=True,  # Ctrl-C in a terminal is not for it
                )  # fmt: skip
        except OSError as error:
            raise MoejaxError(f"no process for chat templates can be started: {error}") from error
        self.end = weakref.finalize(self, _end, self._process, self._connection)
        self._receive(_START_S)

    def ask(self, request: bytes) -> dict[str, str]:
        """Sends a request and returns the answer."""
        try:
            self._connection.send_bytes(request)
        except OSError as error:
            raise MoejaxError(f"the process of chat templates has ended: {error}") from error
        return json.loads(self._receive(_WALL_S))

    def _receive(self, seconds: float) -> bytes:
        try:
            if self._connection.poll(seconds):
                return self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            status = self._process.wait()
            if status == -signal.SIGXCPU:
                raise MoejaxError(
                    f"the chat template failed: it computes for more than {chat_worker.CPU_S} s"
                ) from error
            raise MoejaxError(
                f"the chat template failed: its process ended with status {status}"
            ) from error
        raise MoejaxError(f"the chat template failed: no answer in {seconds:g} s")


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()
