"""Recommends a policy for a trace: the fastest above a fidelity floor, within a memory.

Candidates are the cache of one tier, DynaExq, DyMoE (two tiers, or leaving experts out) and DynaExq
with DyMoE, each with several settings and divisions of the memory; all are replayed over the trace.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moejax.config.grid import described
from moejax.errors import MoejaxError
from moejax.experts.budget import size_text
from moejax.policies.dymoe import SKIP
from moejax.routing.simulate.costs import GIB, Machine
from moejax.routing.simulate.sweeping import SweepPoint, Tiers, sweep
from moejax.routing.simulate.table import fidelity
from moejax.routing.trace import Trace

SAME_TIME = 0.01  # nobody gives up precision for less
RETENTIONS = (0.5, 0.625, 0.75, 0.9)
PERIODS = (64, 256)
SHARES = (0.25, 0.5, 0.75)  # of the memory that goes to the first tier where all of it is divided


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A policy, its tiers, and its setting with `slots`."""

    policy: str
    tiers: Tiers
    setting: Mapping[str, Any]

    def flags(self) -> str:
        """Flags that run a model with this candidate."""
        names = self.tiers.names
        slots = self.setting["slots"]
        slots = slots if isinstance(slots, tuple) else (slots,)
        said = [f"--config.policy.name={self.policy}"]
        for name, values in (("tiers", names), ("slots", slots)):
            said.append(f"--config.policy.{name}={','.join(map(str, values))}")
        known = {k: v for k, v in self.setting.items() if k != "slots"}
        if known:
            said.append(f"--config.policy.settings={described(known).replace(' ', ',')}")
        return " ".join(said)


def _candidates(trace: Trace, tiers: Tiers, device_gib: float) -> Iterator[_Candidate]:
    """Candidates whose slots fit in so much memory.

    Args:
      trace: its shape and contents limit what can be _replayed.
      tiers: of falling fidelity; the first one and the last one are used.
      device_gib: memory for the slots of all layers.
    """
    room = int(device_gib * GIB) // trace.num_layers
    first, last = tiers.expert_bytes[0], tiers.expert_bytes[-1]
    alone = min(room // first, trace.num_experts)
    if alone < 1:
        raise MoejaxError(
            f"device_gib={device_gib:g} does not hold an expert of each layer: {trace.num_layers} "
            f"of {size_text(first)}"
        )
    one = Tiers(names=tiers.names[:1], expert_bytes=(first,))
    yield _Candidate(policy="on_demand", tiers=one, setting={"slots": alone})
    # A prompt's tokens count alike: attention is seldom in a trace.
    plain = {"prefetch": 0} | ({} if trace.importance is not None else {"selection": "load"})
    for r in RETENTIONS:
        setting = {"slots": alone, "retention": r, "low": SKIP} | plain
        yield _Candidate(policy="dymoe", tiers=one, setting=setting)
    if len(tiers.names) < 2:
        return
    two = Tiers(names=(tiers.names[0], tiers.names[-1]), expert_bytes=(first, last))
    divisions = _divisions(room, first, last, trace)
    for slots in divisions:
        for period in PERIODS:
            setting = {"slots": slots, "period": period}
            yield _Candidate(policy="dynaexq", tiers=two, setting=setting)
        for r in RETENTIONS:
            together = {"slots": slots, "retention": r, "period": 64} | plain
            yield _Candidate(policy="compose", tiers=two, setting=together)
    # Copies of the first tier serve for the second one, which may have no slots.
    for slots in (*divisions, (alone, 0)):
        for r in RETENTIONS:
            setting = {"slots": slots, "retention": r} | plain
            yield _Candidate(policy="dymoe", tiers=two, setting=setting)


def _divisions(room: int, first: int, last: int, trace: Trace) -> list[tuple[int, int]]:
    """Divides the memory between both tiers: several shares, and the low tier whole."""
    found = []
    whole = (room - trace.num_experts * last) // first
    if whole > 0:
        found.append((min(whole, trace.num_experts), trace.num_experts))
    for share in SHARES:
        high = int(share * room) // first
        low = min((room - high * first) // last, trace.num_experts)
        if 0 < high < trace.num_experts and low > 0:
            found.append((high, low))
    return list(dict.fromkeys(found))


def _replayed(trace: Trace, chosen: Sequence[_Candidate], bulk: int | None) -> list[SweepPoint]:
    """Replays every candidate; those of one policy and tiers in one sweep."""
    groups: dict[Any, list[int]] = {}
    for i, one in enumerate(chosen):
        groups.setdefault((one.policy, one.tiers), []).append(i)
    found: dict[int, SweepPoint] = {}
    for (policy, tiers), members in groups.items():
        grid = [chosen[i].setting for i in members]
        found |= dict(zip(members, sweep(trace, policy, grid, tiers, bulk), strict=True))
    return [found[i] for i in range(len(chosen))]


def _recommend(
    chosen: Sequence[_Candidate], swept: Sequence[SweepPoint], machine: Machine, floor: float
) -> tuple[_Candidate, str]:
    """Picks the fastest candidate that serves a gate mass share of at least `floor`, and says why.

    The share is that which is served as the first tier would. Times within `SAME_TIME` of the
    shortest count as equal, of which the most faithful is taken, then the shortest, then the first.
    The cache of the first tier reaches every floor.
    """
    figures = [one.figures(machine) for one in swept]
    enough = [i for i, of in enumerate(figures) if fidelity(of) >= floor - 1e-9]
    longest = (1 + SAME_TIME) * min(figures[i]["tpot_ms"] for i in enough)

    def rank(i: int) -> tuple[float, ...]:
        ms, lost = round(figures[i]["tpot_ms"], 6), -fidelity(figures[i])
        return (0, lost, ms) if ms <= longest else (1, ms, lost)

    order = sorted(enough, key=rank)
    best: dict[str, float] = {}
    for i in order:
        best.setdefault(_kind(chosen[i]), figures[i]["tpot_ms"])
    one, of = chosen[order[0]], figures[order[0]]
    others = ", ".join(f"{kind} {ms:.3g}" for kind, ms in best.items() if kind != _kind(one))
    why = (
        f"{_kind(one)}, {described(one.setting)}: {of['tpot_ms']:.3g} ms a token at "
        f"{machine.link_gib_per_s:.4g} GiB/s, {100 * fidelity(of):.1f} % of the gate mass in "
        f"{one.tiers.names[0]} (floor {100 * floor:g} %); the best of others: {others or 'none'}"
    )
    return one, why


def lines(
    trace: Trace,
    tiers: Tiers,
    machines: Sequence[Machine],
    device_gib: float,
    bulk: int | None,
    floor: float,
) -> Iterator[str]:
    """Two lines per machine: the recommendation with its reason, and its flags."""
    chosen = list(_candidates(trace, tiers, device_gib))
    swept = _replayed(trace, chosen, bulk)
    for machine in machines:
        best, why = _recommend(chosen, swept, machine, floor)
        yield why
        yield f"    {best.flags()}"


def _kind(one: _Candidate) -> str:
    forms = "/".join(one.tiers.names)
    return f"{one.policy} {forms}" + (" or left out" if SKIP in one.setting.values() else "")
