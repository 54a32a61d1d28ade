"""Section `compose` of `policies.py`: policies together against each alone.

At equal memory, decoding token by token: the time of a token that the bytes over the link give
(`decode.MACHINE`), against the KL of the exact model. A setting that no other one of its memory
beats in both is on the front.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from moejax.policies.base import AnyPolicy
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.compose import Compose
from moejax.policies.dymoe import DyMoE
from moejax.policies.dynaexq import DynaExq
from moejax.routing.profile_file import BuddyProfile
from scripts.studies.quality.decode import Decoded, Decoding, Exact
from scripts.studies.quality.sections import Bench, Point, profiled

LENGTH = 256  # tokens of a window; those of the bench are cut
WARM = 3  # windows that do not count
COUNTED = 5  # one of each domain
BOTH, ONE = ("int4", "int2"), ("int4",)


class Group(NamedTuple):
    """Settings of one program: `memory` in INT4 slots of a layer, tiers and their slots."""

    series: str
    memory: int
    tiers: tuple[str, ...]
    slots: tuple[int, ...]
    settings: Sequence[dict[str, Any]]


def _each(name: str, *values: Any, **others: Any) -> list[dict[str, Any]]:
    return [{name: value, **others} for value in values]


# An INT4 expert takes the place of 1.8 in INT2. With r = 1 and one tier DyMoE is the plain cache.
GROUPS = (
    Group("dymoe 4/0", 16, ONE, (16,), _each("r", 0.5, 0.625, 0.75, 0.9, 1.0)),
    Group("dymoe 4/2", 16, BOTH, (8, 14), _each("r", 0.5, 0.625, 0.75, 0.9)),
    Group("dynaexq", 16, BOTH, (4, 21), _each("period", 64, 256)),
    Group("buddymoe", 16, ONE, (16,), _each("rho", 1, 2, 4)),
    Group("dynaexq+dymoe", 16, BOTH, (8, 14), _each("r", 0.5, 0.625, 0.75, 0.9, period=64)),
    Group(
        "dymoe 4/0+buddymoe",
        16,
        ONE,
        (16,),
        [*_each("r", 0.625, 0.75, 0.9, rho=1), {"r": 0.75, "rho": 4}],
    ),
    Group(
        "dynaexq+dymoe+buddymoe", 16, BOTH, (8, 14), _each("r", 0.5, 0.75, rho=1, period=64)
    ),
    Group("dynaexq", 24, BOTH, (6, 32), _each("period", 64, 256)),
    Group("dynaexq+dymoe", 24, BOTH, (6, 32), _each("r", 0.5, 0.75, period=64)),
    Group("dymoe 4/2", 24, BOTH, (11, 23), _each("r", 0.5, 0.75, 0.9)),
    Group("dymoe 4/0", 24, ONE, (24,), _each("r", 0.625, 0.75, 0.9, 1.0)),
)  # fmt: skip


def policy_of(group: Group, setting: dict[str, Any], found: BuddyProfile) -> AnyPolicy:
    """The policy of a series with a setting: r of DyMoE, T of DynaExq, rho of BuddyMoE."""
    low = "skip" if len(group.tiers) == 1 else ""
    names = [name.split()[0] for name in group.series.split("+")]
    parts: dict[str, Any] = {}
    if "dynaexq" in names:
        parts["hotness"] = DynaExq(period=setting["period"])
    if "dymoe" in names:
        parts["importance"] = DyMoE(retention=setting["r"], low=low, prefetch=0)
    if "buddymoe" in names:
        parts["buddies"] = BuddyMoe(
            lists=found.lists, gains=found.gains, rho=setting["rho"], spend_on="last"
        )
    return Compose(**parts) if len(parts) > 1 else next(iter(parts.values()))


def front(found: Sequence[Decoded]) -> list[bool]:
    """Whether no other one is at least as good in time and in KL, and better in one of them."""

    def beats(a: Decoded, b: Decoded) -> bool:
        no_worse = a.tpot_ms <= b.tpot_ms and a.kl <= b.kl
        return no_worse and (a.tpot_ms < b.tpot_ms or a.kl < b.kl)

    return [not any(beats(other, one) for other in found) for one in found]


def compose(bench: Bench) -> Iterator[Point]:
    """Every group in turn; the front of a memory is told when its groups are done."""
    profile = profiled(bench, bench.calibration, source="outputs", alpha=1.0)
    exact = Exact(bench.model)
    other = bench.others["mixed"]
    warm = dataclasses.replace(other, tokens=other.tokens[:WARM, : LENGTH + 1])
    windows = dataclasses.replace(bench.mixed, tokens=bench.mixed.tokens[:COUNTED, : LENGTH + 1])
    for memory in dict.fromkeys(group.memory for group in GROUPS):
        done: list[tuple[str, Decoded]] = []
        for group in (group for group in GROUPS if group.memory == memory):
            decoding = None
            for setting in group.settings:
                policy = policy_of(group, setting, profile)
                if decoding is None:
                    decoding = Decoding(bench.model, exact, policy, group.tiers, group.slots)
                found = decoding.run(policy, warm, windows)
                name = " ".join(f"{key}={value:g}" for key, value in setting.items())
                slots = "/".join(map(str, group.slots))
                print(f"  {memory}: {group.series} {slots} {name}: {found}", flush=True)
                done.append((f"{group.series}, slots {slots}, {name}", found))
        best = front([found for _, found in done])
        for (name, found), is_best in zip(done, best, strict=True):
            shares = {f"gate {tier}": share for tier, share in found.shares.items()}
            more = {
                "on the front": is_best, "link": found.link, "hit rate": found.hit_rate,
                "device": found.device, "tokens": COUNTED * LENGTH, **shares,
            }  # fmt: skip
            section = f"compose, memory of {memory} INT4 slots"
            yield Point(section, "mixed", name, found.tpot_ms, found.kl, more, "nats of KL")
