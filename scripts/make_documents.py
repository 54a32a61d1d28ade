"""Writes what of docs/ and RESULTS.md is made from the code and from committed rows.

    python -m scripts.make_documents
    python -m scripts.make_documents --figures   # and the pictures of peers and of what to run

A region between `<!-- made: NAME -->` and `<!-- end -->` is replaced by what is made under that
name, and so is what stands between two such marks in one line; the rest of a page is written by
hand. To be run again whenever a configuration, a public docstring or the rows change, which a test
asks for. Rows are `scripts/studies/*/*.jsonl`.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path

from absl import app, flags

from moejax.files.result_rows import read_rows
from moejax.models.hf.config import ARCHITECTURES
from scripts.documents import api_reference, config_tables, measured
from scripts.documents.commands import ROOT
from scripts.studies.peers import budgets, llama_cpp, ours
from scripts.studies.peers import section as peers
from scripts.studies.speed.configurations import MIXTRAL, QWEN3
from scripts.studies.tables import results
from scripts.studies.tables.decisions import Picture
from scripts.studies.tables.rows import Results

STUDIES = ROOT / "scripts/studies"


@functools.cache
def _picture(shape: str) -> Picture:
    speed = list(read_rows(STUDIES / "speed/decide_h200.jsonl"))
    files = [STUDIES / f"quality/study{n}_quality.jsonl" for n in (3, 4, 5, 6)]
    return Picture(shape, speed, [row for file in files for row in read_rows(file)])


def _families() -> str:
    """The values of `model_type` that are read, as a list in a sentence."""
    *names, last = (f"`{name}`" for name in sorted(ARCHITECTURES))
    return f"{', '.join(names)} or {last}"


REGIONS: dict[str, Callable[[], str]] = {
    "configs": config_tables.tables,
    "api": api_reference.reference,
    "families": _families,
    **measured.REGIONS,
    "peers": lambda: budgets.short(peers.all_rows()),
    "peers moejax": lambda: budgets.in_line(peers.all_rows(), ours.NAME),
    "peers llama": lambda: budgets.in_line(peers.all_rows(), llama_cpp.NAME),
    "peers bars": lambda: budgets.bars(peers.all_rows()),
    "peers new models": lambda: budgets.by_budget(peers.all_rows(), ours.NEW_MODELS),
    "what to run short": lambda: _picture(QWEN3).beside(_picture(MIXTRAL), "INT4", "INT3"),
    "what to run": lambda: _picture(QWEN3).text(),
    "what to run Mixtral": lambda: _picture(MIXTRAL).text(),
    "peers whole": lambda: peers.whole(peers.all_rows()),
}
FIGURES = ROOT / "docs/figures"
_REGION = re.compile(r"(<!-- made: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_IN_LINE = re.compile(r"(<!-- made: ([\w ]+) -->)(?!\n)[^\n]*?(<!-- end -->)")
_FIGURES = flags.DEFINE_bool("figures", False, "draw the pictures of the peers and of what to run")


def pages() -> list[Path]:
    """The pages of docs/, the README and RESULTS.md."""
    return [ROOT / "README.md", ROOT / "RESULTS.md", *sorted((ROOT / "docs").glob("*.md"))]


@functools.cache
def _of_results() -> dict[str, str]:
    return results.regions(Results(results.ROWS), (ROOT / "RESULTS.md").read_text("utf-8"))


def region(name: str) -> str:
    """The text of a region.

    Raises:
      KeyError: there is none of that name.
    """
    return REGIONS[name]() if name in REGIONS else _of_results()[name]


def made(text: str) -> str:
    """A page with its regions made anew."""
    text = _IN_LINE.sub(lambda match: f"{match[1]}{region(match[2])}{match[3]}", text)
    return _REGION.sub(lambda match: f"{match[1]}\n{region(match[2])}\n\n{match[3]}", text)


def main(argv: list[str]) -> None:
    """Writes the pages that change."""
    del argv
    for page in pages():
        text = page.read_text("utf-8")
        new = made(text)
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")
    if _FIGURES.value:
        pictures = [_picture(shape).save(FIGURES) for shape in (QWEN3, MIXTRAL)]
        drawn = [*peers.draw(peers.all_rows(), FIGURES), *pictures]
        print(f"{len(drawn)} figures: {sum(one.stat().st_size for one in drawn) / 1e3:.0f} kB")


if __name__ == "__main__":
    app.run(main)
