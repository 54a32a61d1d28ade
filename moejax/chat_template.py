"""Chat templates: Jinja sources of a checkpoint, rendered in a sandbox as transformers does."""

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from moejax.errors import MoejaxError
from moejax.models.hf_config import read_json

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclasses.dataclass(frozen=True)
class ChatSettings:
    """What a conversation's prompts are rendered with, beside its messages.

    Attributes:
      system: the system prompt of conversations that begin without one; "": none.
      thinking: what templates such as Qwen3's read as `enable_thinking`; None: their own default.
    """

    system: str = ""
    thinking: bool | None = None

    def messages(self, given: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        """The messages, after the system prompt where they begin without one."""
        if self.system and (not given or given[0].get("role") != "system"):
            return [{"role": "system", "content": self.system}, *given]
        return list(given)

    def variables(self) -> dict[str, Any]:
        """Variables of the template."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking}


def checked_messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The messages of a conversation, as templates take them.

    Raises:
      MoejaxError: there is none, or one lacks a known role or a text.
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
    """chat_template.jinja, else the (default) template in tokenizer_config.json, else None.

    Raises:
      MoejaxError: a file is broken, or its named templates hold no default.
    """
    jinja_path, json_path = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if jinja_path.exists():
        try:
            return jinja_path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MoejaxError(f"cannot read {jinja_path}: {error}") from error
    template = read_json(json_path).get("chat_template") if json_path.exists() else None
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


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """The text of a conversation.

    Raises:
      MoejaxError: the template is broken, or refuses the messages.
    """
    given = {"messages": messages, "tools": None, "documents": None, **variables}
    try:
        return _compile(template).render(given)
    except Exception as error:  # a template is somebody's program: it may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise MoejaxError(f"the chat template failed: {reason}") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only encloses them."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(value: Any, *, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which prompts do not want."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
