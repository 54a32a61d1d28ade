"""The command line of a paper's section of RESULTS.md, and of its pictures."""

from collections.abc import Callable
from pathlib import Path

from absl import app, flags

from scripts.studies.tables.page import Page
from scripts.studies.tables.rows import Results

RESULTS = Path("scripts/studies")
FIGURES = "docs/figures"
Build = Callable[[Results, str], Page]


def run(build: Build) -> None:
    """Prints a paper's section of RESULTS.md; draws its pictures where a folder is named."""
    rows = flags.DEFINE_string("rows", str(RESULTS), "folder of *.jsonl, in folders of it too")
    figures = flags.DEFINE_string("figures", "", "folder of the pictures; '': none")

    def main(argv: list[str]) -> None:
        del argv
        page = build(Results(Path(rows.value)), figures.value or FIGURES)
        print(page.markdown())
        if figures.value:
            for path in page.draw(Path(figures.value)):
                print(f"drawn: {path}")

    app.run(main)
