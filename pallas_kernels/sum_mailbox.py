"""Memory through which GPUs add, see `peer_sum`: its layout in bytes, without JAX."""

MOST = 64 * 4096  # numbers of a sum: 64 tokens of a wide model
NUMBERS_NBYTES = 4 * MOST  # each number's count of its sums
PART_NBYTES = 8 * MOST  # a device's part: float32, and the count beside each


def mailbox_nbytes(num_devices: int) -> int:
    """Bytes of each device's mailbox: counts, and every device's part twice; zeros at first."""
    return NUMBERS_NBYTES + 2 * num_devices * PART_NBYTES
