"""Which of the demo model's experts are used together, and how alike their outputs are."""

from collections.abc import Iterator

import numpy as np

from moejax.evaluation.expert_profile import Counting, profile
from moejax.inference.runner import Runner
from moejax.policies.buddy_lists import (
    buddy_lists,
    conditional_coactivation,
    output_similarity,
)
from scripts.studies.quality.demo import WIKI, Demo, Finding, listed

ALPHAS = (0.5, 0.75, 0.95, 0.99)
TOP_SHARE = 0.25  # of the experts: so many peers, 8 of 31 and 4 of 15
SHOWN_LAYER = 1  # of the papers' heat maps


def measure(demo: Demo) -> Iterator[Finding]:
    """Rows of every layer; the matrices of one."""
    ids = np.concatenate([row[:-1] for row in demo.windows()[WIKI].tokens])
    assert demo.texts is not None
    runner = Runner(demo.config, demo.weights, demo.device)
    counted = profile(runner, ids, demo.texts.length, 4, Counting(outputs=True))
    coactivations, activations = (
        np.asarray(part) for part in (counted.coactivations, counted.activations)
    )
    assert counted.cosines is not None
    q = conditional_coactivation(coactivations)
    similar = output_similarity(np.asarray(counted.cosines), activations)
    ranked = np.sort(q, axis=-1)[..., ::-1]
    num_experts = demo.config.num_experts
    num_peers = round(TOP_SHARE * num_experts)
    off = ~np.eye(num_experts, dtype=bool)
    for layer in range(len(q)):
        top = 100 * ranked[layer, :, :num_peers].sum(-1)
        more = {"tokens": float(counted.tokens), "least": float(top.min())}
        if layer == SHOWN_LAYER:
            more["counts"] = listed(coactivations[layer].astype(int))
        what = f"share of the first {num_peers} peers | layer {layer}"
        yield Finding(what, float(top.mean()), "%", more)
    for layer, raw in enumerate(np.asarray(counted.cosines)):
        cosines = raw / np.maximum(activations[layer][:, None], 1)
        more = {
            "largest": float(cosines[off].max()),
            "best peer, mean": float(np.where(off, cosines, -1).max(-1).mean()),
        }
        if layer == SHOWN_LAYER:
            more["cosines"] = listed(cosines, 3)
        mean = float(cosines[off].mean())
        yield Finding(f"cosine of outputs | layer {layer}", mean, "cosine", more)
    for alpha in ALPHAS:
        for source, share in (("co-activation", q), ("outputs", similar)):
            sizes = buddy_lists(share, alpha, num_experts - 1).sizes()
            for layer, of_layer in enumerate(sizes):
                what = f"list length, {source}, alpha {alpha:g} | layer {layer}"
                more = {"least": int(of_layer.min()), "most": int(of_layer.max())}
                yield Finding(what, float(of_layer.mean()), "experts", more)
