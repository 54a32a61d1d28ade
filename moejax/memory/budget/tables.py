"""Bytes of what the device knows of its slots."""

NUM_EVENTS = 13  # that `moejax.ledger` counts in each layer


RING_BLOCKS = 8  # pinned, each of an expert on its way from the disk
_BLOB_PADDING = 64  # more than the padding of an expert's arrays to full words


def bulk_nbytes(expert_nbytes: int, bulk: int) -> int:
    """Of so many experts between steps; arrays are sent in full words, odd 16-bit scales too."""
    return bulk * (expert_nbytes + _BLOB_PADDING)


def least_host_nbytes(expert_nbytes: int, num_experts: int, bulk: int) -> int:
    """Below it there is no room for what is on its way from the disk, nor for all experts."""
    return min(RING_BLOCKS, num_experts) * expert_nbytes + bulk_nbytes(expert_nbytes, bulk)


def table_nbytes(
    num_layers: int, num_experts: int, slots: int, num_tiers: int = 1, *, last_uses: bool = False
) -> int:
    """Bytes of the residency tables, of the counters and of the table of rows on the device.

    Args:
      num_layers: M.
      num_experts: E.
      slots: C.
      num_tiers: of the gate mass that is counted.
      last_uses: with the table of them, by which host memory evicts.
    """
    columns = 4 * (num_experts + 4 * slots)  # slot of an expert; owner, use and flags of a slot
    residency = num_layers * (columns + num_experts) + 4  # and pins; the clock
    rows = num_layers * num_experts * 4
    counters = num_layers * 4 * (NUM_EVENTS + 1 + num_tiers)
    return residency + rows + counters + (rows if last_uses else 0)
