"""Disk space of a quantized checkpoint, bounded before any of it is written."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from moejax.errors import MoejaxError
from moejax.quantization.pipeline.batches import Task
from moejax.quantization.pipeline.inventory import Entry, Shard
from moejax.quantization.pipeline.manifest import COPIED_FILES
from moejax.quantization.pipeline.quantizers import SAFE_FACTOR_BITS
from moejax.quantization.ranks import rank_bytes
from pallas_kernels import layout

# A matrix is at most eight tensors (codes, scales, zero points, an order, two factors of two). Each
# one's name stands in a header, the index and a note, and the matrix's record in note and manifest.
_NAMES, _RECORD_BYTES = 26, 2048
# Beside the weights: histograms and a file's last block for each shard; pictures, config.json.
_SHARD_BYTES, _REST_BYTES = 32 * 2**10, 2**20


def check_space(
    output: Path, source: Path, shards: tuple[Shard, ...], tasks: Mapping[str, Task]
) -> None:
    """Checks that the disk has room for the remaining shards.

    Args:
      source: the checkpoint, whose small files are copied.
      shards: those not written yet.
      tasks: matrices to quantize, by name.

    Raises:
      MoejaxError: the disk has less room.
    """
    needed = most_bytes(source, shards, tasks)
    free = shutil.disk_usage(output).free
    if needed > free:
        raise MoejaxError(
            f"the result takes up to {needed / 1e6:,.1f} MB more, but {output} has room for "
            f"{free / 1e6:,.1f} MB; make room or give another output"
        )


def most_bytes(source: Path, shards: tuple[Shard, ...], tasks: Mapping[str, Task]) -> int:
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


def _stored_bytes(entry: Entry, task: Task | None) -> int:
    """Bytes of a matrix's tensors, in the largest format."""
    if task is None:
        return entry.source.num_bytes
    (num_rows, num_inputs), scheme = entry.shape, task.scheme
    scale_bytes = 4 if scheme.scale_dtype == "float32" else 2
    zero_bytes = {"float": scale_bytes, "integer": 1, "symmetric": 0}[scheme.zero_kind]
    groups = layout.num_groups(num_inputs, scheme.group_size)
    row_bytes = 4 * layout.num_words(num_inputs, scheme.bits) + groups * (scale_bytes + zero_bytes)
    order_bytes = 4 * num_inputs  # of a permutation, or of GPTQ's g_idx
    # Factors that surge are kept in more bits.
    factor_bits = max(scheme.factor_bits, SAFE_FACTOR_BITS)
    factor_bytes = task.rank * rank_bytes(num_rows, num_inputs, factor_bits)
    return num_rows * row_bytes + order_bytes + factor_bytes
