"""Experts of a checkpoint one at a time, bit for bit what loading the whole gives.

An expert's arrays are its row: those of its gate-and-up matrices, then those of its down matrix;
`words`, `scales` and `zeros` of packed ones, the matrix itself of plain ones. A host store, a slot
of a device pool and a block on the way from disk all hold rows.

Bytes are read by position into memory that is given. Nothing is memory-mapped: mapped pages would
count as resident memory, and a file that shrinks under a mapping kills the process.
"""

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

import jax
import numpy as np
import tqdm

from moejax.checkpoints.expert_stacks import Stack, TensorFiles, make_stack
from moejax.checkpoints.formats.interfaces import Tensors
from moejax.checkpoints.formats.leaves import Part, fill_compensators
from moejax.checkpoints.formats.load import plan_parts
from moejax.checkpoints.load import EXPERT_LEAVES, plan_leaves
from moejax.checkpoints.open import Checkpoint
from moejax.checkpoints.safetensors_reader import OutOfRangeError, stored_tensors
from moejax.errors import MoejaxError
from moejax.files.checksums import checksum
from moejax.models.config import ModelConfig
from moejax.weights.qtensor import Compensator


class ExpertReader:
    """The experts of a checkpoint, made by `open_experts`; its methods may be called by any thread.

    Attributes:
      num_layers: M, sparse layers.
      num_experts: E, of a layer.
      gate_up: the form of `moe.gate_up`: a ShapeDtypeStruct [M, E, 2F, D] where it is plain, a
        QTensor with such leaves [M, E, ...] where it is packed, without its compensators.
      down: that of `moe.down`, likewise.
      row: the arrays of one expert, in the order of `jax.tree.leaves((gate_up, down))`, without
        the axes M and E.
      row_nbytes: their bytes.
      uses_jax: whether JAX's CPU device converts what is read. Only plain experts and those of the
        package's own format lie in the files as rows hold them.
    """

    def __init__(
        self,
        config: ModelConfig,
        gate_up: Stack,
        down: Stack,
        files: TensorFiles,
        has_checksums: bool,
    ) -> None:
        self._stacks, self._files = (gate_up, down), files
        self._has_checksums = has_checksums
        self.num_layers, self.num_experts = len(config.moe_layers), config.num_experts
        self.gate_up, self.down = gate_up.template, down.template
        self.row = (*gate_up.row, *down.row)
        self.row_nbytes = sum(array.size * array.dtype.itemsize for array in self.row)
        self.uses_jax = gate_up.uses_jax or down.uses_jax
        self._checksums: dict[tuple[int, int], int] = {}  # of rows that were read
        self._lock = threading.Lock()

    def __enter__(self) -> "ExpertReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; no read may be going on, and none may follow."""
        self._files.close()

    def empty_row(self) -> list[np.ndarray]:
        """Memory for one expert."""
        return [np.empty(array.shape, array.dtype) for array in self.row]

    def read(
        self, layer: int, expert: int, into: Sequence[np.ndarray], *, check: bool = True
    ) -> None:
        """Fills the arrays of one expert.

        Args:
          layer: index among the sparse layers.
          expert: of that layer.
          into: arrays of `row`'s shapes and dtypes, contiguous; undefined after an error.
          check: compute the row's checksum and compare it with that of the first checked read of
            files that nobody wrote to. An expert that is read only once needs none.

        Raises:
          MoejaxError: a file cannot be read or ended early; a value does not fit float16; a
            tensor has not the checksum that its file says; where files say none, the row's is
            another than before, or it was not read before and a file was written to since.
          ValueError: there is no such expert, or `into` is not a row.
        """
        if not (0 <= layer < self.num_layers and 0 <= expert < self.num_experts):
            raise ValueError(
                f"expert {expert} of sparse layer {layer} of {self.num_layers} x {self.num_experts}"
            )
        self._check_row(into)
        num_first = len(self._stacks[0].row)
        try:
            self._stacks[0].read(layer, expert, into[:num_first])
            self._stacks[1].read(layer, expert, into[num_first:])
        except OSError as error:
            raise MoejaxError(
                f"expert {expert} of sparse layer {layer} cannot be read from "
                f"{self._files.directory}: {error.strerror or error}"
            ) from error
        except OutOfRangeError:
            if check:
                self._check_unchanged(layer, expert)
            raise
        if check:
            self._compare(layer, expert, row_checksum(into))

    def checksum(self, layer: int, expert: int) -> int:
        """The checksum of an expert's row as it was first read; reads it if it was not.

        Raises:
          MoejaxError: as `read`.
        """
        with self._lock:
            found = self._checksums.get((layer, expert))
        if found is None:
            self.read(layer, expert, self.empty_row())
            with self._lock:
                found = self._checksums[layer, expert]
        return found

    def load_compensators(
        self, device: jax.Device, *, progress: bool = False
    ) -> tuple[tuple[Compensator, ...], tuple[Compensator, ...]]:
        """The low-rank terms of all experts, which rows have not: of `gate_up` and of `down`.

        They are what the leaves of a whole load have, `start` and `rank` int32[M, E] by layer and
        expert. Empty where there are none. Only their own bytes are read.

        Args:
          device: where the factors are to be.
          progress: show a bar over the matrices read on stderr.

        Raises:
          MoejaxError: a file cannot be read or ended early.
        """
        gate_up, down = self._stacks
        total = len(gate_up.terms) + len(down.terms)
        with tqdm.tqdm(total=total, desc="low-rank terms", disable=not (progress and total)) as bar:
            return tuple(  # type: ignore[return-value]
                fill_compensators(stack.shape, stack.terms, device, lambda _: bar.update())
                for stack in (gate_up, down)
            )

    def _check_row(self, arrays: Sequence[np.ndarray]) -> None:
        if len(arrays) != len(self.row):
            raise ValueError(f"{len(arrays)} arrays, expected the {len(self.row)} of a row")
        for array, expected in zip(arrays, self.row, strict=True):
            if array.shape != expected.shape or array.dtype != expected.dtype:
                raise ValueError(
                    f"an array {array.dtype}{list(array.shape)}, expected "
                    f"{expected.dtype}{list(expected.shape)}"
                )
            if not (array.flags.c_contiguous and array.flags.writeable):
                raise ValueError("an array is not contiguous or cannot be written")

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
        if not self._has_checksums and not self._files.are_as_opened():
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


def open_experts(
    checkpoint: Checkpoint, *, dtype: str, device: jax.Device, verify_checksums: bool = False
) -> ExpertReader:
    """A reader of the experts that `checkpoint.load(..., experts=False)` leaves out.

    Args:
      checkpoint: any but an Orbax directory.
      dtype: as that of `Checkpoint.load`; of plain experts.
      device: where they will be computed with; "auto" depends on it.
      verify_checksums: of the package's own format: first read every file whole and compare its
        SHA-256 with the manifest's.

    Raises:
      MoejaxError: the model has no experts, or they have a form of which there are no slots (FP8,
        act-order); else as `Checkpoint.load`.
    """
    if checkpoint.is_orbax:
        raise checkpoint.orbax_is_whole()
    directory, config = checkpoint.directory, checkpoint.config
    if not config.moe_layers:
        raise MoejaxError(f"{directory}: the model has no sparse layer, so no experts")
    chosen = np.dtype(checkpoint.choose_dtype(dtype, device))
    tensors = stored_tensors(directory)
    if checkpoint.is_quantized:
        parts = plan_parts(directory, config, Tensors(tensors), verify_checksums=verify_checksums)
    else:
        plain = plan_leaves(directory, config, tensors)
        parts = {leaf: [Part(p, None) for p in plain[leaf]] for leaf in EXPERT_LEAVES}
    files = TensorFiles(directory, {tensor.path for tensor in tensors.values()})
    try:
        gate_up, down = (
            make_stack(directory, leaf, config, parts[leaf], chosen, tensors, files)
            for leaf in EXPERT_LEAVES
        )
    except BaseException:
        files.close()
        raise
    is_fused = any(len(part.index) < 2 for leaf in EXPERT_LEAVES for part in parts[leaf])
    has_checksums = not is_fused and all(t.checksum is not None for t in tensors.values())
    return ExpertReader(config, gate_up, down, files, has_checksums)


def row_checksum(row: Sequence[np.ndarray]) -> int:
    """The checksum of a row's bytes."""
    return checksum(row)
