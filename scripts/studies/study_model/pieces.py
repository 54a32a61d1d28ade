"""Cuts a directory's files into pieces with checksums, and puts them together again.

    python -m scripts.studies.study_model.pieces split --directory=DIR --pieces=PIECES
    python -m scripts.studies.study_model.pieces join --pieces=PIECES --directory=DIR

The files one after another are one stream of bytes, cut every `--piece_mib`. `pieces.json` beside
the pieces has size and SHA-256 of each file and of each piece. The pieces may travel in any number
of turns: `join` names those that are missing or damaged, and writes nothing unless all are right.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from absl import app, flags

from moejax.errors import MoejaxError
from moejax.files.whole import WrittenFile, file_digest, write_json, write_whole
from moejax.models.hf.config import read_json

_DIRECTORY = flags.DEFINE_string("directory", None, "the files", required=True)
_PIECES = flags.DEFINE_string("pieces", None, "the pieces and pieces.json", required=True)
_PIECE_MIB = flags.DEFINE_integer("piece_mib", 15, "size of a piece, 1 to 16 MiB", 1, 16)

TABLE = "pieces.json"


def split(directory: Path, pieces: Path, piece_bytes: int) -> None:
    """Writes the pieces of all files in `directory` (not of its folders), and their table."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    if not files:
        raise MoejaxError(f"{directory} has no files to cut into pieces")
    pieces.mkdir(parents=True, exist_ok=True)
    for old in [pieces / TABLE, *pieces.glob("*.piece")]:
        old.unlink(missing_ok=True)
    table: dict[str, Any] = {"files": [], "pieces": []}
    for path in files:
        table["files"].append({"name": path.name, **file_digest(path)._asdict()})
    for i, piece in enumerate(_cut(files, piece_bytes)):
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
    with contextlib.closing(_Stream(paths)) as stream:
        for name, size, sha256 in files:
            if write_whole(directory / name, stream.read(size)) != WrittenFile(size, sha256):
                raise MoejaxError(f"{directory / name} is not the file that was cut into pieces")


def _cut(files: list[Path], piece_bytes: int) -> Iterator[bytes]:
    """Bytes of all files, `piece_bytes` at a time; the last piece is shorter."""
    stream = _Stream(files)
    while piece := b"".join(stream.read(piece_bytes)):
        yield piece


class _Stream:
    """Files read one after another."""

    def __init__(self, paths: list[Path]):
        self._paths = iter(paths)
        self._file: BinaryIO | None = None

    def read(self, size: int) -> Iterator[bytes]:
        """The next `size` bytes, or as many as there are, in parts."""
        while size:
            if self._file is None:
                path = next(self._paths, None)
                if path is None:
                    return
                self._file = path.open("rb")
            part = self._file.read(min(size, 2**20))
            size -= len(part)
            if part:
                yield part
            else:
                self.close()

    def close(self) -> None:
        """Closes the file that is being read."""
        if self._file is not None:
            self._file.close()
            self._file = None


def main(argv: list[str]) -> None:
    """Splits or joins by the flags."""
    directory, pieces = Path(_DIRECTORY.value), Path(_PIECES.value)
    match argv[1:]:
        case ["split"]:
            split(directory, pieces, _PIECE_MIB.value * 2**20)
        case ["join"]:
            join(pieces, directory)
        case _:
            raise app.UsageError("say split or join")


if __name__ == "__main__":
    app.run(main)
