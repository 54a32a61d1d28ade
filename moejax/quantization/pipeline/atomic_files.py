"""Files that are whole or not there: written beside their place, synced, renamed.

Safetensors are written by hand rather than by the library, which wants all tensors in memory at
once: here a tensor that stays as it is goes from file to file in pieces, and the digest is taken on
the way.
"""

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from moejax.checkpoints.safetensors_reader import StoredTensor, without_masks
from moejax.errors import MoejaxError
from moejax.files.checksums import Checksum, checksum, checksum_fields

PARTIAL = ".partial"
_PIECE_BYTES = 16 * 2**20
# A header's length is a multiple of this, so that the data that follow are aligned.
_ALIGNMENT_BYTES = 8

_NAMES: dict[np.dtype, str] = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.uint32): "U32",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
}

Tensor = np.ndarray | StoredTensor


class WrittenFile(NamedTuple):
    """What the manifest says of a file."""

    size: int
    sha256: str


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
    """Writes a safetensors file.

    Args:
      path: its place; nothing is there before it is whole.
      tensors: arrays, or tensors of another file, which are copied as they are stored.

    Raises:
      MoejaxError: the disk is full, or a copied tensor holds NaN or infinity.
    """
    # Wide types first, so that every tensor is aligned, as the library has them.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    checksums = {name: checksum(_pieces(tensor)) for name, tensor in tensors.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt", **checksum_fields(checksums)}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + _num_bytes(tensor)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return _write(path, _contents(len(text).to_bytes(8, "little") + text, tensors))


def write_bytes(path: Path, content: bytes) -> WrittenFile:
    """Writes a small file.

    Raises:
      MoejaxError: the disk is full.
    """
    return _write(path, iter([memoryview(content)]))


def write_json(path: Path, fields: Mapping[str, object]) -> WrittenFile:
    """Writes a JSON object; what is not JSON (NaN) is an error.

    Raises:
      MoejaxError: the disk is full.
    """
    return write_bytes(path, json_bytes(fields))


def json_bytes(fields: Mapping[str, object]) -> bytes:
    """The text that `write_json` writes."""
    return (json.dumps(fields, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()


def file_digest(path: Path) -> WrittenFile:
    """Size and digest of a file that is there."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return WrittenFile(path.stat().st_size, digest.hexdigest())


def read_finite(
    tensor: StoredTensor, first_row: int = 0, num_rows: int | None = None
) -> Iterator[np.ndarray]:
    """The values of a tensor, or of some of its rows, flat, in pieces.

    Args:
      tensor: where they lie.
      first_row: the first that is wanted.
      num_rows: how many are wanted; None: all.

    Raises:
      MoejaxError: the file ends too soon, a value is NaN or infinite, or the whole was read and has
        not the checksum that the file says.
    """
    found = Checksum()
    width = math.prod(tensor.shape[1:])
    num_values = (tensor.shape[0] if num_rows is None else num_rows) * width
    step = _PIECE_BYTES // tensor.dtype.itemsize
    start = first_row * width
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.offset + start * tensor.dtype.itemsize)
        for first in range(0, num_values, step):
            piece = np.empty(min(step, num_values - first), tensor.dtype)
            view = piece.view(np.uint8).data
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise MoejaxError(f"{tensor.path} ended inside {tensor.name}; it was changed")
                done += count
            found.update(piece)
            check_finite(tensor, piece, start + first)
            yield piece
    if num_values == math.prod(tensor.shape):
        tensor.compare(found.value)


def read_matrix(
    tensor: StoredTensor, rows: np.ndarray | None = None, first_row: int = 0
) -> np.ndarray:
    """A matrix, or the rows from `first_row` on that fill `rows`, as float32.

    Args:
      tensor: [N, K].
      rows: float32[n, K], contiguous, filled and returned; None: new memory for all.
      first_row: the first that is read.

    Raises:
      MoejaxError: as `read_finite`.
    """
    if rows is None:
        rows = np.empty(tensor.shape, np.float32)
    flat, done = rows.reshape(-1), 0
    for values in read_finite(tensor, first_row, len(rows)):
        flat[done : done + values.size] = values
        done += values.size
    return rows


def check_finite(tensor: StoredTensor, values: np.ndarray, first: int = 0) -> None:
    """Raises MoejaxError naming the first value that is NaN or infinite, but for `without_masks`.

    Args:
      tensor: where they are from.
      values: float[n], values `first`.. of it.
      first: how many of its values are before these.
    """
    values = without_masks(tensor.name, values)
    # One pass without a mask of the size of the values: a sum is finite only if all are.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum(dtype=np.float32)):
            return
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        place = ", ".join(map(str, np.unravel_index(first + int(wrong[0]), tensor.shape)))
        raise MoejaxError(
            f"{tensor.path}: {tensor.name} holds {values[wrong[0]]} at [{place}]; such a "
            "checkpoint cannot be quantized, download or convert it again"
        )


def _contents(header: bytes, tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for tensor in tensors.values():
        for piece in _pieces(tensor):
            if piece.size:
                yield piece.view(np.uint8).data


def _pieces(tensor: Tensor) -> Iterator[np.ndarray]:
    """Yields the values of a tensor, flat; one of another file is read anew."""
    if isinstance(tensor, StoredTensor):
        yield from read_finite(tensor)
    else:
        yield np.ascontiguousarray(tensor).reshape(-1)


def _write(path: Path, pieces: Iterator[memoryview]) -> WrittenFile:
    partial = path.with_name(path.name + PARTIAL)
    digest, size = hashlib.sha256(), 0
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
    except OSError as error:
        partial.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free_bytes = shutil.disk_usage(path.parent).free
            raise MoejaxError(
                f"no space left for {path} ({free_bytes / 1e6:,.0f} MB free); make room and start "
                "the same command again, it goes on from here"
            ) from error
        raise
    except MoejaxError:
        partial.unlink(missing_ok=True)
        raise
    return WrittenFile(size, digest.hexdigest())


def _sync_directory(directory: Path) -> None:
    """Makes a rename last through a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.nbytes if isinstance(tensor, np.ndarray) else tensor.num_bytes
