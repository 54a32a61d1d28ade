"""RESULTS.md: the tables and figures of four papers beside ours, from the committed rows.

    python -m scripts.make_results

Reads `scripts/studies/*/*.jsonl` and `published.csv` beside them; writes RESULTS.md and the
pictures that it shows to docs/figures. Measures nothing; the same rows give the same bytes of text.
To be run again whenever rows are added, which a test asks for.
"""

from pathlib import Path

from absl import app, flags

from scripts.studies.tables.document import FIGURES, build, document, draw
from scripts.studies.tables.rows import Results

_ROWS = flags.DEFINE_string("rows", "scripts/studies", "folder of *.jsonl, in folders of it too")
_OUTPUT = flags.DEFINE_string("output", ".", "folder of RESULTS.md, and of docs/figures below it")


def main(argv: list[str]) -> None:
    """Writes both."""
    del argv
    pages, folder = build(Results(Path(_ROWS.value))), Path(_OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "RESULTS.md"
    path.write_text(document(pages), encoding="utf-8")
    drawn = draw(pages, folder / FIGURES)
    total = sum(one.stat().st_size for one in drawn)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB; {len(drawn)} figures: {total / 1e3:.0f} kB")


if __name__ == "__main__":
    app.run(main)
