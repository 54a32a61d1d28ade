"""Files that are whole or absent, and write errors that name the file."""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from moejax.errors import MoejaxError

ROOM = "make room, or name a place that has more"
PARTIAL = ".partial"  # ends the name of a file that is being written
_PIECE_BYTES = 16 * 2**20


class WrittenFile(NamedTuple):
    """Size and digest of a file."""

    size: int
    sha256: str


@contextlib.contextmanager
def write_errors(path: Path, mend: str = ROOM) -> Iterator[None]:
    """Turns an OSError into a MoejaxError that names `path`; `mend` is advice for a full disk."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = error.strerror or str(error)
        raise MoejaxError(f"{path}: {reason}{f'; {mend}' if is_full else ''}") from error


def write_whole(
    path: Path, content: str | bytes | Iterable[bytes | memoryview], mend: str = ROOM
) -> WrittenFile:
    """Replaces a file whole; on failure the old content stays, and MoejaxError is raised.

    It is written beside its place, synced and renamed, so that it lasts through a power cut.

    Args:
      content: all of it, or its pieces in turn.
      mend: what to do where the disk is full.
    """
    if isinstance(content, str):
        content = content.encode()
    pieces = [content] if isinstance(content, bytes) else content
    partial = path.with_name(path.name + PARTIAL)
    digest, size = hashlib.sha256(), 0
    with write_errors(path, mend):
        try:
            with partial.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
                    digest.update(piece)
                    size += len(piece)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            _sync_directory(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    return WrittenFile(size, digest.hexdigest())


def write_json(path: Path, fields: Mapping[str, object], mend: str = ROOM) -> WrittenFile:
    """Writes a JSON object as `write_whole` does; NaN is an error."""
    return write_whole(path, json_text(fields), mend)


def json_text(fields: Mapping[str, object]) -> str:
    """The text that `write_json` writes."""
    return json.dumps(fields, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def file_digest(path: Path) -> WrittenFile:
    """Size and digest of a file that is there."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return WrittenFile(path.stat().st_size, digest.hexdigest())


def append(path: Path, text: str) -> None:
    """Appends all of a text to a file, or nothing (MoejaxError); creates the file if needed."""
    with write_errors(path):
        before = path.stat().st_size if path.exists() else None
        try:
            # Without a buffer: closing the file writes nothing more.
            with path.open("ab", buffering=0) as file:
                content = memoryview(text.encode())
                while content:
                    content = content[file.write(content) :]
        except BaseException:
            if before is None:
                path.unlink(missing_ok=True)
            elif path.exists():
                with path.open("r+b") as file:
                    file.truncate(before)
            raise


def _sync_directory(directory: Path) -> None:
    """Makes a rename last through a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_output(path: Path, name: str = "output", begins: str = "") -> None:
    """Raises MoejaxError unless `path`, given by the field `name`, can be written.

    `begins`: how a file that is there must begin, white space aside; "": it may hold anything.
    """
    what = ""
    if path.is_dir():
        what = "is a directory"
    elif path.exists() and not path.is_file():  # renaming would replace it, even /dev/null
        what = "is no regular file"
    elif not path.parent.is_dir():
        what = f"lies in {path.parent}, which is not there"
    if what:
        raise MoejaxError(f"{name} {path} {what}; name a file in a directory that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise MoejaxError(f"{name} {path} cannot be written: no permission")
    if begins and path.exists():
        with path.open("rb") as file:
            head = "".join(file.read(1024).decode(errors="replace").split())
        if not head.startswith(begins) and path.stat().st_size:
            raise MoejaxError(
                f"{name} {path} is there and holds no earlier result; name another file"
            )


def check_directory(path: Path, name: str) -> None:
    """Makes the directory that a field names, or raises MoejaxError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MoejaxError(f"{name} {path}: {error.strerror}; name a directory") from error
    if not os.access(path, os.W_OK):
        raise MoejaxError(f"{name} {path} cannot be written: no permission")
