"""The sections of `policies.py`: each yields points of one table and one plot."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moejax.evaluation.expert_profile import Counting, profile
from moejax.inference.runner import Runner
from moejax.policies.baselines import Resident
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.dymoe import FIGURE_3
from moejax.policies.dynaexq import DynaExq
from moejax.routing.profile_file import BuddyProfile, profile_of
from scripts.studies.buddymoe.controls import MatchedRandom
from scripts.studies.dymoe.controls import AsAsked
from scripts.studies.quality.bench import EachToken, Measured, Model, Served, Texts, Windows

PAIRS = (("int4", "int2"), ("bf16", "int4"))
N_HOT = (4, 8, 12, 16, 24)
RETENTIONS = (0.75, 0.9, 1.0)
CACHE_RATES = (0.75, 0.5, 0.375)
PERIOD = 2048  # tokens between updates; less than a chunk of `BATCH` windows of 512
BATCH = 5  # windows at once: of the mixed text, one of each domain
SEGMENTS = ("books", "code", "math")
SHIFT_HOT = 8


@dataclasses.dataclass(frozen=True)
class Point:
    """One figure of a table: `series` is a curve of the plot, `x` its place on it.

    The figure is a perplexity unless `unit` says something else.
    """

    section: str
    text: str
    series: str
    x: float
    perplexity: float
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    unit: str = "perplexity"


@dataclasses.dataclass
class Bench:
    """The model and the texts of a run, and how many windows of each."""

    model: Model
    texts: Texts
    wiki: Windows
    mixed: Windows
    calibration: Windows
    others: dict[str, Windows]  # of the texts by name, as many windows that are not scored
    _uniform: dict[str, Served] = dataclasses.field(default_factory=dict)

    @property
    def both(self) -> tuple[Windows, Windows]:
        """The texts."""
        return self.wiki, self.mixed

    def uniform(self, tier: str, windows: Windows, batch: int = BATCH) -> float:
        """Perplexity with every expert in one precision."""
        policy = Resident()
        if tier not in self._uniform:
            slots = (self.model.config.num_experts,)
            self._uniform[tier] = Served(self.model, policy, (tier,), slots)
        self._uniform[tier].begin(policy)
        return self._uniform[tier].run(windows, batch).perplexity


def of_gate(measured: Measured) -> dict[str, float]:
    """Shares of the gate mass, and experts that bulk transfers brought."""
    shares = {f"gate {name}": share for name, share in measured.shares.items()}
    return shares | {"promoted": measured.promoted}


def dynaexq(bench: Bench) -> Iterator[Point]:
    """Figure 4: perplexity against the share of experts in low precision.

    The warm-up is of windows of the same text that are not scored, as a service warms up on what it
    serves.
    """
    num_experts = bench.model.config.num_experts
    for high, low in PAIRS:
        name = f"dynaexq {high}/{low}"
        ends = {}
        for windows in bench.both:
            for tier, x in ((high, 0.0), (low, 1.0)):
                ends[windows.name, x] = bench.uniform(tier, windows)
                yield Point(name, windows.name, "uniform", x, ends[windows.name, x])
        for choice, seeds in (("hot", (0,)), ("random", (0, 1)), ("first", (0,))):
            how: dict[str, Any] = {"choice": choice, "period": PERIOD, "max_requests": 512}
            # Slots for all but one expert: how many are hot is then a setting that sweeps.
            served = Served(
                bench.model, DynaExq(**how), (high, low), (num_experts - 1, num_experts)
            )
            for n_hot in N_HOT:
                for windows in bench.both:
                    runs = []
                    for seed in seeds:
                        policy = DynaExq(**how, n_hot=n_hot, seed=seed)
                        served.begin(policy, (_nothing(bench.model), None))
                        warm = bench.others[windows.name]
                        if choice != "hot":  # a chunk, after which it is in its slots
                            warm = dataclasses.replace(warm, tokens=warm.tokens[:BATCH])
                        served.run(warm, BATCH)
                        runs.append(served.run(windows, BATCH))
                    perplexities = [run.perplexity for run in runs]
                    best, worst = ends[windows.name, 0.0], ends[windows.name, 1.0]
                    mean = float(np.exp(np.mean(np.log(perplexities))))
                    recovered = np.log(worst / mean) / np.log(worst / best)
                    series = choice if len(seeds) == 1 else f"{choice}, mean of {len(seeds)}"
                    more = {"recovered": float(recovered), "all": perplexities}
                    x = 1 - n_hot / num_experts
                    yield Point(name, windows.name, series, x, mean, more | of_gate(runs[0]))


def _nothing(model: Model) -> np.ndarray:
    return np.zeros((model.num_layers, 0), np.int32)


def sensitivities(bench: Bench, tier: str, low: str, windows: Windows) -> list[float]:
    """Figure 5: what one layer alone in low precision adds to the mean nats."""
    policy = Resident()
    experts = bench.model.config.num_experts
    served = Served(bench.model, policy, (tier,), (experts,))
    memory = served.memory.tiers[0]
    plain, found = memory.store, []
    for layer in (None, *range(bench.model.num_layers)):
        rows = slice(0, 0) if layer is None else slice(layer * experts, (layer + 1) * experts)
        gate_up, down = (
            full.at[rows].set(coarse[rows])
            for full, coarse in zip(
                bench.model.experts[tier], bench.model.experts[low], strict=True
            )
        )
        memory.store = dataclasses.replace(plain, gate_up=gate_up, down=down)
        served.begin(policy)
        found.append(served.run(windows, BATCH).nats.sum() / windows.num_targets)
    return [float(nats - found[0]) for nats in found[1:]]


def dymoe(bench: Bench) -> Iterator[Point]:
    """Table 2 and Figures 3, 5 and 11: prompts by heavy hitters, tokens by the gate."""
    tiers, experts = ("int4", "int2"), bench.model.config.num_experts
    width, layers = bench.model.config.experts_per_token, bench.model.num_layers
    for layer, nats in enumerate(sensitivities(bench, *tiers, bench.calibration)):
        factor = float(np.exp(nats))
        yield Point("dymoe layers", "calibration", "times the perplexity", layer, factor)
    settings: list[tuple[str, float, dict[str, Any]]] = [
        (label, r, {"low": low}) for low, label in (("", "4/2"), ("skip", "4/0"))
        for r in RETENTIONS
    ]  # fmt: skip
    settings += [
        (f"figure 3 {kind}", r, curve)
        for kind, curve in FIGURE_3.items()
        for r in (0.5, 0.625, 0.75, 0.875)
    ]
    for selection in ("critical", "random"):
        base = AsAsked(prefetch=0, selection=selection)
        served = Served(bench.model, base, tiers, (experts, experts))
        each = EachToken(bench.model, base, tiers)
        for name, r, given in settings:
            if given.get("selection", "critical") != selection:
                continue
            policy = AsAsked(**{**given, "selection": selection, "retention": r, "prefetch": 0})
            realised = {
                count: {"realised mean": float(policy.counts(layers, count).mean() / count)}
                for count in (experts, width)
            }
            for windows in bench.both:
                served.begin(policy)
                run = served.run(windows, 1)
                more = realised[experts] | of_gate(run)
                yield Point("dymoe prefill", windows.name, name, r, run.perplexity, more)
                found, more = each.perplexity(policy, windows), realised[width]
                yield Point("dymoe token by token", windows.name, name, r, found, more)


def profiled(bench: Bench, windows: Windows, **how: Any) -> BuddyProfile:
    """A profile of a text, outputs compared."""
    model = bench.model
    activity = profile(
        Runner(model.config, model.weights, model.device),
        windows.tokens[:, :-1].reshape(-1),
        windows.tokens.shape[1] - 1,
        BATCH,
        Counting(outputs=True),
    )
    given: dict[str, Any] = {"source": "coactivations", "alpha": 0.95, "max_buddies": 31}
    return profile_of(activity, {}, smoothing=1.0, percentile=10.0, **(given | how))


def _hottest(found: BuddyProfile, slots: int) -> np.ndarray:
    order = np.argsort(-np.asarray(found.activity.activations), axis=1, kind="stable")
    return np.sort(order[:, :slots], axis=1).astype(np.int32)


BUDDIES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("co-activation", "coactivations", {}),
    ("co-activation, B 4", "coactivations", {"depth": 4}),
    ("co-activation, rho 1", "coactivations", {"rho": 1}),
    ("co-activation, TAE gate", "coactivations", {"tae_tau": "profile"}),
    ("outputs", "outputs", {}),
    ("outputs, rho 1 on the last", "outputs", {"rho": 1, "spend_on": "last"}),
    ("co-activation, gains", "coactivations", {"gains": True}),
    ("outputs, gains", "outputs", {"gains": True}),
    (
        "outputs, gains, rho 1 on the last",
        "outputs",
        {"gains": True, "rho": 1, "spend_on": "last"},
    ),
)


def buddymoe(bench: Bench) -> Iterator[Point]:
    """Tables 2 to 4: what buddies lose, beside random experts at the same pairs."""
    sources = {
        source: profiled(bench, bench.calibration, source=source, alpha=alpha)
        for source, alpha in (("coactivations", 0.95), ("outputs", 1.0))
    }
    exact = {w.name: bench.uniform("bf16", w) for w in bench.both}
    for text, perplexity in exact.items():
        yield Point("buddymoe", text, "original", 1.0, perplexity)
    for rate in CACHE_RATES:
        slots = round(rate * bench.model.config.num_experts)
        held = _hottest(sources["coactivations"], slots)
        made: dict[Any, Any] = {}
        for name, source, given in BUDDIES:
            yield from _buddy_rows(bench, made, sources[source], name, given, held, rate, exact)
        for windows in bench.both:
            dropping = BuddyMoe(lists=_empty(sources["coactivations"]), fall_back="drop")
            served = Served(bench.model, dropping, ("bf16",), (slots,))
            served.begin(dropping, (held,))
            run = served.run(windows, BATCH)
            yield Point("buddymoe", windows.name, "left out", rate, run.perplexity, of_gate(run))


def _empty(found: BuddyProfile) -> Any:
    lists = found.lists
    return type(lists)(np.full_like(lists.ids, -1), np.zeros_like(lists.q))


def _buddy_rows(
    bench: Bench,
    made: dict[Any, Any],
    found: BuddyProfile,
    name: str,
    given: dict[str, Any],
    held: np.ndarray,
    rate: float,
    exact: dict[str, float],
    section: str = "buddymoe",
    texts: Sequence[Windows] | None = None,
) -> Iterator[Point]:
    """Buddies, and what else may be done to the pairs that these replace; losses over random's.

    Where gains scale buddies, the pairs are also left out, and given to random experts with gains.
    """
    how = dict(given)
    gains = found.gains if how.pop("gains", False) else None
    if how.get("tae_tau") == "profile":
        how["tae_tau"] = found.tau
    kinds: dict[str, tuple[type[BuddyMoe], np.ndarray | None]] = {
        "buddies": (BuddyMoe, gains), "random": (MatchedRandom, None)
    }  # fmt: skip
    if gains is not None:
        kinds["random with gains"] = MatchedRandom, gains
        kinds["left out"] = BuddyMoe, np.zeros_like(gains)
    slots = held.shape[1]
    for windows in texts or bench.both:
        runs = {}
        for kind, (made_of, own) in kinds.items():
            policy = made_of(lists=found.lists, gains=own, background_bytes=0.0, **how)
            key = (slots, made_of, own is None, how.get("spend_on"))
            if key not in made:
                made[key] = Served(bench.model, policy, ("bf16",), (slots,))
            done = (policy, windows.name) if own is None else None
            if done not in made:
                made[key].begin(policy, (held,))
                runs[kind] = made[key].run(windows, BATCH)
                if done is not None:
                    made[done] = runs[kind]
            else:
                runs[kind] = made[done]
        base = exact[windows.name]
        losses = {kind: float(np.log(run.perplexity / base)) for kind, run in runs.items()}
        over = {kind: loss / losses["random"] for kind, loss in losses.items()}
        more = {
            "random perplexity": runs["random"].perplexity,
            "loss over random's": over["buddies"],
        }
        if gains is not None:
            more |= {f"loss over random's, {k}": over[k] for k in ("random with gains", "left out")}
        run = runs["buddies"]
        yield Point(section, windows.name, name, rate, run.perplexity, more | of_gate(run))


def domains(bench: Bench) -> Iterator[Point]:
    """Buddy lists and gains of one domain, used on another; half of the experts resident."""
    count, slots = 10, bench.model.config.num_experts // 2
    names = ("books", "code")
    halves = {n: bench.texts.domain(n, 2 * count) for n in names}
    first = {n: dataclasses.replace(w, tokens=w.tokens[::2]) for n, w in halves.items()}
    second = {n: dataclasses.replace(w, tokens=w.tokens[1::2]) for n, w in halves.items()}
    exact = {n: bench.uniform("bf16", w) for n, w in second.items()}
    found = {n: profiled(bench, w, source="outputs", alpha=1.0) for n, w in first.items()}
    made: dict[Any, Any] = {}
    for of in names:
        for on in names:
            yield from _buddy_rows(
                bench, made, found[of], f"profile of {of}", {"gains": True},
                _hottest(found[on], slots), 0.5, exact, "domains", [second[on]],
            )  # fmt: skip


def shift(bench: Bench) -> Iterator[Point]:
    """A workload from prose to code to maths: choices that follow it, and choices that do not."""
    count, high, low = 8, "int4", "int2"
    num_experts = bench.model.config.num_experts
    parts = {name: bench.texts.domain(name, count + 4) for name in SEGMENTS}
    warm = dataclasses.replace(parts["books"], tokens=parts["books"].tokens[::3])
    segments = {
        name: dataclasses.replace(w, tokens=np.delete(w.tokens, np.s_[::3], axis=0))
        for name, w in parts.items()
    }
    ends = {}
    for name, windows in segments.items():
        for tier in (high, low):
            ends[name, tier] = bench.uniform(tier, windows, 1)
            yield Point("shift", name, f"all {tier}", 0, ends[name, tier])
    never = 2**30
    choices = {
        "dynaexq, T 512": DynaExq(period=512, n_hot=SHIFT_HOT, max_requests=512),
        "static, hottest of the prose": DynaExq(
            period=never, alpha=1 - 1 / 4096, warmup=512, n_hot=SHIFT_HOT, max_requests=512
        ),
    }
    slots = (num_experts - 1, num_experts)
    served = Served(bench.model, choices["dynaexq, T 512"], (high, low), slots)
    for name, policy in choices.items():
        served.begin(policy, (_nothing(bench.model), None))
        served.run(warm, 1)
        for segment, windows in segments.items():
            nats, hot = [], 0.0
            for row in windows.tokens:
                run = served.run(dataclasses.replace(windows, tokens=row[None]), 1)
                nats.append(run.nats)
                hot += run.shares[high] / len(windows.tokens)
            perplexity = float(np.exp(np.concatenate(nats).sum() / windows.num_targets))
            worst, best = ends[segment, low], ends[segment, high]
            recovered = float(np.log(worst / perplexity) / np.log(worst / best))
            more = {"gate int4": hot, "promoted so far": run.promoted, "recovered": recovered}
            yield Point("shift", segment, name, 0, perplexity, more)
