"""The expert cache: its static facts, what it has on the device, and the rows that it reads.

Axes: M sparse layers, E experts, C slots of a layer, B transient slots, of which b lie apart, S =
ceil(M / banks) C + B - b slots of a bank, and one more for each of its longer layers, R rows of
host memory, T tiers of falling fidelity.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.experts.budget.limits import BOTH, DECODE, PREFILL
from moejax.experts.residency import CacheSizes, Counts, Residency
from moejax.policies.base import AnyPolicy
from moejax.weights.qtensor import Compensator, QTensor, Weight
from pallas_kernels import cache_plan

# Before buffers are assigned XLA counts pools twice, as donated and as given back, and the rows of
# host memory too. Where pools fill the device it would compute much a second time, to no end: of 12
# layers of Qwen3-30B's decode 2,423 instructions in place of 2,113 (jax 0.11.2, H100, not run).
NO_REMATERIALIZATION = {"xla_gpu_memory_limit_slop_factor": "1000"}  # percent of the memory
# By XLA's default the kernels of a graph run one after another, whatever their buffers are.
IN_ORDER_OF_BUFFERS = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


@dataclasses.dataclass(frozen=True)
class TierSpec:
    """Static facts of a tier: the experts in one stored form, and their slots."""

    cache: CacheSizes  # layers, experts and slots
    prefetch: int = 0  # most experts of the next layer that a layer prefetches; 0: none
    # where experts may be on the disk alone: (layer, int32[J] experts or -1) to the arrays of a
    # slot, stacked [J, ...], called by the running step; None where the host store has all
    read: Callable[[Any, Any], tuple[Any, ...]] | None = None
    # nothing is copied: tables and counts are those of slots that there are not, the products read
    # the store's rows, which are on the device
    emulated: bool = False
    is_complete: bool = False  # every expert is in its slot from before the first step on
    # experts are moved between steps alone (`Policy.transfer_tiers`), and no step needs one that is
    # not in a slot
    between_steps: bool = False
    prefetch_in: str = BOTH  # the steps that prefetch, one of `budget.limits.PHASES`
    # bits of the plane that a row is, whose experts have their leading planes in the next tier,
    # which holds every expert; 0: rows are whole experts
    refines: int = 0
    # of the first of two tiers, with `refines`: its rows go to the slots of the next one, which
    # then needs not hold every expert. Both have equal `cache`, of 2 planes; this one has no arrays
    # and no table of its own.
    shares_slots: bool = False
    # on a mesh whose devices have experts of their own (`weights.handed_out`) the experts of a
    # layer of all of them; `cache` is that of one, whose tables and counts are its own, too. 0: all
    # devices have the same tables.
    handed_out: int = 0

    def looks_ahead(self, is_prefill: bool) -> bool:
        """Whether prefill steps, or decode steps, prefetch for the next layer."""
        return self.prefetch > 0 and self.prefetch_in in (BOTH, PREFILL if is_prefill else DECODE)

    def num_apart(self, is_prefill: bool) -> int:
        """Transient slots of an array of their own, where a step uses them."""
        return self.cache.apart if is_prefill else 0

    def refined(self, leading: Weight, plane: Any, plane_slots: Any) -> QTensor:
        """Joins leading planes and the plane of this tier, a pool, to matrices of more bits."""
        assert isinstance(leading, QTensor)
        return dataclasses.replace(
            leading, bits=leading.bits + self.refines, refinements=(plane,),
            plane_slots=plane_slots, compensators=(),
        )  # fmt: skip

    @property
    def is_still(self) -> bool:
        """Whether no step copies anything to the slots."""
        return self.emulated or self.is_complete or self.between_steps


def compiler_options(tiers: Sequence[TierSpec], is_prefill: bool) -> dict[str, str]:
    """XLA options of prefill or decode steps on a GPU; none without tiers.

    Where a tier prefetches, or waves of a prompt pass, copies run beside products; where steps of
    prompts alone do so, those of decode do not: two kernels at once took 0.5 ms of a step's 3.6
    (Mixtral, H200, jax 0.11.2).
    """
    if not tiers:
        return {}
    beside = any(tier.looks_ahead(is_prefill) or tier.num_apart(is_prefill) for tier in tiers)
    return NO_REMATERIALIZATION | (IN_ORDER_OF_BUFFERS if beside else {})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TierSlots:
    """A tier's slots on the device, residency and counts; donated through every step.

    Invariants: shapes never change; `residency` has the expert in each slot of a layer, transient
    slots have none between layers. A tier that shares slots (`TierSpec.shares_slots`) has no banks.
    """

    # each bank's slots [S, 2F, D] of gates and ups and [S, D, F] of downs, without low-rank terms
    banks: tuple[tuple[Weight, Weight], ...]
    residency: Residency
    counts: Counts  # events since the counters were read
    used: jax.Array | None = None  # int32[M, E], clock of the last use; with `TierSpec.read` alone
    # [b, 2F, D] and [b, D, F], transient slots beside all banks; None: there are none
    apart: tuple[Weight, Weight] | None = None
    jobs: jax.Array | None = None  # int32[2], state of `pallas_kernels.host_job`; None: no jobs


class HostJobs(NamedTuple):
    """Operands of the jobs that decode steps of one token give the host's cores."""

    split: jax.Array  # int32[A + 1], by the number of misses how many the host multiplies
    address: jax.Array  # int32[2], of the mailbox


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostRows:
    """A tier's experts that a step reads: rows of host memory, and parts that do not move."""

    # [R, 2F, D], in pinned host memory on a GPU, without low-rank terms; of a tier that refines
    # another the words of its plane, uint32[R, 2F, W]
    gate_up: Weight
    down: Weight  # [R, D, F], or uint32[R, D, W]
    row_of: jax.Array  # int32[M, E], rows; -1 for experts on the disk alone
    # low-rank terms of gate and up, and of down, on the device, starts and ranks [M, E]
    terms: tuple[tuple[Compensator, ...], tuple[Compensator, ...]] = ((), ())
    # float32[steps, M, B, E], logits in place of the routers' in steps of B tokens, for
    # measurements; step s of the cache's life takes entry s modulo their number
    replay: jax.Array | None = None
    # int32[steps, M, t], experts of a layer that the one before predicts in such a step, -1 for
    # less than t; None for its router's prediction
    replay_ahead: jax.Array | None = None
    # float32[steps, M, B, E], under a policy the logits of a layer's router for the input of the
    # layer before; those of layer 0 are not read. None: its own.
    replay_predicted: jax.Array | None = None
    jobs: HostJobs | None = None  # None: every miss is fetched


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Static facts of an expert cache."""

    policy: AnyPolicy | None  # None: the router alone decides, with one tier
    names: tuple[str, ...]  # names of the tiers, in order of falling fidelity
    tiers: tuple[TierSpec, ...]  # one for each, of the same layers and experts

    @property
    def cache(self) -> CacheSizes:
        """Sizes of the tier of highest fidelity."""
        return self.tiers[0].cache

    @property
    def num_experts(self) -> int:
        """Experts among which a router chooses; those of all devices where they are handed out."""
        return self.tiers[0].handed_out or self.cache.num_experts

    def resident(self, tables: Sequence[jax.Array]) -> jax.Array:
        """bool[..., T, E], experts that have slots in each tier.

        Args:
          tables: of each tier, the columns of a layer or of all of them [..., K].
        """
        num_experts = self.cache.num_experts
        if self.tiers[0].shares_slots:
            return cache_plan.resident_planes(tables[1], num_experts)
        return jnp.stack([table[..., :num_experts] >= 0 for table in tables], axis=-2)

    @property
    def full(self) -> tuple[bool, ...]:
        """Whether each tier has a slot for every expert, never to be evicted."""
        return tuple(tier.cache.slots >= tier.cache.num_items for tier in self.tiers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertCache:
    """The slots of all tiers and the policy's state; donated through every step.

    Invariants: shapes never change; an expert is in at most one of the tiers that are not `full`
    while a layer runs.
    """

    tiers: tuple[TierSlots, ...]
    state: Any  # the policy's; () without one
    # float32[M, T + 3], the router's gate mass that each tier served, that was skipped, that
    # another expert served (which is in its tier's too), and of all; since it was last taken. None
    # without a policy.
    gate: jax.Array | None


def no_gate(num_layers: int, num_tiers: int) -> jax.Array:
    """`ExpertCache.gate` before any token."""
    return jnp.zeros((num_layers, num_tiers + 3), jnp.float32)
