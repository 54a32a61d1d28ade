"""Process that renders chat templates within limits of time and memory.

Started by `moejax.text.chat_template` as a script, with a descriptor to talk over. A template is
somebody's program. Jinja's sandbox keeps it from the machine, but not from multiplying strings or
counting for ever, in more ways than a list of forbidden things could name; the operating system
stops all of them. Nothing of the package is imported: this starts in a tenth of a second.
"""

import contextlib
import datetime
import functools
import json
import math
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_BYTES = 512 * 2**20
CPU_S = 1  # of one template, and up to one more, as the system counts whole ones
_MOST_REASON = 300  # characters of an error


def _main() -> None:
    """Renders requests until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    connection = Connection(int(sys.argv[1]))
    connection.send_bytes(b"ready")
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        _limit_time()
        connection.send_bytes(json.dumps(_answer(request)).encode())


def _limit_time() -> None:
    """Sets the system's limit on this process's compute time to one template's."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = math.ceil(used.ru_utime + used.ru_stime) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


def _answer(request: bytes) -> dict[str, str]:
    """Renders a conversation: its "text", or the "error" that ended the template."""
    try:
        fields = json.loads(request)
        text = _compile(fields["template"]).render(fields["variables"])
        most = fields["most"]
        if len(text) > most:
            return {"error": f"its text has {len(text):,} characters, at most {most:,} may be"}
        return {"text": text}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_BYTES // 2**20} MiB"}
    except Exception as error:  # it may raise anything
        reason = " ".join(str(error)[: 2 * _MOST_REASON].split())[:_MOST_REASON]
        return {"error": reason or type(error).__name__}


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only encloses them."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Returns the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(value: Any, *, ensure_ascii: bool = False, **options: Any) -> str:
    """Serialises without escaping HTML, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


if __name__ == "__main__":
    _main()
