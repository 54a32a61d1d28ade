"""Quality of the methods that `scripts.studies.speed.decide` times, all on the same windows.

The experts are in INT4 where the method says nothing else. BuddyMoE and what is composed with it
decode token by token, a sequence at a time, from a cache whose share of the experts is `x`; of
DynaExq `x` is the share in INT4. Where `x` is 0 the quality does not depend on what is resident:
uniform precisions, and DyMoE as it asks (what a better copy in a slot adds is left out).
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.dynaexq import DynaExq
from moejax.policies.make import make_policy
from scripts.studies.dymoe.controls import AsAsked
from scripts.studies.quality import buddymoe
from scripts.studies.quality.bench import MILO, EachToken, Served, Windows
from scripts.studies.quality.cases import Case, Point
from scripts.studies.quality.dynaexq import PERIOD
from scripts.studies.quality.subject import BATCH, Subject, point

WINDOWS = 5  # of each text; of the mixed one, one of each domain
SHARES = (0.125, 0.25, 0.375, 0.625, 0.875)  # near those of Qwen3-30B-A3B under 6 to 24 GiB
HIGH, LOW = "int4", "int2"
RETENTION, RHO = 0.75, 3
UNIFORM = {"bf16": "bf16", "INT4": HIGH, "INT3": "int3", "INT2": LOW, "MiLo INT3": MILO}
DYMOE = {"DyMoE 4/2": "", "DyMoE 4/0": "skip"}
BUDDIES = {"BuddyMoE": False, "DyMoE 4/0 + BuddyMoE": True}


def cases(subject: Subject) -> Iterator[Case]:
    """Uniform precisions, then methods at every share of the experts."""
    for method, tier in UNIFORM.items():
        yield Case(method, functools.partial(_uniform, subject, method, tier))
    for method, low in DYMOE.items():
        yield Case(method, functools.partial(_dymoe, subject, method, low))
    runs = buddymoe.Runs(subject)
    for share in SHARES:
        yield Case(f"DynaExq 4/2 {share:g}", functools.partial(_dynaexq, subject, share))
        for method, composed in BUDDIES.items():
            yield Case(
                f"{method} {share:g}",
                functools.partial(_buddies, subject, runs, share, method, composed=composed),
            )


def _few(subject: Subject) -> tuple[Windows, ...]:
    return tuple(
        dataclasses.replace(of, tokens=of.tokens[:WINDOWS], domains=of.domains[:WINDOWS])
        for of in subject.both
    )


def _uniform(subject: Subject, method: str, tier: str) -> Iterator[Point]:
    for windows in _few(subject):
        yield point(windows, method, 0, subject.uniform(tier, windows))


def _dymoe(subject: Subject, method: str, low: str) -> Iterator[Point]:
    policy = AsAsked(prefetch=0, retention=RETENTION, low=low)
    each = EachToken(subject.model, policy, (HIGH, LOW))
    for windows in _few(subject):
        yield point(windows, method, 0, each.run(policy, windows))


def _dynaexq(subject: Subject, share: float) -> Iterator[Point]:
    """Choices follow the text; the warm-up is on other text of its kind."""
    most = 2 * subject.num_experts * subject.model.num_layers
    policy = DynaExq(period=PERIOD, n_hot=subject.part(share), max_requests=min(512, most))
    slots = subject.num_experts - 1, subject.num_experts
    served = Served(subject.model, policy, (HIGH, LOW), slots)
    for windows in _few(subject):
        served.begin(policy, (subject.none_held(), None))
        served.run(subject.others[windows.name], BATCH)
        yield point(windows, "DynaExq 4/2", share, served.run(windows, BATCH))


def _buddies(
    subject: Subject, runs: buddymoe.Runs, share: float, method: str, *, composed: bool
) -> Iterator[Point]:
    """Buddies by co-activation of other text, whose most used experts are there first."""
    for windows in _few(subject):
        lists = runs.profile(windows.name, "coactivations").lists
        how: dict[str, Any] = {"lists": lists, "rho": RHO, "background_bytes": 0.0}
        policy: Any = BuddyMoe(**how)
        if composed:
            more = {"parts": "dymoe+buddymoe", "low": "skip", "retention": RETENTION}
            policy = make_policy("compose", prefetch=0, **how, **more)
        served = Served(subject.model, policy, (HIGH,), (subject.part(share),))
        served.begin(policy, (runs.held(windows.name, share),))
        yield point(windows, method, share, served.run(windows, 1, as_decode=True))
