"""The picture of a shape: quality against tokens a second under budgets, and its table.

    python -m scripts.studies.tables.decide --shape=Qwen3-30B-A3B --output=DIR \
        --speed=SPEED.jsonl --quality=QUALITY.jsonl

It answers "I have 12 GB: what should I run?". Speed is of rows of `moejax.benchmark`, as
`scripts.studies.speed.decide` asks it; quality of rows of `quality.policies --sections=decide`: of
the study model where they are, else of the demo, as the caption says. They are joined by method
and, where a method's quality depends on the share of experts in slots, by the nearest share that
was scored, at most 1/16 away. What has no row is named and not drawn. In the table a cell is bold
where no other method of its budget is as fast and as good, and better in one.
"""

from pathlib import Path

from absl import app, flags

from scripts.studies.tables.decisions import make

_SHAPE = flags.DEFINE_string("shape", None, "whose rows", required=True)
_SPEED = flags.DEFINE_multi_string("speed", [], "files of rows of speed")
_QUALITY = flags.DEFINE_multi_string("quality", [], "files of rows of quality")
_OUTPUT = flags.DEFINE_string("output", None, "folder to write to", required=True)


def main(argv: list[str]) -> None:
    """Writes decide_SHAPE.md, and decide_SHAPE.png where a point has speed and quality."""
    del argv
    speed, quality = map(Path, _SPEED.value), map(Path, _QUALITY.value)
    for path in make(_SHAPE.value, [*speed], [*quality], Path(_OUTPUT.value)):
        if path.exists():
            print(path)


if __name__ == "__main__":
    app.run(main)
