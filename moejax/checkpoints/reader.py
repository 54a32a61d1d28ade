"""Reads the leaves of a checkpoint, plain or quantized, tensor by tensor.

On the CPU the leaves are filled in place and given to JAX without a copy. On an accelerator each
leaf is allocated there once, and one layer at a time is staged in host memory. Either way the
host never holds more than the leaves and one matrix with what its conversion takes.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import logging

from moejax.checkpoints.formats.bitstream import on_host
from moejax.checkpoints.leaves import FactorPool, LeafPlan, Part, plan_leaves, split_experts
from moejax.checkpoints.safetensors_reader import (
    StoredTensor,
    check_floats,
    check_range,
    in_range,
    is_float,
    read_array,
    read_tensor,
    stored_tensors,
)
from moejax.devices import DeviceMesh, Place, put, rows_of
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.models.head_shares import HEAD_LEAVES, OUTPUT, QKV, HeadShares
from moejax.models.hf.names import Placement, multi_token, vision_tower
from moejax.models.leaf_kinds import EXPERT_BIASES, EXPERT_LEAVES, VOCABULARY_LEAVES
from moejax.weights.qtensor import CodesKind, Compensator, Fp8Tensor, QTensor, Weight
from moejax.weights.shares import EVERYTHING, Shares, Window, shares_of

# The XLA CPU client takes over host memory without a copy only at this alignment.
_ALIGNMENT_BYTES = 64
_HEAD = "lm_head.weight"
# Columns are read by themselves where at least this much of each row is not theirs: disks and
# network file systems read whole pages.
_LEAST_GAP_BYTES = 4096

# Reads a tensor into contiguous memory of its size and dtype, and checks what was read.
ReadTensor = Callable[[StoredTensor, np.ndarray], None]
Advance = Callable[[int], Any]  # called with the bytes of the files that were read


class CheckpointReader:
    """The weights of a directory of safetensors, read by one plan of its leaves."""

    def __init__(
        self, directory: Path, config: ModelConfig, *, dtype: Any, read_bits: int = 0
    ) -> None:
        """Reads little but headers; arguments and errors are those of `plan_leaves`."""
        self.directory, self.config = directory, config
        self.stored = stored_tensors(directory)
        self.leaves: Mapping[str, LeafPlan] = plan_leaves(  # by name of `weight_shapes(config)`
            directory, config, self.stored, dtype=dtype, read_bits=read_bits
        )

    def check_left_out(self) -> None:
        """Logs what is left out; raises MoejaxError if a head differs from tied embeddings."""
        if further := multi_token(self.config, tuple(self.stored)):
            logging.warning(
                "%s: left out %d tensors (%s, ...) of the head that predicts further tokens at "
                "once", self.directory, len(further), further[0],
            )  # fmt: skip
        if images := vision_tower(self.config, tuple(self.stored)):
            logging.warning(
                "%s: left out %d tensors (%s, ...) of the vision tower: only text can be given",
                self.directory, len(images), images[0],
            )  # fmt: skip
        head, embedding = self.stored.get(_HEAD), self.leaves["embed"].parts[0].tensor
        if not self.config.tied_embeddings or head is None or embedding is None:
            return
        one, other = (read_array(tensor).view(np.uint8) for tensor in (embedding, head))
        if not np.array_equal(one, other):
            raise MoejaxError(
                f"{head.path}: {head.name} differs from {embedding.name}, but config.json says "
                "tie_word_embeddings; set that to false"
            )

    def load(
        self, place: Place, *, progress: bool = True, experts: bool = True,
        mesh: DeviceMesh | None = None, places: Mapping[str, Place] = MappingProxyType({}),
    ) -> dict[str, Weight]:  # fmt: skip
        """Loads all leaves; those whose matrices are of one kind stay packed.

        Leaves that `places` names go there.

        `EXPERT_LEAVES` are checked even without `experts`. `progress` shows a bar over the bytes on
        stderr. On a mesh each device gets its share of every expert, or its own experts, and of the
        vocabulary's rows, of attention where that is split, and all of the other leaves; of several
        processes each reads what its devices get, where that lies apart (`fill_part`). What is read
        in part is not compared with its checksum.

        Raises:
          MoejaxError: a file ended early or has not its checksums; a value does not fit float16.
        """
        self.check_left_out()
        self._log_share()
        leaves = [leaf for leaf in self.leaves if experts or leaf not in EXPERT_LEAVES]
        num_bytes = sum(part.num_bytes for leaf in leaves for part in self.leaves[leaf].parts)
        with tqdm.tqdm(
            total=num_bytes, desc="loading", unit="B", unit_scale=True, disable=not progress
        ) as bar:
            return {
                leaf: self._read_leaf(leaf, places.get(leaf, place), mesh, bar.update)
                for leaf in leaves
            }

    def shares(self, count: int) -> Shares:
        """Shares of every expert among so many devices; MoejaxError if there are too many."""
        kind = self.leaves[EXPERT_LEAVES[1]].kind
        group_size = kind.group_size if isinstance(kind, CodesKind) else None
        return shares_of(self.config.expert_dim, count, group_size)

    def heads_refusal(self, shares: HeadShares) -> str | None:
        """Returns why the attention, as it is stored, is not split by heads, or None."""
        qkv, output = self.leaves[QKV], self.leaves[OUTPUT]
        if not (qkv.splits_by_rows and output.splits_by_rows):
            return "is in FP8, permuted (act-order) or has low-rank compensators"
        kind = output.kind
        return shares.refusal(kind.group_size if isinstance(kind, CodesKind) else 1)

    def _cut_of(self, plan: LeafPlan, mesh: DeviceMesh) -> "_Cut | None":
        """Returns how devices of a mesh share a leaf; None where each has all, or rows of it."""
        name = plan.name
        experts = mesh.handed_out
        if name in EXPERT_LEAVES:
            refuse_division(plan, are_whole=experts is not None)
        if name in (*EXPERT_LEAVES, *EXPERT_BIASES) and experts is not None:
            return _Cut(
                lambda layer, weight, i: jax.tree.map(lambda leaf: leaf[experts[i, layer]], weight)
            )
        if name in (*EXPERT_LEAVES, *EXPERT_BIASES):
            shares = self.shares(mesh.size)
            gate_up, down = shares.windows(mesh.local)
            cuts: dict[str, _Cut] = {
                EXPERT_LEAVES[0]: _Cut(lambda _, weight, i: shares.gate_up(weight, i), gate_up),
                EXPERT_LEAVES[1]: _Cut(lambda _, weight, i: shares.down(weight, i), down),
                EXPERT_BIASES[0]: _Cut(lambda _, bias, i: shares.gate_up_bias(bias, i)),
                EXPERT_BIASES[1]: _Cut(lambda _, bias, i: shares.down_bias(bias, i)),
            }
            return cuts[name]
        if name in HEAD_LEAVES and mesh.splits_heads:
            heads = HeadShares(self.config, mesh.size)
            return _Cut(
                lambda _, weight, i: heads.take(name, weight, i), heads.window(name, mesh.local)
            )
        return None

    def _read_leaf(
        self, name: str, place: Place, mesh: DeviceMesh | None, advance: Advance
    ) -> Weight:
        """Loads one leaf; `advance` is called with the bytes of each part."""
        plan = self.leaves[name]
        if plan.mixture:
            logging.warning(
                "%s is dequantized to %s while it is loaded: %s",
                name, plan.dtype.name, plan.mixture,
            )  # fmt: skip
        if mesh is not None and (cut := self._cut_of(plan, mesh)):
            shares = _read_by_layer(plan, cut, mesh.local, advance, dict.fromkeys(mesh.local))
            return jax.tree.map(lambda *leaves: mesh.join(leaves), *shares)
        is_split = mesh is not None and name in VOCABULARY_LEAVES and plan.splits_by_rows
        if is_split:
            place = jax.local_devices(backend="cpu")[0]
        window = EVERYTHING
        if mesh is not None and is_split and len(mesh.local) < mesh.size:
            count, own = rows_of(plan.shape[0], mesh.size), mesh.local
            window = Window(rows=((count * min(own), count * (max(own) + 1)),))
        is_stacked = plan.parts[0].index != ()
        if is_stacked and not _is_host(place):
            # Before staging memory: this call lets go of that of the leaf before.
            zeros = {n: jnp.zeros(a.shape, a.dtype, device=place) for n, a in plan.arrays.items()}
            stacks = {0: plan.assemble(zeros)}
            (leaf,) = _read_by_layer(plan, _WHOLE, {0: place}, advance, stacks)
        else:
            memory = _allocate(plan)
            for part in plan.parts:
                arrays = {name: array[part.index] for name, array in memory.items()}
                fill_part(plan, part, arrays, _read_checked, window)
                advance(part.num_bytes)
            leaf = plan.assemble(put(memory, place))
        if compensators := read_compensators(plan, place):
            leaf = dataclasses.replace(leaf, compensators=compensators)
            leaf.check()
        if mesh is None or not is_split:
            return leaf
        rows: Weight = mesh.split_rows(leaf)
        return rows

    def _log_share(self) -> None:
        packed = sum(
            math.prod(part.placement.shape)
            for plan in self.leaves.values()
            for part in plan.parts
            if part.matrix is not None
        )
        if packed:
            total = sum(math.prod(plan.shape) for plan in self.leaves.values())
            logging.info("%.2f %% of the parameters are quantized", 100 * packed / total)


def stored_dtype(directory: Path, *, is_quantized: bool = False) -> np.dtype:
    """The dtype of most of a checkpoint's bytes; if quantized, of norms, embeddings and the like.

    MoejaxError if a file is missing, broken or empty, or holds other types than floats.
    """
    num_bytes: dict[np.dtype, int] = defaultdict(int)
    tensors: Iterable[StoredTensor] = stored_tensors(directory).values()
    if is_quantized:
        tensors = [t for t in tensors if t.name.endswith(".weight") and is_float(t)]
    check_floats(tensors)
    for tensor in tensors:
        num_bytes[tensor.dtype] += tensor.num_bytes
    if not num_bytes:
        raise MoejaxError(f"the weight files in {directory} hold no tensors; download them again")
    return max(num_bytes, key=lambda dtype: num_bytes[dtype])


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised host memory that JAX's CPU device can use as it is."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _allocate(plan: LeafPlan) -> dict[str, np.ndarray]:
    """Host memory of a leaf's arrays, which JAX's CPU device takes over without a copy."""
    return {name: _aligned_empty(of.shape, of.dtype) for name, of in plan.arrays.items()}


def _is_host(place: Place) -> bool:
    return isinstance(place, jax.Device) and place.platform == "cpu"


@functools.partial(jax.jit, donate_argnums=0)
def _with_layer(leaf: jax.Array, slab: jax.Array, layer: jax.Array) -> jax.Array:
    """Puts `slab` [...] into `leaf` [L, ...] as one layer, in place."""
    return jax.lax.dynamic_update_index_in_dim(leaf, slab, layer, 0)


def refuse_division(plan: LeafPlan, *, are_whole: bool) -> None:
    """Raises MoejaxError for a leaf of experts that no mesh divides, or none in shares."""
    if plan.kind is not None and plan.refusal and not are_whole:
        raise MoejaxError(
            f"{plan.name} is {plan.refusal}, of which a mesh does not cut experts yet; hand them "
            "out (mesh=2,experts), quantize it anew in the package's own format "
            "(python -m moejax.quantize), or leave the mesh out"
        )
    if plan.factor_pools:
        raise MoejaxError(
            f"{plan.name} has low-rank compensators, which a mesh does not serve yet; quantize it "
            "by another method, or leave the mesh out"
        )


class _Cut(NamedTuple):
    """Cut of a leaf into what devices have of it."""

    take: Callable[[int, Any, int], Any]  # of a layer, its matrices, and a device's number
    window: Window = EVERYTHING  # what this process's devices have


_WHOLE = _Cut(lambda _, weight, i: weight)


def _read_by_layer(
    plan: LeafPlan, cut: _Cut, places: Mapping[int, Place], advance: Advance, stacks: dict[int, Any]
) -> list[Any]:
    """Loads what each place gets of a stacked leaf; one layer at a time is staged on the host.

    `stacks` are filled, where they are None with what the first layer is cut to.
    """
    memory = {name: np.empty(of.shape[1:], of.dtype) for name, of in plan.arrays.items()}
    staged = plan.assemble(memory)
    for layer, parts in _group_by_layer(plan.parts).items():
        for part in parts:
            for one in [part] if cut.window == EVERYTHING else split_experts(part):
                arrays = {name: array[one.index[1:]] for name, array in memory.items()}
                fill_part(plan, one, arrays, _read_checked, cut.window)
            advance(part.num_bytes)
        for i, place in places.items():
            slabs = put(cut.take(layer, staged, i), place)
            if stacks[i] is None:
                stacks[i] = jax.tree.map(
                    lambda slab: jnp.zeros(
                        (plan.shape[0], *slab.shape), slab.dtype, device=slab.sharding
                    ),
                    slabs,
                )
            with_slab = functools.partial(_with_layer, layer=layer)
            stacks[i] = jax.tree.map(with_slab, stacks[i], slabs)
        jax.block_until_ready(stacks)  # the staging memory is about to be written again
    return list(stacks.values())


def fill_part(
    plan: LeafPlan, part: Part, arrays: Mapping[str, np.ndarray], read: ReadTensor,
    window: Window = EVERYTHING,
) -> None:  # fmt: skip
    """Reads a part into its rows of `arrays`, those of `plan.arrays` at the part's index.

    Args:
      read: reads the tensors that lie in the files as arrays hold them.
      window: what must be read of the leaf's matrices. Rows are read by themselves, of plain
        tensors and of the package's own format; columns of plain matrices whose rows are long. All
        else is read whole.

    Raises:
      MoejaxError: a tensor cannot be read, or a value does not fit the dtype.
    """
    rows = {name: plan.rows(name, array, part) for name, array in arrays.items()}
    stored = part.stored
    if isinstance(stored, StoredTensor):
        _read_window(stored, part.placement, rows["array"], read, window)
    elif plan.kind is None:
        values = np.asarray(_dequantized(stored.read())).reshape(rows["array"].shape)
        _convert_floats(part.placement.name, values, rows["array"])
    elif stored.as_held is not None:
        for name, memory in rows.items():
            if name in stored.as_held:
                own = Window(window.rows)
                _read_window(stored.as_held[name], part.placement, memory, read, own)
            else:
                memory[...] = plan.default(name)
    else:
        matrix = stored.read()
        for name, memory in rows.items():
            values = getattr(matrix, name)
            memory[...] = plan.default(name) if values is None else values.reshape(memory.shape)


def read_compensators(
    plan: LeafPlan, place: Place, advance: Callable[[Part], Any] | None = None
) -> tuple[Compensator, ...]:
    """Loads the low-rank terms of a leaf's matrices; `advance` is called with each part."""
    return tuple(_read_pool(pool, place, advance) for pool in plan.factor_pools)


def _read_pool(
    pool: FactorPool, place: Place, advance: Callable[[Part], Any] | None
) -> Compensator:
    lead = pool.shape[:-2]
    starts, ranks = np.zeros(lead, np.int32), np.zeros(lead, np.int32)
    plans = {name: pool.factor(name) for name in ("u", "v")}
    memories = {name: _allocate(plan) for name, plan in plans.items()}
    start = 0
    for part, rank in zip(pool.owners, pool.ranks, strict=True):
        assert part.matrix is not None and part.matrix.read_factors is not None
        compensator = part.matrix.read_factors()
        for name, arrays in memories.items():
            factor = getattr(compensator, name)
            for array, memory in arrays.items():
                values = factor if array == "array" else getattr(factor, array)
                memory[start : start + rank] = values
        starts[part.index], ranks[part.index] = start, rank
        start += rank
        if advance is not None:
            advance(part)
    u, v = (plans[name].assemble(put(memories[name], place)) for name in memories)
    assert not isinstance(u, Fp8Tensor) and not isinstance(v, Fp8Tensor)
    return Compensator(
        u=u,
        v=v,
        start=put(starts, place),
        rank=put(ranks, place),
        first_row=pool.owners[0].placement.start,
        num_rows=pool.num_rows,
        max_rank=max(pool.ranks),
    )


@on_host
@jax.jit
def _dequantized(matrix: QTensor | Fp8Tensor) -> jax.Array:
    """float32[N, K] of a matrix that was read, by the CPU."""
    return matrix.dequantize()


def _read_checked(tensor: StoredTensor, destination: np.ndarray) -> None:
    """Reads a tensor (`ReadTensor`); raises MoejaxError if it is broken or out of range."""
    read_tensor(tensor, destination)
    check_range(tensor, destination)


def _read_window(
    tensor: StoredTensor, placement: Placement, memory: np.ndarray, read: ReadTensor,
    window: Window,
) -> None:  # fmt: skip
    """Reads what a window has of a tensor into `memory`, the tensor's rows of a leaf."""
    if placement.is_interleaved or placement.is_transposed:
        window = EVERYTHING
    for start, stop in window.rows_of(placement.start, len(memory)):
        own, into = tensor, memory
        if stop - start < len(memory):
            own = tensor.part(start, (stop - start, *tensor.shape[1:]))
            into = memory[start:stop]
        if window.columns is not None:
            first, end = window.columns
            gap_bytes = (tensor.shape[1] - (end - first)) * tensor.dtype.itemsize
            if gap_bytes >= _LEAST_GAP_BYTES:
                own, into = own.columns(first, end), into[:, first:end]
        _read_floats(own, into, read)


def _read_floats(tensor: StoredTensor, rows: np.ndarray, read: ReadTensor) -> None:
    """Reads a tensor into `rows`, converting floats to their dtype."""
    if tensor.dtype == rows.dtype and rows.flags.c_contiguous:
        read(tensor, rows)
        return
    values = np.empty(tensor.shape, tensor.dtype)
    read(tensor, values)
    _convert_floats(tensor.name, values.reshape(rows.shape), rows)


def _convert_floats(name: str, values: np.ndarray, rows: np.ndarray) -> None:
    """Copies `values` into `rows`; raises MoejaxError if one is too large for its dtype."""
    with np.errstate(over="ignore"):
        np.copyto(rows, values, casting="unsafe")
    if not in_range(name, rows):
        mend = "bfloat16 or float32" if rows.dtype == np.float16 else "float32"
        raise MoejaxError(
            f"{name} does not fit {rows.dtype.name} (largest {abs(values).max()}); load as {mend}"
        )


def _group_by_layer(parts: Sequence[Part]) -> dict[int, list[Part]]:
    """The parts of one leaf by layer; all of them under 0 where nothing is stacked."""
    found: dict[int, list[Part]] = defaultdict(list)
    for part in parts:
        found[part.index[0] if part.index else 0].append(part)
    return found
