"""Routing for models of random weights: made up with a stated skew, or replayed from a trace.

Logits. Of a layer's E experts each has a rank r; a token's logit for it is -s log r plus a normal
draw of its own, so that popularity is like Zipf's law and any expert may be chosen. At s = 0.85 and
E = 128, A = 8 LRU caches of 8, 24, 48 and 80 slots hit 37, 72, 89 and 96 %, within two points of
the published curve of Qwen3-30B-A3B (`QWEN3_HIT_RATES`; measured by
`tests/made_up_routing_test.py`). The curve does not say how much of it is lasting popularity and
how much recency: here all of it is popularity, the hottest 32 of 128 are chosen 87 times in 100,
and experts are together as often as their popularity says. Mixtral's experts are drawn evenly
(s = 0), the hardest case, for which LRU caches of C of 8 slots hit C / 8.

Probabilities. The softmax of the logits at a temperature, found by bisection, at which the chosen
weights, divided by their sum, begin on average with 0.65 (Mixtral, top 2: 0.65 and 0.35) or 0.25
(Qwen3, top 8); what is not chosen shares the rest. The chosen experts are the top A of the
probabilities, always.

Shifts. Every N steps a share of a layer's experts exchange their ranks among each other, each layer
at a time of its own, so that promotions never come to an end. The sequences of a batch are of one
workload: they share the ranks and draw on their own.

Predictions. What the layer before says of a step is its probabilities, in which each chosen expert
keeps its place with the probability `recall`, else changes places with one that is not chosen.
"""

import dataclasses
import functools

import numpy as np

from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.routing.trace import DECODE, Trace, replay_of_trace

# Of 128 experts a layer, slots under LRU and the share of hits: a published curve of Qwen3-30B-A3B.
QWEN3_HIT_RATES = {8: 0.37, 24: 0.74, 48: 0.89, 80: 0.96}

# Of shapes whose hit rates or shares are published: what is drawn with this exponent has them (see
# above). Nothing is published of the others, which a benchmark draws evenly and says so.
EXPONENTS = {"Qwen3-30B-A3B": 0.85}

_TOP_SHARES = {2: 0.65, 8: 0.25}  # by A, of the weights' sum, the likeliest expert's; mean

PLACES = 512  # tokens that the temperature is found on

# Steps after which what is replayed begins again, and tokens in them at most.
MOST_STEPS, LEAST_STEPS, MOST_TOKENS = 256, 32, 2048

SHIFT_SHARE = 0.25  # of a layer's experts, which exchange ranks in a shift

_CHOSEN_MASS = 0.9  # of a softmax that a trace of chosen experts stands for


@dataclasses.dataclass(frozen=True)
class Workload:
    """Router outputs of S steps of M layers and B sequences.

    Invariants: `ids` are the top A of `probabilities`, by falling probability, none twice.
    """

    ids: np.ndarray  # int32[S, M, B, A]
    probabilities: np.ndarray  # float32[S, M, B, E]
    # float32[S, M, B, E], as the layer before expects them; of layer 0 nobody asks
    predicted: np.ndarray
    num_shifts: int  # exchanges of ranks, over all layers
    about: str = ""  # where the choices are from, for people
    # float32[M, E], -s log r of the experts' ranks before any shift; None: profiles are of `ids`
    popularity: np.ndarray | None = None
    seed: int = 0

    @property
    def _num_experts(self) -> int:
        """E."""
        return self.probabilities.shape[-1]

    @functools.cached_property
    def _profiled(self) -> np.ndarray:
        """int32[S, M, B, A], chosen in other steps of the same popularity."""
        if self.popularity is None:
            return self.ids
        rng, width = np.random.default_rng((self.seed, 1)), self.ids.shape[-1]
        logits = rng.standard_normal(self.probabilities.shape, np.float32)
        logits += self.popularity[:, None]
        return np.argpartition(-logits, width - 1, axis=-1)[..., :width].astype(np.int32)

    def expected(self, width: int) -> np.ndarray:
        """int32[S, M, t], the likeliest by `predicted`, summed over the sequences (DyMoE eq. 8)."""
        mass = self.predicted.sum(axis=2)
        return np.argsort(-mass, axis=-1, kind="stable")[..., :width].astype(np.int32)

    def activations(self) -> np.ndarray:
        """int64[M, E], times that each expert was chosen, by `_profiled`."""
        layers = np.moveaxis(self._profiled, 1, 0)
        return np.stack(
            [np.bincount(ids.reshape(-1), minlength=self._num_experts) for ids in layers]
        )

    def coactivations(self) -> np.ndarray:
        """float64[M, E, E], tokens of `_profiled` that chose both, 0 for i = j (BuddyMoE eq. 4)."""
        counts = []
        # A layer at a time: marks of all are gigabytes.
        for ids in np.moveaxis(self._profiled, 1, 0):
            tokens = ids.reshape(-1, ids.shape[-1])
            marks = np.zeros((len(tokens), self._num_experts), np.float32)
            np.put_along_axis(marks, tokens, 1, axis=1)
            counts.append((marks.T @ marks).astype(np.float64))
        return np.stack(counts) * (1 - np.eye(self._num_experts))


def _num_steps(batch: int) -> int:
    """S of a workload for so many sequences."""
    return max(LEAST_STEPS, min(MOST_STEPS, MOST_TOKENS // batch))


def with_skew(
    config: ModelConfig,
    batch: int,
    *,
    shape: str,  # its name, which says what skew is known of it
    exponent: float | None,  # s; None: the shape's of `EXPONENTS`, else 0
    recall: float,  # share of the needed experts that look-ahead expects
    seed: int,
    shift_every: int = 0,  # N, steps between the shifts of a layer; 0: ranks stay
) -> Workload:
    """Made up, popularity like Zipf's law (the head of this file says how)."""
    why = "as asked"
    if exponent is None:
        exponent = EXPONENTS.get(shape, 0.0)
        why = f"{shape}'s own" if exponent else f"no skew of {shape} is published"
    steps = max(_num_steps(batch), 2 * shift_every)
    work = make_workload(
        config, num_steps=steps, batch=batch, exponent=exponent, shift_every=shift_every,
        recall=recall, seed=seed,
    )  # fmt: skip
    popularity = f"popularity of rank r as r^-{exponent:g}" if exponent else "even popularity"
    if shift_every:
        popularity += f", {SHIFT_SHARE:.0%} of a layer's experts in turn every {shift_every} steps"
    how = f"{popularity} ({why}), {steps} steps over and over{_said(recall)}"
    return dataclasses.replace(work, about=f"made up, {how}")


def of_trace(
    config: ModelConfig, trace: Trace, batch: int, *, recall: float, seed: int, name: str
) -> Workload:
    """Replays the decoded tokens of a trace, each sequence from another place of it.

    A trace of another number of experts is scaled (`_scaled_trace`), and its gates
    are made up; layers that it lacks are its layers again, from another place.
    """
    ids, gates = _scaled(config, trace, name)
    steps = _num_steps(batch)
    used, num_experts = min(steps, len(ids)), config.num_experts
    ids, gates = (_spread(of, batch, steps) for of in (ids, gates))
    rest = (1 - _CHOSEN_MASS) / max(1, num_experts - ids.shape[-1])
    probabilities = np.full((*ids.shape[:-1], num_experts), rest, np.float32)
    # A gate of 0 is a chosen expert all the same: not below what is not chosen.
    np.put_along_axis(probabilities, ids, _CHOSEN_MASS * gates + rest, axis=-1)
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    predicted = _predictions(np.random.default_rng(seed), probabilities, ids, recall)
    is_own = (trace.num_experts, trace.width) == (config.num_experts, config.experts_per_token)
    how = "its own gates" if is_own else f"scaled from {trace.num_experts} experts, gates made up"
    about = f"trace {name}, {how}, {used} steps over and over{_said(recall)}"
    return Workload(ids, probabilities, predicted, 0, about)


def make_workload(
    config: ModelConfig,
    *,
    num_steps: int,
    batch: int,
    exponent: float = 0.0,  # s; 0: experts are drawn evenly
    shift_every: int = 0,  # N, steps between the shifts of a layer; 0: ranks stay
    shift_share: float = SHIFT_SHARE,  # of the experts that exchange ranks
    recall: float = 0.85,  # the probability that a needed expert is expected
    seed: int = 0,
) -> Workload:
    """A workload of a model's shape."""
    num_experts, width = config.num_experts, config.experts_per_token
    num_layers = len(config.moe_layers)
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_layers, batch, num_experts)
    popularity, num_shifts = _popularity(
        rng, num_steps, num_layers, num_experts, exponent, shift_every, shift_share
    )
    logits = rng.standard_normal(shape, np.float32)
    logits += popularity[:, :, None]
    first = popularity[0].copy()
    del popularity
    scale = _scale(logits.reshape(-1, num_experts)[:PLACES], width)
    logits *= np.float32(scale)
    logits -= logits.max(axis=-1, keepdims=True)
    probabilities = np.exp(logits, out=logits)
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    order = np.argpartition(-probabilities, width - 1, axis=-1)[..., :width]
    some = np.take_along_axis(probabilities, order, axis=-1)
    ids = np.take_along_axis(order, np.argsort(-some, axis=-1, kind="stable"), axis=-1)
    predicted = _predictions(rng, probabilities, ids, recall)
    ids = ids.astype(np.int32)
    return Workload(ids, probabilities, predicted, num_shifts, popularity=first, seed=seed)


def _scaled_trace(
    trace: np.ndarray, num_experts: int, *, num_layers: int, of_experts: int, width: int
) -> np.ndarray:
    """A small model's routing in the shape of a large one; how experts recur stays as it is.

    More experts than the small model has: several copies of it side by side, each reading the text
    from another place, of whose experts the likeliest few are taken (of the first copies one more,
    where they do not divide evenly). Fewer: groups of its experts
    stand for one, and a token takes those of its likeliest ones. Layers beyond those of the small
    model are its layers again, from another place in the text.

    Args:
      trace: int32[steps, m, a], by falling probability.
      num_experts: e of the small model.
      of_experts: E; a multiple of e, or a divisor.

    Returns:
      int32[steps, M, A], no expert twice in a token.

    Raises:
      ValueError: the numbers of experts do not divide, or a copy would have no expert to take.
    """
    steps, layers, taken = trace.shape
    copies, group = max(1, of_experts // num_experts), max(1, num_experts // of_experts)
    shares = [width // copies + (copy < width % copies) for copy in range(copies)]
    if copies * num_experts != of_experts * group or min(shares) < 1 or max(shares) > taken:
        raise ValueError(f"{taken} of {num_experts} experts do not make {width} of {of_experts}")
    firsts = np.cumsum([0, *shares])
    num_places = copies * -(-num_layers // layers)
    scaled = np.zeros((steps, num_layers, width), trace.dtype)
    for layer in range(num_layers):
        for copy, share in enumerate(shares):
            place = (layer // layers * copies + copy) * steps // num_places
            ids = np.roll(trace[:, layer % layers], -place, axis=0)
            if group > 1:
                ids = _first_distinct(ids // group, share, of_experts)
            taken_here = slice(firsts[copy], firsts[copy + 1])
            scaled[:, layer, taken_here] = copy * num_experts + ids[:, :share]
    return scaled


def _predictions(
    rng: np.random.Generator, probabilities: np.ndarray, ids: np.ndarray, recall: float
) -> np.ndarray:
    """Probabilities in which some of the chosen experts have changed places with others."""
    predicted, width = probabilities.copy(), ids.shape[-1]
    num_others = min(width, probabilities.shape[-1] - width)
    # Of those that are not chosen, some at random: none of them twice.
    draws = rng.random(probabilities.shape, np.float32)
    np.put_along_axis(draws, ids, 2.0, axis=-1)
    others = np.argpartition(draws, num_others - 1, axis=-1)[..., :num_others]
    for rank in range(num_others):
        mine, other = ids[..., rank : rank + 1], others[..., rank : rank + 1]
        leaves = rng.random(mine.shape) >= recall
        of_mine = np.take_along_axis(predicted, mine, axis=-1)
        of_other = np.take_along_axis(predicted, other, axis=-1)
        np.put_along_axis(predicted, mine, np.where(leaves, of_other, of_mine), axis=-1)
        np.put_along_axis(predicted, other, np.where(leaves, of_mine, of_other), axis=-1)
    return predicted


def _popularity(
    rng: np.random.Generator, num_steps: int, num_layers: int, num_experts: int,
    exponent: float, every: int, share: float,
) -> tuple[np.ndarray, int]:  # fmt: skip
    """float32[S, M, E], -s log r of each expert's rank, and the number of shifts."""
    of_rank = -exponent * np.log(np.arange(1, num_experts + 1))
    found = np.zeros((num_steps, num_layers, num_experts), np.float32)
    moved, num_shifts = max(2, round(share * num_experts)), 0
    for layer in range(num_layers):
        ranks = rng.permutation(num_experts)
        # Layers shift one after another, the first one after a whole period.
        first = every + layer * every // num_layers if every else num_steps
        start = 0
        for end in [*range(first, num_steps, every or num_steps), num_steps]:
            found[start:end, layer] = of_rank[ranks]
            start = end
            if end < num_steps:
                chosen = rng.permutation(num_experts)[:moved]
                ranks[chosen] = ranks[rng.permutation(chosen)]
                num_shifts += 1
    return found, num_shifts


def _scale(logits: np.ndarray, width: int) -> float:
    """Factor of the logits at which the likeliest chosen expert has its share."""
    top = -np.sort(-logits.astype(np.float64), axis=-1)[:, :width]
    wanted = _TOP_SHARES.get(width, 0.5 + 0.5 / width)
    low, high = 0.0, 64.0
    for _ in range(50):
        middle = (low + high) / 2
        weights = np.exp(middle * (top - top[:, :1]))
        reached = np.mean(weights[:, 0] / weights.sum(axis=1)) > wanted
        low, high = (low, middle) if reached else (middle, high)
    return high


def _first_distinct(ids: np.ndarray, width: int, num_experts: int) -> np.ndarray:
    """int32[steps, width], the first different numbers of each row; the next ones where too few."""
    found = np.zeros((len(ids), width), np.int32)
    for row, numbers in enumerate(ids):
        start = int(numbers[0])
        rest = ((start + i) % num_experts for i in range(num_experts))
        found[row] = list(dict.fromkeys([*map(int, numbers), *rest]))[:width]
    return found


def _scaled(config: ModelConfig, trace: Trace, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 and gates float32 [S, M, A] of a trace's first decoded sequence, for the shape."""
    is_decoded = trace.phase == DECODE
    first = int(trace.sequence[is_decoded][0]) if is_decoded.any() else None
    ids = replay_of_trace(trace, first)
    layers, experts, width = len(config.moe_layers), config.num_experts, config.experts_per_token
    if (trace.num_experts, trace.width) == (experts, width):
        gates = trace.weights[is_decoded & (trace.sequence == first)].astype(np.float32)
        order = np.argsort(-gates, axis=-1, kind="stable")
        pairs = (np.take_along_axis(rows, order, axis=-1) for rows in (ids, gates))
        sizes = {"num_layers": layers, "of_experts": experts, "width": width}
        ids, gates = (_scaled_trace(rows, experts, **sizes) for rows in pairs)
        return ids, gates / gates.sum(axis=-1, keepdims=True)
    try:
        ids = _scaled_trace(
            ids, trace.num_experts, num_layers=layers, of_experts=experts, width=width
        )
    except ValueError as error:
        raise MoejaxError(f"trace {name} does not suit the shape: {error}") from error
    falling = np.arange(width, 0, -1, dtype=np.float32)
    return ids, np.broadcast_to(falling / falling.sum(), ids.shape)


def _spread(rows: np.ndarray, batch: int, steps: int) -> np.ndarray:
    """[S, M, B, A] of [s, M, A]: the sequences of a batch read it from different places."""
    shape = (steps, *rows.shape[1:])
    places = [np.roll(rows, -(b * len(rows) // batch), axis=0) for b in range(batch)]
    return np.stack([np.resize(place, shape) for place in places], axis=2)


def _said(recall: float) -> str:
    return f"; look-ahead expects {100 * recall:g} % of what is needed"
