"""The ledger: what the expert cache did, counted on the device and summed on the host.

`Ledger` has a `TierLedger` of each tier and, under a policy, what that made of the router's gate
mass. Axes: M sparse layers, T tiers. A report of speed stands beside its ledger.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from moejax.experts.budget import LINK_GIB_PER_S, size_text
from moejax.experts.disk_cache import Counters
from moejax.experts.residency import Counts
from pallas_kernels.cache_plan.operands import EVENTS

DISK_TROUBLE = ("retries", "errors")  # of what is counted of the disk


@dataclasses.dataclass
class TierLedger:
    """Sums of one tier's `Counts` over calls, in Python's integers and floats, and in bytes.

    Attributes:
      expert_bytes: bytes of one expert as it crosses the link; of its plane where planes are apart.
      refines: its experts are refinements over base planes of which the next tier has all.
      layers: for each of the M layers a sum by the names of `EVENTS`.
      gate_mass: the router's, over all layers.
      host_mass: the part of it that the host's cores multiplied.
      disk: sums by name: experts read (reads) and their bytes; those that a step waited for (waits)
        and the seconds of it (wait_seconds); retries and errors of reads; experts that were read
        since a policy foresaw them, and those that were then asked for (ahead, ahead_used).
      bulk_requests: what became of requests between steps, by name, told by the transfers.
    """

    expert_bytes: int
    refines: bool = False
    layers: list[dict[str, int]] = dataclasses.field(default_factory=list)
    gate_mass: float = 0.0
    host_mass: float = 0.0
    disk: dict[str, float] = dataclasses.field(
        default_factory=lambda: dataclasses.asdict(Counters())
    )
    bulk_requests: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, counts: Counts, *, disk: Mapping[str, float] | None = None) -> None:
        """Adds the counts of a call, after which the next one starts from `no_counts`.

        Args:
          disk: counted of the disk for the call (`DiskExperts.counts_since`).

        Raises:
          ValueError: counts of another number of layers, or a negative one (overflow).
          RuntimeError: an expert was needed and had no slot, so that the tokens are wrong: more
            experts were needed than `max_needed` said.
        """
        events = np.asarray(counts.events)
        if self.layers and len(self.layers) != len(events):
            raise ValueError(f"counts of {len(events)} layers, the ledger has {len(self.layers)}")
        if events.min(initial=0) < 0:
            raise ValueError("a count is negative: take the counts before they reach 2^31")
        self.layers = self.layers or [dict.fromkeys(EVENTS, 0) for _ in events]
        for total, row in zip(self.layers, events.tolist(), strict=True):
            for name, amount in zip(EVENTS, row, strict=True):
                total[name] += amount
        mass = np.asarray(counts.gate, np.float64).sum(axis=0)
        self.gate_mass += float(mass[0])
        self.host_mass += float(mass[0] - mass[1])
        for name, amount in (disk or {}).items():
            self.disk[name] += amount
        if counts.unserved.any():
            raise RuntimeError(f"{int(counts.unserved.sum())} needed experts had no slot")

    def total(self, event: str) -> int:
        """Total count of one of `EVENTS` over all layers."""
        return sum(layer[event] for layer in self.layers)

    @property
    def on_host(self) -> int:
        """Misses that the host's cores multiplied: those that no slot took."""
        return self.total("misses") - sum(map(self.total, ("admitted", "streamed", "unserved")))

    @property
    def hit_rate(self) -> float:
        """Share of needed experts that were in a slot; NaN before anything was needed."""
        return _share(self.total("hits"), self.total("needed"))

    @property
    def prefetch_precision(self) -> float:
        """Share of prefetched experts that were used, of those decided; NaN if none."""
        used = self.total("prefetch_hits")
        return _share(used, used + self.total("prefetch_waste"))

    @property
    def host_hit_rate(self) -> float:
        """Share of step fetches that were in host memory; NaN without fetches."""
        fetched = self.total("admitted") + self.total("streamed") + self.total("prefetched")
        return _share(fetched - int(self.disk["waits"]), fetched)

    @property
    def bytes_by_cause(self) -> dict[str, int]:
        """Bytes to the device by cause, and bytes from the disk."""
        causes = {"demand": "admitted", "stream": "streamed", "prefetch": "prefetched"}
        causes["bulk"] = "bulk"
        found = {cause: self.total(name) * self.expert_bytes for cause, name in causes.items()}
        return {**found, "disk": int(self.disk["bytes"])}

    @property
    def link_bytes(self) -> int:
        """Bytes from host to device, for whatever cause."""
        return sum(amount for cause, amount in self.bytes_by_cause.items() if cause != "disk")

    def link_stall_seconds(self) -> float:
        """Estimated seconds that steps waited for the link, for all they fetched."""
        causes = self.bytes_by_cause
        return (causes["demand"] + causes["stream"]) / (LINK_GIB_PER_S * 2**30)

    def stall_seconds(self) -> float:
        """Seconds that steps waited for experts: link's estimated, disk's measured.

        Experts from the disk cross the link as well, and count in both parts. Experts read or sent
        beside the steps (in bulk, foreseen, predicted) count in neither.
        """
        return self.link_stall_seconds() + self.disk["wait_seconds"]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON; a rate of nothing is None."""
        disk, on_host = self.disk, self.on_host
        host = {
            "experts": on_host, "bytes_not_fetched": on_host * self.expert_bytes,
            "gate_mass": self.host_mass,
        }  # fmt: skip
        return {
            **({"host": host} if self.host_mass else {}),
            "stall_seconds": {
                "estimate": self.stall_seconds(),
                "link_estimate": self.link_stall_seconds(),
                "link_gib_per_s": LINK_GIB_PER_S,
                "disk_measured": disk["wait_seconds"],
            },
            "expert_bytes": self.expert_bytes,
            "totals": {name: self.total(name) for name in EVENTS},
            "hit_rate": _or_none(self.hit_rate),
            "prefetch_precision": _or_none(self.prefetch_precision),
            "host_hit_rate": _or_none(self.host_hit_rate),
            "bytes": self.bytes_by_cause,
            "gate_mass": {"resident": self.gate_mass},
            **{f"disk_{name}": disk[name] for name in ("reads", "waits", "ahead", "ahead_used")},
            "disk_trouble": {name: disk[name] for name in DISK_TROUBLE},
            "bulk_requests": dict(self.bulk_requests),
            "layers": [dict(layer) for layer in self.layers],
        }

    def describe(self) -> list[str]:
        """Lines of a report, without causes and tiers that have no counts."""
        count = self.total
        lines = [
            f"experts needed {count('needed')}: hits {count('hits')} "
            f"({_percent(self.hit_rate)}), misses {count('misses')} (admitted "
            f"{count('admitted')}, streamed {count('streamed')}), evictions {count('evictions')}"
        ]
        if self.host_mass:
            share, on_host = _percent(self.host_mass / self.gate_mass), self.on_host
            lines.append(
                f"on the host's cores: {on_host} of the misses, {share} of the gate mass; "
                f"{size_text(on_host * self.expert_bytes)} not fetched"
            )
        if count("prefetched") or count("bulk"):
            lines.append(
                f"brought ahead: {count('prefetched')} predicted, {count('bulk')} in bulk; "
                f"{count('prefetch_hits')} used, {count('prefetch_waste')} wasted "
                f"({_percent(self.prefetch_precision)} of those decided were used)"
            )
        causes = [f"{name} {size_text(n)}" for name, n in self.bytes_by_cause.items() if n]
        lines.append(f"moved: {', '.join(causes) or 'nothing'}")
        if self.stall_seconds():
            seconds = self.disk["wait_seconds"]
            disk = f" and {1e3 * seconds:.3g} ms for the disk" if seconds else ""
            link = f"{1e3 * self.link_stall_seconds():.3g} ms"
            lines.append(f"stalls: about {link}, if the link moves {LINK_GIB_PER_S} GiB/s{disk}")
        of = self.disk
        if of["waits"] or of["reads"]:
            lines.append(
                f"disk: {of['reads']} experts read; steps waited for {of['waits']} of them; host "
                f"memory had {_percent(self.host_hit_rate)} of what they fetched"
            )
        if of["ahead"]:
            lines.append(
                f"foreseen: {of['ahead']} experts read ahead from the disk, {of['ahead_used']} of "
                "them asked for later"
            )
        trouble = {name: of[name] for name in DISK_TROUBLE}
        for what, requests in (("disk", trouble), ("bulk", self.bulk_requests)):
            if said := [f"{name} {n}" for name, n in requests.items() if n]:
                lines.append(f"{what} requests: {', '.join(said)}")
        if count("unserved"):
            lines.append(f"WRONG: {count('unserved')} needed experts had no slot")
        return lines

    def describe_layers(self) -> list[str]:
        """A line for each layer."""
        return [
            f"layer {i}: needed {row['needed']}, hits {row['hits']}, misses {row['misses']}"
            for i, row in enumerate(self.layers)
        ]


@dataclasses.dataclass
class Ledger:
    """Sums over calls: a ledger of each tier, and a policy's gate mass.

    Attributes:
      tiers: by name, in order of falling fidelity.
      gate: float64[M, T + 3]: the router's gate mass that each tier served, that was skipped, that
        another expert than the router's served (which is in its tier's too), and of all; None: no
        policy decides.
      asked: how often the policy was asked between steps what to move; None: it moves nothing then.
    """

    tiers: dict[str, TierLedger]
    gate: np.ndarray | None = None
    asked: int | None = None

    def add(self, gate: np.ndarray) -> None:
        """Adds a call's gate mass, float64[M, T + 3]; RuntimeError where some is missing."""
        self.gate = gate if self.gate is None else self.gate + gate
        served, total = gate[:, : len(self.tiers) + 1].sum(axis=1), gate[:, -1]
        if not np.allclose(served, total, rtol=1e-3, atol=1e-3):
            raise RuntimeError(f"gate mass {total.tolist()}, of which {served.tolist()} is known")

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the gate mass by tier, "skipped", "substituted"; NaN before any token."""
        return self._shares(None if self.gate is None else self.gate.sum(axis=0))

    @property
    def _shares_by_layer(self) -> list[dict[str, float]]:
        """Shares of each layer's gate mass."""
        return [] if self.gate is None else [self._shares(row) for row in self.gate]

    def _shares(self, row: np.ndarray | None) -> dict[str, float]:
        names = [*self.tiers, "skipped", "substituted"]
        if row is None or not row[-1]:
            return dict.fromkeys(names, float("nan"))
        return dict(zip(names, (row[:-1] / row[-1]).tolist(), strict=True))

    @property
    def layers(self) -> list[dict[str, int]]:
        """Counts of each layer by the names of `EVENTS`, over all tiers."""
        return [
            {name: sum(one[name] for one in of_layer) for name in of_layer[0]}
            for of_layer in zip(*(tier.layers for tier in self.tiers.values()), strict=True)
        ]

    def total(self, event: str) -> int:
        """Total count of one of `EVENTS` over all layers and tiers."""
        return sum(tier.total(event) for tier in self.tiers.values())

    @property
    def hit_rate(self) -> float:
        """Share of needed experts that were in a slot of their tier; NaN before any.

        Planes count apart: an expert in high precision of which the base plane alone is there is a
        hit and a miss, half a miss.
        """
        bases = sum(tier.total("needed") for tier in self.tiers.values() if tier.refines)
        return _share(self.total("hits") + bases, self.total("needed") + bases)

    @property
    def link_bytes(self) -> int:
        """Bytes from host to device, for whatever cause."""
        return sum(tier.link_bytes for tier in self.tiers.values())

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON; without a policy that of the only tier."""
        if self.gate is None and len(self.tiers) == 1:
            (only,) = self.tiers.values()
            return only.as_dict()
        return {
            "tiers": {name: tier.as_dict() for name, tier in self.tiers.items()},
            "asked": self.asked,
            "hit_rate": _or_none(self.hit_rate),
            "gate_shares": _or_nones(self.shares),
            "gate_shares_by_layer": [_or_nones(row) for row in self._shares_by_layer],
        }

    def describe(self) -> list[str]:
        """Lines of a report."""
        lines = []
        for name, tier in self.tiers.items():
            prefix = f"{name}: " if len(self.tiers) > 1 else ""
            lines += [prefix + line for line in tier.describe()]
        if self.gate is None:
            return lines
        *better, _ = self.tiers.items()
        for name, tier in better:
            arrived = sum(map(tier.total, ("admitted", "prefetched", "bulk")))
            lines.append(f"promotions to {name} {arrived}, demotions {tier.total('evictions')}")
        if self.asked is not None:
            lines.append(f"between steps the policy was asked {self.asked} times what to move")
        if self.asked == 0:
            lines[-1] = f"WARNING: {lines[-1]}, so it moved nothing: the run was too short for it"
        return [*lines, "gate mass: " + _percents(self.shares)]

    def describe_layers(self) -> list[str]:
        """A line for each layer."""
        if self.gate is None:
            return [line for tier in self.tiers.values() for line in tier.describe_layers()]
        shares = self._shares_by_layer
        return [f"layer {i}: {_percents(row)}" for i, row in enumerate(shares)]


def _percents(shares: dict[str, float]) -> str:
    """Shares in percent; "skipped" and "substituted", a part of the others, only if not zero."""
    kept = {n: s for n, s in shares.items() if n != "substituted" and (n != "skipped" or s)}
    text = ", ".join(f"{name} {100 * share:.2f} %" for name, share in kept.items())
    by_others = shares.get("substituted", 0.0)
    return f"{text} (substituted {100 * by_others:.2f} % of all)" if by_others else text


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def _or_none(rate: float) -> float | None:
    return None if np.isnan(rate) else rate


def _or_nones(shares: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _or_none(share) for name, share in shares.items()}


def _percent(share: float) -> str:
    return "n/a" if np.isnan(share) else f"{100 * share:.1f} %"
