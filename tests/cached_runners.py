"""Runners of tiny random models whose experts are cached, in one tier or in several."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.experts.cache import ExpertMemory, TierMemory, preload
from moejax.experts.residency import CacheSizes
from moejax.experts.state import TierSpec
from moejax.inference.runner import Runner
from moejax.models.config import ModelConfig, leaf_dtype
from moejax.policies.base import AnyPolicy
from moejax.quantization.grid import Grid
from moejax.quantization.rtn import rtn
from moejax.weights import linear as ops
from moejax.weights.qtensor import MXFP4, QTensor, Weight, from_codes
from tests import packed_weights, tiny_engine

QWEN = tiny_engine.CONFIG
MIXTRAL = dataclasses.replace(
    QWEN, family="mixtral", num_experts=4, moe_layers=(0, 1), qk_norm=False, norm_topk_prob=True
)
PROMPTS = [
    np.random.default_rng(n).integers(0, QWEN.vocab_size, n).tolist() for n in (7, 20, 3, 11)
]
EXPERTS = ("moe.gate_up", "moe.down")
CPU = jax.devices("cpu")[0]


def random_weights(
    config: ModelConfig, form: int | str = 16, dtype: Any = jnp.float32
) -> dict[str, Weight]:
    """Weights of a tiny model.

    Args:
      form: of the experts: plain (16), codes of a width, MXFP4, or one of `packed_weights.SPECS`,
        with which the queries', keys' and values' projection is packed, too.
      dtype: of what is not packed.
    """
    rng, weights = np.random.default_rng(0), {}
    grid = Grid(bits=form if form in (2, 3, 4, 8) else 4, group_size=8, zero_kind="float")
    for name, array in tiny_engine.random_weights(config).items():
        if form == "mxfp4" and name in EXPERTS:
            parts = MXFP4.arrays(array.shape)
            words = rng.integers(0, 2**32, parts["words"].shape, np.uint32)
            scales = rng.integers(123, 126, parts["scales"].shape, np.uint8)
            parts = {"words": jnp.asarray(words), "scales": jnp.asarray(scales)}
            weights[name] = MXFP4.tensor(array.shape[-1], parts)
        elif form in packed_weights.SPECS and name in (*EXPERTS, "attention.qkv_proj"):
            kind = packed_weights.SPECS[form if name in EXPERTS else "int3"]
            weights[name] = packed_weights.draw(rng, array.shape, kind)[0]
        elif form != 16 and name in EXPERTS:
            codes = jax.device_get(rtn(jnp.asarray(array), grid))
            packed = from_codes(*codes, bits=grid.bits, group_size=8, zero_kind="float")
            weights[name] = jax.tree.map(jnp.asarray, packed)
        else:
            weights[name] = jnp.asarray(array, leaf_dtype(name, jnp.dtype(dtype)))
    return weights


def plain(weight: Weight) -> jax.Array:
    """Dequantizes a weight to float32."""
    return weight.dequantize() if isinstance(weight, QTensor) else jnp.asarray(weight)


def without_experts(weights: dict[str, Weight]) -> dict[str, Weight]:
    return {name: leaf for name, leaf in weights.items() if name not in EXPERTS}


def tier_memory(
    config: ModelConfig,
    weights: dict[str, Weight],
    slots: int,
    *,
    transient: int = 2,
    apart: int = 0,
    longer_layers: int = 0,
    prefetch: int = 0,
    emulated: bool = False,
    first: int = -1,
    num_rows: int | None = None,
    read: list[tuple[int, int]] | None = None,
) -> TierMemory:
    """One tier's.

    Args:
      slots: of a layer; at most all its experts.
      first: experts of a layer that are there from the start (-1: all, if all fit).
      num_rows: of the host; the others are read from a disk.
      read: takes what is read from the disk, as (layer, expert).
    """
    num_layers, num_experts = len(config.moe_layers), config.num_experts
    slots, number = min(slots, num_experts), np.arange(num_layers * num_experts)
    cache = CacheSizes(
        num_layers=num_layers, num_experts=num_experts, slots=slots, transient=transient,
        banks=2 if prefetch else 1, apart=apart, longer_layers=longer_layers,
    )  # fmt: skip
    stacks = [weights[name] for name in EXPERTS]
    terms = tuple(getattr(stack, "compensators", ()) for stack in stacks)
    bare = [
        dataclasses.replace(stack, compensators=()) if isinstance(stack, QTensor) else stack
        for stack in stacks
    ]
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), bare)

    def from_disk(layer: Any, experts: Any) -> tuple[np.ndarray, ...]:
        read.extend((int(layer), int(expert)) for expert in np.asarray(experts) if expert >= 0)
        index = int(layer) * num_experts + np.maximum(np.asarray(experts), 0)
        return tuple(np.asarray(leaf)[index] for leaf in jax.tree.leaves(rows))

    held = len(number) if num_rows is None else num_rows
    row_of = np.where(number < held, number, -1).reshape(num_layers, num_experts)
    spec = TierSpec(cache, prefetch, None if read is None else from_disk, emulated=emulated)
    hosts = jax.tree.map(lambda leaf: leaf[:held], rows)
    memory = TierMemory(spec, *hosts, row_of, CPU, terms)
    count = (num_experts if slots == num_experts else 0) if first < 0 else first
    if count:
        experts = np.tile(np.arange(count, dtype=np.int32), (num_layers, 1))
        preload(memory, config, ops.NO_KERNELS, experts)
    return memory


def cached_runner(
    policy: AnyPolicy | None,
    forms: Sequence[int | str],
    slots: Sequence[int],
    *,
    config: ModelConfig = QWEN,
    dtype: Any = jnp.float32,
    runs: Mapping[str, Any] | None = None,
    **how: Any,
) -> tuple[Runner, ExpertMemory]:
    """A runner, with options `runs`, of random weights whose experts are stored in these forms.

    Without a policy there is one tier, and nothing is there from the start unless `how` says so.
    """
    stored = [random_weights(config, form, dtype) for form in forms]
    if policy is None:
        how = {"first": 0, **how}
    tiers = [
        tier_memory(config, weights, size, **how)
        for weights, size in zip(stored, slots, strict=True)
    ]
    if policy is None:
        memory = ExpertMemory(tiers)
    else:
        names = [f"int{form}" for form in forms]
        memory = ExpertMemory(tiers, names, policy, width=config.experts_per_token)
    runner = Runner(config, without_experts(stored[0]), CPU, memory=memory, **(runs or {}))
    return runner, memory


def answers(runner: Runner, prompts: list[list[int]], num_tokens: int = 12) -> list[list[int]]:
    return tiny_engine.answers(runner, prompts, 64, num_tokens, per_call=4)
