"""DyMoE's Tables 1 and 2 and Figures 3, 5 and 11.

Prompts go by heavy hitters, tokens one by one by the gate. "load" is a fair null of heavy hitters:
the experts of most tokens are critical. Sensitivity is measured on the calibration text. `heavy` is
Figure 4 beside its null, as many tokens of the same window chosen at random.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.attention import causal_attention
from moejax.models.moe import MoeInputs, ResidentExperts
from moejax.models.transformer import merge_weights, model_definition
from moejax.policies.baselines import Resident
from moejax.policies.dymoe import attention_received
from scripts.studies.dymoe.controls import AsAsked
from scripts.studies.quality.bench import EachToken, Measured, Model, Served
from scripts.studies.quality.cases import Case, Claim, Comparison, Point, fewer, standard_error
from scripts.studies.quality.subject import BATCH, Subject, point

HIGH, LOW = "int4", "int2"
RETENTIONS = (0.5, 0.625, 0.75, 0.875, 0.9, 1.0)
KINDS = {"4/2": "", "4/0": "skip"}
SELECTIONS = ("critical", "load", "random")
SCHEDULES = ("cosine", "linear", "equal", "sensitivity")
AT = 0.75  # where schedules are compared
NEAR = 0.01  # nats: our reading of "nearly as good"
TEXTS = ("wikitext-2", "mixed")
HEAVY_SHARE, DRAWS = 0.1, 8  # of a window's tokens, as the policy's default; random samples
HEAVY_BAR = (
    "dymoe, an expert's load and its load of heavy hitters are highly correlated (3.3, Figure 4): "
    "more than its load of as many random tokens, by two standard errors over windows"
)


def cases(subject: Subject) -> Iterator[Case]:
    """Layers alone in INT2, then selections at every retention, then schedules."""
    for layer in (None, *range(subject.model.num_layers)):
        name = "layer none" if layer is None else f"layer {layer}"
        yield Case(name, functools.partial(_one_layer, subject, layer))
    runs = _Runs(subject)
    for kind, selection, r in itertools.product(KINDS, SELECTIONS, RETENTIONS):
        yield Case(
            f"{kind} {selection} {r:g}",
            functools.partial(runs.points, f"{kind} {selection}", r, kind, selection, "cosine"),
        )
    for kind, schedule in itertools.product(KINDS, SCHEDULES[1:]):
        yield Case(
            f"{kind} {schedule}",
            functools.partial(runs.points, f"{kind} {schedule}", AT, kind, "critical", schedule),
        )


def _one_layer(subject: Subject, layer: int | None) -> Iterator[Point]:
    """Figure 5: one layer's experts in INT2, the others in INT4."""
    run = _with_layer(subject, layer)
    yield point(subject.calibration, "one layer in int2", -1 if layer is None else layer, run)


def _with_layer(subject: Subject, layer: int | None) -> Measured:
    model, experts = subject.model, subject.num_experts
    served = subject.served_uniform(HIGH)
    memory = served.memory.tiers[0]
    plain = memory.store
    rows = slice(0, 0) if layer is None else slice(layer * experts, (layer + 1) * experts)
    gate_up, down = (
        full.at[rows].set(coarse[rows])
        for full, coarse in zip(model.experts(HIGH), model.experts(LOW), strict=True)
    )
    memory.store = dataclasses.replace(plain, gate_up=gate_up, down=down)
    try:
        served.begin(Resident())
        return served.run(subject.calibration, BATCH)
    finally:
        memory.store = plain


class _Runs:
    """Programs of each selection, made when they are needed."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self._made: dict[str, tuple[Served, EachToken]] = {}

    def points(
        self, series: str, r: float, kind: str, selection: str, schedule: str
    ) -> Iterator[Point]:
        """Prompts, then token by token, of each text."""
        policy = AsAsked(
            prefetch=0, selection=selection, retention=r, low=KINDS[kind], schedule=schedule,
            sensitivity=self._sensitivity if schedule == "sensitivity" else (),
        )  # fmt: skip
        served, each = self._programs(selection)
        model = self.subject.model

        def mean(count: int) -> float:
            return float(policy.counts(model.num_layers, count).mean() / count)

        for windows in self.subject.both:
            served.begin(policy)
            run = served.run(windows, 1)
            more = {"realised mean": mean(self.subject.num_experts)}
            yield point(windows, f"prompts {series}", r, run, **more)
            if selection != "load":  # of one token it is the order of the gate, as "critical"
                more = {"realised mean": mean(model.config.experts_per_token)}
                yield point(windows, f"tokens {series}", r, each.run(policy, windows), **more)

    def _programs(self, selection: str) -> tuple[Served, EachToken]:
        if selection not in self._made:
            model, experts = self.subject.model, self.subject.num_experts
            base, tiers = AsAsked(prefetch=0, selection=selection), (HIGH, LOW)
            served = Served(model, base, tiers, (experts, experts))
            self._made[selection] = served, EachToken(model, base, tiers)
        return self._made[selection]

    @functools.cached_property
    def _sensitivity(self) -> tuple[float, ...]:
        """Nats that each layer alone in INT2 adds, above 0."""
        first, *others = (
            float(np.mean(_with_layer(self.subject, layer).by_window))
            for layer in (None, *range(self.subject.model.num_layers))
        )
        return tuple(max(nats - first, 1e-6) for nats in others)


def heavy(subject: Subject) -> Iterator[Case]:
    """Correlation of experts' loads of all tokens with those of heavy hitters, and of others."""
    yield Case("correlation", functools.partial(_correlations, subject))


def _correlations(subject: Subject) -> Iterator[Point]:
    model, rng = subject.model, np.random.default_rng(0)
    loads = jax.jit(functools.partial(_loads, model))
    for windows in subject.both:
        found = []
        for row in windows.tokens[:, None, :-1]:
            keys = rng.random((model.num_layers, DRAWS, row.size), np.float32)
            of_layers = np.asarray(loads(model.weights, row, keys))
            found.append([np.corrcoef(of)[0, 1:] for of in of_layers])
        hitters, random = np.array(found)[..., 0], np.array(found)[..., 1:].mean(axis=-1)
        for series, of in (
            ("heavy hitters", hitters), ("random tokens", random), ("difference", hitters - random),
        ):  # fmt: skip
            means = np.round(of.mean(axis=0), 5).tolist()
            more = {"standard error": standard_error(of.mean(axis=1)), "layers": means}
            yield Point(windows.name, series, HEAVY_SHARE, float(of.mean()), (), more, "")


def _loads(model: Model, weights: Any, tokens: jax.Array, keys: jax.Array) -> jax.Array:
    """Loads float32[M, 2 + DRAWS, E] of all tokens [1, T], heavy hitters, and those of top keys."""
    config, received = model.config, list[jax.Array]()
    net = merge_weights(model_definition(config), weights)
    positions, active = jnp.arange(tokens.size)[None], jnp.ones(tokens.shape, bool)

    def attend(index: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        received.append(attention_received(q, k, positions, active, scale=config.score_scale))
        return causal_attention(q, k, v, config.sliding_window, "xla")

    class Counted(ResidentExperts):
        def __call__(self, carry: Any, inputs: MoeInputs) -> tuple[jax.Array, Any, Any]:
            out, carry, _ = super().__call__(carry, inputs)
            marks = jax.nn.one_hot(inputs.routing.ids, config.num_experts).sum(axis=1)
            order = jnp.concatenate([received[-1], keys[inputs.layer.mlp]])
            chosen = jax.lax.top_k(order, round(HEAVY_SHARE * tokens.size))[1]
            return out, carry, jnp.concatenate([marks.sum(0)[None], marks[chosen].sum(axis=1)])

    return net.layers(tokens, positions, active, attend, Counted(net.moe, "block"))[2]


def _row(text: str, phase: str, series: str, r: float) -> str:
    return f"dymoe | {text} | {phase} {series} | {r:g}"


def _pairs(phase: str, own: str, null: str, r: float) -> tuple[Comparison, ...]:
    return tuple(fewer(_row(text, phase, own, r), _row(text, phase, null, r)) for text in TEXTS)


def claims(num_layers: int) -> tuple[Claim, ...]:
    """Bars of a model of so many layers."""
    last = f"dymoe | calibration | one layer in int2 | {num_layers - 1}"
    return (
        *(
            Claim(
                "dymoe", f"experts of heavy hitters are worth more than those of {said}",
                "3.1, Figure 3", f"fewer nats in prompts at r = {AT}, {kind}",
                _pairs("prompts", f"{kind} critical", f"{kind} {null}", AT),
            )
            for null, said in (("random", "a random choice"), ("load", "most tokens"))
            for kind in KINDS
        ),
        *(
            Claim(
                "dymoe", f"a share that falls with depth ({own}) is better than {null}",
                "3.2, 4.1, Figure 3", f"fewer nats in {phase} at r = {AT}, 4/0",
                _pairs(phase, "4/0 critical" if own == "cosine" else f"4/0 {own}",
                       f"4/0 {null}", AT),
            )
            for own, null in (("cosine", "equal"), ("cosine", "linear"))
            for phase in ("prompts", "tokens")
        ),
        *(
            Claim(
                "dymoe", f"{kind} at r = 0.9 is nearly as good as uniform INT4", "6.3, Table 2",
                f"at most {NEAR} nats more, in {phase}",
                tuple(
                    fewer(_row(text, phase, f"{kind} critical", 0.9),
                          f"dynaexq | {text} | uniform int4 | 0", NEAR)
                    for text in TEXTS
                ),
            )
            for kind in KINDS
            for phase in ("prompts", "tokens")
        ),
        Claim(
            "dymoe", "at r = 0.75 INT2 in place of skipping recovers quality", "6.3, Table 2",
            "fewer nats in prompts and token by token",
            _pairs("prompts", "4/2 critical", "4/0 critical", AT)
            + _pairs("tokens", "4/2 critical", "4/0 critical", AT),
        ),
        Claim(
            "dymoe", "shallow layers suffer most from INT2", "3.2, Figure 5",
            "the first layer in INT2 costs more nats than the last one",
            (fewer(last, "dymoe | calibration | one layer in int2 | 0"),),
        ),
    )  # fmt: skip
