"""Names the routing that a row of speed replayed."""

import re

from moejax.benchmarking.routing import EXPONENTS
from scripts.studies.tables.rows import Found


def routing_of(found: Found | None, shape: str) -> str:
    """Names what a row replayed; older rows do not say it, but their command and shape do.

    Args:
      found: a row of `bench_policies`.
      shape: its model's name.
    """
    if found is None:
        return "routing not measured"
    if "routing" in found.more:
        return str(found.more["routing"])
    given = re.search(r"--zipf=([\d.]+)", found.row.command)
    exponent = float(given[1]) if given else EXPONENTS.get(shape, 0.0)
    if not exponent:
        return "made-up routing, even popularity"
    return f"made-up routing, popularity of rank r as r^-{exponent:g}"
