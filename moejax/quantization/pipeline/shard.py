"""Quantization of one shard, batch by batch, to the content of its file and manifest."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoints.formats.native import whole_compensator
from moejax.checkpoints.safetensors_writer import Tensor
from moejax.devices import plain_memory_errors
from moejax.errors import MoejaxError
from moejax.quantization.pipeline.batches import Batch, BatchPlan, MatrixTask, RowRange
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
from moejax.quantization.pipeline.recipe import CALIBRATED, COMPENSATED
from moejax.weights.qtensor import FACTOR_GROUP_SIZE, QTensor

# Computes the calibration of matrices.
Calibrate = Callable[[Sequence[Entry]], Calibration]


class ShardResult(NamedTuple):
    """A quantized shard in host memory."""

    tensors: dict[str, Tensor]  # what the file holds
    matrices: dict[str, QTensor]  # by name, what was quantized
    records: dict[str, dict[str, Any]]  # by name, what the manifest says of each
    histograms: dict[str, Any]  # by name, of the first matrix of each class


@dataclasses.dataclass
class _Parts:
    """Parts of one matrix: its quantized row ranges, and their measurements."""

    tensors: list[QTensor] = dataclasses.field(default_factory=list)
    lost: list[tuple[float, ...]] = dataclasses.field(default_factory=list)
    whole: list[float] = dataclasses.field(default_factory=list)
    surged: bool = False
    starved: bool = False


def quantize_shard(
    shard: Shard,
    tasks: Mapping[str, MatrixTask],  # matrices to quantize, by name; the rest is copied as stored
    plan: BatchPlan,
    *,
    device: jax.Device,
    meter: Meter,
    calibrate: Calibrate | None,
    write_matrix: WriteMatrix,  # converts a matrix, named without ".weight", to the file's tensors
) -> ShardResult:
    """Quantizes a shard; only one batch of it is on the device at a time.

    Raises:
      MoejaxError: a weight is NaN or infinite; scales do not fit their type; the device is out of
        memory.
    """
    own = [tasks[entry.name] for entry in shard.entries if entry.name in tasks]
    found: dict[str, _Parts] = defaultdict(_Parts)
    for batch in plan.batches(own):
        result = _run(batch, device, meter, calibrate)
        for i, part in enumerate(batch.ranges):
            _add(found[part.task.entry.name], part, result, i)
    total = ShardResult({}, {}, {}, {})
    seen: set[str] = set()
    for entry in shard.entries:
        if entry.name not in tasks:
            total.tensors[entry.name] = entry.stored()
            dtype, num_bytes = entry.source.dtype.name, entry.source.num_bytes
            total.records[entry.name] = {**_place(entry), "dtype": dtype, "bytes": num_bytes}
            continue
        parts = found[entry.name]
        matrix = parts.tensors[0]
        if len(parts.tensors) > 1:
            matrix = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts.tensors)
        tensors = write_matrix(entry.prefix, matrix)
        total.tensors.update(tensors)
        total.matrices[entry.name] = matrix
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        total.records[entry.name] = _record(tasks[entry.name], parts, num_bytes)
        if entry.kind not in seen and math.prod(entry.shape) <= MOST_WEIGHTS:
            total.histograms[entry.name] = histogram(entry.read(), matrix)
            seen.add(entry.kind)
    return total


def _run(
    batch: Batch, device: jax.Device, meter: Meter, calibrate: Calibrate | None
) -> QuantizedStack:
    """Quantizes a batch; the result is in host memory."""
    with meter.phase("read"):
        weights = batch.read()
    calibration = None
    if calibrate is not None and batch.program.scheme.method in CALIBRATED:
        found = calibrate([part.task.entry for part in batch.ranges])
        missing = batch.num_matrices - len(batch.ranges)
        calibration = Calibration(
            *(jnp.pad(part, ((0, missing), *((0, 0),) * (part.ndim - 1))) for part in found)
        )
    with meter.phase("quantize"), plain_memory_errors(device), jax.default_device(device):
        placed = jax.device_put(weights, device)
        ranks = jax.device_put(batch.ranks(), device)
        del weights
        result = jax.device_get(quantize_stack(placed, ranks, calibration, batch.program))
    for part in batch.ranges:
        source = part.task.entry.source
        meter.bar.update(part.num_rows * math.prod(source.shape[1:]) * source.dtype.itemsize)
    return result


def _add(parts: _Parts, part: RowRange, result: QuantizedStack, i: int) -> None:
    """Adds matrix `i` of a batch's result to its matrix's parts."""
    entry = part.task.entry
    if not result.is_storable[i]:
        raise MoejaxError(
            f"{entry.prefix}: a scale or zero point of it does not fit "
            f"{part.task.scheme.scale_dtype}; take scale_dtype=float32 or another method for it"
        )
    if not all(np.isfinite(lost[i]) for lost in result.lost):
        raise MoejaxError(f"{entry.prefix}: {part.task.scheme.method} gave no finite result")
    tensor = _first_rows(result.tensor, i, part.num_rows)
    surged = bool(result.surged[i])
    compensators = []
    for bits, rank, factors in zip(
        part.task.scheme.planes[::-1] or (0,), part.task.ranks,
        result.safe_factors if surged else result.factors, strict=True,
    ):  # fmt: skip
        if factors is not None and rank:
            u, v = (_first_rows(factor, i, rank) for factor in factors)
            compensators.append(whole_compensator(u, v, bits=bits))
    tensor = dataclasses.replace(tensor, compensators=tuple(compensators))
    parts.tensors.append(tensor)
    parts.lost.append(tuple(float(lost[i]) for lost in result.lost))
    parts.whole.append(float(result.whole[i]))
    parts.surged |= surged
    parts.starved |= bool(result.starved[i])


def _first_rows(stack: Any, i: int, num_rows: int) -> Any:
    """First rows of matrix `i` of an array or a QTensor, with numpy leaves."""
    return jax.tree.map(lambda leaf: np.ascontiguousarray(leaf[i, :num_rows]), stack)


def _place(entry: Entry) -> dict[str, Any]:
    """Class, place in the model, and shape of a tensor."""
    place = {"class": entry.kind, "layer": entry.layer, "expert": entry.expert}
    known = {name: value for name, value in place.items() if value is not None}
    return {**known, "shape": list(entry.shape)}


def _record(task: MatrixTask, parts: _Parts, num_bytes: int) -> dict[str, Any]:
    """Entry of a quantized matrix in the manifest."""
    scheme = task.scheme
    whole = math.fsum(parts.whole)
    losses = [math.fsum(lost) for lost in zip(*parts.lost, strict=True)]
    errors = [math.sqrt(lost / whole) if whole else 0.0 for lost in losses]
    record = {
        **_place(task.entry),
        "method": scheme.method,
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "zero_kind": scheme.zero_kind,
        "scale_dtype": scheme.scale_dtype,
        "relative_error": errors[0],
        "bytes": num_bytes,
    }
    if scheme.planes:
        record["planes"] = list(scheme.planes)
        record["plane_weight"] = scheme.grid.widths[0].share
        record["narrow_errors"] = dict(
            zip(map(str, scheme.planes[-2::-1]), errors[1:], strict=True)
        )
    if scheme.method in COMPENSATED:
        record["rank"] = task.rank
        record["factor_bits"] = SAFE_FACTOR_BITS if parts.surged else scheme.factor_bits
        record["factor_group_size"] = FACTOR_GROUP_SIZE
        if scheme.planes:
            record["compensated_bits"] = scheme.planes[0]
            others = zip(scheme.planes[:0:-1], task.ranks[:-1], strict=True)
            record["refined_ranks"] = {str(bits): rank for bits, rank in others}
    if parts.surged:
        record["surged"] = True
    if parts.starved:
        record["starved"] = True
    return record
