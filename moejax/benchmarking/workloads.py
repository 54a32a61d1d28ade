"""Routing with gate probabilities, made up: what a trained router might say of every step.

Logits. Of a layer's E experts each has a rank r; a token's logit for it is -s log r plus a normal
draw of its own, so that popularity is like Zipf's law and any expert may be chosen. At s = 0.85 and
E = 128, A = 8 LRU caches of 8, 24, 48 and 80 slots hit 37, 72, 89 and 96 %, within two points of
the published curve of Qwen3-30B-A3B (`synthetic_traces.QWEN3_HIT_RATES`; measured by
`tests/bench_policies_test.py`). The curve does not say how much of it is lasting popularity and how
much recency: here all of it is popularity, the hottest 32 of 128 are chosen 87 times in 100, and
experts are together as often as their popularity says. Mixtral's experts are drawn evenly (s = 0),
the hardest case, for which LRU caches of C of 8 slots hit C / 8.

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
from typing import Any

import numpy as np

from moejax.models.config import ModelConfig

# Of shapes whose hit rates or shares are published: what is drawn with this exponent has them (see
# above). Nothing is published of the others, which a benchmark draws evenly and says so.
EXPONENTS = {"Qwen3-30B-A3B": 0.85}
TOP_SHARES = {2: 0.65, 8: 0.25}  # by A, of the weights' sum, the likeliest expert's; mean
PLACES = 512  # tokens that the temperature is found on


@dataclasses.dataclass(frozen=True)
class Workload:
    """What the routers say in S steps of M layers and B sequences.

    Invariants: `ids` are the top A of `probabilities`, by falling probability, none twice.

    Attributes:
      ids: int32[S, M, B, A].
      probabilities: float32[S, M, B, E].
      predicted: float32[S, M, B, E], as the layer before expects them; of layer 0 nobody asks.
      num_shifts: exchanges of ranks, over all layers.
    """

    ids: np.ndarray
    probabilities: np.ndarray
    predicted: np.ndarray
    num_shifts: int

    @property
    def num_experts(self) -> int:
        """E."""
        return self.probabilities.shape[-1]

    @property
    def distinct(self) -> float:
        """Experts that a layer's tokens choose in a step, the mean."""
        chosen = (self.ids[..., None] == np.arange(self.num_experts)).any(axis=(2, 3))
        return float(chosen.sum(axis=-1).mean())

    def expected(self, width: int) -> np.ndarray:
        """int32[S, M, t], the likeliest by `predicted`, summed over the sequences (DyMoE eq. 8)."""
        mass = self.predicted.sum(axis=2)
        return np.argsort(-mass, axis=-1, kind="stable")[..., :width].astype(np.int32)

    def activations(self, steps: slice = slice(None)) -> np.ndarray:
        """int64[M, E], times that each expert was chosen."""
        ids = self.ids[steps]
        return np.stack(
            [
                np.bincount(ids[:, layer].reshape(-1), minlength=self.num_experts)
                for layer in range(ids.shape[1])
            ]
        )

    def hottest(self, count: int, steps: slice = slice(None)) -> np.ndarray:
        """int32[M, count], those chosen most, by rising number."""
        order = np.argsort(-self.activations(steps), axis=1, kind="stable")
        return np.sort(order[:, :count], axis=1).astype(np.int32)

    def coactivations(self) -> np.ndarray:
        """float64[M, E, E], tokens that chose both; 0 on the diagonal (BuddyMoE eq. 4's M)."""
        num_layers, num_experts = self.ids.shape[1], self.num_experts
        counts = np.zeros((num_layers, num_experts, num_experts))
        for layer in range(num_layers):
            tokens = self.ids[:, layer].reshape(-1, self.ids.shape[-1])
            marks = np.zeros((len(tokens), num_experts), np.float32)
            np.put_along_axis(marks, tokens.astype(np.int64), 1, axis=1)
            counts[layer] = marks.T @ marks
            np.fill_diagonal(counts[layer], 0)
        return counts


def make_workload(
    config: ModelConfig,
    *,
    num_steps: int,
    batch: int,
    exponent: float = 0.0,
    shift_every: int = 0,
    shift_share: float = 0.5,
    recall: float = 0.85,
    seed: int = 0,
) -> Workload:
    """A workload of a model's shape.

    Args:
      config: of the model.
      num_steps: S.
      batch: B.
      exponent: s; 0: experts are drawn evenly.
      shift_every: N, steps between the shifts of a layer; 0: ranks stay.
      shift_share: of the experts that exchange ranks.
      recall: the probability that a needed expert is expected.
      seed: of all draws.
    """
    num_experts, width = config.num_experts, config.experts_per_token
    num_layers = len(config.moe_layers)
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_layers, batch, num_experts)
    popularity, num_shifts = _popularity(
        rng, num_steps, num_layers, num_experts, exponent, shift_every, shift_share
    )
    logits = rng.standard_normal(shape, np.float32)
    logits += popularity[:, :, None]
    del popularity
    scale = _scale(logits.reshape(-1, num_experts)[:PLACES], width)
    logits *= np.float32(scale)
    logits -= logits.max(axis=-1, keepdims=True)
    probabilities = np.exp(logits, out=logits)
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    order = np.argpartition(-probabilities, width - 1, axis=-1)[..., :width]
    some = np.take_along_axis(probabilities, order, axis=-1)
    ids = np.take_along_axis(order, np.argsort(-some, axis=-1, kind="stable"), axis=-1)
    predicted = predictions(rng, probabilities, ids, recall)
    return Workload(ids.astype(np.int32), probabilities, predicted, num_shifts)


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
    """What logits are multiplied by so that the likeliest of the chosen has its share."""
    top = -np.sort(-logits.astype(np.float64), axis=-1)[:, :width]
    wanted = TOP_SHARES.get(width, 0.5 + 0.5 / width)
    low, high = 0.0, 64.0
    for _ in range(50):
        middle = (low + high) / 2
        weights = np.exp(middle * (top - top[:, :1]))
        reached = np.mean(weights[:, 0] / weights.sum(axis=1)) > wanted
        low, high = (low, middle) if reached else (middle, high)
    return high


def predictions(
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


def one_miss_workload(
    config: ModelConfig, *, num_steps: int, slots: int, misses: bool, hits_ahead: bool = True
) -> Workload:
    """Of one sequence: A - 1 experts of the first `slots` stay, the last one is what is asked.

    With `misses` it is another one in each step, of those that no LRU cache of so many slots still
    holds, else it stays too. So a step's time over that without misses is what a miss costs.

    Args:
      config: of the model; more than twice `slots` - A + 1 experts, or fewer slots.
      num_steps: S.
      slots: of a layer, which hold the first experts before any step.
      misses: whether the last expert misses in every layer.
      hits_ahead: whether it is expected; else the prediction names one that is not needed.

    Raises:
      ValueError: a cache of so many slots would hold the last expert again.
    """
    num_experts, width = config.num_experts, config.experts_per_token
    num_layers, outside = len(config.moe_layers), config.num_experts - slots
    if misses and outside <= slots - width + 1:
        raise ValueError(f"{outside} experts in turn do not miss in {slots} slots")
    step = np.arange(num_steps)[:, None] + np.arange(num_layers)[None]
    ids = np.tile(np.arange(width, dtype=np.int32), (num_steps, num_layers, 1, 1))
    # What is brought in vain comes from the other half: the cache sees as many experts in turn.
    turn = outside if hits_ahead else outside // 2
    if misses:
        ids[:, :, 0, -1] = slots + step % turn
    weights = 0.9 * (np.arange(width, 0, -1) * 2 / (width * (width + 1)))
    probabilities = np.full((num_steps, num_layers, 1, num_experts), 1e-6, np.float32)
    np.put_along_axis(probabilities, ids, weights.astype(np.float32), axis=-1)
    predicted = probabilities.copy()
    if misses:  # nothing but the last expert is expected: the others are there
        predicted[...] = 1e-6
        wrong = slots + turn + step % max(1, outside - turn)
        named = ids[:, :, 0, -1] if hits_ahead else wrong
        np.put_along_axis(predicted, named[:, :, None, None], 0.9, axis=-1)
    return Workload(ids, probabilities, predicted, 0)


def describe(workload: Workload) -> dict[str, Any]:
    """Facts of a workload, to be printed beside what was measured on it."""
    top = np.take_along_axis(workload.probabilities, workload.ids, axis=-1)
    weights = top / top.sum(axis=-1, keepdims=True)
    return {
        "distinct_experts": workload.distinct,
        "top_weight": float(weights[..., 0].mean()),
        "chosen_mass": float(top.sum(axis=-1).mean()),
        "shifts": workload.num_shifts,
    }
