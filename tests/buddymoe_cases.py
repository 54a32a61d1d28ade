"""Routings, observations and buddy lists at random, for the tests of BuddyMoE."""

import jax.numpy as jnp
import numpy as np

from moejax.policies.base import Observation, PolicySpec
from moejax.policies.buddy_lists import BuddyLists, buddy_lists, conditional_coactivation

TOKENS, WIDTH, EXPERTS, DEPTH, LAYERS = 6, 4, 12, 5, 2
SPEC = PolicySpec(
    num_layers=LAYERS, num_experts=EXPERTS, width=WIDTH, tiers=("int4",), expert_bytes=(100,),
    slots=(6,),
)  # fmt: skip


def softmax(logits: np.ndarray) -> np.ndarray:
    """float32, over the last axis."""
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (raised / raised.sum(axis=-1, keepdims=True)).astype(np.float32)


def routed(
    rng: np.random.Generator, num_tokens: int = TOKENS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """probabilities [N, E], ids [N, A] by falling probability and their normalized weights."""
    probabilities = softmax(2 * rng.standard_normal((num_tokens, EXPERTS)))
    ids = np.argsort(-probabilities, axis=-1, kind="stable")[:, :WIDTH].astype(np.int32)
    weights = np.take_along_axis(probabilities, ids, axis=-1)
    return probabilities, ids, weights / weights.sum(axis=-1, keepdims=True)


def random_lists(
    rng: np.random.Generator, num_layers: int = LAYERS, num_experts: int = EXPERTS
) -> BuddyLists:
    """Makes lists of every length from random co-activations."""
    shape = (num_layers, num_experts, num_experts)
    counts = rng.integers(0, 4, shape) * rng.integers(0, 2, num_experts)
    return buddy_lists(conditional_coactivation(counts), 0.8, DEPTH)


def as_lists(padded: np.ndarray) -> list[list[int]]:
    """int[E, K] without its padding."""
    return [[int(j) for j in row if j >= 0] for row in padded]


LISTS = random_lists(np.random.default_rng(0))
HOPS = tuple(float(e % 3) for e in range(EXPERTS))


def observation(rng: np.random.Generator, layer: int = 0, share: float = 0.5) -> Observation:
    """A layer of a step; some rows are padding."""
    probabilities, ids, weights = routed(rng)
    active = rng.random(TOKENS) < 0.8
    active[0] = True
    arrays = (probabilities, ids, weights, active, rng.random((1, EXPERTS)) < share)
    return Observation(jnp.int32(layer), *map(jnp.asarray, arrays))


def steps(seed: int, count: int) -> list[Observation]:
    """Observations of all layers of some steps."""
    rng = np.random.default_rng(seed)
    return [observation(rng, i % LAYERS) for i in range(count * LAYERS)]
