"""BuddyMoE in plain numpy and loops, written from the paper's text and not from `moejax.policies`.

Axes: T tokens, K experts a token, E experts of a layer.
"""

import collections
import math

import numpy as np


def entropy(probabilities: np.ndarray, chosen: np.ndarray, temperature: float = 1.0) -> float:
    """Eq. 1 of one token: `probabilities` of all experts, `chosen` the ids of S(x)."""
    logits = np.log(probabilities.astype(np.float64))
    smoothed = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    p = smoothed[chosen] / smoothed[chosen].sum()
    if len(p) == 1:
        return 0.0
    return -sum(x * math.log(x) for x in p) / math.log(len(p))


def margin(probabilities: np.ndarray, chosen: np.ndarray) -> float:
    """p~_max - p~_2nd of one token, without temperature."""
    p = np.sort(probabilities[chosen].astype(np.float64) / probabilities[chosen].sum())[::-1]
    return p[0] - p[1]


def missing_share(requested: set[int], on_gpu: set[int]) -> float:
    """Eq. 2."""
    return len(requested - on_gpu) / len(requested)


def beta_of_budget(
    missing: np.ndarray, requested: np.ndarray, expert_bytes: float, budget_bytes: float
) -> float:
    """The least beta that keeps the traffic of bypassed layers within a budget (section 3.1).

    Over the steps of a trace the mean of n_cpu w over the layers with delta >= beta stays within B.

    Args:
      missing: int[steps, M], requested experts that are not on the device, without replacement.
      requested: int[steps, M], distinct experts requested.
      expert_bytes: w, of one expert.
      budget_bytes: B, of one step.

    Returns:
      beta in [0, 1], or infinity where even delta = 1 must not bypass.
    """
    delta = (missing / np.maximum(requested, 1)).reshape(-1)
    order = np.argsort(-delta, kind="stable")
    bytes_down_to = np.cumsum(missing.reshape(-1)[order]) * expert_bytes / len(missing)
    falling = delta[order]
    # All entries of one delta come together: the sum that counts is the last one of each.
    is_last = np.append(falling[1:] < falling[:-1], True)
    affordable = falling[is_last & (bytes_down_to <= budget_bytes)]
    return float(affordable[-1]) if len(affordable) else math.inf


def likely_experts(predicted: np.ndarray, width: int, count: int, *, is_prefill: bool) -> set[int]:
    """Chooses what to prefetch of the next layer (section 2.3, Figure 3), at most `count` experts.

    Of a prompt, those among the first `width` of the most tokens; in decode, those of the largest
    probability, summed over tokens.

    Args:
      predicted: [T, E], the next layer's probabilities, from what this layer knows.
    """
    votes = np.zeros(predicted.shape[1])
    for row in predicted:
        if is_prefill:
            votes[np.argsort(-row, kind="stable")[:width]] += 1
        else:
            votes += row
    falling = sorted(range(len(votes)), key=lambda e: (-votes[e], e))
    return {e for e in falling[:count] if votes[e] > 0}


class LayerSlots:
    """Slots of a layer on the GPU: a cache that evicts the least recently used expert."""

    def __init__(self, size: int):
        self.size = size
        self.last_use: dict[int, int] = {}
        self.unused: set[int] = set()  # prefetched, and not needed yet
        self.counts: collections.Counter[str] = collections.Counter()

    def prefetch(self, experts: set[int], clock: int) -> None:
        """Brings experts that are not there."""
        came = self._admit(experts - self.last_use.keys(), experts, clock)
        self.unused |= came
        self.counts.update(prefetched=len(came))

    def run(self, needed: set[int], clock: int) -> None:
        """Runs experts; those that are not there come on demand."""
        misses = needed - self.last_use.keys()
        hits = needed - misses
        self.counts.update(
            needed=len(needed), hits=len(hits), misses=len(misses),
            prefetch_hits=len(hits & self.unused),
        )  # fmt: skip
        self.unused -= hits
        self.last_use |= dict.fromkeys(hits, clock)
        came = self._admit(misses, needed, clock)
        self.counts.update(admitted=len(came), streamed=len(misses) - len(came))

    def _admit(self, coming: set[int], kept: set[int], clock: int) -> set[int]:
        victims = sorted((use, e) for e, use in self.last_use.items() if e not in kept)
        free = self.size - len(self.last_use)
        if len(coming) > free + len(victims):  # no victims, since these are not enough
            coming = set(sorted(coming)[:free])
        for _, expert in victims[: max(0, len(coming) - free)]:
            self.counts.update(evictions=1, prefetch_waste=int(expert in self.unused))
            self.unused.discard(expert)
            del self.last_use[expert]
        self.last_use |= dict.fromkeys(coming, clock)
        return coming


def coactivations(routed: list[list[int]], num_experts: int) -> np.ndarray:
    """M(i, j), tokens for which both are chosen."""
    counts = np.zeros((num_experts, num_experts))
    for chosen in routed:
        for i in chosen:
            for j in chosen:
                counts[i, j] += i != j
    return counts


def conditional(counts: np.ndarray, smoothing: float = 0.0) -> np.ndarray:
    """Eq. 4, row by row."""
    num_experts = len(counts)
    q = np.zeros((num_experts, num_experts))
    for i in range(num_experts):
        others = [j for j in range(num_experts) if j != i]
        total = sum(counts[i, j] + smoothing for j in others)
        for j in others:
            q[i, j] = (counts[i, j] + smoothing) / total if total else 0.0
    return q


def buddies(q: np.ndarray, alpha: float, max_size: int) -> list[list[int]]:
    """Eq. 5 and 6: for each pivot the shortest covering prefix, cut at `max_size`."""
    lists = []
    for i, row in enumerate(q):
        peers = sorted((j for j in range(len(row)) if j != i), key=lambda j: -row[j])
        covered, listed = 0.0, []
        for j in peers:
            if covered >= alpha - 1e-9 or row[j] == 0:
                break
            covered += row[j]
            listed.append(j)
        lists.append(listed[:max_size])
    return lists


def score(q: float, eta: float, logit: float, kappa: float, hop: float) -> float:
    """Eq. 3."""
    return q * (1 + eta * logit) * (1 - kappa * hop)


def algorithm_1(
    selected: np.ndarray,
    on_gpu: np.ndarray,
    profile: list[list[int]],
    depth: int,
    *,
    budget: int | None = None,
    may: np.ndarray | None = None,
    last_first: bool = False,
    scores: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The printed loops, with rho, a mask of pairs that may be replaced, and scores at will.

    Args:
      selected: [T, K].
      on_gpu: bool[E].
      profile: a list of buddies for each expert.
      depth: H.
      budget: rho.
      may: bool[T, K].
      last_first: ranks K..1.
      scores: [T, E, E], Psi of (token, missing expert, buddy); the largest wins, then the earliest.

    Returns:
      S', which pairs were replaced, and for which a buddy was looked for.
    """
    result = selected.copy()
    replaced, searched = np.zeros(selected.shape, bool), np.zeros(selected.shape, bool)
    for t in range(selected.shape[0]):
        used = set(selected[t].tolist())
        num_replaced = 0
        ranks = range(selected.shape[1])
        for k in reversed(ranks) if last_first else ranks:
            missing = int(result[t, k])
            if on_gpu[missing] or (may is not None and not may[t, k]):
                continue
            if budget is not None and num_replaced >= budget:
                continue
            searched[t, k] = True
            found, best = None, 0.0
            for buddy in profile[missing][:depth]:
                if not on_gpu[buddy] or buddy in used:
                    continue
                value = 1.0 if scores is None else scores[t, missing, buddy]
                if value > best:
                    found, best = buddy, value
            if found is not None:
                result[t, k] = found
                used.add(found)
                replaced[t, k] = True
                num_replaced += 1
    return result, replaced, searched
