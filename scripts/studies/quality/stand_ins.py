"""Section `stand_ins` of `policies.py`: what of an absent expert another gives back.

Of each token, the lightest chosen expert that is not resident, alone: the squared error of the
layer's output when something stands in for it, over that of leaving it out, summed over tokens and
sparse layers; a layer of large outputs counts for more, the demo model's last one for about half.
1 is no better than nothing. What is fitted is fitted on the calibration text. The rows "in
hindsight" see the missing output itself: with one resident that the token has not chosen, as
BuddyMoE's rule of uniqueness asks, the least error that any choice and any gain can have, and with
a weighted sum of all residents. "The token's others" are taken as if they were there. The last row
is the expert itself in INT2.

These are errors of a layer, not losses: what they do to the text is in nats, section `buddymoe`.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.inference import steps
from moejax.inference.runner import Runner
from moejax.models.expert_products import gated
from moejax.models.kv_cache import KVCache
from moejax.models.moe import ResidentExperts
from moejax.models.transformer import ChunkSpec, merge_weights
from scripts.studies.quality.bench import Model, Windows
from scripts.studies.quality.buddymoe import CACHE_RATES
from scripts.studies.quality.cases import Case, Point
from scripts.studies.quality.subject import Subject

UNIT = "squared error, leaving out = 1"
LEAVING_OUT, HINDSIGHT = "left out", "in hindsight"
_RIDGE = 1e-3  # of the mean of the diagonal, for what is fitted


class Routed(NamedTuple):
    """Tokens of a text at every sparse layer: x float32[M, N, D], ids int32[M, N, A], weights."""

    x: Any
    ids: Any
    weights: Any


class Products(NamedTuple):
    """Inner products of all experts' outputs f on the tokens of one layer, without the outputs.

    Attributes:
      gram: float64[N, E, E], f_a . f_b.
      with_mean: float64[N, E], f_e . m_e, m of the calibration text.
      low: float64[N, E], the squared error of f_e in INT2.
    """

    gram: np.ndarray
    with_mean: np.ndarray
    low: np.ndarray


class Fitted(NamedTuple):
    """Gains and means of a layer that the calibration text gives.

    Attributes:
      counts: int64[E], tokens that chose the expert.
      gram: float64[E, E, E], of each expert over the tokens that chose it, by squared weight.
      cosine: float64[E, E], mean of the cosine of outputs, likewise, each token alike.
      mean_squared: float64[E], the squared norm of the mean output.
    """

    counts: np.ndarray
    gram: np.ndarray
    cosine: np.ndarray
    mean_squared: np.ndarray


def cases(subject: Subject) -> Iterator[Case]:
    """One case: the texts share what is fitted."""
    yield Case("all", functools.partial(_points, subject))


def _points(subject: Subject) -> Iterator[Point]:
    """Each text, at each cache rate, the most used experts resident."""
    model = subject.model
    texts = {windows.name: routed(model, windows) for windows in subject.both}
    calibration = routed(model, subject.calibration)
    errors: dict[tuple[str, float], dict[str, float]] = {}
    for layer in range(model.num_layers):
        own = outputs_of(model, layer, calibration)
        means = means_of(own, calibration.ids[layer], calibration.weights[layer])
        fitted = fit(own, calibration.ids[layer], calibration.weights[layer], means)
        for name, text in texts.items():
            found = outputs_of(model, layer, text)
            low = outputs_of(model, layer, text, "int2")
            products = products_of(found, low, means)
            for rate in CACHE_RATES:
                slots = round(rate * model.config.num_experts)
                into = errors.setdefault((name, rate), {})
                told = squared_errors(fitted, products, text.ids[layer], text.weights[layer], slots)
                for kind, error in told.items():
                    into[kind] = into.get(kind, 0.0) + error
    for (name, rate), by_kind in errors.items():
        for kind, error in by_kind.items():
            share = error / by_kind[LEAVING_OUT]
            yield Point(name, kind, rate, share, unit=UNIT)


def routed(model: Model, windows: Windows) -> Routed:
    """Inputs of the sparse layers and choices of the routers, one window after the other."""
    runner = Runner(model.config, model.weights, model.device)
    parts = []
    for row in windows.tokens:
        length = len(row) - 1
        found = runner.scan_windows(_collect, None, row[None, :-1], np.array([length], np.int32))
        parts.append([np.asarray(array)[:, :length] for array in found])
    return Routed(*(np.concatenate(part, axis=1) for part in zip(*parts, strict=True)))


def _collect(
    program: steps.StepProgram,
    spec: ChunkSpec,
    state: tuple[KVCache, Any],
    experts: None,
    inputs: steps.StepInputs,
    chunk: steps.TokenChunk,
) -> steps.StepResult[tuple[KVCache, Routed]]:
    """A step for `Runner.scan_windows`, of windows that are one chunk."""
    model = merge_weights(program.definition, inputs.weights)
    positions, mask = steps.chunk_positions(chunk)
    run = ResidentExperts(model.moe, spec.experts, lambda *found: found)
    cache, _, _, (x, routing) = model(
        chunk.tokens, positions, mask, state[0], spec, run, chunk.lengths
    )
    found = Routed(x, routing.ids, routing.weights)
    return steps.StepResult((cache, found), experts, None, None)


def outputs_of(model: Model, layer: int, text: Routed, tier: str = "bf16") -> np.ndarray:
    """float32[N, E, D]: every expert's output on every token of a text."""
    num_experts = model.config.num_experts
    rows = slice(layer * num_experts, (layer + 1) * num_experts)
    gate_up, down = (stack[rows] for stack in model.experts[tier])
    return np.asarray(_outputs(gate_up, down, jnp.asarray(text.x[layer])))


@jax.jit
def _outputs(gate_up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
    hidden = gated(jnp.einsum("nd,ekd->nek", x, gate_up))
    return jnp.einsum("nef,edf->ned", hidden, down)


def means_of(outputs: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """float64[E, D]: of each expert on the tokens that chose it, by squared weight."""
    squared = _by_expert(ids, weights, outputs.shape[1]) ** 2
    sums = np.einsum("ne,ned->ed", squared, outputs.astype(np.float64), optimize=True)
    return sums / np.maximum(squared.sum(0), 1e-30)[:, None]


def _by_expert(ids: np.ndarray, weights: np.ndarray, num_experts: int) -> np.ndarray:
    """float64[N, E]: the weight of each expert, 0 where it is not chosen."""
    found = np.zeros((len(ids), num_experts))
    np.put_along_axis(found, ids, weights, axis=1)
    return found


def _gram(outputs: np.ndarray) -> np.ndarray:
    return (outputs @ outputs.swapaxes(1, 2)).astype(np.float64)


def products_of(outputs: np.ndarray, low: np.ndarray, means: np.ndarray) -> Products:
    """Products of outputs float32[N, E, D], those in INT2, and the means float64[E, D]."""
    with_mean = np.einsum("ned,ed->ne", outputs, means)
    return Products(_gram(outputs), with_mean, np.square(outputs - low).sum(-1, dtype=np.float64))


def fit(outputs: np.ndarray, ids: np.ndarray, weights: np.ndarray, means: np.ndarray) -> Fitted:
    """Fits the calibration text's outputs float32[N, E, D]."""
    gram = _gram(outputs)
    num_experts = outputs.shape[1]
    chosen = _by_expert(ids, weights, num_experts)
    norms = np.sqrt(np.maximum(np.einsum("nee->ne", gram), 1e-30))
    cosines = np.zeros((num_experts, num_experts))
    grams = np.zeros((num_experts, num_experts, num_experts))
    for expert in range(num_experts):
        tokens = np.flatnonzero((ids == expert).any(1))
        if not len(tokens):
            continue
        grams[expert] = np.einsum("n,nab->ab", chosen[tokens, expert] ** 2, gram[tokens])
        own = norms[tokens, expert]
        cosine = gram[tokens, expert] / (norms[tokens] * own[:, None])
        cosines[expert] = cosine.mean(0)
    counts = np.bincount(ids.ravel(), minlength=num_experts)
    return Fitted(counts, grams, cosines, np.square(means).sum(1))


def squared_errors(
    fitted: Fitted, products: Products, ids: np.ndarray, weights: np.ndarray, slots: int
) -> dict[str, float]:
    """Squared errors of one layer by stand-in; the `slots` experts of most tokens are resident."""
    order = np.argsort(-fitted.counts, kind="stable")
    resident = np.zeros(len(order), bool)
    resident[order[:slots]] = True
    kinds: dict[str, Callable[..., float]] = {
        LEAVING_OUT: lambda **at: at["gram"][at["of"], at["of"]],
        "random": _random,
        "buddy": functools.partial(_buddy, fitted, gain=lambda cosine: 1.0),
        "buddy, by its cosine": functools.partial(_buddy, fitted, gain=lambda c: max(c, 0.0)),
        "buddy, least squares": functools.partial(_least_squares, fitted, joint=False),
        "buddy and the token's others": functools.partial(_least_squares, fitted, joint=True),
        "its mean output": functools.partial(_mean, fitted),
        f"best resident, {HINDSIGHT}": _best,
        f"all residents, {HINDSIGHT}": functools.partial(_all, resident),
        "itself in INT2": lambda **at: at["low"],
    }
    total = dict.fromkeys(kinds, 0.0)
    for token, (chosen, share) in enumerate(zip(ids, weights, strict=True)):
        absent = np.flatnonzero(~resident[chosen])
        if not len(absent):
            continue
        at = absent[np.argmin(share[absent])]
        of, others = chosen[at], np.delete(chosen, at)
        free = resident.copy()
        free[others] = False
        given: dict[str, Any] = {
            "of": of, "others": others, "candidates": np.flatnonzero(free),
            "gram": products.gram[token], "with_mean": products.with_mean[token, of],
            "low": products.low[token, of],
        }  # fmt: skip
        for kind, error in kinds.items():
            total[kind] += float(share[at]) ** 2 * error(**given)
    return total


def _error(gram: np.ndarray, of: int, by: np.ndarray, gains: np.ndarray) -> float:
    """|f_of - sum of gains f_by|^2."""
    return gram[of, of] - 2 * gains @ gram[by, of] + gains @ gram[np.ix_(by, by)] @ gains


def _random(*, gram: np.ndarray, of: int, candidates: np.ndarray, **_: Any) -> float:
    """The mean over the residents that the token has not chosen."""
    own = gram[candidates, candidates] - 2 * gram[candidates, of]
    return gram[of, of] + own.mean()


def _buddy(
    fitted: Fitted, *, gram: np.ndarray, of: int, candidates: np.ndarray,
    gain: Callable[[float], float], **_: Any,
) -> float:  # fmt: skip
    """The resident whose outputs are most like its own."""
    best = candidates[np.argmax(fitted.cosine[of, candidates])]
    return _error(gram, of, np.array([best]), np.array([gain(fitted.cosine[of, best])]))


def _least_squares(
    fitted: Fitted, *, gram: np.ndarray, of: int, others: np.ndarray, candidates: np.ndarray,
    joint: bool, **_: Any,
) -> float:  # fmt: skip
    """The resident that would have explained most, with the gain that would have."""
    known = fitted.gram[of]
    diagonal = np.maximum(known[candidates, candidates], 1e-30)
    best = candidates[np.argmax(known[of, candidates] ** 2 / diagonal)]
    by = np.array([*others, best]) if joint else np.array([best])
    ridge = _RIDGE * np.trace(known) / len(known) + 1e-30
    gains = np.linalg.solve(known[np.ix_(by, by)] + ridge * np.eye(len(by)), known[by, of])
    return _error(gram, of, by, gains)


def _mean(fitted: Fitted, *, gram: np.ndarray, of: int, with_mean: float, **_: Any) -> float:
    """A vector that is kept in the expert's place."""
    return gram[of, of] - 2 * with_mean + fitted.mean_squared[of]


def _best(*, gram: np.ndarray, of: int, candidates: np.ndarray, **_: Any) -> float:
    """One resident that the token has not chosen."""
    explained = gram[candidates, of] ** 2 / np.maximum(gram[candidates, candidates], 1e-30)
    return gram[of, of] - explained.max()


def _all(resident: np.ndarray, *, gram: np.ndarray, of: int, **_: Any) -> float:
    by = np.flatnonzero(resident)
    gains = np.linalg.lstsq(gram[np.ix_(by, by)], gram[by, of], rcond=1e-10)[0]
    return max(0.0, _error(gram, of, by, gains))
