"""The error messages of the package, with a dot for what differs, read from the source."""

import ast
import re

from scripts.documents.commands import ROOT

OPEN = "…"  # what differs from case to case
_ERRORS = ("MoejaxError", "BudgetError", "OutOfRangeError")
_QUOTED = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)


def templates() -> dict[str, list[str]]:
    """Messages of `MoejaxError` and its kinds that a user can meet, by the file of the package.

    What begins with nothing but a value, or is one, is left out: it is another message's text.
    """
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "moejax").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Raise) and (text := _message(node.exc)):
                messages = found.setdefault(name, [])
                if text not in messages:
                    messages.append(text)
    return found


def quoted(page: str) -> list[str]:
    """The messages of a page: the first cells of its tables."""
    return _QUOTED.findall(page)


def _message(raised: ast.expr | None) -> str | None:
    if not isinstance(raised, ast.Call) or not isinstance(raised.func, ast.Name):
        return None
    if raised.func.id not in _ERRORS or not raised.args:
        return None
    text = re.sub(f"{OPEN}+", OPEN, " ".join(_text(raised.args[0]).split()))
    return text if re.search(r"[a-z]{3}", text) else None


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return OPEN
