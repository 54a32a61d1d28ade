"""Bytes of residency tables, of blobs, and of blocks from the disk."""

NUM_EVENTS = 13  # that `moejax.experts.residency` counts in each layer
RING_BLOCKS = 8  # each of an expert on its way from the disk
_BLOB_PADDING = 64  # more than the padding of an expert's arrays to full words


def bulk_nbytes(expert_nbytes: int, bulk: int) -> int:
    """Bytes of `bulk` experts in flight between steps, padded to full words."""
    return bulk * (expert_nbytes + _BLOB_PADDING)


def most_at_once(num_experts: int, num_pairs: int, slots: int, transient: int) -> int:
    """Experts that a step of `num_pairs` fetches at once for a layer, to slots or in a wave."""
    return max(min(num_experts, num_pairs, slots), transient)


def blocks_from_disk(at_once: int) -> int:
    """Experts in host memory without a row, where some are on the disk alone.

    They are the ring's blocks, the rows that a callback returns to a step that waits, and the one
    that it reads to copy from.
    """
    return RING_BLOCKS + at_once + 1


def least_host_nbytes(expert_nbytes: int, num_experts: int, bulk: int, at_once: int) -> int:
    """Smallest host memory: room for blocks from the disk, or for all experts."""
    least = min(blocks_from_disk(at_once), num_experts)
    return least * expert_nbytes + bulk_nbytes(expert_nbytes, bulk)


def table_nbytes(num_layers: int, num_experts: int, slots: int, *, last_uses: bool = False) -> int:
    """Bytes of the residency tables, of the counters and of the table of rows on the device.

    `last_uses` includes the table of last uses, by which host memory evicts.
    """
    # The slot of an expert; owner, last use and flag of a slot. And the clock.
    residency = num_layers * 4 * (num_experts + 3 * slots) + 4
    rows = num_layers * num_experts * 4
    counters = num_layers * 4 * (NUM_EVENTS + 2)
    return residency + rows + counters + (rows if last_uses else 0)
