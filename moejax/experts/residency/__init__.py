"""Residency of experts in slots: pure functions over fixed-shape tables.

Axes: M sparse layers, E experts of a layer, C cache slots of a layer, B transient slots that all
layers share, S = M C + B slots of the device pool. The slot of (layer l, local slot c) is l C + c;
transient slot b is M C + b. -1 stands for none.
"""

from moejax.experts.residency.tables import CacheSpec, Counter, Residency, empty, seeded
from moejax.experts.residency.transfers import (
    admit,
    release_everywhere,
)

__all__ = [
    "CacheSpec",
    "Counter",
    "Residency",
    "admit",
    "empty",
    "release_everywhere",
    "seeded",
]
