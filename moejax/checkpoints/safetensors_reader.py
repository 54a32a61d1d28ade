"""Reads safetensors files: headers checked against file sizes, tensors read into given memory.

Tensors are read rather than memory-mapped: mapped pages would count as resident memory, and a
file that shrinks under a mapping kills the process.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moejax.errors import MoejaxError
from moejax.models.hf_config import read_json

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file."""

    name: str
    path: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights: one, or those that the index names.

    Raises:
      MoejaxError: the directory, the weights or one of the shards is missing.
    """
    if not directory.is_dir():
        raise MoejaxError(f"no such directory: {directory}")
    if (directory / WEIGHTS_FILE).exists():
        return [directory / WEIGHTS_FILE]
    if not (directory / INDEX_FILE).exists():
        raise MoejaxError(
            f"no {WEIGHTS_FILE} and no {INDEX_FILE} in {directory}; weights of other formats "
            "must be converted to safetensors first"
        )
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise MoejaxError(f"{directory / INDEX_FILE} has no weight_map")
    files = sorted({directory / str(name) for name in weight_map.values()})
    if missing := [path.name for path in files if not path.exists()]:
        raise MoejaxError(
            f"{directory}: {len(missing)} of {len(files)} weight files are missing "
            f"({', '.join(missing[:3])}); finish the download"
        )
    return files


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint by name, from the headers alone.

    Raises:
      MoejaxError: a file is missing, truncated, or no safetensors file.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        tensors |= _read_header(path)
    return tensors


def read_tensor(tensor: StoredTensor, destination: np.ndarray) -> None:
    """Reads a tensor into contiguous memory of its own size and dtype."""
    view = destination.reshape(-1).view(np.uint8).data
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.offset)
        done = 0
        while done < len(view):  # one read returns at most 2 GiB
            count = file.readinto(view[done:])
            if not count:
                raise MoejaxError(f"{tensor.path} ended inside {tensor.name}; it was changed")
            done += count


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Format: 8 bytes little-endian header length, JSON header, data without gaps."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        header_bytes = int.from_bytes(start, "little")
        if start == b"version ":
            raise MoejaxError(f"{path} is a Git LFS pointer, not the weights; run git lfs pull")
        if len(start) < 8 or 8 + header_bytes > file_bytes:
            raise _truncated(path, file_bytes, max(8, 8 + header_bytes))
        try:
            header: dict[str, Any] = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            data_bytes = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if 8 + header_bytes + data_bytes > file_bytes:
                raise _truncated(path, file_bytes, 8 + header_bytes + data_bytes)
            return {
                name: _stored_tensor(name, path, 8 + header_bytes, entry)
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MoejaxError(f"{path} is not a safetensors file ({error!r})") from error


def _stored_tensor(name: str, path: Path, base: int, entry: dict[str, Any]) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise MoejaxError(
            f"{path}: {name} is stored as {entry['dtype']}; supported are {', '.join(_DTYPES)}"
        )
    begin, end = entry["data_offsets"]
    tensor = StoredTensor(name, path, base + begin, tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    if tensor.num_bytes != end - begin:
        raise ValueError(f"{name} has {end - begin} bytes, its shape needs {tensor.num_bytes}")
    return tensor


def _truncated(path: Path, file_bytes: int, needed_bytes: int) -> MoejaxError:
    return MoejaxError(
        f"{path} is truncated: {file_bytes:,} bytes, its header asks for {needed_bytes:,}; "
        "download or copy it again"
    )
