"""Disk space of a quantized checkpoint, bounded before any of it is written."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from moejax.errors import MoejaxError
from moejax.quantization.pipeline.batches import MatrixTask
from moejax.quantization.pipeline.inventory import Entry, Shard
from moejax.quantization.pipeline.manifest import COPIED_FILES
from moejax.quantization.pipeline.quantizers import SAFE_FACTOR_BITS
from moejax.quantization.ranks import rank_bytes

# A matrix is at most nine tensors (three planes, scales, zero points, two factors of two). Each
# one's name stands in a header, the index and a note, and the matrix's record in note and manifest.
_NAMES, _RECORD_BYTES = 29, 2048
# Beside the weights: histograms and a file's last block for each shard; pictures, config.json.
_SHARD_BYTES, _REST_BYTES = 32 * 2**10, 2**20


def check_space(
    output: Path, source: Path, shards: tuple[Shard, ...], tasks: Mapping[str, MatrixTask]
) -> None:
    """Raises MoejaxError unless the disk has room for the shards that are not written yet.

    `source` has small files that are copied; `tasks` are the matrices to quantize, by name.
    """
    needed = _most_bytes(source, shards, tasks)
    free = shutil.disk_usage(output).free
    if needed > free:
        raise MoejaxError(
            f"the result takes up to {needed / 1e6:,.1f} MB more, but {output} has room for "
            f"{free / 1e6:,.1f} MB; make room or give another output"
        )


def _most_bytes(source: Path, shards: tuple[Shard, ...], tasks: Mapping[str, MatrixTask]) -> int:
    """Bound on the bytes of all files; see `check_space`."""
    copied = [source / name for name in COPIED_FILES if (source / name).is_file()]
    small = sum(path.stat().st_size for path in copied) + _REST_BYTES
    entries = [entry for shard in shards for entry in shard.entries]
    return (
        small
        + len(shards) * _SHARD_BYTES
        + sum(_NAMES * len(entry.name) + _RECORD_BYTES for entry in entries)
        + sum(_stored_bytes(entry, tasks.get(entry.name)) for entry in entries)
    )


def _stored_bytes(entry: Entry, task: MatrixTask | None) -> int:
    """Bytes of a matrix's tensors, in the largest format."""
    if task is None:
        return entry.source.num_bytes
    (num_rows, num_inputs), scheme = entry.shape, task.scheme
    order_bytes = 4 * num_inputs  # of GPTQ's g_idx
    # Factors that surge are kept in more bits.
    factor_bits = max(scheme.factor_bits, SAFE_FACTOR_BITS)
    factor_bytes = sum(task.ranks) * rank_bytes(num_rows, num_inputs, factor_bits)
    return scheme.kind.num_bytes(entry.shape) + order_bytes + factor_bytes
