"""Errors of layers under policies: what a profile foretells beside what is measured.

The exact model's hidden states go in; a policy's experts and the exact ones run side by side in
every layer, and the exact output goes on. So a layer's error is its own. The profile is of other
text. The bound is a theorem where every pair runs in one form; else it rests on the pairs of a form
being like all pairs.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.evaluation.expert_errors import measure_errors
from moejax.evaluation.expert_profile import Counting, profile
from moejax.experts.cached_experts import CachedExperts
from moejax.experts.state import ExpertCache
from moejax.inference import steps
from moejax.inference.runner import Runner
from moejax.models.expert_products import ExpertPairs, ExpertStacks, combine, products_by_block
from moejax.models.moe import Experts, MoeInputs
from moejax.models.transformer import ChunkSpec, merge_weights
from moejax.policies.baselines import Resident
from moejax.policies.buddymoe import BuddyMoe
from moejax.policies.dynaexq import DynaExq
from moejax.routing.profile_file import BuddyProfile, profile_of
from moejax.routing.tier_errors import LayerErrors, TierErrors
from scripts.studies.dymoe.controls import AsAsked
from scripts.studies.quality.bench import Served, Windows
from scripts.studies.quality.buddymoe import ALPHA, MOST
from scripts.studies.quality.cases import Case, Point
from scripts.studies.quality.subject import BATCH, Subject

TIERS = ("int4", "int3", "int2")
NEAR = 1.25  # factor within which the estimate is to be of the measured error: our bar
BAR = (
    "bars, written first: the bound is above the measured error of every layer of every run; the "
    f"estimate over all layers is within a factor of {NEAR} of it"
)


class _Beside(Experts):
    """A policy's experts and the exact ones, side by side; the exact output goes on."""

    def __init__(self, inner: CachedExperts, exact: tuple[jax.Array, jax.Array], num_experts: int):
        self._inner, self._exact, self._num_experts = inner, exact, num_experts
        self.layers_per_iteration = inner.layers_per_iteration
        self.observes_attention = inner.observes_attention

    def init(self) -> Any:
        return self._inner.init()

    def route(self, *args: Any, **how: Any) -> Any:
        return self._inner.route(*args, **how)

    def __call__(self, carry: Any, inputs: MoeInputs) -> tuple[jax.Array, Any, Any]:
        found, carry, _ = self._inner(carry, inputs)
        x, routing, mask = inputs.x, inputs.routing, inputs.token_mask
        experts = self._num_experts
        pairs = ExpertPairs(routing.ids, jnp.broadcast_to(mask[:, None], routing.ids.shape))
        gate_up, down = (part.reshape(-1, experts, *part.shape[1:]) for part in self._exact)
        stacks = ExpertStacks(gate_up, down, inputs.layer.mlp)
        products = products_by_block(x, pairs, stacks, experts, 2**26)
        y = combine(products, pairs, routing.weights, x.dtype)
        lost = jnp.sum(jnp.where(mask[:, None], found - y, 0.0) ** 2)
        return y, carry, jnp.stack([lost, jnp.sum(jnp.where(mask[:, None], y, 0.0) ** 2)])


def _chunk(
    program: steps.StepProgram,
    spec: ChunkSpec,
    state: Any,
    experts: ExpertCache | None,
    inputs: steps.StepInputs,
    chunk: steps.TokenChunk,
) -> steps.StepResult[Any]:
    """A step for `Runner.scan_windows` that adds up squares float32[M, 2] of errors and outputs."""
    cache, (sums, exact) = state
    assert program.experts is not None and experts is not None and inputs.rows is not None
    model = merge_weights(program.definition, inputs.weights)
    positions, mask = steps.chunk_positions(chunk)
    inner = CachedExperts(
        program.experts, model.config, experts, inputs.rows, spec.tiers or (spec.experts,),
        model.kernels, num_prefilled=chunk.tokens.size,
    )  # fmt: skip
    run = _Beside(inner, exact, model.config.num_experts)
    cache, _, carry, found = model(chunk.tokens, positions, mask, cache, spec, run, chunk.lengths)
    return steps.StepResult((cache, (sums + found, exact)), carry.cache, None, None)


def measured(served: Served, windows: Windows, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Relative error float64[M] of each layer, and the gate mass of the run [M, T + 3]."""
    model = served.model
    served.memory.read_counters()
    served.memory.ledger.gate = None
    exact = tuple(jnp.copy(part) for part in model.experts["bf16"])  # what is carried is donated
    carried: Any = (jnp.zeros((model.num_layers, 2), jnp.float32), exact)
    for first in range(0, len(windows.tokens), batch):
        part = windows.tokens[first : first + batch]
        lengths = np.full(len(part), part.shape[1] - 1, np.int32)
        carried = served.runner.scan_windows(_chunk, carried, part[:, :-1], lengths)
    lost, whole = np.asarray(carried[0], np.float64).T
    gate = served.memory.read_counters().gate
    assert gate is not None
    return np.sqrt(lost / whole), gate


def cases(subject: Subject) -> Iterator[Case]:
    """Uniform tiers, then DynaExq, DyMoE and BuddyMoE at their budgets."""
    of = _Foretold(subject)
    for tier in TIERS:
        yield Case(f"uniform {tier}", functools.partial(of.uniform, tier))
    for share in (0.125, 0.25, 0.5):
        yield Case(f"dynaexq {share:g}", functools.partial(of.dynaexq, share))
    for low in ("", "skip"):
        for r in (0.5, 0.75, 0.9):
            yield Case(f"dymoe {low or 'low'} {r:g}", functools.partial(of.dymoe, low, r))
    for rate in (0.75, 0.5, 0.375):
        yield Case(f"buddymoe {rate:g}", functools.partial(of.buddymoe, rate))


class _Foretold:
    """Profiles of text that is not scored, and what they say of runs."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self._profiles: dict[str, tuple[BuddyProfile, TierErrors]] = {}

    def profile(self, text: str) -> tuple[BuddyProfile, TierErrors]:
        """Buddy lists, and errors of the tiers, with what those lists replace."""
        if text not in self._profiles:
            model, windows = self.subject.model, self.subject.others[text]
            ids, length = windows.tokens[:, :-1].reshape(-1), windows.tokens.shape[1] - 1
            runner = Runner(model.config, model.weights, model.device)
            activity = profile(runner, ids, length, BATCH, Counting(outputs=True))
            how: Any = {"source": "outputs", "alpha": ALPHA, "max_buddies": MOST}
            lists = profile_of(activity, {}, smoothing=1.0, percentile=10.0, **how)
            shape = model.num_layers, model.config.num_experts
            stacks = {
                name: tuple(jnp.copy(part).reshape(*shape, *part.shape[1:]) for part in pair)
                for name, pair in model.experts.items()
            }
            tiers: Any = {"bf16": None} | {name: stacks[name] for name in TIERS}
            errors = measure_errors(runner, tiers, lists.lists.ids[:, :, 0], ids, length, BATCH)
            self._profiles[text] = lists, errors
        return self._profiles[text]

    def _points(
        self, series: str, x: float, served: Served, run: Callable[[Windows], None], batch: int
    ) -> Iterator[Point]:
        for windows in self.subject.both:
            _, errors = self.profile(windows.name)
            run(windows)
            real, gate = measured(served, windows, batch)
            told = errors.of_gate(list(served.tiers), gate)
            yield _row(windows, series, x, real, told)

    def uniform(self, tier: str) -> Iterator[Point]:
        served = self.subject.served_uniform(tier)
        yield from self._points(
            f"uniform {tier}", 0, served, lambda _: served.begin(Resident()), BATCH
        )

    def dynaexq(self, share: float) -> Iterator[Point]:
        experts = self.subject.num_experts
        policy = DynaExq(period=2048, n_hot=self.subject.part(share), max_requests=512)
        served = Served(self.subject.model, policy, ("int4", "int2"), (experts - 1, experts))

        def warm(windows: Windows) -> None:
            served.begin(policy, (self.subject.none_held(), None))
            served.run(self.subject.others[windows.name], BATCH)

        yield from self._points("dynaexq int4/int2", share, served, warm, BATCH)

    def dymoe(self, low: str, retention: float) -> Iterator[Point]:
        experts = self.subject.num_experts
        policy = AsAsked(prefetch=0, retention=retention, low=low)
        served = Served(self.subject.model, policy, ("int4", "int2"), (experts, experts))
        series = f"dymoe prompts {'4/0' if low else '4/2'}"
        yield from self._points(series, retention, served, lambda _: served.begin(policy), 1)

    def buddymoe(self, rate: float) -> Iterator[Point]:
        slots = self.subject.part(rate)
        for windows in self.subject.both:
            found, errors = self.profile(windows.name)
            policy = BuddyMoe(lists=found.lists, rho=3, background_bytes=0.0)
            served = Served(self.subject.model, policy, ("bf16",), (slots,))
            used = -np.asarray(found.activity.activations)
            held = np.sort(np.argsort(used, axis=1, kind="stable")[:, :slots], axis=1)
            served.begin(policy, (held.astype(np.int32),))
            real, gate = measured(served, windows, BATCH)
            told = errors.of_gate(["bf16"], gate)
            yield _row(windows, "buddymoe rho 3", rate, real, told)


def _row(windows: Windows, series: str, x: float, real: np.ndarray, told: LayerErrors) -> Point:
    estimate, bound = told.mean
    more = {
        "estimate": estimate, "bound": bound,
        "layers above the bound": int((real > told.bound).sum()),
        "layers": [[round(float(v), 5) for v in of] for of in (real, *told)],
    }  # fmt: skip
    figure = float(np.sqrt(np.mean(real**2)))
    return Point(windows.name, series, x, figure, (), more, "relative error of a layer's output")
