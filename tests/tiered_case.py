"""Tiny models whose experts lie in several tiers, and runners of them under policies."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.experts.cache import ExpertMemory, TierMemory, preload
from moejax.experts.residency import CacheSizes
from moejax.experts.state import TierSpec
from moejax.inference.runner import Runner
from moejax.models.config import ModelConfig
from moejax.policies.base import AnyPolicy
from moejax.weights import linear as ops
from moejax.weights.qtensor import QTensor, Weight
from tests.pooled_test import CPU, EXPERTS, QWEN, random_weights, rows_of, without_experts

CONFIG = QWEN


def plain(weight: Weight) -> jax.Array:
    """Dequantizes a weight to float32."""
    return weight.dequantize() if isinstance(weight, QTensor) else jnp.asarray(weight)


def tier_memory(
    config: ModelConfig,
    weights: dict[str, Weight],
    slots: int,
    *,
    transient: int = 2,
    prefetch: int = 0,
    emulated: bool = False,
    first: int = -1,
) -> TierMemory:
    """One tier's; `first` experts of a layer are there from the start (-1: all, if all fit)."""
    num_layers, num_experts = len(config.moe_layers), config.num_experts
    cache = CacheSizes(
        num_layers=num_layers, num_experts=num_experts, slots=slots, transient=transient,
        banks=2 if prefetch else 1,
    )  # fmt: skip
    places = np.arange(num_layers * num_experts).reshape(num_layers, num_experts)
    memory = TierMemory(
        TierSpec(cache, prefetch, emulated=emulated),
        *(rows_of(weights[name]) for name in EXPERTS), places, CPU,
    )  # fmt: skip
    count = (num_experts if slots == num_experts else 0) if first < 0 else first
    if count:
        experts = np.tile(np.arange(count, dtype=np.int32), (num_layers, 1))
        preload(memory, config, ops.NO_KERNELS, experts)
    return memory


def tiered_runner(
    policy: AnyPolicy,
    bits: Sequence[int],
    slots: Sequence[int],
    *,
    config: ModelConfig = CONFIG,
    runs: Mapping[str, Any] | None = None,
    **how: Any,
) -> tuple[Runner, ExpertMemory]:
    """A runner, with options `runs`, of random weights whose experts are stored in these widths."""
    stored = [random_weights(config, width) for width in bits]
    tiers = [
        tier_memory(config, weights, size, **how)
        for weights, size in zip(stored, slots, strict=True)
    ]
    names = [f"int{width}" for width in bits]
    memory = ExpertMemory(tiers, names, policy, width=config.experts_per_token)
    runner = Runner(config, without_experts(stored[0]), CPU, memory=memory, **(runs or {}))
    return runner, memory
