"""Runs of other sections beside the exact model: its predictions, and the outputs of its layers.

`fidelity`: KL of the exact model to a run, and tokens whose likeliest next one stays. `layers`: the
exact hidden states go in, a policy's experts and the exact ones run side by side in every layer,
and the exact output goes on, so that a layer's error is its own; beside it what a profile of other
text foretells by the gate mass that the run served in each tier.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.evaluation.expert_errors import measure_errors
from moejax.experts.cached_experts import CachedExperts
from moejax.experts.state import ExpertCache
from moejax.inference import steps
from moejax.inference.runner import Runner
from moejax.models.expert_products import ExpertPairs, ExpertStacks, combine, products_by_block
from moejax.models.moe import Experts, MoeInputs
from moejax.models.transformer import ChunkSpec, merge_weights, model_definition
from moejax.routing.tier_errors import TierErrors
from scripts.studies.quality import buddymoe, dymoe, dynaexq
from scripts.studies.quality.bench import BITS, Beside, Model, Served, Windows
from scripts.studies.quality.cases import Case, Claim, Point, fewer
from scripts.studies.quality.subject import BATCH, Subject

# Cases of the papers' sections that are run again.
CASES = re.compile(r"uniform int[432]|int4/int2 hot|4/[20] critical 0\.(75|9)|0\.75 rho 3")
LAYERS_BAR = "layer errors: each below its bound, over all within a factor of 1.25 of the estimate"
Found = tuple[np.ndarray, dict[str, Any]]


def _again(subject: Subject, make: Callable[[Windows], Beside]) -> Iterator[Case]:
    """Cases on texts that are measured beside the exact model."""
    wiki, mixed = (dataclasses.replace(text, beside=make(text)) for text in subject.both)
    seen = dataclasses.replace(subject, wiki=wiki, mixed=mixed)
    for section in (dynaexq, dymoe, buddymoe):
        yield from (case for case in section.cases(seen) if CASES.fullmatch(case.name))


def fidelity(subject: Subject) -> Iterator[Case]:
    """Distances of predictions."""
    for case in _again(subject, functools.partial(_Predictions, subject.model)):
        yield Case(case.name, functools.partial(_distances, case))


def _distances(case: Case) -> Iterator[Point]:
    for p in case.measure():
        kl, same = tuple(p.found["kl"].tolist()), p.found["same"]
        more = {"perplexity": p.figure}
        yield Point(p.text, p.series, p.x, 1e3 * float(np.mean(kl)), kl, more, "nats in 1,000")
        yield Point(p.text, f"{p.series}, same likeliest token", p.x, 100 * same, unit="%")


def _hidden(runner: Runner, windows: Windows, batch: int) -> list[jax.Array]:
    """Last hidden states [1, T, D] of each window."""
    found: list[jax.Array] = []
    for part, lengths in windows.batches(batch):
        zeros = jnp.zeros((len(part), part.shape[1] - 1, runner.config.model_dim), jnp.float32)
        found += list(runner.scan_windows(_hidden_chunk, zeros, part[:, :-1], lengths)[:, None])
    return found


def _hidden_chunk(
    program: steps.StepProgram, spec: ChunkSpec, state: Any, experts: ExpertCache | None,
    inputs: steps.StepInputs, chunk: steps.TokenChunk,
) -> steps.StepResult[Any]:  # fmt: skip
    """A step for `Runner.scan_windows` that keeps the last hidden states [B, T, D]."""
    cache, hidden = state
    _, found = steps.run_chunk(program, spec, cache, experts, inputs, chunk)
    hidden = jax.lax.dynamic_update_slice_in_dim(hidden, found.output, chunk.start, axis=1)
    return steps.StepResult((found.state, hidden), found.experts, None, None)


class _Predictions(Beside):
    """KL of the exact model to a run, and the share of tokens whose likeliest next one stays."""

    def __init__(self, model: Model, windows: Windows):
        self._model, self._windows = model, windows
        self._compare = jax.jit(self._compared)

    @functools.cached_property
    def _exact(self) -> list[jax.Array]:
        model = self._model
        return _hidden(Runner(model.config, model.weights, model.device), self._windows, BATCH)

    def of_served(self, served: Served, batch: int) -> Found:
        return self.of_hidden(_hidden(served.runner, self._windows, batch))

    def of_hidden(self, hidden: Sequence[jax.Array]) -> Found:
        targets = self._windows.tokens[:, 1:]
        of_windows = zip(hidden, self._exact, targets, strict=True)
        found = [np.asarray(self._compare(self._model.dense, *of)) for of in of_windows]
        nats, kl, same = np.stack(found, axis=1).astype(np.float64)
        length = targets.shape[1]
        return nats, {"kl": kl / length, "same": float(same.mean() / length)}

    def _compared(
        self, weights: Any, own: jax.Array, exact: jax.Array, targets: jax.Array
    ) -> jax.Array:
        """Sums of nats, KL and tokens alike of one window: float32[3]."""
        model = merge_weights(model_definition(self._model.config, holds_experts=False), weights)
        q, p = (jax.nn.log_softmax(model.project_to_vocab(of)[0]) for of in (own, exact))
        nats = -jnp.take_along_axis(q, targets[:, None], axis=1)
        same = jnp.argmax(p, axis=1) == jnp.argmax(q, axis=1)
        every = nats, jnp.exp(p) * (p - q), same
        return jnp.stack([jnp.sum(of, dtype=jnp.float32) for of in every])


def layers(subject: Subject) -> Iterator[Case]:
    """Errors of layers' outputs, measured and foretold."""
    lists = buddymoe.Runs(subject)
    for case in _again(subject, functools.partial(_Layers, subject, lists)):
        yield Case(case.name, functools.partial(_errors, case))


def _errors(case: Case) -> Iterator[Point]:
    """Root mean squares over layers, percent of the output; a random expert is not foretold."""
    for p in case.measure():
        if "layers" not in p.found or "random" in p.series:
            continue
        names = dict(zip(("measured", "estimate", "bound"), p.found["layers"], strict=True))
        above = int((names["measured"] > names["bound"]).sum())
        for name, of in names.items():
            more = {"layers": np.round(of, 5).tolist(), "layers above the bound": above}
            figure = 100 * float(np.sqrt(np.mean(of**2)))
            yield Point(p.text, f"{p.series}, {name}", p.x, figure, (), more, "%")


class _Layers(Beside):
    """Errors float64[M] of layers' outputs, over the outputs: measured, estimate and bound."""

    def __init__(self, subject: Subject, lists: buddymoe.Runs, windows: Windows):
        self._subject, self._lists, self._windows = subject, lists, windows

    @functools.cached_property
    def _profile(self) -> TierErrors:
        """Errors of text that is not scored; a buddy's are of the first of its list."""
        model, other = self._subject.model, self._subject.others[self._windows.name]
        lists = self._lists.profile(self._windows.name, "coactivations").lists
        tiers: dict[str, Any] = {"bf16": None} | {tier: _by_layer(model, tier) for tier in BITS}
        return measure_errors(
            Runner(model.config, model.weights, model.device), tiers, lists.ids[:, :, 0],
            other.tokens[:, :-1].reshape(-1), other.tokens.shape[1] - 1, BATCH,
        )  # fmt: skip

    def of_served(self, served: Served, batch: int) -> Found:
        profile, model = self._profile, served.model
        carried: Any = jnp.zeros((model.num_layers, 2), jnp.float32), _by_layer(model, "bf16")
        for part, lengths in self._windows.batches(batch):
            carried = served.runner.scan_windows(_layers_chunk, carried, part[:, :-1], lengths)
        lost, whole = np.asarray(carried[0], np.float64).T
        gate = served.memory.read_counters().gate
        assert gate is not None
        told = profile.of_gate(list(served.tiers), gate)
        return np.zeros(len(self._windows.tokens)), {"layers": (np.sqrt(lost / whole), *told)}

    def of_hidden(self, hidden: Sequence[jax.Array]) -> Found:
        return np.zeros(len(hidden)), {}  # token by token nothing is measured


def _by_layer(model: Model, tier: str) -> tuple[jax.Array, jax.Array]:
    """Copies of all experts by layer, since steps take over what they carry."""
    copies = map(jnp.copy, model.experts(tier))
    up, down = (of.reshape(model.num_layers, -1, *of.shape[1:]) for of in copies)
    return up, down


def _layers_chunk(
    program: steps.StepProgram, spec: ChunkSpec, state: Any, experts: ExpertCache | None,
    inputs: steps.StepInputs, chunk: steps.TokenChunk,
) -> steps.StepResult[Any]:  # fmt: skip
    """A step for `Runner.scan_windows` that adds up squares float32[M, 2] of errors and outputs."""
    cache, (sums, exact) = state
    assert program.experts is not None and experts is not None and inputs.rows is not None
    model = merge_weights(program.definition, inputs.weights)
    positions, mask = steps.chunk_positions(chunk)
    inner = CachedExperts(
        program.experts, model.config, experts, inputs.rows, spec.tiers or (spec.experts,),
        model.kernels, num_prefilled=chunk.tokens.size,
    )  # fmt: skip
    run = _BesideExact(inner, exact)
    cache, _, carry, found = model(chunk.tokens, positions, mask, cache, spec, run, chunk.lengths)
    return steps.StepResult((cache, (sums + found, exact)), carry.cache, None, None)


class _BesideExact(Experts):
    """A policy's experts and the exact ones, side by side; the exact output goes on."""

    def __init__(self, inner: CachedExperts, exact: tuple[jax.Array, jax.Array]):
        self._inner, self._exact = inner, exact
        self.layers_per_iteration = inner.layers_per_iteration
        self.observes_attention = inner.observes_attention

    def init(self) -> Any:
        return self._inner.init()

    def __call__(self, carry: Any, inputs: MoeInputs) -> tuple[jax.Array, Any, Any]:
        found, carry, _ = self._inner(carry, inputs)
        ids, mask = inputs.routing.ids, inputs.token_mask[:, None]
        pairs = ExpertPairs(ids, jnp.broadcast_to(mask, ids.shape))
        stacks = ExpertStacks(*self._exact, inputs.layer.mlp)
        products = products_by_block(inputs.x, pairs, stacks, stacks.gate_up.shape[1], 2**26)
        y = combine(products, pairs, inputs.routing.weights, found.dtype)
        squares = [jnp.sum(jnp.where(mask, of, 0.0) ** 2) for of in (found - y, y)]
        return y, carry, jnp.stack(squares)


# Written before any row. No paper has KL: the bars are what about as many bits, or fewer, do alone.
CLAIMS = tuple(
    Claim(
        paper, f"{own} is nearer to the exact model than {null}", "ours",
        f"{f'at most {margin} nats more' if margin else 'less'} KL, with {why}",
        tuple(
            fewer(f"fidelity | {text} | {series}", f"fidelity | {text} | {null} | 0", margin)
            for text in dynaexq.TEXTS
            for series in every
        ),
    )
    for paper, own, null, margin, why, every in (
        ("dynaexq", "a quarter in INT4", "uniform int3", 0.0, "3.6 bits a weight for 3.5",
         ["int4/int2 hot | 0.75"]),
        ("buddymoe", "c = 0.75, rho 3", "uniform int4", 0.0, "12 bits a weight for 4.5",
         ["rho 3 | 0.75"]),
        *(
            ("dymoe", f"{kind} at r = {r}, {phase},", null, margin, why,
             [f"{phase} {kind} critical | {r}"])
            for phase in ("prompts", "tokens")
            for kind, r, null, margin, why in (
                ("4/0", 0.75, "uniform int3", 0.0, "3.4 bits a weight read for 3.5"),
                ("4/2", 0.9, "uniform int4", dymoe.NEAR, "4.3 bits a weight read for 4.5"),
                ("4/0", 0.9, "uniform int4", dymoe.NEAR, "4.1 bits a weight read for 4.5"),
            )
        ),
    )
)  # fmt: skip
