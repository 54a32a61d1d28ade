"""Simulates which misses the host should multiply: hits of an LRU cache, by rule.

python -m scripts.studies.host_experts.rules
"""

from collections.abc import Callable, Sequence

import numpy as np
from absl import app

EXPERTS, WIDTH, LAYERS, TOKENS = 128, 8, 8, 600
SLOTS = (13, 46, 89)  # of Qwen3-30B-A3B under 3, 7 and 12 GiB
SPLIT = [round(0.7 * misses) for misses in range(WIDTH + 1)]
# Order in which misses go to the host: of their place among the router's, and when they were seen.
RULES: dict[str, Callable[..., tuple[int, ...]]] = {
    "smallest id": lambda expert, place, seen: (expert,),
    "least weight": lambda expert, place, seen: (-place,),
    "most weight": lambda expert, place, seen: (place,),
    "seen longest ago": lambda expert, place, seen: (seen, expert),
}


def routing(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A layer's experts int[T, A], of falling weight, and their weights."""
    popular = rng.permutation(np.log(1 / np.arange(1, EXPERTS + 1))) if kind != "even" else 0.0
    drift, ids, weights = np.zeros(EXPERTS), [], []
    for _ in range(TOKENS):
        if kind == "drifting":
            drift = 0.95 * drift + rng.normal(0, 0.5, EXPERTS)
        logits = 0.8 * popular + drift + rng.gumbel(size=EXPERTS)
        chosen = np.argsort(-logits)[:WIDTH]
        gates = np.exp(logits[chosen] - logits[chosen[0]])
        ids.append(chosen)
        weights.append(gates / gates.sum())
    return np.array(ids), np.array(weights)


def replay(
    ids: np.ndarray, weights: np.ndarray, slots: int, rule: str
) -> tuple[float, float, float, float]:
    """Hits, misses on the host and fetched misses per expert, and gate mass on the host."""
    last: dict[int, int] = {}  # use of each expert in a slot
    seen, found = np.full(EXPERTS, -1), np.zeros(4)
    for t, row in enumerate(ids.tolist()):
        misses = [(expert, place) for place, expert in enumerate(row) if expert not in last]
        hosted = SPLIT[len(misses)] if rule else 0
        if rule:
            misses.sort(key=lambda of: RULES[rule](*of, int(seen[of[0]])))
        mass = sum(float(weights[t, place]) for _, place in misses[:hosted])
        found += WIDTH - len(misses), hosted, len(misses) - hosted, mass
        last |= {expert: t for expert in row if expert in last}
        for expert, _ in misses[hosted:]:
            if len(last) >= slots:
                del last[min(set(last) - set(row), key=lambda of: (last[of], of))]
            last[expert] = t
        seen[row] = t
    hits, on_host, fetched, mass = found / TOKENS
    return hits / WIDTH, on_host / WIDTH, fetched / WIDTH, mass


def main(argv: Sequence[str]) -> None:
    """Prints a row of a table for each routing, cache and rule."""
    del argv
    print("| routing | slots | to the host | hits | on the host | fetched | mass on the host |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for kind in ("even", "skewed", "drifting"):
        rng = np.random.default_rng(0)
        layers = [routing(kind, rng) for _ in range(LAYERS)]
        for slots in SLOTS:
            for rule in ("", *RULES):
                means = np.mean([replay(*layer, slots, rule) for layer in layers], axis=0)
                cells = " | ".join(f"{value:.3f}" for value in means)
                print(f"| {kind} | {slots} | {rule or 'none'} | {cells} |", flush=True)


if __name__ == "__main__":
    app.run(main)
