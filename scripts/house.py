"""Counts what a reader of this code has to hold in mind: lines, names, files that a token passes.

    python -m scripts.house

Prints a table of two columns. The files of a token are those of `moejax` and `pallas_kernels` in
which a function runs for one answer of three tokens of the demo model (`sys.setprofile`): resident,
with 8 slots a layer, and under DyMoE; loading is left out.
"""

import ast
import collections
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import app

ROOT = Path(__file__).parents[1]
LIBRARY = ("moejax", "pallas_kernels")
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def lines(folder: str) -> int:
    """Lines of a folder's Python files."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in _sources(folder))


def public_names(*, reachable: bool = False) -> collections.Counter[str]:
    """Functions, methods and classes of the library without an underscore, and how often each.

    With `reachable`, without those inside a function or a private class, which nothing outside can
    name.
    """
    trees = (ast.parse(p.read_text("utf-8")) for folder in LIBRARY for p in _sources(folder))
    return collections.Counter(name for tree in trees for name in _public(tree, reachable))


def _public(tree: ast.AST, reachable: bool) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        is_public = isinstance(node, _NAMED) and not node.name.startswith("_")
        if isinstance(node, _NAMED) and is_public:
            yield node.name
        is_open = is_public and isinstance(node, ast.ClassDef)
        if is_open or not (reachable and isinstance(node, _NAMED)):
            yield from _public(node, reachable)


def files_of_a_token(**load: Any) -> set[str]:
    """Files of the library in which a function runs while the demo answers with three tokens."""
    from moejax import Engine

    prefixes = tuple(str(ROOT / folder) + "/" for folder in LIBRARY)
    found = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        del argument
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(prefixes):
            found.add(name)

    with Engine.from_pretrained("demo", progress=False, **load) as engine:
        sys.setprofile(note)
        try:
            engine.generate(["The history of"], max_new_tokens=3)
        finally:
            sys.setprofile(None)
    return found


def loads() -> dict[str, dict[str, Any]]:
    """Arguments of `files_of_a_token` by name."""
    from moejax import Tiering
    from moejax.experts.budget import Limits

    return {
        "resident": {},
        "slots": {"limits": Limits(slots=8, prefetch=2)},
        "a policy": {"policy": Tiering(policy="dymoe", tiers=("int4", "int2"))},
    }


def _sources(folder: str) -> Iterator[Path]:
    return (ROOT / folder).rglob("*.py")


def main(argv: list[str]) -> None:
    """Prints the table."""
    del argv
    names = public_names()
    classes = sum(number > 1 and name[0].isupper() for name, number in names.items())
    rows = [
        ("lines of moejax and pallas_kernels", sum(map(lines, LIBRARY))),
        ("lines of scripts", lines("scripts")),
        ("lines of tests", lines("tests")),
        ("public names of the library", sum(names.values())),
        ("those not in functions or private classes", public_names(reachable=True).total()),
        ("names of more than one class", classes),
        *(
            (f"files of a token, {name}", len(files_of_a_token(**load)))
            for name, load in loads().items()
        ),
    ]
    for name, value in rows:
        print(f"{name:42} {value:>7,}")


if __name__ == "__main__":
    app.run(main)
