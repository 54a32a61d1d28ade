"""Models of random weights whose experts move: dense weights on the device, rows of the host.

Rows of the host are made once for each precision. A tier that holds every expert on the device
never fetches one, and what a bulk transfer reads no step waits for: where a plan says so, experts
share rows of `FEW_GIB`, which is more than a processor's cache holds.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from moejax.benchmarking.random_weights import Packing, random_weights
from moejax.benchmarking.routing import Workload
from moejax.devices import DeviceMesh, Place
from moejax.errors import print_stderr
from moejax.experts.budget import BOTH, TierBudget
from moejax.experts.budget.planned import EMBEDDINGS_LEAF
from moejax.experts.cache import ExpertMemory, TierMemory, preload
from moejax.experts.host_store import HostStore
from moejax.experts.load import use_host
from moejax.experts.pinned_memory import host_place
from moejax.experts.residency import CacheSizes
from moejax.experts.state import TierSpec
from moejax.experts.transfers import Transfers
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.head_shares import HEAD_LEAVES, HeadShares
from moejax.models.leaf_kinds import EXPERT_LEAVES, VOCABULARY_LEAVES
from moejax.models.shapes import one_layer_of
from moejax.weights import linear as ops
from moejax.weights.qtensor import MXFP4, Weight
from pallas_kernels import layout, mxfp4
from pallas_kernels.target import target_of

FEW_GIB = 4.0
NUM_DRAWN = 8  # different experts; the others are copies, in memory of their own


def tier_name(bits: int, *, is_mxfp4: bool = False) -> str:
    """Such as "int4"."""
    if is_mxfp4 and bits == mxfp4.BITS:
        return "mxfp4"
    return "bf16" if bits == 16 else f"int{bits}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierPlan:
    """One tier of a memory."""

    bits: int  # of the experts
    slots: int  # of a layer; E: all experts are there from the start
    transient: int = 0  # slots for what passes
    prefetch: int = 0  # experts of the next layer that are brought ahead at most
    bulk: int = 0  # experts on their way between steps at most; 0: none ever
    # int32[M, n], what the slots hold before any step; None: nothing, or all
    first: np.ndarray | None = None
    prefetch_in: str = BOTH  # the steps that bring experts ahead, one of `budget.PHASES`
    few_rows: bool = False  # the experts share a few rows of host memory
    refines: int = 0  # bits of the last plane of `bits`, which is all that a row is; 0: whole codes
    planes: int = 1  # of an expert that have slots of their own, as `CacheSizes.planes`
    host_threads: int = 0  # as `Limits.host_threads`


class _SyntheticRows:
    """All experts of a shape in host memory; a `moejax.experts.host_store.RowSource`."""

    def __init__(
        self, config: ModelConfig, packing: Packing, device: jax.Device, num_rows: int,
        *, is_plane: bool = False, mesh: DeviceMesh | None = None,
    ):  # fmt: skip
        """Draws a few experts, all rows of `packing`, or planes of as many bits."""
        self.num_layers = len(config.moe_layers)
        self.num_experts = (mesh.num_handed_out if mesh else 0) or config.num_experts
        small = dataclasses.replace(one_layer_of(config, NUM_DRAWN), vocab_size=64)
        drawn = random_weights(small, packing, device)
        stacks: Any = tuple(drawn[name] for name in EXPERT_LEAVES)
        if is_plane:
            stacks = tuple(stack.words for stack in stacks)
        leaves, self._tree = jax.tree.flatten(stacks)
        self._drawn = [np.asarray(leaf)[0] for leaf in leaves] * (mesh.size if mesh else 1)
        self.row = tuple(jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype) for leaf in leaves)
        self.row_nbytes = sum(part.size * part.dtype.itemsize for part in self.row)
        self.uses_jax = False
        del drawn, stacks, leaves
        total = self.num_layers * self.num_experts
        store = self.store = HostStore(self, num_rows, device, mesh)
        store.fill(progress=False)
        self.nbytes, self.row_of = sum(array.nbytes for array in store.arrays), store.row_of
        self.row_of[...] = np.arange(total).reshape(self.row_of.shape) % num_rows  # few are shared
        self.stacks: tuple[Weight, Weight] = jax.tree.unflatten(self._tree, store.arrays)
        self.views: tuple[Any, Any] = jax.tree.unflatten(self._tree, store.views[: len(self.row)])

    def read(
        self, layer: int, expert: int, into: Sequence[np.ndarray], *, check: bool = True
    ) -> None:
        """One of the drawn experts."""
        del check
        for part, drawn in zip(into, self._drawn, strict=True):
            np.copyto(part, drawn[(layer * self.num_experts + expert) % NUM_DRAWN])


def on_mesh(
    dense: Mapping[str, Weight], mesh: DeviceMesh, config: ModelConfig
) -> dict[str, Weight]:
    """Gives each device rows of the vocabulary, heads if they are split, and all of the others."""
    heads = HeadShares(config, mesh.size)

    def split(name: str, leaf: Weight) -> Weight:
        if name in VOCABULARY_LEAVES:
            rows: Weight = mesh.split_rows(leaf)
            return rows
        if name not in HEAD_LEAVES or not mesh.splits_heads:
            return jax.device_put(leaf, mesh.replicated)
        host = jax.tree.map(np.asarray, leaf)
        parts = [jax.device_put(heads.take(name, host, i), d) for i, d in mesh.local.items()]
        joined: Weight = jax.tree.map(lambda *leaves: mesh.join(leaves), *parts)
        return joined

    return {name: split(name, leaf) for name, leaf in dense.items()}


class ShapeMemories:
    """A shape with random dense weights on the device, and experts in host memory."""

    def __init__(
        self, config: ModelConfig, packing: Packing, device: jax.Device, host_gib: float = 0.0,
        mesh: DeviceMesh | None = None,
    ):  # fmt: skip
        """Makes the dense weights, of `packing` but for the experts.

        Args:
          config: on a mesh with the width of a device's share of an expert.
          host_gib: of a precision's rows, which experts share where they are more; 0: no limit.
        """
        self.config, self.packing, self.device = config, packing, device
        self._mesh = mesh
        self._place: Place = mesh.replicated if mesh else device
        self._host_gib = host_gib / (mesh.size if mesh else 1)
        dense = random_weights(config, packing, device, experts=False)
        self.dense = on_mesh(dense, mesh, config) if mesh else dense
        jax.block_until_ready(self.dense)
        self._embeddings_on_host = False
        self._rows: dict[tuple[int, int, int], _SyntheticRows] = {}

    def place_embeddings(self, *, on_host: bool) -> None:
        """Moves the embeddings of `dense` to where a budget has them: host memory or the device."""
        if on_host == self._embeddings_on_host:
            return
        place = host_place(self.device) if on_host else self.device
        leaf = jax.device_put(self.dense[EMBEDDINGS_LEAF], place)
        self.dense = {**self.dense, EMBEDDINGS_LEAF: leaf}
        self._embeddings_on_host = on_host

    def _tier_name(self, bits: int) -> str:
        return tier_name(bits, is_mxfp4=self.packing.mxfp4)

    def _packing(self, bits: int) -> Packing:
        return dataclasses.replace(self.packing, bits=bits, expert_rank=0)

    @property
    def num_layers(self) -> int:
        """M."""
        return len(self.config.moe_layers)

    @property
    def _num_handed_out(self) -> int:
        return self._mesh.num_handed_out if self._mesh else 0

    @property
    def num_experts(self) -> int:
        """Experts of a layer that a device has, whole or shares of them."""
        return self._num_handed_out or self.config.num_experts

    def expert_nbytes(self, bits: int, refines: int = 0) -> int:
        """Bytes of one expert: codes, and float16 scales and zeros of each group, or MXFP4.

        With `refines` they are those of a plane of so many bits alone.
        """
        shapes = weight_shapes(self.config)
        sizes = [shapes[name][-2:] for name in EXPERT_LEAVES]
        if bits == 16:
            return sum(2 * math.prod(size) for size in sizes)
        if refines:
            words = (n * layout.num_plane_words(inputs, refines) for n, inputs in sizes)
            return sum(4 * count for count in words)
        if self.packing.mxfp4 and bits == mxfp4.BITS:
            return sum(MXFP4.num_bytes(size) for size in sizes)
        group = self._packing(bits).group_size
        return sum(
            outputs * (4 * layout.num_words(inputs, bits) + 4 * layout.num_groups(inputs, group))
            for outputs, inputs in sizes
        )

    def _rows(self, bits: int, few: bool = False, refines: int = 0) -> _SyntheticRows:
        """Rows of a precision, or of its last plane; made once."""
        nbytes, total = self.expert_nbytes(bits, refines), self.num_layers * self.num_experts
        gib = min([limit for limit in (self._host_gib, FEW_GIB if few else 0) if limit], default=0)
        num_rows = min(total, max(1, int(gib * 2**30) // nbytes)) if gib else total
        form = bits, refines
        held = [count for *of, count in self._rows if tuple(of) == form and count >= num_rows]
        if held:
            return self._rows[*form, max(held)]
        start = time.perf_counter()
        made = _SyntheticRows(
            self.config, self._packing(refines or bits), self.device, num_rows,
            is_plane=refines > 0, mesh=self._mesh,
        )  # fmt: skip
        assert made.row_nbytes == nbytes, (made.row_nbytes, nbytes)
        self._rows[*form, num_rows] = made
        spent = time.perf_counter() - start
        print_stderr(
            f"{self._tier_name(bits)}{' refinements' if refines else ''}: {num_rows} rows of "
            f"{total} experts, {made.nbytes / 2**30:.1f} GiB, in {spent:.1f} s"
        )
        return made

    def tier_memory(self, plan: TierPlan) -> TierMemory:
        """Slots of one precision."""
        num_experts = self.num_experts
        rows = self._rows(plan.bits, plan.few_rows, plan.refines)
        is_full = plan.slots == num_experts and plan.planes == 1
        transient = plan.transient or (1 if is_full else self.config.experts_per_token)
        cache = CacheSizes(
            num_layers=self.num_layers, num_experts=num_experts, slots=plan.slots,
            transient=transient, banks=2 if plan.prefetch else 1, planes=plan.planes,
        )  # fmt: skip
        spec = TierSpec(
            cache, plan.prefetch, prefetch_in=plan.prefetch_in, refines=plan.refines,
            shares_slots=plan.refines > 0 and plan.planes > 1,
            handed_out=self.config.num_experts if self._num_handed_out else 0,
        )  # fmt: skip
        memory = TierMemory(spec, *rows.stacks, rows.row_of, self._place)
        if plan.host_threads:
            use_host(memory, rows.views, self.config, plan.host_threads, self.device)
            assert memory.host is not None
            print_stderr(memory.host.text)
        first = plan.first
        if is_full:
            first = np.tile(np.arange(num_experts, dtype=np.int32), (self.num_layers, 1))
        if first is not None and first.shape[1]:
            preload(memory, self.config, ops.Kernels(target_of(self.device)), first)
        if plan.bulk:
            memory.transfers = Transfers(
                cache, memory.pool, rows.store, self.device, in_flight=plan.bulk
            )
        return memory

    def plan_of(self, bits: int, budget: TierBudget, **more: Any) -> TierPlan:
        """Plan of a tier by a budget."""
        limits = budget.limits
        return TierPlan(
            bits=bits, slots=budget.slots, transient=budget.transient, prefetch=limits.prefetch,
            prefetch_in=limits.prefetch_in, bulk=limits.bulk, planes=budget.tier.planes,
            host_threads=limits.host_threads, **more,
        )  # fmt: skip


def replay(memory: ExpertMemory, workload: Workload, batch: int) -> None:
    """From now on decode steps of so many sequences take what the workload says."""
    if workload.ids.shape[2] != batch:
        raise ValueError(f"a workload of {workload.ids.shape[2]} sequences, not {batch}")

    def kept(array: np.ndarray) -> jax.Array:
        return jax.device_put(array, memory.place)

    def logits(probabilities: np.ndarray) -> jax.Array:
        return kept(np.log(np.maximum(probabilities, np.finfo(np.float32).tiny)))

    said = logits(workload.probabilities)
    first, *others = memory.tiers
    policy, ahead, predicted = memory.spec.policy, None, None
    if policy is None and first.spec.prefetch:
        ahead = kept(workload.expected(first.spec.prefetch))
    if policy is not None and policy.needs.predicted:
        predicted = logits(workload.predicted)
    first.store = dataclasses.replace(
        first.store, replay=said, replay_ahead=ahead, replay_predicted=predicted
    )
    for tier in others:
        tier.store = dataclasses.replace(tier.store, replay=None, replay_ahead=None)


def release(memory: ExpertMemory | TierMemory | None) -> None:
    """Gives back what a memory has on the device, but not the host's rows."""
    if memory is None:
        return
    memory.close()
    for leaf in jax.tree.leaves(memory.pool):
        if not leaf.is_deleted():
            leaf.delete()
