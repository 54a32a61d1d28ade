"""What rows with a known flaw would say without it, by CHANGELOG's estimate."""

from scripts.reproducing.rows import Found

ROUTERS_MS = (0.2, 0.1)  # of a step of 48 layers, by which replays without routers are too fast


def with_routers(found: Found, beside: str) -> tuple[float, float]:
    """The throughput of a step over that of another one, in percent, were the routers in it.

    Args:
      found: a TPOT whose replay left the routers out.
      beside: the key of the other step's time, which has them.

    Returns:
      With the most and with the least that they take.
    """
    most, least = (100 * found.more[beside] / (found.figure + more) for more in ROUTERS_MS)
    return most, least


def said(ends: tuple[float, float], less: float = 0.0) -> str:
    """A range as one reads it; `less` is taken away: 100 of a gain."""
    low, high = (round(end - less) for end in ends)
    return f"{low} %" if low == high else f"{low} to {high} %"
