"""Writes safetensors files whose tensors need not all be in memory at once.

The library wants them all. Here a tensor that stays as it is goes from file to file in pieces, and
its checksum is taken before.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from moejax.checkpoints.safetensors_reader import DTYPE_CODES, StoredTensor, read_finite
from moejax.files.checksums import checksum, checksum_fields
from moejax.files.whole import ROOM, WrittenFile, write_whole

# A header's length is a multiple of this, so that the data that follow are aligned.
_ALIGNMENT_BYTES = 8
_TRACE_CODES = DTYPE_CODES | {np.dtype(np.uint16): "U16"}

Tensor = np.ndarray | StoredTensor


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], mend: str = ROOM,
    metadata: Mapping[str, str] | None = None,
) -> WrittenFile:  # fmt: skip
    """Writes a safetensors file, which appears at `path` only when it is whole.

    Args:
      tensors: arrays, or tensors of another file, which are copied as they are stored.
      mend: what to do where the disk is full (MoejaxError).
      metadata: what the header says of a trace; None: a checkpoint's, with its tensors' checksums.
    """
    # Wide types first, so that every tensor is aligned, as the library has them.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    codes = DTYPE_CODES if metadata is None else _TRACE_CODES
    if metadata is None:
        checksums = {name: checksum(_pieces(tensor)) for name, tensor in tensors.items()}
        metadata = {"format": "pt", **checksum_fields(checksums)}
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + _num_bytes(tensor)
        header[name] = {
            "dtype": codes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return write_whole(path, _contents(len(text).to_bytes(8, "little") + text, tensors), mend)


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


def _num_bytes(tensor: Tensor) -> int:
    return tensor.nbytes if isinstance(tensor, np.ndarray) else tensor.num_bytes
