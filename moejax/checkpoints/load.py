"""Streams a Hugging Face checkpoint into layer-stacked leaves, tensor by tensor.

On the CPU the leaves are filled in place and given to JAX without a copy. On an accelerator each
leaf is allocated there once, and one layer at a time is staged in host memory. Either way the
host never holds more than the model in its target dtype plus one tensor.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import logging

from moejax.checkpoints.safetensors_reader import (
    StoredTensor,
    check_floats,
    check_range,
    in_range,
    is_float,
    read_array,
    read_tensor,
    stored_tensors,
    without_masks,
)
from moejax.devices import choose_device
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig, leaf_dtype, weight_shapes
from moejax.models.hf.config import read_json
from moejax.models.hf.names import (
    Placement,
    find_spelling,
    ignored,
    multi_token,
    placements,
)

# The XLA CPU client takes over host memory without a copy only at this alignment.
_ALIGNMENT_BYTES = 64
_MOST_MISSING = 20_000  # tensors that are listed though they are not there
EXPERT_LEAVES = ("moe.gate_up", "moe.down")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Placed(Protocol):
    """Something with a place in a leaf."""

    @property
    def index(self) -> tuple[int, ...]:
        """Leading positions: layer, then expert."""


PlacedT = TypeVar("PlacedT", bound=Placed)
T = TypeVar("T")


def load_weights(
    directory: Path,
    config: ModelConfig,
    *,
    dtype: jnp.dtype,
    device: jax.Device | None = None,
    progress: bool = True,
    experts: bool = True,
) -> dict[str, jax.Array]:
    """The leaves of `weight_shapes(config)` on `device`, converted to `dtype`.

    Args:
      directory: holds safetensors, one file or several with an index.
      config: what config.json says.
      dtype: float32, bfloat16 or float16.
      device: None means JAX's default device.
      progress: show a bar over the bytes read on stderr.
      experts: whether `EXPERT_LEAVES` are loaded; they are checked in either case.

    Raises:
      MoejaxError: a file is missing or broken; tensors are missing, unexpected or of another
        shape than `config` says; a value does not fit float16.
    """
    _refuse_quantized(directory)
    device = device or choose_device("auto")
    tensors = stored_tensors(directory)
    plan = wanted_leaves(plan_leaves(directory, config, tensors), experts=experts)
    log_multi_token(directory, config, tensors)
    num_bytes = sum(tensors[p.name].num_bytes for part in plan.values() for p in part)
    with tqdm.tqdm(
        total=num_bytes, desc="loading", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        source = _Source(tensors, bar)
        return {
            leaf: _fill(shape, leaf_dtype(leaf, dtype), device, plan[leaf], source)
            for leaf, shape in wanted_leaves(weight_shapes(config), experts=experts).items()
        }


def wanted_leaves(by_leaf: Mapping[str, T], *, experts: bool) -> dict[str, T]:
    """All entries, or those of the leaves that are no experts'."""
    return {leaf: of for leaf, of in by_leaf.items() if experts or leaf not in EXPERT_LEAVES}


def log_multi_token(directory: Path, config: ModelConfig, names: Iterable[str]) -> None:
    """Says how many tensors of a checkpoint are left out, if it has a head for further tokens."""
    if further := multi_token(config, tuple(names)):
        logging.warning(
            "%s: left out %d tensors (%s, ...) of the head that predicts further tokens at once",
            directory, len(further), further[0],
        )  # fmt: skip


def _refuse_quantized(directory: Path) -> None:
    path = directory / "config.json"
    if path.is_file() and (quantization := read_json(path).get("quantization_config")):
        raise MoejaxError(
            f"{path}: the checkpoint is quantized ({quantization}); open it with open_checkpoint, "
            "which reads such ones too"
        )


def stored_dtype(directory: Path, *, is_quantized: bool = False) -> np.dtype:
    """The dtype of most of a checkpoint's bytes.

    Args:
      directory: of the checkpoint.
      is_quantized: count what is not quantized only, such as norms and embeddings.

    Raises:
      MoejaxError: a file is missing, broken or empty, or holds other types than floats.
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


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised host memory that JAX's CPU device can use as it is."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


class LeafMemory:
    """A leaf while it is being filled, a layer at a time.

    On the CPU the whole leaf is host memory, which JAX takes over; on an accelerator it lies there,
    and one layer of it is staged in host memory.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, device: jax.Device, *, is_stacked: bool
    ) -> None:
        self._device = device
        self._leaf: jax.Array | None = None
        if is_stacked and not _is_host(device):
            self._leaf = jnp.zeros(shape, dtype, device=device)
            self._memory = np.empty(shape[1:], dtype)
        else:
            self._memory = aligned_empty(shape, dtype)

    def part(self, index: tuple[int, ...]) -> np.ndarray:
        """The memory of the matrices at `index`, layer first; () where nothing is stacked."""
        return self._memory[index if self._leaf is None else index[1:]]

    def finish_layer(self, layer: int) -> None:
        """Call it when all parts of a layer are written and no other layer was begun."""
        if self._leaf is not None:
            slab = jax.device_put(self._memory, self._device)
            self._leaf = _with_layer(self._leaf, slab, layer)
            self._leaf.block_until_ready()  # the staging memory is about to be written again

    def finish(self) -> jax.Array:
        """The leaf on its device; not to be written to any more."""
        if self._leaf is not None:
            return self._leaf
        return jax.device_put(self._memory, self._device)


def by_layer(plan: Sequence[PlacedT]) -> dict[int, list[PlacedT]]:
    """What fills one leaf, by layer; all of it under 0 where nothing is stacked."""
    found: dict[int, list[PlacedT]] = defaultdict(list)
    for placed in plan:
        found[placed.index[0] if placed.index else 0].append(placed)
    return found


@dataclasses.dataclass(frozen=True)
class _Source:
    """A checkpoint that is being read."""

    tensors: dict[str, StoredTensor]
    bar: tqdm.tqdm

    def place(self, placement: Placement, memory: np.ndarray) -> None:
        """Reads the placement's tensor into its rows of `memory`, which is of its index."""
        tensor = self.tensors[placement.name]
        place_floats(tensor, placement.rows(memory))
        self.bar.update(tensor.num_bytes)


def place_floats(tensor: StoredTensor, rows: np.ndarray) -> None:
    """Reads a tensor into `rows`, converting to its dtype.

    Raises:
      MoejaxError: a value is NaN, infinite, huge, or too large for the dtype.
    """
    if tensor.dtype == rows.dtype:
        read_tensor(tensor, rows)
        check_range(tensor, rows)
        return
    values = read_array(tensor)
    check_range(tensor, values)
    convert_floats(tensor.name, values, rows)


def convert_floats(name: str, values: np.ndarray, rows: np.ndarray) -> None:
    """Copies `values` into `rows`, converting to its dtype.

    Raises:
      MoejaxError: a value is too large for that.
    """
    with np.errstate(over="ignore"):
        np.copyto(rows, values, casting="unsafe")
    if not in_range(without_masks(name, rows)):
        mend = "bfloat16 or float32" if rows.dtype == np.float16 else "float32"
        raise MoejaxError(
            f"{name} does not fit {rows.dtype.name} (largest {abs(values).max()}); load as {mend}"
        )


def _is_host(device: jax.Device) -> bool:
    return device.platform == "cpu"


def _fill(
    shape: tuple[int, ...],
    dtype: np.dtype,
    device: jax.Device,
    plan: list[Placement],
    source: _Source,
) -> jax.Array:
    """One leaf; `plan` says which tensors fill it."""
    memory = LeafMemory(shape, dtype, device, is_stacked=plan[0].index != ())
    for layer, placements_of_layer in by_layer(plan).items():
        for placement in placements_of_layer:
            source.place(placement, memory.part(placement.index))
        memory.finish_layer(layer)
    return memory.finish()


@functools.partial(jax.jit, donate_argnums=0)
def _with_layer(leaf: jax.Array, slab: jax.Array, layer: jax.Array) -> jax.Array:
    """`leaf` [L, ...] with `slab` [...] in the place of one layer, in place."""
    return jax.lax.dynamic_update_index_in_dim(leaf, slab, layer, 0)


def expected_placements(
    directory: Path, config: ModelConfig, names: Collection[str]
) -> Iterator[Placement]:
    """The placements of a checkpoint with tensors of these names.

    Raises:
      MoejaxError: config.json asks for so many more tensors that listing them would take long.
    """
    spelling = find_spelling(config.family, names)
    experts = 0 if spelling.fused else 3 * config.num_experts
    least = 2 * config.num_layers + experts * len(config.moe_layers)  # each layer has two norms
    if least > len(names) + _MOST_MISSING:
        raise MoejaxError(
            f"{directory} does not fit its config.json: {config.num_layers:,} layers of "
            f"{config.num_experts:,} experts take at least {least:,} tensors, and the files hold "
            f"{len(names):,}; download it again or mend config.json"
        )
    return placements(config, spelling)


def checked_placements(
    directory: Path, config: ModelConfig, tensors: dict[str, StoredTensor]
) -> list[Placement]:
    """The placements of a checkpoint's tensors, once it holds all of them and nothing else.

    Raises:
      MoejaxError: tensors are missing, unexpected or wrongly shaped.
    """
    expected = list(expected_placements(directory, config, tensors))
    left_out = ignored(config, tensors)
    by_name = {placement.name: placement for placement in expected}
    faults = Faults(
        missing=[f"{p.name} {list(p.shape)}" for p in expected if p.name not in tensors],
        misshaped=[
            misshaped(p.name, tensors[p.name].shape, p.shape)
            for p in expected
            if p.name in tensors and tensors[p.name].shape != p.shape
        ],
        unexpected=[
            f"{name} {list(tensor.shape)}"
            for name, tensor in tensors.items()
            if not (name in by_name or name in left_out or is_tied_head(config, tensor))
        ],
    )
    faults.check(directory)
    check_floats(tensors[placement.name] for placement in expected)
    check_tied(config, tensors)
    return expected


def plan_leaves(
    directory: Path, config: ModelConfig, tensors: dict[str, StoredTensor]
) -> dict[str, list[Placement]]:
    """What fills each leaf.

    Raises:
      MoejaxError: as `checked_placements`.
    """
    plan = defaultdict(list)
    for placement in checked_placements(directory, config, tensors):
        plan[placement.leaf].append(placement)
    return plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """How the tensors of a checkpoint differ from what its config.json asks for."""

    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    misshaped: list[str] = dataclasses.field(default_factory=list)

    @property
    def count(self) -> int:
        """Of all kinds."""
        return len(self.missing) + len(self.unexpected) + len(self.misshaped)

    def check(self, directory: Path) -> None:
        """Raises MoejaxError, with the first of each kind, if there are any."""
        said = [
            f"{kind} ({len(found)}): {', '.join(found[:3])}{', ...' if len(found) > 3 else ''}"
            for kind, found in (
                ("missing tensors", self.missing),
                ("unexpected tensors", self.unexpected),
                ("wrongly shaped tensors", self.misshaped),
            )
            if found
        ]
        if said:
            raise MoejaxError(
                f"{directory} does not fit its config.json: {'; '.join(said)}; download it again "
                "or mend config.json"
            )


def misshaped(name: str, found: Sequence[int], expected: Sequence[int]) -> str:
    """Both shapes of a tensor, for `Faults`."""
    return f"{name} is {list(found)} in the file, {list(expected)} by config.json"


def is_tied_head(config: ModelConfig, tensor: StoredTensor) -> bool:
    """Whether it is a head that is stored though it is tied to the embeddings."""
    shape = (config.vocab_size, config.model_dim)
    return config.tied_embeddings and tensor.name == _HEAD and tensor.shape == shape


def check_tied(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises MoejaxError unless a head that is stored beside tied embeddings equals them."""
    if not config.tied_embeddings or not {_HEAD, _EMBEDDING} <= tensors.keys():
        return
    embedding, head = tensors[_EMBEDDING], tensors[_HEAD]
    if not np.array_equal(read_array(embedding).view(np.uint8), read_array(head).view(np.uint8)):
        raise MoejaxError(
            f"{head.path}: {head.name} differs from {embedding.name}, but config.json says "
            "tie_word_embeddings; set that to false"
        )
