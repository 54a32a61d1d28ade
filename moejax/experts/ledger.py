"""The ledger: what the experts' memory did, counted on the device and summed on the host.

Axes: M sparse layers, T tiers. A report of speed stands beside its ledger.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.experts.budget import size_text

# Counts of experts, but for `steps`; the order is that of the columns of `Counts.events`.
EVENTS = (
    "steps",  # times that the layer ran for some token; of a tier, that it served some pair
    "needed",  # experts that its tokens were routed to
    "hits",  # of them, those in a slot already
    "misses",  # of them, those that were not: admitted, streamed or unserved
    "admitted",  # misses fetched into a slot of the cache
    "streamed",  # misses fetched into a transient slot
    "unserved",  # misses for which there was no slot: a broken contract, see `Ledger.add`
    "evictions",  # experts that left a slot for another one
    "prefetched",  # experts that a prediction brought
    "bulk",  # experts that a bulk transfer brought
    "prefetch_hits",  # of what was brought ahead, experts whose first use found them there
    "prefetch_waste",  # of what was brought ahead, experts that went unused
    "waits",  # experts that the step asked the host for, which read them or had them by then
)
LINK_GIB_PER_S = 50  # of PCIe 5 x16: the link's part of stalls is estimated by it
DISK_TROUBLE = ("retries", "errors", "refused")  # of what a reader counts
_COLUMN = {name: i for i, name in enumerate(EVENTS)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """What happened in the layers since the counts were last taken; two arrays, to be donated.

    Invariants (`check`):
      * `events` is int32[M, len(EVENTS)]; a step adds to one row at once, one operation a layer;
      * `gate` is float32[M, 1 + T]: gate mass of all, then of each tier.

    Every name in `EVENTS` is also a property, int32[M].
    """

    events: jax.Array
    gate: jax.Array

    def check(self) -> None:
        """Raises ValueError when an invariant does not hold."""
        if self.events.ndim != 2 or self.events.shape[1] != len(EVENTS):
            raise ValueError(f"events have shape {self.events.shape}, expected [M, {len(EVENTS)}]")
        if self.gate.ndim != 2 or self.gate.shape[0] != self.events.shape[0]:
            raise ValueError(f"gate has shape {self.gate.shape}, events {self.events.shape}")
        if self.events.dtype != jnp.int32 or self.gate.dtype != jnp.float32:
            raise ValueError(f"events are {self.events.dtype}, gate {self.gate.dtype}")

    def __getattr__(self, name: str) -> jax.Array:
        if name not in _COLUMN:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return self.events[..., _COLUMN[name]]

    @property
    def gate_mass(self) -> jax.Array:
        """float32[M], the gates of all (token, expert) pairs."""
        return self.gate[..., 0]

    def add(self, layer: int | jax.Array, **amounts: jax.Array | int) -> "Counts":
        """Adds to events of one layer.

        Args:
          layer: int or int32[].
          **amounts: int32[] or int by the names of `EVENTS`.
        """
        return dataclasses.replace(self, events=self.events.at[layer].add(_columns(amounts)))

    def add_everywhere(self, **amounts: jax.Array | int) -> "Counts":
        """Adds to events of every layer; amounts as of `add`, or int32[M]."""
        return dataclasses.replace(self, events=self.events + _columns(amounts))

    def add_gate_mass(self, layer: int | jax.Array, by_tier: jax.Array) -> "Counts":
        """Adds gate mass of one layer: float32[T]; the mass of all is their sum."""
        row = jnp.concatenate([by_tier.sum(keepdims=True), by_tier])
        return dataclasses.replace(self, gate=self.gate.at[layer].add(row))


def _columns(amounts: Mapping[str, jax.Array | int]) -> jax.Array:
    """int32[..., len(EVENTS)], in the order of `EVENTS`."""
    unknown = sorted(set(amounts) - set(EVENTS))
    if unknown:
        raise ValueError(f"no events {', '.join(unknown)}; there are {', '.join(EVENTS)}")
    given = (jnp.asarray(amounts.get(name, 0), jnp.int32) for name in EVENTS)
    return jnp.stack(jnp.broadcast_arrays(*given), axis=-1)


def no_counts(num_layers: int, num_tiers: int = 1) -> Counts:
    """Zeros for M layers and T tiers."""
    return Counts(
        jnp.zeros((num_layers, len(EVENTS)), jnp.int32),
        jnp.zeros((num_layers, 1 + num_tiers), jnp.float32),
    )


@dataclasses.dataclass
class Ledger:
    """Sums of `Counts` over calls, in Python's integers and floats, and in bytes.

    Attributes:
      expert_bytes: of one expert as it crosses the link.
      tiers: their names, T of them.
      layers: for each of the M layers a sum by the names of `EVENTS`.
      gate_mass: of all, by tier, of all layers.
      disk_bytes: read from the disk, told by the reader.
      disk_reads: experts, likewise.
      disk_waits: of them, those that a step waited for.
      disk_wait_seconds: that steps spent in the host's answers to what no row of host memory held,
        by its clock: reading, repeating what failed, and copying to what it answers.
      disk_ahead: experts that were read since a policy foresaw them; not of `disk_waits`, and
        without those that a transfer asked for while they were being read.
      disk_ahead_used: of them, those that were then asked for and still in host memory.
      disk_trouble: tries that had to be repeated and requests that came to nothing, by name.
      bulk_requests: what became of requests between steps, by name, told by the transfers.
    """

    expert_bytes: int
    tiers: tuple[str, ...] = ("resident",)
    layers: list[dict[str, int]] = dataclasses.field(default_factory=list)
    gate_mass: dict[str, float] = dataclasses.field(default_factory=dict)
    disk_bytes: int = 0
    disk_reads: int = 0
    disk_waits: int = 0
    disk_wait_seconds: float = 0.0
    disk_ahead: int = 0
    disk_ahead_used: int = 0
    disk_trouble: dict[str, int] = dataclasses.field(default_factory=dict)
    bulk_requests: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, counts: Counts, *, disk: Mapping[str, float] | None = None) -> None:
        """Adds the counts of a call, after which the next one starts from `no_counts`.

        Args:
          counts: of numpy arrays, or of arrays that are fetched here.
          disk: what was counted of the disk for the call (`DiskExperts.read_since`), by name.

        Raises:
          ValueError: counts of another number of layers or tiers, or a negative one (overflow).
          RuntimeError: an expert was needed and had no slot, so that the tokens are wrong: more
            experts were needed than `max_needed` said or more slots pinned than the spec allows.
        """
        events, gate = np.asarray(counts.events), np.asarray(counts.gate, np.float64)
        if gate.shape[1] != 1 + len(self.tiers):
            raise ValueError(f"counts of {gate.shape[1] - 1} tiers, the ledger has {self.tiers}")
        if self.layers and len(self.layers) != len(events):
            raise ValueError(f"counts of {len(events)} layers, the ledger has {len(self.layers)}")
        if events.min(initial=0) < 0:
            raise ValueError("a count is negative: take the counts before they reach 2^31")
        self.layers = self.layers or [dict.fromkeys(EVENTS, 0) for _ in events]
        for total, row in zip(self.layers, events.tolist(), strict=True):
            for name, amount in zip(EVENTS, row, strict=True):
                total[name] += amount
        for tier, mass in zip(self.tiers, gate[:, 1:].sum(0).tolist(), strict=True):
            self.gate_mass[tier] = self.gate_mass.get(tier, 0.0) + mass
        told = disk or {}
        self.disk_bytes += int(told.get("bytes", 0))
        self.disk_reads += int(told.get("reads", 0))
        self.disk_waits += int(told.get("waits", 0))
        self.disk_wait_seconds += told.get("wait_seconds", 0.0)
        self.disk_ahead += int(told.get("ahead", 0))
        self.disk_ahead_used += int(told.get("ahead_used", 0))
        for name in DISK_TROUBLE:
            self.disk_trouble[name] = self.disk_trouble.get(name, 0) + int(told.get(name, 0))
        if counts.unserved.any():
            raise RuntimeError(f"{int(counts.unserved.sum())} needed experts had no slot")

    def total(self, event: str) -> int:
        """Of one of `EVENTS`, over all layers."""
        return sum(layer[event] for layer in self.layers)

    @property
    def hit_rate(self) -> float:
        """Share of needed experts that were in a slot; NaN before anything was needed."""
        return _share(self.total("hits"), self.total("needed"))

    @property
    def prefetch_precision(self) -> float:
        """Share used of the experts brought ahead whose fate is known; NaN if none."""
        used = self.total("prefetch_hits")
        return _share(used, used + self.total("prefetch_waste"))

    @property
    def host_hit_rate(self) -> float:
        """Share of what steps fetched that was in host memory; NaN if they fetched nothing."""
        fetched = self.total("admitted") + self.total("streamed") + self.total("prefetched")
        return _share(fetched - self.disk_waits, fetched)

    @property
    def bytes_by_cause(self) -> dict[str, int]:
        """Bytes to the device by what asked for them, and what the disk gave."""
        causes = {"demand": "admitted", "stream": "streamed", "prefetch": "prefetched"}
        causes["bulk"] = "bulk"
        found = {cause: self.total(name) * self.expert_bytes for cause, name in causes.items()}
        return {**found, "disk": self.disk_bytes}

    @property
    def link_bytes(self) -> int:
        """Bytes from host to device, for whatever cause."""
        return sum(amount for cause, amount in self.bytes_by_cause.items() if cause != "disk")

    def link_stall_seconds(self, link_gib_per_s: float = LINK_GIB_PER_S) -> float:
        """An estimate of what steps waited for the link: all that was fetched inside them."""
        causes = self.bytes_by_cause
        return (causes["demand"] + causes["stream"]) / (link_gib_per_s * 2**30)

    def stall_seconds(self, link_gib_per_s: float = LINK_GIB_PER_S) -> float:
        """What steps waited for experts: the link's part is estimated, the disk's is measured.

        What the disk gives crosses the link as well, and counts in both parts. What is read or sent
        beside the steps (in bulk, foreseen, predicted) is in neither.
        """
        return self.link_stall_seconds(link_gib_per_s) + self.disk_wait_seconds

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON; a rate of nothing is None."""
        return {
            "stall_seconds": {
                "estimate": self.stall_seconds(),
                "link_estimate": self.link_stall_seconds(),
                "link_gib_per_s": LINK_GIB_PER_S,
                "disk_measured": self.disk_wait_seconds,
            },
            "expert_bytes": self.expert_bytes,
            "totals": {name: self.total(name) for name in EVENTS},
            "hit_rate": _or_none(self.hit_rate),
            "prefetch_precision": _or_none(self.prefetch_precision),
            "host_hit_rate": _or_none(self.host_hit_rate),
            "bytes": self.bytes_by_cause,
            "gate_mass": dict(self.gate_mass),
            "disk_reads": self.disk_reads,
            "disk_waits": self.disk_waits,
            "disk_ahead": self.disk_ahead,
            "disk_ahead_used": self.disk_ahead_used,
            "disk_trouble": dict(self.disk_trouble),
            "bulk_requests": dict(self.bulk_requests),
            "layers": [dict(layer) for layer in self.layers],
        }

    def describe(self) -> list[str]:
        """Lines of a report; causes and tiers of which there was nothing are left out."""
        count = self.total
        lines = [
            f"experts needed {count('needed')}: hits {count('hits')} "
            f"({_percent(self.hit_rate)}), misses {count('misses')} (admitted "
            f"{count('admitted')}, streamed {count('streamed')}), evictions {count('evictions')}"
        ]
        if count("prefetched") or count("bulk"):
            lines.append(
                f"brought ahead: {count('prefetched')} predicted, {count('bulk')} in bulk; "
                f"{count('prefetch_hits')} used, {count('prefetch_waste')} wasted "
                f"({_percent(self.prefetch_precision)} of those decided were used)"
            )
        causes = [f"{name} {size_text(n)}" for name, n in self.bytes_by_cause.items() if n]
        lines.append(f"moved: {', '.join(causes) or 'nothing'}")
        if self.stall_seconds():
            disk = f" and {1e3 * w:.3g} ms for the disk" if (w := self.disk_wait_seconds) else ""
            link = f"{1e3 * self.link_stall_seconds():.3g} ms"
            lines.append(f"stalls: about {link}, if the link moves {LINK_GIB_PER_S} GiB/s{disk}")
        if self.disk_waits or self.disk_reads:
            lines.append(
                f"disk: {self.disk_reads} experts read; steps waited for {self.disk_waits} of them;"
                f" host memory had {_percent(self.host_hit_rate)} of what they fetched"
            )
        if self.disk_ahead:
            lines.append(
                f"foreseen: {self.disk_ahead} experts read ahead from the disk, "
                f"{self.disk_ahead_used} of them asked for later"
            )
        if any(self.disk_trouble.values()):
            said = (f"{name} {n}" for name, n in self.disk_trouble.items() if n)
            lines.append(f"disk requests: {', '.join(said)}")
        if any(self.bulk_requests.values()):
            said = (f"{name} {n}" for name, n in self.bulk_requests.items() if n)
            lines.append(f"bulk requests: {', '.join(said)}")
        mass = sum(self.gate_mass.values())
        if mass and len(self.tiers) > 1:
            shares = (f"{tier} {_percent(self.gate_mass[tier] / mass)}" for tier in self.tiers)
            lines.append(f"gate mass: {', '.join(shares)}")
        if count("unserved"):
            lines.append(f"WRONG: {count('unserved')} needed experts had no slot")
        return lines

    def describe_layers(self) -> list[str]:
        """A line for each layer."""
        return [
            f"layer {i}: needed {row['needed']}, hits {row['hits']}, misses {row['misses']}"
            for i, row in enumerate(self.layers)
        ]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def _or_none(rate: float) -> float | None:
    return None if np.isnan(rate) else rate


def _percent(share: float) -> str:
    return "n/a" if np.isnan(share) else f"{100 * share:.1f} %"
