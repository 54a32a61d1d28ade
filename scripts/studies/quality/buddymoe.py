"""BuddyMoE's Tables 2 to 4: what buddies lose, by lists of other text than is scored.

The experts that other text uses most are resident. At each setting the pairs that buddies replace
are also given to random experts ("random at equal pairs"), and to the same buddies in another
order: the most used first ("by use", the null of co-activation), and "shuffled". (Rows until
2026-11-26 have "popularity", lists of the most used experts, which replaced more pairs.) Pairs
without a buddy are exact. "decode, prefetch" steps token by token: the router looks ahead, and what
it foresaw wrongly is replaced.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from moejax.evaluation.expert_profile import Counting, profile
from moejax.inference.runner import Runner
from moejax.policies.buddy_lists import BuddyLists
from moejax.policies.buddymoe import BuddyMoe
from moejax.routing.profile_file import BuddyProfile, ExpertActivity, profile_of
from scripts.studies.buddymoe.controls import MatchedRandom, Original
from scripts.studies.quality.bench import Model, Served, Windows
from scripts.studies.quality.cases import Case, Claim, Comparison, Point, share_of_loss
from scripts.studies.quality.subject import BATCH, Subject, point

CACHE_RATES = (0.75, 0.5, 0.375)
ALPHA, MOST = 0.95, 16  # tau and |B| of the tables' best rows
PRINTED: dict[str, Any] = {"background_bytes": 0.0, "keep_fetched": False}  # Algorithm 1 alone
DECODED = 8  # windows at once, of steps of a token each
# Of the loss of random experts: 0.735 - 0.695 over 0.735 - 0.55, Table 2's averages at c = 0.75.
LOSS_OF_RANDOM = 0.216
# Name, source of lists, which of their entries, and settings of the policy.
SETTINGS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("rho 3", "coactivations", "all", {"rho": 3}),
    ("rho 4", "coactivations", "all", {"rho": 4}),
    ("rho 3, TAE", "coactivations", "all", {"rho": 3, "tae_tau": "profile"}),
    ("rho 3, TAE and beta", "coactivations", "all",
     {"rho": 3, "tae_tau": "profile", "beta": 0.5}),
    ("outputs, rho 3", "outputs", "all", {"rho": 3}),
    ("outputs and gains, rho 3", "outputs", "all", {"rho": 3, "gains": True}),
    ("rho 3, buddies of other origin", "coactivations", "other origin", {"rho": 3}),
    ("rho 3, buddies of the same origin", "coactivations", "same origin", {"rho": 3}),
    ("outputs, rho 3, buddies of other origin", "outputs", "other origin", {"rho": 3}),
    ("outputs, rho 3, buddies of the same origin", "outputs", "same origin", {"rho": 3}),
)  # fmt: skip
TEXTS = ("wikitext-2", "mixed")


def cases(subject: Subject) -> Iterator[Case]:
    """The exact model, then each cache rate and setting, then steps of one token."""
    yield Case("original", functools.partial(_original, subject))
    runs = Runs(subject)
    for rate in CACHE_RATES:
        for (name, *given), orders in itertools.product(SETTINGS, ("", ", reordered")):
            if "all" in given or subject.origins:
                measure = functools.partial(runs.replaced, rate, name, *given, orders=bool(orders))
                yield Case(f"{rate:g} {name}{orders}", measure)
        yield Case(f"{rate:g} left out", functools.partial(runs.left_out, rate))
    for rate in CACHE_RATES:
        yield Case(f"{rate:g} decode, prefetch", functools.partial(runs.decoded, rate))


def _original(subject: Subject) -> Iterator[Point]:
    for windows in subject.both:
        yield point(windows, "original", 1, subject.uniform("bf16", windows))


def of_origin(lists: BuddyLists, origins: int, *, same: bool) -> BuddyLists:
    """Lists without the experts of another origin than their own, or without those of the same."""
    expert = np.arange(lists.ids.shape[1])[None, :, None]
    is_same = lists.ids % origins == expert % origins
    kept = (lists.ids >= 0) & (is_same if same else ~is_same)
    order = np.argsort(~kept, axis=-1, kind="stable")  # those that stay come first
    ids, q = (
        np.take_along_axis(np.where(kept, part, empty).astype(part.dtype), order, axis=-1)
        for part, empty in ((lists.ids, -1), (lists.q, 0))
    )
    return BuddyLists(ids, q)


def reordered(lists: BuddyLists, key: np.ndarray) -> BuddyLists:
    """Lists of the same buddies, that of the least `key`, float[M, E, places], first."""
    order = np.argsort(np.where(lists.ids >= 0, key, np.inf), axis=-1, kind="stable")
    return BuddyLists(np.take_along_axis(lists.ids, order, axis=-1), lists.q)


def activity_of(model: Model, windows: Windows) -> ExpertActivity:
    """Counts routing on windows, and compares outputs."""
    return profile(
        Runner(model.config, model.weights, model.device),
        windows.tokens[:, :-1].reshape(-1),
        windows.tokens.shape[1] - 1,
        BATCH,
        Counting(outputs=True),
    )


def profiled(activity: ExpertActivity, **how: Any) -> BuddyProfile:
    """Makes a profile of counts, by `profile_of`'s options."""
    given: dict[str, Any] = {"source": "coactivations", "alpha": ALPHA, "max_buddies": 31}
    return profile_of(activity, {}, smoothing=1.0, percentile=10.0, **(given | how))


class Runs:
    """Profiles, residents and programs of a run, made when they are needed."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self._profiles: dict[tuple[str, str], BuddyProfile] = {}
        self._made: dict[Any, Served] = {}

    def profile(self, text: str, source: str) -> BuddyProfile:
        """Profiles the text of that kind that is not scored."""
        if (text, source) not in self._profiles:
            activity = activity_of(self.subject.model, self.subject.others[text])
            for name, alpha in (("coactivations", ALPHA), ("outputs", 1.0)):
                found = profiled(activity, source=name, alpha=alpha, max_buddies=MOST)
                self._profiles[text, name] = found
        return self._profiles[text, source]

    def held(self, text: str, rate: float) -> np.ndarray:
        """Experts int32[M, slots] that the other text uses most."""
        found = self.profile(text, "coactivations")
        order = np.argsort(-np.asarray(found.activity.activations), axis=1, kind="stable")
        return np.sort(order[:, : self.subject.part(rate)], axis=1).astype(np.int32)

    def replaced(
        self, rate: float, name: str, source: str, part: str, how: dict[str, Any], *, orders: bool
    ) -> Iterator[Point]:
        """Buddies and random experts for the same pairs, or the same buddies in other orders."""
        for windows in self.subject.both:
            found = self.profile(windows.name, source)
            lists = found.lists
            if part != "all":
                lists = of_origin(lists, self.subject.origins, same=part == "same origin")
            given = dict(how)
            gains = found.gains if given.pop("gains", False) else None
            if "tae_tau" in given:
                given["tae_tau"] = found.tau
            activations = np.asarray(found.activity.activations)[:, None]
            use = np.take_along_axis(activations, lists.ids, axis=-1)
            random = np.random.default_rng(0).random(lists.ids.shape)
            kinds: tuple[tuple[str, type[BuddyMoe], np.ndarray | None], ...] = (
                (("", BuddyMoe, None), (", random at equal pairs", MatchedRandom, None)),
                ((", by use", BuddyMoe, -use), (", shuffled", BuddyMoe, random)),
            )[orders]
            for suffix, make, order in kinds:
                used = lists if order is None else reordered(lists, order)
                policy = make(lists=used, gains=gains if not suffix else None, **PRINTED, **given)
                key = rate, make, gains is not None and not suffix, "beta" in given
                yield self.run(windows, f"{name}{suffix}", rate, policy, key)

    def run(self, windows: Windows, series: str, rate: float, policy: BuddyMoe, key: Any) -> Point:
        """Scores a text under a policy; `key` names the program that serves it."""
        served = self._begun(windows, rate, policy, key)
        return point(windows, series, rate, served.run(windows, BATCH))

    def _begun(
        self, windows: Windows, rate: float, policy: BuddyMoe, key: Any, prefetch: int = 0
    ) -> Served:
        """The program of that key, made once, before any token of a text."""
        if key not in self._made:
            slots = (self.subject.part(rate),)
            self._made[key] = Served(self.subject.model, policy, ("bf16",), slots, prefetch)
        served = self._made[key]
        served.begin(policy, (self.held(windows.name, rate),))
        return served

    def left_out(self, rate: float) -> Iterator[Point]:
        """Every pair of an absent expert is left out."""
        for windows in self.subject.both:
            lists = self.profile(windows.name, "coactivations").lists
            empty = BuddyLists(np.full_like(lists.ids, -1), np.zeros_like(lists.q))
            policy = BuddyMoe(lists=empty, fall_back="drop", **PRINTED)
            yield self.run(windows, "left out", rate, policy, (rate, "left out"))

    def decoded(self, rate: float) -> Iterator[Point]:
        """Steps of a token of each of some windows, experts of the next layer prefetched.

        The exact one fetches what was missed; buddies take only what the prefetch missed.
        """
        width = self.subject.model.config.experts_per_token
        for windows in self.subject.both:
            few = dataclasses.replace(windows, tokens=windows.tokens[: 2 * DECODED])
            few = dataclasses.replace(few, domains=few.domains[: 2 * DECODED])
            lists = self.profile(windows.name, "coactivations").lists
            for name, make, rho in (
                ("original", Original, None),
                ("rho 3", BuddyMoe, 3),
                ("rho 3, random at equal rho", MatchedRandom, 3),
            ):
                policy = make(lists=lists, prefetch=width, rho=rho, **PRINTED)
                served = self._begun(windows, rate, policy, (rate, "decode", make), width)
                run = served.run(few, DECODED, as_decode=True)
                ledger = served.memory.read_counters()
                more = {name: ledger.total(name) for name in ("needed", "hits", "prefetched")}
                yield point(few, f"decode, prefetch, {name}", rate, run, **more)


def _row(text: str, series: str, rate: float) -> str:
    return f"buddymoe | {text} | {series} | {rate:g}"


def tests_of(
    own: str, null: str, factor: float = 1.0, how: str = "", at_exact: float | None = 1
) -> tuple[Comparison, ...]:
    """Whether the loss is at most so much of the null's, at each rate and text.

    Args:
      how: begins the names of all three series.
      at_exact: place of the exact model's rows; None: each rate has its own.
    """
    return tuple(
        share_of_loss(
            factor,
            _row(text, f"{how}{own}", rate),
            _row(text, f"{how}{null}", rate),
            _row(text, f"{how}original", rate if at_exact is None else at_exact),
        )
        for text in TEXTS
        for rate in CACHE_RATES
    )


CLAIMS = (
    Claim(
        "buddymoe", "a buddy costs little where a random expert costs much", "5.2, Tables 2 to 4",
        f"buddies (rho 3) lose at most {LOSS_OF_RANDOM} of the nats of random experts for the same "
        "pairs, as Table 2's averages have it",
        tests_of("rho 3", "rho 3, random at equal pairs", LOSS_OF_RANDOM),
    ),
    Claim(
        "buddymoe", "buddies by co-activation are better than random experts", "ours",
        "fewer nats for the same pairs, rho 3", tests_of("rho 3", "rho 3, random at equal pairs"),
    ),
    Claim(
        "buddymoe", "co-activation tells more than use", "ours (null of 3.2)",
        "fewer nats than the same buddies, the most used first, rho 3",
        tests_of("rho 3", "rho 3, by use"),
    ),
    Claim(
        "buddymoe", "buddies are better than leaving the expert out", "ours",
        "by outputs and gains, rho 3, fewer nats than leaving every absent expert out",
        tests_of("outputs and gains, rho 3", "left out"),
    ),
    Claim(
        "buddymoe", "buddies of the same origin are not what it rests on", "ours",
        "without them buddies by outputs lose fewer nats than random experts for the same pairs",
        tests_of(
            "outputs, rho 3, buddies of other origin",
            "outputs, rho 3, buddies of other origin, random at equal pairs",
        ),
    ),
    Claim(
        "buddymoe", "outputs tell which experts of another origin are alike", "ours",
        "without buddies of the same origin those by outputs lose fewer nats than in random order",
        tests_of(
            "outputs, rho 3, buddies of other origin",
            "outputs, rho 3, buddies of other origin, shuffled",
        ),
    ),
    Claim(
        "buddymoe", "substitution after a failed prefetch keeps accuracy", "2.3, 5.2, Figure 3",
        f"in steps of a token, at most {LOSS_OF_RANDOM} of random experts' loss",
        tests_of(
            "rho 3", "rho 3, random at equal rho", LOSS_OF_RANDOM, "decode, prefetch, ", None
        ),
    ),
)  # fmt: skip
