"""Bytes of what the device knows of its slots."""

NUM_EVENTS = 13  # that `moejax.ledger` counts in each layer


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
