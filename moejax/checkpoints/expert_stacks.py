"""The stacks of experts' matrices in the files of a checkpoint: where one lies, and reading it."""

import abc
import dataclasses
import os
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from absl import logging

from moejax.checkpoints.formats.interfaces import CodesKind, Fp8Kind, as_leaf
from moejax.checkpoints.formats.leaves import Part, code_arrays, common_kind, stored_zeros
from moejax.checkpoints.formats.load import dequantized
from moejax.checkpoints.load import convert_floats
from moejax.checkpoints.safetensors_reader import StoredTensor, check_range
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig, weight_shapes
from moejax.weights.qtensor import QTensor

_NUM_SAMPLES, _PAGE_BYTES = 16, 4096
Template = jax.ShapeDtypeStruct | QTensor


class TensorFiles:
    """Open files of a checkpoint.

    A file that is written to while it is open may hold anything. `are_as_opened` sees that by the
    time of the last write; by samples of the content it sees that a file was put back as it was.
    """

    def __init__(self, directory: Path, paths: Iterable[Path]) -> None:
        self.directory = directory
        self._opened: dict[Path, int] = {}
        # Whoever forgets to close a reader keeps no file open longer than the reader.
        self._finalizer = weakref.finalize(self, _close, self._opened)
        for path in paths:
            try:
                self._opened[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                self.close()
                raise MoejaxError(f"{path} cannot be opened: {error.strerror}") from error
        self._stamps = {path: _stamp(opened) for path, opened in self._opened.items()}
        self._samples = {path: _sample(opened) for path, opened in self._opened.items()}

    def close(self) -> None:
        """Closes all, once."""
        self._finalizer()

    def read(self, tensor: StoredTensor, destination: np.ndarray) -> None:
        """Reads a tensor into contiguous memory of its size and dtype; raises as `read_tensor`."""
        if not self._finalizer.alive:
            raise ValueError(f"the files of {self.directory} are closed")
        view, descriptor = bytes_of(destination), self._opened[tensor.path]
        done = 0
        while done < len(view):  # one read returns at most 2 GiB
            count = _read_at(descriptor, view[done:], tensor.offset + done)
            if not count:
                raise MoejaxError(f"{tensor.path} ended inside {tensor.name}; it was changed")
            done += count
        tensor.verify(destination)
        check_range(tensor, destination)

    def are_as_opened(self) -> bool:
        """Whether no file was written to since it was opened, or since it was put back.

        One that was written to and holds the samples that it held is as opened from the next call
        on, as this one may follow a read of what it held in between.
        """
        as_opened = True
        for path, descriptor in self._opened.items():
            stamp = _stamp(descriptor)
            if stamp != self._stamps[path]:
                as_opened = False
                if _sample(descriptor) == self._samples[path]:
                    self._stamps[path] = stamp
        return as_opened


def _stamp(descriptor: int) -> tuple[int, int]:
    """Size and time of the last write."""
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns


def _sample(descriptor: int) -> list[bytes]:
    """Pages of a file, evenly spaced, the first and the last among them."""
    last = max(0, os.fstat(descriptor).st_size - _PAGE_BYTES)
    starts = {last * i // (_NUM_SAMPLES - 1) for i in range(_NUM_SAMPLES)}
    return [os.pread(descriptor, _PAGE_BYTES, start) for start in sorted(starts)]


def _close(opened: dict[Path, int]) -> None:
    while opened:
        os.close(opened.popitem()[1])


def bytes_of(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def _read_at(descriptor: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    content = os.pread(descriptor, len(view), offset)  # macOS
    view[: len(content)] = content
    return len(content)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack(abc.ABC):
    """The matrices of one leaf [M, E, N, K].

    Attributes:
      shape: of the leaf.
      template: see `ExpertReader`.
      row: of one matrix.
      uses_jax: see `ExpertReader`.
      terms: the parts that have a compensator beside the row.
    """

    shape: tuple[int, ...]
    template: Template
    row: tuple[jax.ShapeDtypeStruct, ...]
    uses_jax: bool
    terms: Sequence[Part]

    @abc.abstractmethod
    def read(self, layer: int, expert: int, into: Sequence[np.ndarray]) -> None:
        """Fills the matrix of one expert; raises as `ExpertReader.read`, and OSError."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainStack(Stack):
    """Plain matrices; those that are stored packed are dequantized, as the loader does."""

    parts: Mapping[tuple[int, ...], Sequence[Part]]
    tensors: Mapping[str, StoredTensor]
    files: TensorFiles

    def read(self, layer: int, expert: int, into: Sequence[np.ndarray]) -> None:
        """See `Stack`."""
        (matrix,) = into
        if (layer,) in self.parts:  # one tensor holds all experts of the layer
            for part in self.parts[layer,]:
                fused = self.tensors[part.placement.name]
                self._place(fused.part(expert, fused.shape[1:]), matrix)
            return
        for part in self.parts[layer, expert]:
            rows = part.placement.rows(matrix)
            if part.matrix is None:
                self._place(self.tensors[part.placement.name], rows)
            else:
                convert_floats(part.placement.name, dequantized(part.matrix.read()), rows)

    def _place(self, tensor: StoredTensor, rows: np.ndarray) -> None:
        if tensor.dtype == rows.dtype:
            self.files.read(tensor, rows)
            return
        values = np.empty(tensor.shape, tensor.dtype)
        self.files.read(tensor, values)
        convert_floats(tensor.name, values, rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodesStack(Stack):
    """Packed matrices of one kind."""

    kind: CodesKind
    names: tuple[str, ...]  # of `row`
    parts: Mapping[tuple[int, ...], Sequence[Part]]
    tensors: Mapping[str, StoredTensor]
    files: TensorFiles

    def read(self, layer: int, expert: int, into: Sequence[np.ndarray]) -> None:
        """See `Stack`."""
        for part in self.parts[layer, expert]:
            rows = {
                name: part.placement.rows(array)
                for name, array in zip(self.names, into, strict=True)
            }
            assert part.matrix is not None
            if part.matrix.as_held is not None:
                self._copy(part.matrix.as_held, rows)
                continue
            matrix = part.matrix.read()
            for name, memory in rows.items():
                values = getattr(matrix, name)
                memory[...] = stored_zeros(self.kind) if values is None else values

    def _copy(self, held: Mapping[str, str], rows: Mapping[str, np.ndarray]) -> None:
        for name, memory in rows.items():
            if name not in held:  # it is symmetric, others of the leaf are not
                memory[...] = stored_zeros(self.kind)
                continue
            tensor = self.tensors[held[name]]
            if tensor.dtype == memory.dtype:
                self.files.read(tensor, memory)
            else:
                values = np.empty(tensor.shape, tensor.dtype)
                self.files.read(tensor, values)
                convert_floats(tensor.name, values, memory)


def make_stack(
    directory: Path,
    leaf: str,
    config: ModelConfig,
    parts: Sequence[Part],
    dtype: np.dtype,
    tensors: Mapping[str, StoredTensor],
    files: TensorFiles,
) -> Stack:
    """The matrices of a leaf.

    Args:
      directory: of the checkpoint, for errors.
      leaf: its name.
      config: of the model.
      parts: what fills it.
      dtype: of plain matrices.
      tensors: of the checkpoint.
      files: in which they are.

    Raises:
      MoejaxError: it has a form of which there are no slots.
    """
    shape = weight_shapes(config)[leaf]
    by_index: dict[tuple[int, ...], list[Part]] = defaultdict(list)
    for part in parts:
        by_index[part.placement.index].append(part)
    is_packed = any(part.matrix is not None for part in parts)
    kind = common_kind(parts) if is_packed else None
    if isinstance(kind, CodesKind):
        return _codes_stack(directory, leaf, shape, kind, by_index, tensors, files)
    if isinstance(kind, Fp8Kind) or (is_packed and any(len(index) < 2 for index in by_index)):
        raise _no_slots(directory, leaf, "stored in FP8")
    if kind is not None:
        logging.warning("%s is dequantized to %s while it is read: %s", leaf, dtype.name, kind)
    return PlainStack(
        shape=shape,
        template=jax.ShapeDtypeStruct(shape, dtype),
        row=(jax.ShapeDtypeStruct(shape[2:], dtype),),
        uses_jax=is_packed,
        terms=(),  # they are in what is dequantized
        parts=by_index,
        tensors=tensors,
        files=files,
    )


def _codes_stack(
    directory: Path,
    leaf: str,
    shape: tuple[int, ...],
    kind: CodesKind,
    by_index: Mapping[tuple[int, ...], Sequence[Part]],
    tensors: Mapping[str, StoredTensor],
    files: TensorFiles,
) -> CodesStack:
    matrices = [(p, p.matrix) for parts in by_index.values() for p in parts if p.matrix]
    if any(matrix.order for _, matrix in matrices):
        raise _no_slots(directory, leaf, "stored in GPTQ's act-order")
    *lead, num_rows, num_inputs = shape
    arrays = code_arrays(kind, num_rows, num_inputs)
    stacked = {
        name: jax.ShapeDtypeStruct((*lead, *size), dtype) for name, (size, dtype) in arrays.items()
    }
    template = QTensor(
        words=as_leaf(stacked["words"]),
        scales=as_leaf(stacked["scales"]),
        zeros=as_leaf(stacked.get("zeros")),
        num_inputs=num_inputs,
        bits=kind.bits,
        group_size=kind.group_size,
    )
    template.check()
    return CodesStack(
        shape=shape,
        template=template,
        row=tuple(jax.ShapeDtypeStruct(size, dtype) for size, dtype in arrays.values()),
        uses_jax=any(matrix.as_held is None for _, matrix in matrices),
        terms=[part for part, matrix in matrices if matrix.rank],
        kind=kind,
        names=tuple(arrays),
        parts=by_index,
        tensors=tensors,
        files=files,
    )


def _no_slots(directory: Path, leaf: str, how: str) -> MoejaxError:
    return MoejaxError(
        f"{directory}: {leaf} is {how}, of which there are no slots; load the model whole, or "
        "quantize it anew in the package's own format (python -m moejax.quantize)"
    )
