"""Profiles of experts with random counts, of no model."""

from typing import Any

import numpy as np

from moejax.routing.profile_file import BuddyProfile, ExpertActivity, profile_of


def random_profile(
    num_layers: int, num_experts: int, never: int = 0, **provenance: Any
) -> BuddyProfile:
    """Lists by co-activation; the first `never` experts were never chosen."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 9, (num_layers, num_experts, num_experts)).astype(np.float32)
    counts *= 1 - np.eye(num_experts, dtype=np.float32)
    counts[:, :never] = counts[:, :, :never] = 0
    counted: dict[str, Any] = {
        "tokens": np.float32(9),
        "activations": counts.sum(-1),
        "coactivations": counts,
        "weighted": counts / 2,
        "entropies": rng.random((num_layers, 64)).astype(np.float32),
    }
    return profile_of(
        ExpertActivity(**counted), provenance, source="coactivations", smoothing=1.0, alpha=0.9,
        max_buddies=4, percentile=20,
    )  # fmt: skip
