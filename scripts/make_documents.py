"""Writes what of docs/ is made from the code and from committed rows.

    python -m scripts.make_documents

A region between `<!-- made: NAME -->` and `<!-- end -->` is replaced by what `REGIONS` makes under
that name, and so is what stands between two such marks in one line; the rest of a page is written
by hand. To be run again whenever a configuration, a public docstring or the rows change, which a
test asks for.
"""

import re
from collections.abc import Callable
from pathlib import Path

from absl import app

from scripts.documents import api_reference, config_tables, measured, messages
from scripts.documents.commands import ROOT

REGIONS: dict[str, Callable[[], str]] = {
    "configs": config_tables.tables,
    "api": api_reference.reference,
    "families": messages.families,
    **measured.REGIONS,
}
_REGION = re.compile(r"(<!-- made: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_IN_LINE = re.compile(r"(<!-- made: ([\w ]+) -->)(?!\n)[^\n]*?(<!-- end -->)")


def pages() -> list[Path]:
    """The pages of docs/ and the README."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def made(text: str) -> str:
    """A page with its regions made anew.

    Raises:
      KeyError: a region has a name that is not known.
    """
    text = _IN_LINE.sub(lambda match: f"{match[1]}{REGIONS[match[2]]()}{match[3]}", text)
    return _REGION.sub(lambda match: f"{match[1]}\n{REGIONS[match[2]]()}\n\n{match[3]}", text)


def main(argv: list[str]) -> None:
    """Writes the pages that change."""
    del argv
    for page in pages():
        text = page.read_text("utf-8")
        new = made(text)
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    app.run(main)
