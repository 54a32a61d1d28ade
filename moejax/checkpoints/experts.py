"""Reads a checkpoint's experts one by one, bit for bit as a whole load.

An expert's arrays are its row: those of its gate-and-up matrices, then those of its down matrix;
`words`, `scales` and `zeros` of packed ones, the matrix itself of plain ones. A host store, a slot
of a device pool and a block on the way from disk all hold rows.

Bytes are read by position into memory that is given. Nothing is memory-mapped: mapped pages would
count as resident memory, and a file that shrinks under a mapping kills the process.
"""

import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np
import tqdm
from absl import logging

from moejax.checkpoints.leaves import LeafPlan, Part, split_experts
from moejax.checkpoints.open import Checkpoint
from moejax.checkpoints.reader import CheckpointReader, fill_part, read_compensators
from moejax.checkpoints.safetensors_reader import (
    OutOfRangeError,
    StoredTensor,
    check_range,
    read_values,
)
from moejax.errors import MoejaxError
from moejax.files.checksums import checksum
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.weights.qtensor import CodesKind, Compensator
from moejax.weights.shares import EVERYTHING
from pallas_kernels import layout

_NUM_SAMPLES, _PAGE_BYTES = 16, 4096


class _TensorFiles:
    """Open files of a checkpoint.

    A file that is written to while it is open may hold anything. `_are_as_opened` sees that by the
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
        """Closes the files; a second call does nothing."""
        self._finalizer()

    def read(self, tensor: StoredTensor, destination: np.ndarray) -> None:
        """Reads a tensor into contiguous memory of its size and dtype; raises as `read_tensor`."""
        if not self._finalizer.alive:
            raise ValueError(f"the files of {self.directory} are closed")
        read_values(tensor, destination, self._opened[tensor.path])
        tensor.verify(destination)
        check_range(tensor, destination)

    def _are_as_opened(self) -> bool:
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


class ExpertReader:
    """The experts of a checkpoint, made by `open_experts`; its methods may be called by any thread.

    Attributes:
      num_layers: M, sparse layers.
      num_experts: E, of a layer.
      gate_up: the form of `moe.gate_up`: a ShapeDtypeStruct [M, E, 2F, D] where it is plain, a
        QTensor with such leaves [M, E, ...] where it is packed, without its compensators.
      down: the form of `moe.down`.
      row: the arrays of one expert, in the order of `jax.tree.leaves((gate_up, down))`.
      plane_bits: where rows are the last bit plane of the experts alone, its bits; else 0. Then
        `gate_up` and `down` are the plane's words, uint32[M, E, N, W].
      row_nbytes: their bytes.
      windows: what `read` must read of both; the rest of a row may be undefined then.
      uses_jax: whether JAX's CPU device converts what is read. Only plain experts and those of the
        package's own format lie in the files as rows hold them.
    """

    def __init__(self, reader: CheckpointReader, *, last_plane: bool = False) -> None:
        """Opens the files; raises MoejaxError if there are no slots for the experts' form.

        With `last_plane` rows are the last bit plane alone; ValueError where there are no planes.
        """
        self._leaves = [reader.leaves[leaf] for leaf in EXPERT_LEAVES]
        for plan in self._leaves:
            if plan.refusal is not None:
                raise MoejaxError(
                    f"{reader.directory}: {plan.name} is {plan.refusal}, of which there are no "
                    "slots; load the model whole, or quantize it anew in the package's own format "
                    "(python -m moejax.quantize)"
                )
            if plan.mixture:
                logging.warning(
                    "%s is dequantized to %s while it is read: %s",
                    plan.name, plan.dtype.name, plan.mixture,
                )  # fmt: skip
        self._parts = [_parts_by_expert(plan) for plan in self._leaves]
        self.windows = (EVERYTHING, EVERYTHING)
        config, tensors = reader.config, reader.stored.values()
        self.num_layers, self.num_experts = len(config.moe_layers), config.num_experts
        widths = _plane_widths(self._leaves) if last_plane else (0,)
        if widths is None:
            raise ValueError("the experts do not lie by bit planes of one width")
        self.plane_bits = widths[-1]
        self._arrays = [
            dict([list(plan.arrays.items())[-1]]) if last_plane else plan.arrays
            for plan in self._leaves
        ]
        self.gate_up, self.down = (
            next(iter(arrays.values())) if last_plane else plan.assemble(arrays)
            for plan, arrays in zip(self._leaves, self._arrays, strict=True)
        )
        self.row = tuple(
            jax.ShapeDtypeStruct(array.shape[2:], array.dtype)
            for arrays in self._arrays
            for array in arrays.values()
        )
        self.row_nbytes = sum(array.size * array.dtype.itemsize for array in self.row)
        self.uses_jax = any(
            part.matrix is not None and (plan.kind is None or part.matrix.as_held is None)
            for plan in self._leaves
            for part in plan.parts
        )
        is_fused = any(len(part.index) < 2 for plan in self._leaves for part in plan.parts)
        self._has_checksums = not is_fused and all(t.checksum is not None for t in tensors)
        self._checksums: dict[tuple[int, int], int] = {}  # of rows that were read
        self._lock = threading.Lock()
        self._files = _TensorFiles(reader.directory, {tensor.path for tensor in tensors})

    def __enter__(self) -> "ExpertReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; no read may be going on, and none may follow."""
        self._files.close()

    def read(
        self, layer: int, expert: int, into: Sequence[np.ndarray], *, check: bool = True
    ) -> None:
        """Fills the arrays of one expert.

        Args:
          layer: index among the sparse layers.
          into: arrays of `row`'s shapes and dtypes, contiguous; undefined after an error.
          check: compute the row's checksum and compare it with that of the first checked read of
            files that nobody wrote to. An expert that is read only once needs none, and one that is
            read in part has none.

        Raises:
          MoejaxError: a file cannot be read or ended early; a value does not fit float16; a
            tensor has not the checksum that its file says; where files say none, the row's is
            another than before, or it was not read before and a file was written to since.
        """
        arrays = iter(into)
        try:
            of_leaves = zip(self._leaves, self._arrays, self._parts, self.windows, strict=True)
            for plan, names, parts, window in of_leaves:
                own = {name: next(arrays) for name in names}
                for part in parts[layer, expert]:
                    fill_part(plan, part, own, self._files.read, window)
        except OSError as error:
            raise MoejaxError(
                f"expert {expert} of sparse layer {layer} cannot be read from "
                f"{self._files.directory}: {error.strerror or error}"
            ) from error
        except OutOfRangeError:
            if check:
                self._check_unchanged(layer, expert)
            raise
        if check and self.windows == (EVERYTHING, EVERYTHING):
            self._compare(layer, expert, checksum(into))

    def load_compensators(
        self, device: jax.Device, *, progress: bool = False
    ) -> tuple[tuple[Compensator, ...], tuple[Compensator, ...]]:
        """Loads the low-rank terms of all experts, for `gate_up` and for `down`, if there are any.

        They are what the leaves of a whole load have, `start` and `rank` int32[M, E] by layer and
        expert. Only their own bytes are read; `progress` shows a bar on stderr.
        """
        total = sum(len(pool.owners) for plan in self._leaves for pool in plan.factor_pools)
        with tqdm.tqdm(total=total, desc="low-rank terms", disable=not (progress and total)) as bar:
            gate_up, down = (
                read_compensators(plan, device, lambda _: bar.update()) for plan in self._leaves
            )
        return gate_up, down

    def _compare(self, layer: int, expert: int, found: int) -> None:
        """Raises MoejaxError unless a row's checksum is that of its first read."""
        with self._lock:
            is_known = (layer, expert) in self._checksums
        if not is_known:
            self._check_unchanged(layer, expert)
        with self._lock:
            known = self._checksums.setdefault((layer, expert), found)
        if known != found:
            self._refuse_changed(layer, expert)

    def _check_unchanged(self, layer: int, expert: int) -> None:
        """Raises MoejaxError where the file of a bad or first read may have changed."""
        with self._lock:
            is_known = (layer, expert) in self._checksums
        if is_known:
            self._refuse_changed(layer, expert)
        if not self._has_checksums and not self._files._are_as_opened():
            raise MoejaxError(
                f"{self._files.directory}: a file was written to while it was in use, and expert "
                f"{expert} of sparse layer {layer} was not read before, so nothing says that it is "
                "the one that was meant: put the file back as it was, or start again"
            )

    def _refuse_changed(self, layer: int, expert: int) -> NoReturn:
        raise MoejaxError(
            f"{self._files.directory}: expert {expert} of sparse layer {layer} is not what was "
            "read before: the file was changed, or the disk fails"
        )


def have_planes(checkpoint: Checkpoint) -> bool:
    """Tells whether all experts of a checkpoint lie by bit planes, read from its headers."""
    if not checkpoint.planes or not checkpoint.config.moe_layers:
        return False
    reader = CheckpointReader(checkpoint.directory, checkpoint.config, dtype=np.dtype(np.float32))
    return _plane_widths([reader.leaves[leaf] for leaf in EXPERT_LEAVES]) is not None


def _plane_widths(leaves: Sequence[LeafPlan]) -> tuple[int, ...] | None:
    """Bits of the planes that all leaves have alike, or None."""
    found = set()
    for plan in leaves:
        if not isinstance(plan.kind, CodesKind) or not plan.kind.by_planes:
            return None
        found.add(layout.PREFIX_PLANES[plan.kind.bits])
    return found.pop() if len(found) == 1 else None


def open_experts(
    checkpoint: Checkpoint, *, dtype: str, device: jax.Device, last_plane: bool = False
) -> ExpertReader:
    """Opens a reader of the experts that `checkpoint.load(..., experts=False)` leaves out.

    Args:
      dtype: type of plain experts, as in `Checkpoint.load`; "auto" depends on `device`.

    Raises:
      MoejaxError: the checkpoint is an Orbax directory; the model has no experts, or they have a
        form of which there are no slots (FP8, act-order); else as `Checkpoint.load`.
    """
    if checkpoint.is_orbax:
        raise checkpoint.orbax_is_whole()
    if not checkpoint.config.moe_layers:
        raise MoejaxError(f"{checkpoint.directory}: the model has no sparse layer, so no experts")
    reader = checkpoint.reader(np.dtype(checkpoint.choose_dtype(dtype, device)))
    return ExpertReader(reader, last_plane=last_plane)


def _parts_by_expert(plan: LeafPlan) -> Mapping[tuple[int, ...], Sequence[Part]]:
    """The parts of each matrix of [M, E] by layer and expert."""
    found: dict[tuple[int, ...], list[Part]] = defaultdict(list)
    for whole in plan.parts:
        for part in split_experts(whole):
            found[part.index].append(part)
    return found
