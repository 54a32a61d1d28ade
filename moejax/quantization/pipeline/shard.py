"""Quantization of one shard, stack by stack, to the content of its file and manifest."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoints.formats.manifest import FACTOR_GROUP_SIZE
from moejax.checkpoints.formats.native import whole_compensator
from moejax.checkpoints.safetensors_reader import read_matrix
from moejax.checkpoints.safetensors_writer import Tensor
from moejax.devices import plain_memory_errors
from moejax.errors import MoejaxError
from moejax.quantization.pipeline.batches import Piece, Programs, Stack, Task
from moejax.quantization.pipeline.export import WriteMatrix
from moejax.quantization.pipeline.inventory import Entry, Shard
from moejax.quantization.pipeline.plots import MOST_WEIGHTS, histogram
from moejax.quantization.pipeline.progress import Meter
from moejax.quantization.pipeline.quantizers import (
    SAFE_FACTOR_BITS,
    Calibration,
    QuantizedStack,
    quantize_stack,
)
from moejax.quantization.pipeline.recipe import COMPENSATED
from moejax.weights.qtensor import QTensor

# Computes the calibration of matrices.
Calibrate = Callable[[Sequence[Entry]], Calibration]


class ShardResult(NamedTuple):
    """A quantized shard in host memory."""

    tensors: dict[str, Tensor]  # what the file holds
    matrices: dict[str, QTensor]  # by name, what was quantized
    records: dict[str, dict[str, Any]]  # by name, what the manifest says of each
    histograms: dict[str, Any]  # by name, of the first matrix of each class


class _Parts(NamedTuple):
    """Parts of one matrix: its quantized row ranges, and their measurements."""

    tensors: list[QTensor]
    lost: list[float]
    whole: list[float]
    surged: bool
    starved: bool


def quantize_shard(
    shard: Shard,
    tasks: Mapping[str, Task],
    programs: Programs,
    *,
    device: jax.Device,
    meter: Meter,
    calibrate: Calibrate | None,
    write_matrix: WriteMatrix,
) -> ShardResult:
    """Quantizes a shard; only one stack of it is on the device at a time.

    Args:
      tasks: matrices to quantize, by name; the rest is copied as stored.
      programs: of the whole model.
      calibrate: computes the input of calibrated methods.
      write_matrix: converts a matrix, named without ".weight", to the file's tensors.

    Raises:
      MoejaxError: a weight is NaN or infinite; scales do not fit their type; the device is out of
        memory.
    """
    own = [tasks[entry.name] for entry in shard.entries if entry.name in tasks]
    found: dict[str, _Parts] = defaultdict(lambda: _Parts([], [], [], False, False))
    for stack in programs.stacks(own):
        result = _run(stack, device, meter, calibrate)
        for i, piece in enumerate(stack.pieces):
            _add(found, piece, result, i)
    total = ShardResult({}, {}, {}, {})
    seen: set[str] = set()
    for entry in shard.entries:
        if entry.name not in tasks:
            total.tensors[entry.name] = entry.source
            total.records[entry.name] = _plain_record(entry)
            continue
        matrix = _joined(found[entry.name].tensors)
        tensors = write_matrix(entry.prefix, matrix)
        total.tensors.update(tensors)
        total.matrices[entry.name] = matrix
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        total.records[entry.name] = _record(tasks[entry.name], found[entry.name], num_bytes)
        if entry.kind not in seen and entry.num_weights <= MOST_WEIGHTS:
            total.histograms[entry.name] = histogram(read_matrix(entry.source), matrix)
            seen.add(entry.kind)
    return total


def _run(
    stack: Stack, device: jax.Device, meter: Meter, calibrate: Calibrate | None
) -> QuantizedStack:
    """Quantizes a stack; the result is in host memory."""
    with meter.phase("read"):
        weights = stack.read()
    calibration = None
    if calibrate is not None and stack.program.scheme.method in ("gptq", "autoround"):
        entries = [piece.task.entry for piece in stack.pieces]
        calibration = _filled(calibrate(entries), stack.num_matrices)
    with meter.phase("quantize"), plain_memory_errors(device), jax.default_device(device):
        placed = jax.device_put(weights, device)
        ranks = jax.device_put(stack.ranks(), device)
        del weights
        result = jax.device_get(quantize_stack(placed, ranks, calibration, stack.program))
    sources = [piece.task.entry.source for piece in stack.pieces]
    per_row = [math.prod(source.shape[1:]) * source.dtype.itemsize for source in sources]
    rows = [piece.num_rows for piece in stack.pieces]
    meter.advance(sum(a * b for a, b in zip(per_row, rows, strict=True)))
    return result


def _filled(calibration: Calibration, count: int) -> Calibration:
    """Pads calibration to a full stack."""
    missing = count - len(calibration.num_tokens)
    return Calibration(
        *(jnp.pad(part, ((0, missing), *((0, 0),) * (part.ndim - 1))) for part in calibration)
    )


def _add(found: dict[str, _Parts], piece: Piece, result: QuantizedStack, i: int) -> None:
    """Adds matrix `i` of a stack's result to its matrix's parts."""
    entry = piece.task.entry
    if not result.is_storable[i]:
        raise MoejaxError(
            f"{entry.prefix}: a scale or zero point of it does not fit "
            f"{piece.task.scheme.scale_dtype}; take scale_dtype=float32 or another method for it"
        )
    if not np.isfinite(result.lost[i]):
        raise MoejaxError(f"{entry.prefix}: {piece.task.scheme.method} gave no finite result")
    parts = found[entry.name]
    tensor = _matrix(result.tensor, i, piece.num_rows)
    surged = bool(result.surged[i])
    factors = result.safe_factors if surged else result.factors
    if factors is not None and piece.task.rank:
        u, v = (_factor(factor, i, piece.task.rank) for factor in factors)
        tensor = dataclasses.replace(tensor, compensators=(whole_compensator(u, v),))
    parts.tensors.append(tensor)
    parts.lost.append(float(result.lost[i]))
    parts.whole.append(float(result.whole[i]))
    found[entry.name] = parts._replace(
        surged=parts.surged or surged, starved=parts.starved or bool(result.starved[i])
    )


def _matrix(stack: QTensor, i: int, num_rows: int) -> QTensor:
    """First rows of matrix `i`, with numpy leaves."""
    cut: Any = lambda leaf: None if leaf is None else np.ascontiguousarray(leaf[i, :num_rows])  # noqa: E731
    return dataclasses.replace(
        stack,
        words=cut(stack.words),
        scales=cut(stack.scales),
        zeros=cut(stack.zeros),
    )


def _factor(factor: Any, i: int, rank: int) -> Any:
    """First `rank` rows of matrix `i`'s factor."""
    if isinstance(factor, QTensor):
        return jax.tree.map(lambda leaf: np.ascontiguousarray(leaf[i, :rank]), factor)
    return np.ascontiguousarray(factor[i, :rank])


def _joined(parts: Sequence[QTensor]) -> QTensor:
    """Joins parts of a matrix by rows."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _record(task: Task, parts: _Parts, num_bytes: int) -> dict[str, Any]:
    entry, scheme = task.entry, task.scheme
    lost, whole = math.fsum(parts.lost), math.fsum(parts.whole)
    record: dict[str, Any] = {
        "class": entry.kind,
        "layer": entry.layer,
        "expert": entry.expert,
        "shape": list(entry.shape),
        "method": scheme.method,
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "zero_kind": scheme.zero_kind,
        "scale_dtype": scheme.scale_dtype,
        "relative_error": math.sqrt(lost / whole) if whole else 0.0,
        "bytes": num_bytes,
    }
    if scheme.method in COMPENSATED:
        record["rank"] = task.rank
        record["factor_bits"] = SAFE_FACTOR_BITS if parts.surged else scheme.factor_bits
        record["factor_group_size"] = FACTOR_GROUP_SIZE
    if parts.surged:
        record["surged"] = True
    if parts.starved:
        record["starved"] = True
    return {name: value for name, value in record.items() if value is not None}


def _plain_record(entry: Entry) -> dict[str, Any]:
    record = {
        "class": entry.kind,
        "layer": entry.layer,
        "expert": entry.expert,
        "shape": list(entry.shape),
        "dtype": entry.source.dtype.name,
        "bytes": entry.source.num_bytes,
    }
    return {name: value for name, value in record.items() if value is not None}
