"""Source files of the repository, each read and parsed once by a process."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("moejax", "pallas_kernels", "configs", "scripts", "tests")


@functools.cache
def source_files() -> dict[str, tuple[str, ast.Module]]:
    """Text and tree of every file, by its path from the root."""
    found = {}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        found[name] = text, ast.parse(text, name)
    assert len(found) > 500, f"{len(found)} files under {ROOT}"
    return found


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields a module and the statements in it, however deep: a fifth of what `ast.walk` does."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from statements(child)
