"""Fills leaves of stacked QTensors and Fp8Tensors, matrix by matrix."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from moejax.checkpoints.formats.interfaces import (
    CodesKind,
    FactorsKind,
    Fp8Kind,
    Kind,
    StoredMatrix,
)
from moejax.checkpoints.formats.native_reader import BF16_BITS
from moejax.checkpoints.load import LeafMemory, by_layer
from moejax.models.hf.names import Placement
from moejax.weights.qtensor import FP8_BLOCK, Compensator, Factor, Fp8Tensor, QTensor
from pallas_kernels import layout

_ZERO_KINDS = ("symmetric", "integer", "float")  # each can be written as the next one


@dataclasses.dataclass(frozen=True)
class Part:
    """A matrix and its place in a leaf."""

    placement: Placement
    matrix: StoredMatrix | None  # None: plain weights

    @property
    def index(self) -> tuple[int, ...]:
        """Layer, then expert."""
        return self.placement.index


def common_kind(parts: Sequence[Part]) -> Kind | str:
    """The kind in which all parts of a leaf can be held without loss, or why there is none.

    Scales become float32 where some are, and zero points integers or floats where some are.
    """
    kinds = {part.matrix.kind if part.matrix else None for part in parts}
    if kinds == {Fp8Kind()}:
        whole = all(part.placement.start % FP8_BLOCK == 0 for part in parts)
        return Fp8Kind() if whole else f"its parts are no multiples of {FP8_BLOCK} rows"
    codes = [kind for kind in kinds if isinstance(kind, CodesKind)]
    if len(codes) < len(kinds):
        return "some of its matrices are quantized and some are not"
    for name in ("bits", "group_size"):
        values = sorted({getattr(kind, name) for kind in codes})
        if len(values) > 1:
            return f"its matrices have {name} {' and '.join(map(str, values))}"
    orders: dict[tuple[int, ...], set[bytes]] = {}
    for part in parts:
        assert part.matrix is not None
        orders.setdefault(part.index, set()).add(part.matrix.order)
    if any(len(found) > 1 for found in orders.values()):
        return "parts of one matrix have different act-orders"
    has_order = any(found != {b""} for found in orders.values())
    if has_order and any(part.matrix and part.matrix.rank for part in parts):
        return "some of its matrices have an act-order and some a compensator"
    return dataclasses.replace(
        codes[0],
        zero_kind=max((kind.zero_kind for kind in codes), key=_ZERO_KINDS.index),
        scale_dtype=max(kind.scale_dtype for kind in codes),  # "float16" < "float32"
    )


def fill_fp8(
    shape: tuple[int, ...],
    parts: Sequence[Part],
    device: jax.Device,
    advance: Callable[[Part], None],
) -> Fp8Tensor:
    """A leaf of FP8 matrices.

    Args:
      shape: [..., N, K] of the leaf.
      parts: all of kind `Fp8Kind`.
      device: where the leaf is to be.
      advance: called with each part that was read.
    """
    is_stacked = len(shape) > 2
    *lead, rows, inputs = shape
    blocks = (*lead, -(-rows // FP8_BLOCK), -(-inputs // FP8_BLOCK))
    values = LeafMemory(shape, np.dtype(ml_dtypes.float8_e4m3fn), device, is_stacked=is_stacked)
    scales = LeafMemory(blocks, np.dtype(np.float32), device, is_stacked=is_stacked)
    for layer, parts_of_layer in by_layer(parts).items():
        for part in parts_of_layer:
            matrix, first = _read(part), part.placement.start
            assert isinstance(matrix, Fp8Tensor)
            # Of fused experts the first axis is that of the experts, and all are there.
            values.part(part.index)[first : first + len(matrix.values)] = matrix.values
            first //= FP8_BLOCK
            scales.part(part.index)[first : first + len(matrix.scales)] = matrix.scales
            advance(part)
        values.finish_layer(layer)
        scales.finish_layer(layer)
    leaf = Fp8Tensor(values=values.finish(), scales=scales.finish())
    leaf.check()
    return leaf


def fill_codes(
    shape: tuple[int, ...],
    kind: CodesKind,
    parts: Sequence[Part],
    device: jax.Device,
    advance: Callable[[Part], None],
) -> QTensor:
    """A leaf of codes; arguments as those of `fill_fp8`, and the kind of `common_kind`."""
    *lead, rows, inputs = shape
    memories = code_arrays(kind, rows, inputs)
    if any(part.matrix and part.matrix.order for part in parts):
        memories["permutation"] = ((inputs,), np.dtype(np.int32))
    leaves = {
        name: LeafMemory((*lead, *size), dtype, device, is_stacked=bool(lead))
        for name, (size, dtype) in memories.items()
    }
    pools = _pools(tuple(lead), parts, inputs, device)
    for layer, parts_of_layer in by_layer(parts).items():
        for part in parts_of_layer:
            matrix, start = _read(part), part.placement.start
            assert isinstance(matrix, QTensor)
            rows_of_part = slice(start, start + matrix.shape[0])
            for name in leaves.keys() - {"permutation"}:
                values = getattr(matrix, name)  # no zeros: it is symmetric
                values = stored_zeros(kind) if values is None else values
                leaves[name].part(part.index)[rows_of_part] = values
            if "permutation" in leaves:
                order = matrix.permutation
                memory = leaves["permutation"].part(part.index)
                memory[...] = np.arange(inputs) if order is None else order
            for pool in pools:
                pool.put(part, matrix.compensators)
            advance(part)
        for leaf in leaves.values():
            leaf.finish_layer(layer)
    filled: dict[str, Any] = {"zeros": None}
    filled |= {name: leaf.finish() for name, leaf in leaves.items()}
    stack = QTensor(
        **filled,
        compensators=tuple(pool.finish() for pool in pools),
        num_inputs=inputs,
        bits=kind.bits,
        group_size=kind.group_size,
    )
    stack.check()
    return stack


def code_arrays(
    kind: CodesKind, rows: int, inputs: int
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of `words`, `scales` and, unless symmetric, `zeros` of one matrix."""
    groups = layout.num_groups(inputs, kind.group_size)
    scale_dtype = np.dtype(kind.scale_dtype)
    arrays: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "words": ((rows, layout.num_words(inputs, kind.bits)), np.dtype(np.uint32)),
        "scales": ((rows, groups), scale_dtype),
    }
    if kind.zero_kind != "symmetric":
        dtype = np.dtype(np.uint8) if kind.zero_kind == "integer" else scale_dtype
        arrays["zeros"] = ((rows, groups), dtype)
    return arrays


def stored_zeros(kind: CodesKind) -> int:
    """What stands in `zeros` of a leaf of `kind` for a matrix that has none."""
    return 2 ** (kind.bits - 1)


def fill_compensators(
    shape: tuple[int, ...],
    parts: Sequence[Part],
    device: jax.Device,
    advance: Callable[[Part], None],
) -> tuple[Compensator, ...]:
    """The compensators of the leaf that `fill_codes` fills, without its codes; arguments as there.

    Only the tensors of the factors are read.
    """
    *lead, _, inputs = shape
    pools = _pools(tuple(lead), parts, inputs, device)
    for part in parts:
        if part.matrix is not None and part.matrix.rank:
            assert part.matrix.read_factors is not None
            compensators = (part.matrix.read_factors(),)
            for pool in pools:
                pool.put(part, compensators)
            advance(part)
    return tuple(pool.finish() for pool in pools)


class _Pool:
    """The factors of one kind of all matrices that lie at the same rows, while it is filled."""

    def __init__(
        self,
        kind: FactorsKind,
        lead: tuple[int, ...],
        owners: Sequence[Part],
        inputs: int,
        device: jax.Device,
    ) -> None:
        self._kind, self._device, self._inputs = kind, device, inputs
        self._first_row = owners[0].placement.start
        self._num_rows = owners[0].placement.shape[0]
        self._starts, self._ranks = np.zeros(lead, np.int32), np.zeros(lead, np.int32)
        self._owners = {part.index for part in owners}
        total = 0
        for part in owners:
            assert part.matrix is not None
            self._starts[part.index], self._ranks[part.index] = total, part.matrix.rank
            total += part.matrix.rank
        self._u = self._memories(total, self._num_rows, kind.u_group_size)
        self._v = self._memories(total, inputs, kind.v_group_size)

    def put(self, part: Part, compensators: Sequence[Compensator]) -> None:
        """Takes the factors of a matrix that was read, if they belong here."""
        if part.index not in self._owners or part.placement.start != self._first_row:
            return
        (compensator,) = compensators
        start = int(self._starts[part.index])
        rows = slice(start, start + int(self._ranks[part.index]))
        for memories, factor in ((self._u, compensator.u), (self._v, compensator.v)):
            if isinstance(factor, QTensor):
                memories["words"].part(())[rows] = factor.words
                memories["scales"].part(())[rows] = factor.scales
            else:
                memories["array"].part(())[rows] = factor

    def finish(self) -> Compensator:
        """The compensator of the leaf."""
        return Compensator(
            u=self._factor(self._u, self._num_rows, self._kind.u_group_size),
            v=self._factor(self._v, self._inputs, self._kind.v_group_size),
            start=jax.device_put(self._starts, self._device),
            rank=jax.device_put(self._ranks, self._device),
            first_row=self._first_row,
            num_rows=self._num_rows,
            max_rank=int(self._ranks.max()),
        )

    def _memories(self, total: int, length: int, group_size: int) -> dict[str, LeafMemory]:
        if self._kind.bits == BF16_BITS:
            sizes = {"array": (length, np.dtype(ml_dtypes.bfloat16))}
        else:
            sizes = {
                "words": (layout.num_words(length, self._kind.bits), np.dtype(np.uint32)),
                "scales": (layout.num_groups(length, group_size), np.dtype(self._kind.scale_dtype)),
            }
        return {
            name: LeafMemory((total, size), dtype, self._device, is_stacked=False)
            for name, (size, dtype) in sizes.items()
        }

    def _factor(self, memories: dict[str, LeafMemory], length: int, group_size: int) -> Factor:
        if "array" in memories:
            return memories["array"].finish()
        return QTensor(
            words=memories["words"].finish(),
            scales=memories["scales"].finish(),
            zeros=None,
            num_inputs=length,
            bits=self._kind.bits,
            group_size=group_size,
        )


def _pools(
    lead: tuple[int, ...], parts: Iterable[Part], inputs: int, device: jax.Device
) -> list[_Pool]:
    """A pool for every place among the rows and every kind of factors."""
    owners: dict[tuple[int, FactorsKind], list[Part]] = {}
    for part in parts:
        matrix = part.matrix
        if matrix is not None and matrix.factors is not None and matrix.rank:
            owners.setdefault((part.placement.start, matrix.factors), []).append(part)
    return [_Pool(kind, lead, found, inputs, device) for (_, kind), found in owners.items()]


def _read(part: Part) -> QTensor | Fp8Tensor:
    assert part.matrix is not None
    return part.matrix.read()
