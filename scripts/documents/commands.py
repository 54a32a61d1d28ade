r"""The commands of the documents: where they stand, and what becomes of each.

A command is a line of a fence of bash, a line of a docstring that begins with `python`, `moejax` or
a script, or a span of a sentence or a table that does. What becomes of it, its mark says:

    ```bash             each command is run by the tests
    ```bash gpu         none is; flags are parsed and the configuration is made
    ```python           the program is run; marks are those of commands
    command   # hub     the mark of one line, in a fence or a docstring

A mark is a word of `MARKS`. A span is a mention and is never run. A line of a docstring stands for
`DRY_RUN` unless it says otherwise, but for those of `configs/`, which are run unless marked.
"""

import ast
import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from moejax.cli import MAINS

ROOT = Path(__file__).parents[2]

RUN, DRY_RUN = "run", "dry"
PROGRAM = "# Python\n"  # begins the text of a program
MARKS = {
    "long": "takes longer than a test may; run by `python -m scripts.check_documents --all`",
    "gpu": "needs an accelerator, or the weights of a model that needs one",
    "hub": "needs the network, or files that come from it",
    "setup": "changes the environment, or runs the tests themselves",
    "server": "goes on until it is stopped, or reads from a terminal",
    "term": "a mention whose capitals stand for something",
}
_START = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:(?:\.venv/bin/)?python3? (?:-m (?:moejax|scripts|pytest|venv)|scripts/)"
    rf"|(?:\.venv/bin/)?moejax (?:{'|'.join(MAINS)})\b"
    r"|scripts/\w+\.sh|pip install|hf download|\.venv/bin/(?:pip|pre-commit))"
)
_FENCE = re.compile(r"^( *)```(\w*)[ ]*(.*?)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINE_MARK = re.compile(rf"\s#\s*({'|'.join(MARKS)})\b[^'\"]*$")


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of a document."""

    place: str  # file and line
    text: str  # as it stands, lines joined, without its comment
    fate: str  # `RUN`, `DRY_RUN`, or a mark

    @property
    def is_program(self) -> bool:
        """Whether it is Python, and not a command of a shell."""
        return self.text.startswith(PROGRAM)

    @property
    def words(self) -> list[str]:
        """Words, split as a shell would."""
        return shlex.split(self.text, comments=True)

    @property
    def parts(self) -> list[list[str]]:
        """The words of each command of `a && b`, without `NAME=VALUE` before them."""
        found: list[list[str]] = [[]]
        for word in self.words:
            if word == "&&":
                found.append([])
            elif found[-1] or not re.fullmatch(r"[A-Z_]+=.*", word):
                found[-1].append(word)
        return found


def pages() -> list[Path]:
    """README, WORKSPACE, docs/ and the READMEs of scripts/."""
    return [
        ROOT / "README.md",
        ROOT / "WORKSPACE.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "scripts").rglob("README.md")),
    ]


def of_documents() -> list[Command]:
    """Commands of README, WORKSPACE, docs/, and docstrings of mains, configs and scripts."""
    found = [
        command for page in pages() for command in of_page(_name(page), page.read_text("utf-8"))
    ]
    for folder, fate in (("configs", RUN), ("moejax", DRY_RUN), ("scripts", DRY_RUN)):
        find = Path.rglob if folder == "scripts" else Path.glob
        for path in sorted(find(ROOT / folder, "*.py")):
            found += of_docstring(_name(path), path.read_text("utf-8"), fate)
    return found


def of_page(place: str, text: str) -> list[Command]:
    """Commands of a page of Markdown: of its fences, then of its spans.

    Raises:
      ValueError: a fence of shell has no known mark, or is not called bash.
    """
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        language, info, body = match[2], match[3].strip(), match[4]
        if language in ("sh", "shell", "console", "zsh") or (not language and _START.search(body)):
            raise ValueError(f"{place}:{line}: call a fence of commands bash, and mark it")
        if language in ("bash", "python") and info and info not in MARKS:
            raise ValueError(f"{place}:{line}: {info!r} is none of {', '.join(MARKS)}")
        if language == "python":
            found.append(Command(f"{place}:{line}", PROGRAM + body, info or RUN))
        if language == "bash":
            found += list(_of_lines(f"{place}:{{}}", body, line + 1, info or RUN))
    prose = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in _SPAN.finditer(prose):
        if _START.match(match[1]):
            line = prose.count("\n", 0, match.start()) + 1
            fate = "term" if re.search(r"\b(?:NAME|FILE|FIELD|VALUE)\b|\*", match[1]) else DRY_RUN
            found.append(Command(f"{place}:{line}", match[1], fate))
    return found


def of_docstring(place: str, source: str, fate: str) -> list[Command]:
    """Commands of a module's docstring."""
    body = ast.parse(source).body
    text = ast.get_docstring(ast.parse(source), clean=False) or ""
    return list(_of_lines(f"{place}:{{}}", text, body[0].lineno if body else 1, fate, only=_START))


def _of_lines(
    place: str, body: str, line: int, fate: str, only: re.Pattern[str] | None = None
) -> Iterator[Command]:
    """Commands of lines, of which a backslash or a trailing `&&` continues one."""
    waiting, first = "", line
    for number, raw in enumerate(body.splitlines(), line):
        text = raw.strip()
        first = first if waiting else number
        waiting = f"{waiting} {text}".strip()
        if text.endswith("\\"):
            waiting = waiting[:-1].strip()
            continue
        if text.endswith("&&"):
            continue
        whole, waiting = waiting, ""
        if not whole or whole.startswith("#") or (only and not only.match(whole)):
            continue
        mark = _LINE_MARK.search(whole)
        yield Command(place.format(first), whole, mark[1] if mark else fate)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
