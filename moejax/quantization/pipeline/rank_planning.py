"""Rank planning: the rank of each matrix, before the first layer is quantized."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from moejax.errors import MoejaxError
from moejax.quantization import ranks
from moejax.quantization.pipeline.batches import BATCH_BYTES
from moejax.quantization.pipeline.inventory import Entry, Inventory
from moejax.quantization.pipeline.progress import Meter
from moejax.quantization.pipeline.recipe import COMPENSATED, Scheme
from moejax.quantization.statistics import excess_kurtosis

# Share of the router's assignments in its layer that an expert got, by (layer, expert).
Frequencies = Mapping[tuple[int | None, int | None], float]


def read_policy(text: str) -> ranks.RankPolicy:
    """Parses a rank policy; raises MoejaxError."""
    try:
        return ranks.parse_policy(text)
    except ValueError as error:
        raise MoejaxError(str(error)) from error


def measure_kurtosis(
    inventory: Inventory, schemes: Mapping[str, Scheme], *, device: jax.Device, meter: Meter
) -> dict[str, float]:
    """Measures the excess kurtosis of every compensated expert matrix, by name."""
    found: dict[str, float] = {}
    by_shape: dict[tuple[int, ...], list[Entry]] = {}
    for entry in _compensated(inventory, schemes):
        if entry.kind == "experts":
            by_shape.setdefault(entry.shape, []).append(entry)
            meter.expect(entry.source.num_bytes)
    compute = jax.jit(excess_kurtosis)
    for shape, entries in by_shape.items():
        count = max(1, min(len(entries), BATCH_BYTES // (4 * shape[0] * shape[1])))
        for first in range(0, len(entries), count):
            members = entries[first : first + count]
            weights = np.zeros((count, *shape), np.float32)
            with meter.phase("survey"):
                for entry, matrix in zip(members, weights, strict=False):
                    entry.read(matrix)
                measured = np.asarray(compute(jax.device_put(weights, device)))
            named = zip(members, measured, strict=False)
            found |= {entry.name: float(value) for entry, value in named}
            meter.bar.update(sum(entry.source.num_bytes for entry in members))
    return found


def plan_ranks(
    policy: ranks.RankPolicy,
    inventory: Inventory,
    schemes: Mapping[str, Scheme],
    *,
    factor_bits: int,
    kurtosis: Mapping[str, float],
    frequencies: Frequencies,
) -> dict[str, Any]:
    """Plans the rank of every matrix that gets a compensator.

    Args:
      schemes: by name; one with a rank of its own is left out of the policy's averages.
      factor_bits: for policies that count bytes.

    Returns:
      "ranks" by name, and "capped": the names for which the policy exceeds min(N, K). MoejaxError
      if the policy does not fit the model.
    """
    compensated = _compensated(inventory, schemes)
    fixed = {
        entry.name: min(rank, *entry.shape)
        for entry in compensated
        if (rank := schemes[entry.name].rank) is not None
    }
    others = [entry for entry in compensated if entry.name not in fixed]
    if not others:
        return {"ranks": fixed, "capped": []}
    matrices = [
        ranks.RankedMatrix(
            name=entry.name,
            kind=entry.kind,
            num_rows=entry.shape[0],
            num_inputs=entry.shape[1],
            kurtosis=kurtosis.get(entry.name),
            frequency=frequencies.get((entry.layer, entry.expert)),
            all_widths=_all_widths(schemes[entry.name]),
        )
        for entry in others
    ]
    try:
        plan = ranks.assign_ranks(policy, matrices, factor_bits=factor_bits)
    except ValueError as error:
        raise MoejaxError(f"rank policy: {error}") from error
    chosen = {entry.name: rank for entry, rank in zip(others, plan.ranks, strict=True)}
    return {"ranks": {**chosen, **fixed}, "capped": list(plan.capped)}


def _all_widths(scheme: Scheme) -> float:
    """Ranks of all widths together over the narrowest's, before any is rounded down."""
    others = range(1, len(scheme.planes)) if scheme.rank_divisor else ()
    return 1 + sum(float(scheme.rank_divisor) ** -i for i in others)


def _compensated(inventory: Inventory, schemes: Mapping[str, Scheme]) -> Sequence[Entry]:
    methods = {name: scheme.method for name, scheme in schemes.items()}
    return [entry for entry in inventory.entries if methods.get(entry.name) in COMPENSATED]
