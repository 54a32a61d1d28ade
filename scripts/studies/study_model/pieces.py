"""Cuts a directory's files into pieces with checksums, and puts them together again.

    python -m scripts.studies.study_model.pieces split --directory=DIR --pieces=PIECES
    python -m scripts.studies.study_model.pieces join --pieces=PIECES --directory=DIR

The files one after another are one stream of bytes, cut every `--piece_mib`; a piece is the bzip2
of its part, which takes a quarter off bfloat16 weights. `pieces.json` beside the pieces has size
and SHA-256 of each file and of each piece. The pieces may travel in any number of turns: `join`
names those that are missing or damaged, and writes nothing unless all are right.
"""

import bz2
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from absl import app, flags

from moejax.errors import MoejaxError
from moejax.files.whole import WrittenFile, file_digest, write_json, write_whole
from moejax.models.hf.config import read_json

_DIRECTORY = flags.DEFINE_string("directory", None, "the files", required=True)
_PIECES = flags.DEFINE_string("pieces", None, "the pieces and pieces.json", required=True)
_PIECE_MIB = flags.DEFINE_integer("piece_mib", 15, "MiB of the files in a piece, 1 to 15", 1, 15)

TABLE = "pieces.json"


def split(directory: Path, pieces: Path, piece_bytes: int) -> None:
    """Writes the pieces of all files in `directory` (not of its folders), and their table."""
    files = sorted(path for path in directory.glob("*") if path.is_file())
    if not files:
        raise MoejaxError(f"{directory} has no files to cut into pieces")
    pieces.mkdir(parents=True, exist_ok=True)
    for old in [pieces / TABLE, *pieces.glob("*.piece")]:
        old.unlink(missing_ok=True)
    table: dict[str, Any] = {"files": [], "pieces": []}
    for path in files:
        table["files"].append({"name": path.name, **file_digest(path)._asdict()})
    for i, piece in enumerate(_in_threads(bz2.compress, _cut(files, piece_bytes))):
        path = pieces / f"{i:04}.piece"
        table["pieces"].append({"name": path.name, **write_whole(path, piece)._asdict()})
    write_json(pieces / TABLE, table)


def join(pieces: Path, directory: Path) -> None:
    """Writes the files; MoejaxError if a piece is missing or damaged."""
    table = read_json(pieces / TABLE)
    try:
        expected = {row["name"]: WrittenFile(row["size"], row["sha256"]) for row in table["pieces"]}
        files = [(Path(row["name"]).name, row["size"], row["sha256"]) for row in table["files"]]
    except (KeyError, TypeError) as error:
        raise MoejaxError(f"{pieces / TABLE} is no table of pieces: {error!r}") from error
    paths = [pieces / Path(name).name for name in expected]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise MoejaxError(f"{pieces} lacks {len(missing)} of {len(paths)} pieces: {missing}")
    damaged = [path.name for path in paths if file_digest(path) != expected[path.name]]
    if damaged:
        raise MoejaxError(f"damaged pieces in {pieces}, to be copied again: {damaged}")
    directory.mkdir(parents=True, exist_ok=True)
    parts = _in_threads(lambda path: bz2.decompress(path.read_bytes()), iter(paths))
    held = bytearray()
    for name, size, sha256 in files:
        while len(held) < size and (part := next(parts, b"")):
            held += part
        with memoryview(held)[:size] as content:
            written = write_whole(directory / name, [content])
        if written != WrittenFile(size, sha256):
            raise MoejaxError(f"{directory / name} is not the file that was cut into pieces")
        del held[:size]


def _in_threads(of: Callable[[Any], bytes], parts: Iterator[Any]) -> Iterator[bytes]:
    """`of` each part, in order; as many at once as there are cores."""
    count = os.cpu_count() or 1
    with ThreadPoolExecutor(count) as pool:
        for some in iter(lambda: list(itertools.islice(parts, count)), []):
            yield from pool.map(of, some)


def _cut(files: list[Path], piece_bytes: int) -> Iterator[bytes]:
    """Bytes of all files, `piece_bytes` at a time; the last piece is shorter."""
    held = bytearray()
    for path in files:
        with path.open("rb") as file:
            while part := file.read(piece_bytes - len(held)):
                held += part
                if len(held) == piece_bytes:
                    yield bytes(held)
                    held.clear()
    if held:
        yield bytes(held)


def main(argv: list[str]) -> None:
    """Splits or joins by the flags."""
    directory, pieces = Path(_DIRECTORY.value), Path(_PIECES.value)
    try:
        match argv[1:]:
            case ["split"]:
                split(directory, pieces, _PIECE_MIB.value * 2**20)
            case ["join"]:
                join(pieces, directory)
            case _:
                raise app.UsageError("say split or join")
    except MoejaxError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main)
