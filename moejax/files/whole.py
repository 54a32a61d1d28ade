"""Files that are whole or absent, and write errors that name the file."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from moejax.errors import MoejaxError

ROOM = "make room, or name a place that has more"


@contextlib.contextmanager
def write_errors(path: Path, mend: str = ROOM) -> Iterator[None]:
    """Turns an OSError into a MoejaxError that names `path`.

    Args:
      path: the file written inside the context.
      mend: advice for a full disk.

    Raises:
      MoejaxError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = error.strerror or str(error)
        raise MoejaxError(f"{path}: {reason}{f'; {mend}' if is_full else ''}") from error


def write_whole(path: Path, content: str | bytes, mend: str = ROOM) -> None:
    """Replaces a file whole; on failure the old content stays.

    Raises:
      MoejaxError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    with write_errors(path, mend):
        try:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def append(path: Path, text: str) -> None:
    """Appends all of a text to a file, or nothing; creates the file if needed.

    Raises:
      MoejaxError: it cannot be written.
    """
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
