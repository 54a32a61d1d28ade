"""Makes the calibration text that ships, from packed documents on the disk.

    python -m scripts.demo_training.pack_calibration_text --documents=FOLDER

FOLDER holds books, code, math and chinese `.jsonl.xz`, rows {"source": ..., "text": ...}, of the
training side of the corpus: nothing that a model is measured with. Excerpts are taken at even
distances, cut at ends of lines, and laid out in turns of all sources, so that any stretch of some
ten thousand tokens holds prose, code, maths and Chinese.
"""

import argparse
import json
import lzma
from pathlib import Path

from moejax.quantization.pipeline.calibration import TEXT_PATH

EXCERPT_BYTES = 7_000  # about one sample of 2048 tokens
# Source: how many excerpts. All are in the public domain, CC0, MIT or Apache-2.0; see the README.
SOURCES = {
    "books": {"classic-books-markdown": 10, "standardebooks": 8},
    "code": {"pypi:diffusers": 12},
    "math": {"mathlib3": 8, "gsm8k-train": 6},
    "chinese": {"Classical-Modern:modern": 7, "paddle-docs-cn": 5},
}


def excerpts(path: Path, source: str, count: int) -> list[str]:
    """`count` excerpts of about EXCERPT_BYTES from the documents of a source that hold so much."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    texts = [row["text"].strip() for row in rows if row["source"].startswith(source)]
    texts = [text for text in texts if len(text.encode()) >= EXCERPT_BYTES]
    return [_excerpt(texts[i * len(texts) // count]) for i in range(count)]


def _excerpt(text: str) -> str:
    """From the middle of the text, without the lines that the cuts go through."""
    data = text.encode()
    first = (len(data) - EXCERPT_BYTES) // 2
    part = data[first : first + EXCERPT_BYTES].decode(errors="ignore")
    return part.partition("\n")[2].rpartition("\n")[0].strip()


def main() -> None:
    """Writes moejax/quantization/pipeline/calibration_text/text.xz."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=Path, required=True)
    folder = parser.parse_args().documents
    placed: list[tuple[float, str]] = []
    for domain, sources in SOURCES.items():
        for source, count in sources.items():
            found = excerpts(folder / f"{domain}.jsonl.xz", source, count)
            placed += [((i + 0.5) / count, text) for i, text in enumerate(found)]
            print(f"{source}: {sum(len(text.encode()) for text in found)} bytes")
    text = "\n\n".join(text for _, text in sorted(placed)) + "\n"
    TEXT_PATH.parent.mkdir(exist_ok=True)
    TEXT_PATH.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(text.encode())} bytes, {TEXT_PATH.stat().st_size} compressed, in {TEXT_PATH}")


if __name__ == "__main__":
    main()
