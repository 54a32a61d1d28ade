"""The policies under the contract, and random traces for them.

A policy enters by cases in `CASES`; a budget of its own by `Case.within`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from moejax.policies.base import AnyPolicy, Decision, Observation, PolicySpec
from moejax.policies.buddy_lists import buddy_lists, conditional_coactivation
from moejax.policies.dymoe import SKIP
from moejax.policies.make import make_policy

M, E, A = 3, 8, 3
# The curves of DyMoE's Figure 3, as settings of skipping. Its legend explains two choices, of
# experts and of layers; where it names one, the other is the plain one, so "token" and "equal" are
# one run.
FIGURE_3 = {
    "random": {"low": SKIP, "selection": "random", "schedule": "equal"},
    "token": {"low": SKIP, "selection": "critical", "schedule": "equal"},
    "equal": {"low": SKIP, "selection": "critical", "schedule": "equal"},
    "depth": {"low": SKIP, "selection": "critical", "schedule": "cosine"},
}
SPEC = PolicySpec(
    num_layers=M,
    num_experts=E,
    width=A,
    tiers=("int4", "int2"),
    expert_bytes=(200, 100),
    slots=(3, E),
)
EXCLUSIVE = dataclasses.replace(SPEC, slots=(3, E - 3))  # an expert is in one tier

ONE = dataclasses.replace(SPEC, tiers=("int4",), expert_bytes=(200,), slots=(4,))
LISTS = buddy_lists(
    conditional_coactivation(np.random.default_rng(1).integers(0, 9, (M, E, E))), 0.8, 4
)

Within = Callable[[AnyPolicy, Observation, Decision], None]


class Case(NamedTuple):
    """A policy with settings that sweep; of the first one alone, the statics are compiled."""

    name: str
    settings: tuple[dict[str, Any], ...] = ({},)
    spec: PolicySpec = SPEC
    phases: tuple[str, ...] = ("decode", "prefill")
    within: Within | None = None  # raises AssertionError for a decision over the policy's budget

    @property
    def policies(self) -> list[AnyPolicy]:
        return [make_policy(self.name, **settings) for settings in self.settings]


def _dymoe_within(policy: Any, observation: Observation, decision: Decision) -> None:
    """At most t_l of a lone token's experts, or of a prompt's, are critical."""
    layer, rows = int(observation.layer), np.asarray(observation.active)
    critical = np.asarray(decision.ids)[rows][np.asarray(decision.tier)[rows] == 0]
    if observation.is_prefill or rows.sum() == 1:
        requested = E if observation.is_prefill else A
        assert len(set(critical.tolist())) <= policy.counts(M, requested)[layer]
    if decision.ahead is not None:
        limit = policy.counts(M, E)[layer + 1] if layer + 1 < M else 0
        assert (np.asarray(decision.ahead) >= 0).sum() <= min(limit, SPEC.slots[0])


_TAUS = (
    {"period": 4, "max_requests": 4},
    {"period": 4, "max_requests": 4, "tau": "fixed", "alpha": 0.5, "n_hot": (2, 1, 3)},
    {"period": 3, "max_requests": 4, "hysteresis": 0.5, "warmup": 9, "n_hot": 1},
    {"period": 4, "max_requests": 4, "choice": "random", "seed": 3},
)
CASES = {
    "resident": Case("resident", ({}, {"tier": "int2"})),
    "on_demand": Case("on_demand", ({"prefetch": 2}, {"tier": "int2", "prefetch": 1}, {})),
    "dynaexq": Case("dynaexq", _TAUS),
    "dynaexq_exclusive": Case("dynaexq", _TAUS, EXCLUSIVE, ("decode",)),
    "dymoe_4_2": Case(
        "dymoe",
        (
            {},
            {"retention": 0.9, "rounding": "ceil", "prefetch": 0, "heavy_count": 2},
            {"retention": 0.6, "schedule": "sensitivity", "sensitivity": (3.0, 2.0, 1.0)},
        ),
        within=_dymoe_within,
    ),
    "dymoe_4_0": Case(
        "dymoe",
        (
            {"low": "skip", "renormalise": True},
            {"low": "skip", "schedule": "linear", "prefetch": 1},
            {"high": "int2", "low": "skip", "schedule": "equal", "retention": 0.4},
        ),
    ),
    "dymoe_reuses": Case(
        "dymoe", ({"low": "skip", "reuse_skipped": True, "selection": "load"},), phases=("decode",)
    ),
    "buddymoe": Case(
        "buddymoe",
        (
            {"lists": LISTS, "max_requests": 2, "least_misses": 1.0, "background_bytes": 90.0},
            {"lists": LISTS, "max_requests": 2, "rho": 1, "depth": 2, "prefetch": 2},
            {"lists": LISTS, "max_requests": 2, "tae_tau": 0.6, "prefetch": -1},
        ),
        ONE,
    ),
    "compose_buddies": Case(
        "compose",
        (
            {
                "parts": "dynaexq+buddymoe",
                "lists": LISTS,
                "period": 4,
                "max_requests": 4,
                "prefetch": 1,
            },
        ),
        EXCLUSIVE,
        ("decode",),
    ),
    "compose_skips": Case(
        "compose",
        (
            {
                "parts": "dymoe+buddymoe",
                "lists": LISTS,
                "low": "skip",
                "rho": 1,
                "spend_on": "last",
                "prefetch": 0,
            },
        ),
        ONE,
        ("decode",),
    ),
    "compose": Case(
        "compose",
        (
            {"period": 4, "max_requests": 4},
            {"period": 3, "max_requests": 4, "retention": 0.6, "prefetch": 1},
        ),
    ),
    "compose_leaves_out": Case(
        "compose",
        ({"parts": "dynaexq+dymoe", "low": "skip", "period": 4, "max_requests": 4, "prefetch": 0},),
        phases=("decode",),
    ),
    "dymoe_random": Case("dymoe", (FIGURE_3["random"], FIGURE_3["random"] | {"seed": 7})),
}

FIRST_CASES = {case.name: case for case in reversed(CASES.values())}


def random_trace(spec: PolicySpec, steps: int, tokens: int, *, prefill: bool, seed: int) -> Any:
    """Observations with leading axes [steps, M]; a few experts are hot, others as time goes on."""
    rng = np.random.default_rng(seed)
    shape = steps, spec.num_layers, tokens
    logits = rng.standard_normal((*shape, spec.num_experts))
    drift = np.arange(steps) // 4
    for step in range(steps):
        logits[step, ..., (drift[step] * 2) % spec.num_experts] += 2.0
    probabilities = _softmax(logits)
    ids = np.argsort(-probabilities, axis=-1, kind="stable")[..., : spec.width]
    weights = np.take_along_axis(probabilities, ids, axis=-1)
    held = rng.random((*shape[:2], len(spec.tiers), spec.num_experts)) < 0.5
    return Observation(  # of numpy arrays, which are cheap to index
        layer=np.tile(np.arange(spec.num_layers, dtype=np.int32), (steps, 1)),
        probabilities=probabilities.astype(np.float32),
        ids=ids.astype(np.int32),
        weights=(weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32),
        active=np.ones(shape, bool),
        resident=held,
        importance=rng.random(shape, np.float32) if prefill else None,
        predicted=_softmax(rng.standard_normal(logits.shape)).astype(np.float32),
        is_prefill=prefill,
    )


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits)
    return powers / powers.sum(axis=-1, keepdims=True)
