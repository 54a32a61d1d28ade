"""Reads safetensors files: headers checked against file sizes, tensors read into given memory.

Tensors are read rather than memory-mapped: mapped pages would count as resident memory, and a
file that shrinks under a mapping kills the process.
"""

import contextlib
import dataclasses
import gc
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moejax.errors import MoejaxError
from moejax.files.checksums import Checksum, checksum, stored_checksums
from moejax.files.small import MOST_VALUES, check_link, check_regular, parse_json
from moejax.models.hf.config import read_json

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# DeepSeek-V3 in GPTQ's format has 180,000 of them, a model of a trillion weights 280,000.
MOST_TENSORS = 2**19
_OFFSETS = b'"data_offsets"'  # once a tensor
_VALUES_OF_TENSOR = 10  # of JSON: a header's entry of three axes, and its checksum
_MOST_FILES = 10_000
_MOST_HEADER_BYTES = 100_000_000  # the safetensors library's limit too

_FLOATS: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# The others are parts of quantized weights.
_DTYPES = _FLOATS | {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
}
# Numbers without their sign, as integers: the largest there is, and the first that no step can
# compute with. That is 2^63, whose square, summed in a norm, overflows float32; infinity in types
# that end before it; NaN in E4M3, which has no infinity.
_MAGNITUDES: dict[np.dtype, tuple[type[np.unsignedinteger], int, int]] = {
    _DTYPES["F32"]: (np.uint32, 0x7FFFFFFF, 0x5F000000),
    _DTYPES["F16"]: (np.uint16, 0x7FFF, 0x7C00),
    _DTYPES["BF16"]: (np.uint16, 0x7FFF, 0x5F00),
    _DTYPES["F8_E4M3"]: (np.uint8, 0x7F, 0x7F),
}
_CHOOSING_BIAS = ".e_score_correction_bias"  # DeepSeek-V3's; decides who is chosen, weighs nothing
_PIECE_BYTES = 16 * 2**20
_BLOCK = 2**16  # numbers looked at together: their copy is small, and a cache holds it
DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class OutOfRangeError(MoejaxError):
    """Weights outside the computable range; the file may have been changed."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place of a tensor in a file."""

    name: str
    path: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]
    dtype: np.dtype
    checksum: int | None = None  # by the file's metadata; see `moejax.files.checksums`
    row_bytes: int = 0  # from the start of a row to that of the next; 0: rows have no gaps
    is_slice: bool = False  # a part, or columns, of the tensor of that name

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, start: int, shape: tuple[int, ...]) -> "StoredTensor":
        """Returns the part from index `start` of the first axis on, without a checksum."""
        skipped = start * math.prod(self.shape[1:]) * self.dtype.itemsize
        offset = self.offset + skipped
        return dataclasses.replace(self, shape=shape, offset=offset, checksum=None, is_slice=True)

    def columns(self, start: int, stop: int) -> "StoredTensor":
        """Returns some columns of the matrix, without a checksum."""
        num_rows, num_columns = self.shape
        size = self.dtype.itemsize
        return dataclasses.replace(
            self, shape=(num_rows, stop - start), offset=self.offset + start * size, checksum=None,
            row_bytes=num_columns * size, is_slice=True,
        )  # fmt: skip

    def verify(self, content: np.ndarray) -> None:
        """Raises MoejaxError unless `content` has the checksum of the metadata, if there is one."""
        if self.checksum is not None:
            self._compare(checksum([content]))

    def _compare(self, found: int) -> None:
        """Raises MoejaxError unless `found` is the checksum of the metadata, if there is one."""
        if self.checksum is not None and found != self.checksum:
            raise MoejaxError(
                f"{self.path}: {self.name} is not what was written (its checksum is {found:08x}, "
                f"{self.checksum:08x} by the file's header): the file was changed, or the disk "
                "fails; copy it again"
            )


def weight_files(directory: Path) -> list[Path]:
    """Returns the weight files, one or those of the index; raises MoejaxError if one is missing."""
    if not directory.is_dir():
        raise MoejaxError(f"no such directory: {directory}")
    whole = directory / WEIGHTS_FILE
    files = [whole] if _is_there(whole) else _shards(directory, _weight_map(directory))
    for path in files:
        check_link(path)
        if not path.is_file():
            kind = "a directory" if path.is_dir() else "a special file"
            raise MoejaxError(f"{path} is {kind}, expected a safetensors file; download it again")
    return files


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint by name, from the headers alone.

    MoejaxError if a file is missing, truncated, or no safetensors file; if two files hold the same
    tensor, or not what the index says; if there are more than `MOST_TENSORS`.
    """
    headers, num_bytes, num_tensors = {}, 0, 0
    for path in weight_files(directory):
        headers[path] = header = _read_header(path)
        num_bytes += len(header)
        num_tensors += header.count(_OFFSETS)
        if num_tensors > MOST_TENSORS or num_bytes > _MOST_HEADER_BYTES:
            raise MoejaxError(
                f"the files in {directory} hold more than {MOST_TENSORS:,} tensors, or "
                f"{_MOST_HEADER_BYTES:,} bytes of headers, which no model does; download them again"
            )
    tensors: dict[str, StoredTensor] = {}
    with _collector_paused():
        for path, header in headers.items():
            found = _parse_header(path, header)
            if twice := sorted(found.keys() & tensors.keys()):
                raise MoejaxError(
                    f"{twice[0]} is in {tensors[twice[0]].path} and in {path.name} as well; remove "
                    "one of the files or download both again"
                )
            tensors |= found
    if not _is_there(directory / WEIGHTS_FILE):
        _check_index(directory / INDEX_FILE, _weight_map(directory), tensors)
    return tensors


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses Python's collector, which took half the time of making tensors."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _is_there(path: Path) -> bool:
    """Whether a path exists, even as a link that leads nowhere."""
    return path.exists() or path.is_symlink()


def _weight_map(directory: Path) -> dict[str, str]:
    """The file's name by the tensor's name, from the index."""
    index = directory / INDEX_FILE
    if not _is_there(index):
        pickles = sorted(path.name for kind in _PICKLES for path in directory.glob(kind))
        if pickles:
            raise MoejaxError(
                f"no {WEIGHTS_FILE} and no {INDEX_FILE} in {directory}; {pickles[0]} is a pickle, "
                "which can run any code when it is read, so it is not; weights must be converted "
                "to safetensors first"
            )
        raise MoejaxError(
            f"no {WEIGHTS_FILE} and no {INDEX_FILE} in {directory}; weights of other formats "
            "must be converted to safetensors first"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise MoejaxError(f"{index} has no weight_map")
    if len(weight_map) > MOST_TENSORS:
        raise MoejaxError(
            f"{index} has more than {MOST_TENSORS:,} tensors, which no model does; download it "
            "again"
        )
    known: set[str] = set()
    for name, file in weight_map.items():
        if isinstance(file, str) and file in known:
            continue
        if not isinstance(file, str) or file != Path(file).name:
            raise MoejaxError(f"{index}: weight_map has {file!r} for {name}, expected a file name")
        known.add(file)
    if len(known) > _MOST_FILES:
        raise MoejaxError(f"{index} has more than {_MOST_FILES:,} files; download it again")
    return weight_map


def _shards(directory: Path, weight_map: dict[str, str]) -> list[Path]:
    files = sorted({directory / name for name in weight_map.values()})
    if missing := [path.name for path in files if not _is_there(path)]:
        raise MoejaxError(
            f"{directory}: {len(missing)} of {len(files)} weight files are missing "
            f"({', '.join(missing[:3])}); finish the download"
        )
    return files


def _check_index(index: Path, weight_map: dict[str, str], tensors: dict[str, StoredTensor]) -> None:
    """Raises MoejaxError naming the first tensor that is not where the index has it."""
    for name in sorted(tensors.keys() | weight_map.keys()):
        said = weight_map.get(name, "no file")
        found = tensors[name].path.name if name in tensors else "no file"
        if said != found:
            raise MoejaxError(
                f"{index} has {name} in {said}, but {found} holds it; download all again"
            )


def is_float(tensor: StoredTensor) -> bool:
    """Whether weights of the tensor's type can be computed with as they are."""
    return tensor.dtype in _FLOATS.values()


def check_floats(tensors: Iterable[StoredTensor]) -> None:
    """Raises MoejaxError naming the first tensor that is stored in no float type."""
    for tensor in tensors:
        if not is_float(tensor):
            raise MoejaxError(
                f"{tensor.path}: {tensor.name} is stored as {DTYPE_CODES[tensor.dtype]}; supported "
                f"are {', '.join(_FLOATS)}"
            )


def read_array(tensor: StoredTensor) -> np.ndarray:
    """A tensor in memory of its own."""
    memory = np.empty(tensor.shape, tensor.dtype)
    read_tensor(tensor, memory)
    return memory


def read_tensor(tensor: StoredTensor, destination: np.ndarray) -> None:
    """Reads a tensor into contiguous memory of its own size and dtype.

    Raises MoejaxError where the file ended early, or holds other bytes than its checksum is of.
    """
    with tensor.path.open("rb", buffering=0) as file:
        read_values(tensor, destination, file.fileno())
    tensor.verify(destination)


def read_values(
    tensor: StoredTensor, destination: np.ndarray, descriptor: int, first: int = 0
) -> None:
    """Reads the values of a tensor from number `first` on, by position, so that threads may.

    `destination` is contiguous memory of its dtype, which is filled; `columns` are read from the
    first on. MoejaxError if the file ended.
    """
    view = destination.reshape(-1).view(np.uint8).data
    if not tensor.row_bytes:
        _read_run(tensor, view, descriptor, tensor.offset + first * tensor.dtype.itemsize)
        return
    size = len(view) // tensor.shape[0]
    for row in range(tensor.shape[0]):
        run = view[row * size : (row + 1) * size]
        _read_run(tensor, run, descriptor, tensor.offset + row * tensor.row_bytes)


def _read_run(tensor: StoredTensor, view: memoryview, descriptor: int, offset: int) -> None:
    """Fills `view` with the bytes from `offset` on."""
    done = 0
    while done < len(view):  # one read returns at most 2 GiB
        count = _read_at(descriptor, view[done:], offset + done)
        if not count:
            raise MoejaxError(f"{tensor.path} ended inside {tensor.name}; it was changed")
        done += count


def _read_at(descriptor: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    content = os.pread(descriptor, len(view), offset)  # macOS
    view[: len(content)] = content
    return len(content)


def read_finite(
    tensor: StoredTensor, first_row: int = 0, num_rows: int | None = None
) -> Iterator[np.ndarray]:
    """Yields the values of a tensor, or of `num_rows` from `first_row` on, flat, in pieces.

    MoejaxError if the file ends too soon, a value is out of range (`check_range`), or the whole was
    read and has not the checksum that the file says.
    """
    found = Checksum()
    width = math.prod(tensor.shape[1:])
    num_values = (tensor.shape[0] if num_rows is None else num_rows) * width
    step = _PIECE_BYTES // tensor.dtype.itemsize
    start = first_row * width
    with tensor.path.open("rb", buffering=0) as file:
        for first in range(start, start + num_values, step):
            piece = np.empty(min(step, start + num_values - first), tensor.dtype)
            read_values(tensor, piece, file.fileno(), first)
            found.update(piece)
            check_range(tensor, piece, first)
            yield piece
    if num_values == math.prod(tensor.shape):
        tensor._compare(found.value)


def read_matrix(
    tensor: StoredTensor, rows: np.ndarray | None = None, first_row: int = 0
) -> np.ndarray:
    """Reads a matrix, or the rows from `first_row` on that fill `rows`, as float32.

    `rows` is float32[n, K], contiguous, filled and returned; None: new memory for all. MoejaxError
    as `read_finite`.
    """
    if rows is None:
        rows = np.empty(tensor.shape, np.float32)
    flat, done = rows.reshape(-1), 0
    for values in read_finite(tensor, first_row, len(rows)):
        flat[done : done + values.size] = values
        done += values.size
    return rows


def check_range(tensor: StoredTensor, values: np.ndarray, first: int = 0) -> None:
    """Raises OutOfRangeError for a weight, but for `_without_masks`, that is NaN, infinite or huge.

    The error names the first, with its place unless the tensor is a slice of another. `values` are
    numbers `first`.. of the tensor's.
    """
    wrong = _first_out_of_range(tensor.name, values)
    if wrong is not None:
        place = ", ".join(map(str, np.unravel_index(first + wrong, tensor.shape)))
        said = f"{values.reshape(-1)[wrong]!s}{'' if tensor.is_slice else f' at [{place}]'}"
        raise OutOfRangeError(
            f"{tensor.path}: {tensor.name} holds {said}; with NaN, infinite or huge values (2^63 "
            "or more) nothing can be computed; download it again, or convert it anew"
        )


def _without_masks(name: str, values: np.ndarray) -> np.ndarray:
    """Replaces by 0 the -inf by which a router's bias keeps an expert from being chosen."""
    if not name.endswith(_CHOOSING_BIAS):
        return values
    return np.where(values == -np.inf, values.dtype.type(0), values)


def in_range(name: str, values: np.ndarray) -> bool:
    """Whether no weight is NaN, infinite or huge."""
    return _first_out_of_range(name, values) is None


def _first_out_of_range(name: str, values: np.ndarray) -> int | None:
    """Finds the first weight that is out of range; as integers, several times faster than floats.

    Returns its number in `values`, or None.
    """
    values = _without_masks(name, values)
    if values.dtype not in _MAGNITUDES:
        return None
    word, largest, first_wrong = _MAGNITUDES[values.dtype]
    words = values.reshape(-1).view(word)
    for first in range(0, len(words), _BLOCK):
        magnitudes = words[first : first + _BLOCK] & word(largest)
        if int(magnitudes.max()) >= first_wrong:
            return first + int(np.argmax(magnitudes >= first_wrong))
    return None


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name; raises MoejaxError if it is no whole safetensors file."""
    return _parse_header(path, _read_header(path))


def _read_header(path: Path) -> bytes:
    """JSON of a file: 8 bytes of its length, little-endian, itself, then data without gaps."""
    found = path.stat()
    check_regular(path, found.st_mode)
    file_bytes = found.st_size
    with path.open("rb") as file:
        start = file.read(8)
        data_start = 8 + int.from_bytes(start, "little")
        if start == b"version ":
            raise MoejaxError(f"{path} is a Git LFS pointer, not the weights; run git lfs pull")
        if len(start) < 8 or data_start > file_bytes:
            raise _truncated(path, file_bytes, max(8, data_start))
        if data_start - 8 > _MOST_HEADER_BYTES:
            raise MoejaxError(
                f"{path} is not a safetensors file (its header has {data_start - 8:,} bytes, at "
                f"most {_MOST_HEADER_BYTES:,} are allowed)"
            )
        return file.read(data_start - 8)


def _parse_header(path: Path, content: bytes) -> dict[str, StoredTensor]:
    data_start, file_bytes = 8 + len(content), path.stat().st_size
    try:
        num_tensors = min(content.count(_OFFSETS), MOST_TENSORS)
        most_values = max(MOST_VALUES, _VALUES_OF_TENSOR * num_tensors)
        header: dict[str, Any] = parse_json(content, most_values)
        checksums = stored_checksums(header.pop("__metadata__", None))
        if checksums and (other := sorted(checksums.keys() ^ header.keys())):
            has = "a checksum and no data" if other[0] in checksums else "no checksum"
            raise ValueError(f"{other[0]} has {has}, and others have both")
        needed_bytes = data_start + _check_layout(header)
        if needed_bytes > file_bytes:
            raise _truncated(path, file_bytes, needed_bytes)
        if needed_bytes < file_bytes:
            raise ValueError(f"{file_bytes - needed_bytes} bytes follow the last tensor")
        return {
            name: _stored_tensor(name, path, data_start, entry, checksums.get(name))
            for name, entry in header.items()
        }
    except RecursionError as error:  # where a value is printed
        raise MoejaxError(f"{path} is not a safetensors file (header nested too deep)") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise MoejaxError(f"{path} is not a safetensors file ({reason})") from error


def _check_layout(header: dict[str, Any]) -> int:
    """Returns the bytes of the data; raises ValueError unless the tensors cover them in turn."""
    for name, entry in header.items():
        for field in ("data_offsets", "shape"):
            numbers = entry[field]
            if type(numbers) is not list or [n for n in numbers if type(n) is not int or n < 0]:
                raise ValueError(f"{name} has {field} {numbers}, expected integers from 0")
        if len(entry["data_offsets"]) != 2:
            raise ValueError(f"{name} has data_offsets {entry['data_offsets']}, expected two")
    covered = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != covered or end < begin:
            raise ValueError(f"{name} is at {begin}..{end}, expected it to begin at {covered}")
        covered = end
    return covered


def _stored_tensor(
    name: str, path: Path, base: int, entry: dict[str, Any], checksum: int | None
) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise MoejaxError(
            f"{path}: {name} is stored as {entry['dtype']}; supported are {', '.join(_DTYPES)}"
        )
    begin, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), _DTYPES[entry["dtype"]]
    tensor = StoredTensor(name, path, base + begin, shape, dtype, checksum)
    if tensor.num_bytes != end - begin:
        raise ValueError(f"{name} has {end - begin} bytes, its shape needs {tensor.num_bytes}")
    return tensor


def _truncated(path: Path, file_bytes: int, needed_bytes: int) -> MoejaxError:
    return MoejaxError(
        f"{path} is truncated: {file_bytes:,} bytes, its header asks for {needed_bytes:,}; "
        "download or copy it again"
    )
