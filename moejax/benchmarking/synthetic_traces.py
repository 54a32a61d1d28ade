"""Routing made up: of given hit rates under LRU, from stack distances; of a small model, scaled."""

from collections.abc import Mapping

import numpy as np

from moejax.routing.trace import DECODE, Trace, id_dtype

# Of 128 experts a layer, slots under LRU and the share of hits: a published curve of Qwen3-30B-A3B.
QWEN3_HIT_RATES = {8: 0.37, 24: 0.74, 48: 0.89, 80: 0.96}
# By the name of a shape; of the others nothing is published, and experts are drawn evenly.
HIT_RATES: Mapping[str, Mapping[int, float]] = {"Qwen3-30B-A3B": QWEN3_HIT_RATES}


def lru_trace(
    hit_rates: Mapping[int, float],
    *,
    num_steps: int,
    num_layers: int,
    num_experts: int,
    width: int,
    seed: int = 0,
) -> np.ndarray:
    """Experts of one token a step, such that LRU caches hit as often as asked.

    An expert's stack distance is the number of others that were used since its last use. Each step
    takes `width` of the distances, position d with the probability that the curve's slope says
    there (systematic sampling, so that the shares hold exactly in the mean).

    Args:
      hit_rates: slots to the share of hits, both rising; all experts hit always.
      num_steps: of the trace.
      num_layers: M, whose traces are independent.
      num_experts: E.
      width: A, experts a token.
      seed: of the draws.

    Returns:
      int32[num_steps, M, A], no expert twice in a token.

    Raises:
      ValueError: a slope that `width` experts a step cannot have.
    """
    chosen = np.zeros(num_experts)
    before, reached = 0, 0.0
    for slots, share in [*sorted(hit_rates.items()), (num_experts, 1.0)]:
        chosen[before:slots] = width * (share - reached) / max(1, slots - before)
        before, reached = slots, share
    if not np.all((chosen >= 0) & (chosen <= 1)):
        raise ValueError(f"{width} experts a step cannot have hit rates {dict(hit_rates)}")
    rng = np.random.default_rng(seed)
    trace = np.zeros((num_steps, num_layers, width), np.int32)
    for layer in range(num_layers):
        stack = rng.permutation(num_experts)  # the latest use first
        for step in range(num_steps):
            order = rng.permutation(num_experts)
            edges = np.cumsum(chosen[order])
            edges[-1] = width  # what rounding left of it
            places = order[np.searchsorted(edges, rng.uniform() + np.arange(width), side="right")]
            trace[step, layer] = stack[places]
            stack = np.concatenate([stack[places], np.delete(stack, places)])
    return trace


def scaled_trace(
    trace: np.ndarray, num_experts: int, *, num_layers: int, of_experts: int, width: int
) -> np.ndarray:
    """A small model's routing in the shape of a large one; how experts recur stays as it is.

    More experts than the small model has: several copies of it side by side, each reading the text
    from another place, of whose experts the likeliest few are taken. Fewer: groups of its experts
    stand for one, and a token takes those of its likeliest ones. Layers beyond those of the small
    model are its layers again, from another place in the text.

    Args:
      trace: int32[steps, m, a], by falling probability.
      num_experts: e of the small model.
      num_layers: M.
      of_experts: E; a multiple of e, or a divisor.
      width: A.

    Returns:
      int32[steps, M, A], no expert twice in a token.

    Raises:
      ValueError: the numbers of experts do not divide.
    """
    steps, layers, taken = trace.shape
    copies, group = max(1, of_experts // num_experts), max(1, num_experts // of_experts)
    share = width // copies
    if copies * num_experts != of_experts * group or share * copies != width or share > taken:
        raise ValueError(f"{taken} of {num_experts} experts do not make {width} of {of_experts}")
    num_places = copies * -(-num_layers // layers)
    scaled = np.zeros((steps, num_layers, width), np.int32)
    for layer in range(num_layers):
        for copy in range(copies):
            place = (layer // layers * copies + copy) * steps // num_places
            ids = np.roll(trace[:, layer % layers], -place, axis=0)
            if group > 1:
                ids = _first_distinct(ids // group, share, of_experts)
            scaled[:, layer, copy * share : (copy + 1) * share] = (
                copy * num_experts + ids[:, :share]
            )
    return scaled


def _first_distinct(ids: np.ndarray, width: int, num_experts: int) -> np.ndarray:
    """int32[steps, width], the first different numbers of each row; the next ones where too few."""
    found = np.zeros((len(ids), width), np.int32)
    for row, numbers in enumerate(ids):
        start = int(numbers[0])
        rest = ((start + i) % num_experts for i in range(num_experts))
        found[row] = list(dict.fromkeys([*map(int, numbers), *rest]))[:width]
    return found


def logits_of(trace: np.ndarray, num_experts: int) -> np.ndarray:
    """float32[..., E], products of routers that choose int32[..., A], in this order."""
    logits = np.full((*trace.shape[:-1], num_experts), -30.0, np.float32)
    places = np.linspace(0, -1, trace.shape[-1], dtype=np.float32)
    np.put_along_axis(logits, trace.astype(np.int64), np.broadcast_to(places, trace.shape), axis=-1)
    return logits


def expectations(
    trace: np.ndarray, num_experts: int, width: int, recall: float, seed: int = 0
) -> np.ndarray:
    """What look-ahead is to say of a trace: each expert with a probability, else another one.

    Args:
      trace: int32[steps, M, A].
      num_experts: E.
      width: t, experts that are expected of a layer; of a token's A the first min(t, A) are tried.
      recall: the probability.
      seed: of the draws.

    Returns:
      int32[steps, M, t], no expert twice in a layer.
    """
    rng = np.random.default_rng(seed)
    tried = min(width, trace.shape[2])
    needed = (trace[..., None] == np.arange(num_experts)).any(axis=2)
    # Of all others in random order the first ones stand in for those that are not expected.
    others = np.where(needed, 2.0, rng.random(needed.shape)).argsort(axis=-1)[..., :width]
    right = rng.random((*trace.shape[:2], width)) < recall
    right[..., tried:] = False
    true = np.concatenate([trace[..., :tried], others[..., : width - tried]], axis=-1)
    return np.where(right, true, others).astype(np.int32)


def lru_hit_rate(trace: np.ndarray, slots: int, num_experts: int) -> float:
    """Of int32[steps, M, A] on caches of `slots` experts a layer, without the first tenth."""
    hits = total = 0
    for layer in range(trace.shape[1]):
        last_use = np.full(num_experts, -1)
        for step, experts in enumerate(trace[:, layer]):
            held = {e for e in np.argsort(-last_use, kind="stable")[:slots] if last_use[e] >= 0}
            if step >= len(trace) // 10:
                hits += sum(int(expert in held) for expert in experts)
                total += len(experts)
            last_use[experts] = step
    return hits / total


def drifting_trace(
    *,
    num_steps: int,
    num_layers: int,
    num_experts: int,
    width: int,
    foreseen: int = 0,
    seed: int = 0,
) -> Trace:
    """A decoded sequence by routers whose tastes drift: fast to make, whole probabilities with it.

    Logits are a taste of each layer, a walk around it that halves in 200 tokens, and noise of each
    token; what is foreseen is the truth with noise.

    Args:
      num_steps: tokens, one a step.
      num_layers: M.
      num_experts: E.
      width: A.
      foreseen: P, experts foreseen of each next layer; 0: none.
      seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    taste = rng.normal(0, 1.5, (num_layers, num_experts)).astype(np.float32)
    drift = np.zeros_like(taste)
    kept = np.float32(0.5 ** (1 / 200))
    kind = id_dtype(num_experts)
    ids = np.zeros((num_steps, num_layers, width), kind)
    weights = np.zeros(ids.shape, np.float16)
    shares = np.zeros((num_steps, num_layers, num_experts), np.float16)
    guess = np.zeros((num_steps, num_layers - 1, foreseen), kind)
    expected = np.zeros(guess.shape, np.float16)
    step_size = np.float32(1.5 * (1 - kept**2) ** 0.5)
    for step in range(num_steps):
        drift = kept * drift + step_size * rng.standard_normal(taste.shape, np.float32)
        logits = taste + drift + rng.standard_normal(taste.shape, np.float32)
        found = np.exp(logits - logits.max(axis=1, keepdims=True))
        found /= found.sum(axis=1, keepdims=True)
        shares[step] = found
        ids[step], chosen = _largest(found, width)
        weights[step] = chosen / chosen.sum(axis=1, keepdims=True)
        if foreseen:
            noise = np.exp(0.3 * rng.standard_normal(taste.shape, np.float32))
            guess[step], expected[step] = _largest((found * noise)[1:], foreseen)
    count = np.arange(num_steps, dtype=np.int32)
    trace = Trace(
        num_experts=num_experts,
        step=count,
        sequence=np.zeros(num_steps, np.int32),
        position=count,
        phase=np.full(num_steps, DECODE, np.uint8),
        ids=ids,
        weights=weights,
        predicted_ids=guess if foreseen else None,
        predicted_probabilities=expected if foreseen else None,
        probabilities=shares,
    )
    trace.check()
    return trace


def _largest(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Places and values of the largest few of each row, falling."""
    found = np.argpartition(-values, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(values, found, 1), axis=1)
    found = np.take_along_axis(found, order, 1)
    return found, np.take_along_axis(values, found, 1)


def grouped_trace(trace: Trace, num_experts: int, width: int) -> Trace:
    """The decoded tokens of a trace as if groups of its experts were one expert each.

    A group's weight is the sum of its experts'; a token takes the groups of most weight, and where
    its experts are in fewer groups the next ones, with a weight of 0.

    Args:
      trace: with one token a step in decode.
      num_experts: of what it becomes; a divisor of the trace's.
      width: A, of what it becomes.

    Raises:
      ValueError: the number does not divide.
    """
    size, rest = divmod(trace.num_experts, num_experts)
    if rest:
        raise ValueError(f"{trace.num_experts} experts do not make {num_experts}")
    chosen = trace.phase == DECODE
    ids, weights = trace.ids[chosen] // size, trace.weights[chosen].astype(np.float32)
    is_group = ids[..., None] == np.arange(num_experts)
    mass = np.where(is_group, weights[..., None], 0).sum(axis=2)  # [N, M, E]
    found = np.argsort(-mass, axis=-1, kind="stable")[..., :width]
    taken = np.take_along_axis(mass, found, -1)
    rows = np.arange(len(found), dtype=np.int32)
    grouped = Trace(
        num_experts=num_experts,
        step=rows,
        sequence=np.zeros(len(rows), np.int32),
        position=rows,
        phase=np.full(len(rows), DECODE, np.uint8),
        ids=found.astype(id_dtype(num_experts)),
        weights=(taken / taken.sum(axis=-1, keepdims=True)).astype(np.float16),
    )
    grouped.check()
    return grouped
