"""Slots of experts on the device, with their residency and counts.

Axes: M sparse layers, E experts, C slots of a layer, B transient slots, S = ceil(M / banks) C + B
slots of a bank, R rows of the host store.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moejax.experts.budget.limits import BOTH, DECODE, PREFILL
from moejax.experts.residency import CacheSpec, Counts, Residency
from moejax.weights.qtensor import Compensator, Weight

# Before buffers are assigned XLA counts pools twice, as donated and as given back, and the rows of
# host memory too. Where pools fill the device it would compute much a second time, to no end: of 12
# layers of Qwen3-30B's decode 2,423 instructions in place of 2,113 (jax 0.11.2, H100, not run).
NO_REMATERIALIZATION = {"xla_gpu_memory_limit_slop_factor": "1000"}  # percent of the memory
# By XLA's default the kernels of a graph run one after another, whatever their buffers are.
IN_ORDER_OF_BUFFERS = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


@dataclasses.dataclass(frozen=True)
class PoolSpec:
    """Static facts of a pool.

    Attributes:
      cache: layers, experts and slots.
      prefetch: experts of the next layer that a layer brings ahead at most; 0: none.
      read: where experts may be on the disk alone: (layer, int32[J] experts or -1) to the arrays of
        a slot, stacked [J, ...], called by the running step; None where the host store has all.
      emulated: nothing is copied: tables and counts are those of slots that there are not, the
        products read the store's rows, which are on the device.
      is_complete: every expert is in its slot for ever, from before the first step on: nothing is
        fetched.
      between_steps: nobody asks for an expert that is not in a slot, as they come between steps
        alone (`Policy.transfer_tiers`): steps fetch nothing.
      prefetch_in: the steps that bring experts ahead, one of `budget.limits.PHASES`.
    """

    cache: CacheSpec
    prefetch: int = 0
    read: Callable[[Any, Any], tuple[Any, ...]] | None = None
    emulated: bool = False
    is_complete: bool = False
    between_steps: bool = False
    prefetch_in: str = BOTH

    def looks_ahead(self, is_prefill: bool) -> bool:
        """Whether prefill steps, or decode steps, prefetch for the next layer."""
        return self.prefetch > 0 and self.prefetch_in in (BOTH, PREFILL if is_prefill else DECODE)

    @property
    def is_still(self) -> bool:
        """Whether no step copies anything to the slots."""
        return self.emulated or self.is_complete or self.between_steps

    def __post_init__(self) -> None:
        if self.is_complete and self.cache.slots < self.cache.num_experts:
            raise ValueError(f"{self.cache.slots} slots hold no {self.cache.num_experts} experts")
        if self.prefetch and self.cache.slots and self.cache.banks < 2:
            raise ValueError(
                "experts of the next layer are brought ahead into a bank of its own: 2"
            )


def compiler_options(pools: Sequence[PoolSpec], is_prefill: bool) -> dict[str, str]:
    """XLA options of prefill or decode steps on a GPU; none without pools.

    Where a pool looks ahead, copies run beside products; where steps of prompts alone do so, those
    of decode do not: two kernels at once took 0.5 ms of a step's 3.6 (Mixtral, H200, jax 0.11.2).
    """
    if not pools:
        return {}
    beside = any(pool.looks_ahead(is_prefill) for pool in pools)
    return NO_REMATERIALIZATION | (IN_ORDER_OF_BUFFERS if beside else {})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertPool:
    """Slots on the device, residency and counts; donated through every step.

    Invariants: shapes never change; `residency` says what a slot of a layer holds, the transient
    ones hold nothing between layers.

    Attributes:
      banks: each bank's slots [S, 2F, D] of gates and ups and [S, D, F] of downs, without
        low-rank terms.
      counts: events since the counters were read.
    """

    banks: tuple[tuple[Weight, Weight], ...]
    residency: Residency
    counts: Counts
    used: jax.Array | None = None  # int32[M, E], clock of the last use; with `PoolSpec.read` alone


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertStore:
    """Experts that a step reads: host rows, and parts that do not move.

    Attributes:
      gate_up: [R, 2F, D], in pinned host memory on a GPU, without low-rank terms.
      down: [R, D, F].
      row_of: int32[M, E], rows; -1 for experts on the disk alone.
      terms: low-rank terms of gate and up, and of down, on the device, starts and ranks [M, E].
      replay: float32[steps, M, B, E], products that the routers are taken to have given for steps
        of B tokens, for measurements, by `in_place_of`; step s of the pool's life takes entry s
        modulo their number.
      replay_ahead: int32[steps, M, t], what the layers before are to have expected of a layer in
        such a step, -1 for less than t; None for their routers' guesses.
      replay_predicted: float32[steps, M, B, E], under a policy the products that a layer's router
        is taken to give for the input of the layer before; that of layer 0 is not read. None: what
        it gives.
    """

    gate_up: Weight
    down: Weight
    row_of: jax.Array
    terms: tuple[tuple[Compensator, ...], tuple[Compensator, ...]] = ((), ())
    replay: jax.Array | None = None
    replay_ahead: jax.Array | None = None
    replay_predicted: jax.Array | None = None


def in_place_of(replayed: jax.Array, said: jax.Array) -> jax.Array:
    """Returns the replayed values, but not before the router's own exist.

    If they were known from the start, XLA would fetch for a layer before an earlier one has read
    the same slots, copy the slots for that, and leave the routers out. XLA cannot know that no
    `said` is NaN and no id negative.
    """
    never = jnp.isnan(said) if jnp.issubdtype(said.dtype, jnp.floating) else said < 0
    return jnp.where(never, said, replayed)
