"""Interfaces of the readers of quantized formats.

A matrix lies in several tensors of a checkpoint; a reader finds it, compares its kind with others
and reads it.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.checkpoints.safetensors_reader import StoredTensor, check_range, read_array
from moejax.errors import MoejaxError
from moejax.weights.qtensor import CodesKind, Compensator, Fp8Tensor, QTensor

FLOATS = ("float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Fp8Kind:
    """FP8 values in blocks of 128 x 128."""


Kind = CodesKind | Fp8Kind
FactorKinds = tuple[CodesKind | None, CodesKind | None]  # of U and V; None is BF16


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredMatrix:
    """A quantized matrix of a checkpoint, not yet read."""

    names: tuple[str, ...]  # of the tensors that are read
    kind: Kind
    read: Callable[[], QTensor | Fp8Tensor]  # with numpy leaves
    unread: tuple[str, ...] = ()  # of its other tensors: bit planes of wider codes
    factors: FactorKinds | None = None  # of its compensator
    rank: int = 0
    order: bytes = b""  # digest of its permutation, if any
    # The tensors of `words`, `scales`, `zeros` and `permutation`, as far as there are any, where
    # they lie in the file as a QTensor has them.
    as_held: Mapping[str, StoredTensor] | None = None
    # One expert, where this is all experts of a layer, and they can be read one by one.
    expert: Callable[[int], "StoredMatrix"] | None = None
    # The compensator alone, where `rank` is not 0.
    read_factors: Callable[[], Compensator] | None = None


class Tensors:
    """A checkpoint's tensors, and where they differ from its config.json.

    Attributes:
      faults: by kind of difference; `fits` adds to them.
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = stored
        kinds = ("missing tensors", "unexpected tensors", "wrongly shaped tensors")
        self.faults: dict[str, list[str]] = {kind: [] for kind in kinds}

    @property
    def num_faults(self) -> int:
        """Faults of all kinds."""
        return sum(map(len, self.faults.values()))

    def check(self, directory: Path) -> None:
        """Raises MoejaxError, with the first faults of each kind, if there are any."""
        said = [
            f"{kind} ({len(found)}): {', '.join(found[:3])}{', ...' if len(found) > 3 else ''}"
            for kind, found in self.faults.items()
            if found
        ]
        if said:
            raise MoejaxError(
                f"{directory} does not fit its config.json: {'; '.join(said)}; download it again "
                "or mend config.json"
            )

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def __getitem__(self, name: str) -> StoredTensor:
        return self.stored[name]

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor; raises MoejaxError as `read_array` and `check_range`."""
        values = read_array(self.stored[name])
        check_range(self.stored[name], values)
        return values

    def fits(self, name: str, shape: Sequence[int], dtypes: Sequence[str] | None = None) -> bool:
        """Whether a tensor has that shape, else a fault; MoejaxError if it has another dtype."""
        if name not in self.stored:
            self.faults["missing tensors"].append(f"{name} {list(shape)}")
            return False
        tensor = self.stored[name]
        if tensor.shape != tuple(shape):
            self.faults["wrongly shaped tensors"].append(
                f"{name} is {list(tensor.shape)} in the file, {list(shape)} by config.json"
            )
            return False
        if dtypes is not None and tensor.dtype.name not in dtypes:
            raise MoejaxError(
                f"{tensor.path}: {name} is {tensor.dtype.name}, expected {' or '.join(dtypes)}"
            )
        return True


@dataclasses.dataclass(frozen=True)
class Format:
    """A quantized format with the settings of one checkpoint."""

    # returns the matrix PREFIX [N, K] if it is quantized; faults go to `Tensors.faults`. Raises
    # MoejaxError where it is stored in a way that cannot be read.
    find: Callable[[str, tuple[int, ...], Tensors], StoredMatrix | None]
    # widths in which all matrices by bit planes can be read, rising; (): there are none
    planes: tuple[int, ...] = ()
    # ends of the names of tensors that may lie beside a matrix and are not needed
    extras: tuple[str, ...] = ()


def digest(permutation: np.ndarray | None) -> bytes:
    """Digest of a permutation; empty for none."""
    return b"" if permutation is None else hashlib.sha256(permutation.tobytes()).digest()


def scale_dtype(tensor: StoredTensor) -> str:
    """The type that holds stored scales exactly: bfloat16 has a wider range than float16."""
    return "float16" if tensor.dtype == np.float16 else "float32"


def broken(tensors: Tensors, name: str, reason: str) -> MoejaxError:
    """An error about the values of a tensor."""
    return MoejaxError(f"{tensors[name].path}: {name} {reason}")


def read_permutation(name: str, group_size: int, tensors: Tensors) -> np.ndarray | None:
    """The inputs in the order of their groups, int32[K], from the group of each.

    None where the groups are runs of the inputs as they are, or `name` is not there; MoejaxError
    where they are not of `group_size` inputs each, the last one aside.
    """
    if name not in tensors:
        return None
    groups = tensors.read(name)
    order = np.argsort(groups, kind="stable").astype(np.int32)
    expected = np.arange(groups.size) // group_size
    if np.array_equal(groups, expected) or (groups == -1).all():
        return None
    if not np.array_equal(groups[order], expected):
        raise broken(tensors, name, f"has groups that are not of {group_size} inputs each")
    return order


def codes_matrix(
    kind: CodesKind,
    num_inputs: int,
    words: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    permutation: np.ndarray | None = None,
) -> QTensor:
    """A matrix of a kind, its scales and zeros in the types of that kind."""
    arrays: dict[str, Any] = {"words": words, "scales": scales, "zeros": zeros}
    stored = {
        name: np.ascontiguousarray(arrays[name], array.dtype)
        for name, array in kind.arrays((*words.shape[:-1], num_inputs)).items()
    }
    if permutation is not None:
        stored["permutation"] = permutation
    return kind.tensor(num_inputs, stored)
