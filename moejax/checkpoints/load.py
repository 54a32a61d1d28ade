"""Streams a Hugging Face checkpoint into layer-stacked leaves, tensor by tensor.

On the CPU the leaves are filled in place and given to JAX without a copy. On an accelerator each
leaf is allocated there once, and one layer at a time is staged in host memory. Either way the
host never holds more than the model in its target dtype plus one tensor.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from moejax.checkpoints.safetensors_reader import StoredTensor, read_tensor, stored_tensors
from moejax.devices import choose_device
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.hf_names import Placement, find_spelling, is_ignored, placements

# The XLA CPU client takes over host memory without a copy only at this alignment.
_ALIGNMENT_BYTES = 64
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_weights(
    directory: Path,
    config: ModelConfig,
    *,
    dtype: jnp.dtype,
    device: jax.Device | None = None,
    progress: bool = True,
) -> dict[str, jax.Array]:
    """The leaves of `weight_shapes(config)` on `device`, converted to `dtype`.

    Args:
      directory: holds safetensors, one file or several with an index.
      config: what config.json says.
      dtype: float32, bfloat16 or float16.
      device: None means JAX's default device.
      progress: show a bar over the bytes read on stderr.

    Raises:
      MoejaxError: a file is missing or broken; tensors are missing, unexpected or of another
        shape than `config` says; a value does not fit float16.
    """
    device = device or choose_device("auto")
    tensors = stored_tensors(directory)
    plan = _plan(directory, config, tensors)
    num_bytes = sum(tensors[p.name].num_bytes for part in plan.values() for p in part)
    with tqdm.tqdm(
        total=num_bytes, desc="loading", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        source = _Source(tensors, bar)
        return {
            leaf: _fill(shape, np.dtype(dtype), device, plan[leaf], source)
            for leaf, shape in weight_shapes(config).items()
        }


def stored_dtype(directory: Path) -> np.dtype:
    """The dtype of most of a checkpoint's bytes.

    Raises:
      MoejaxError: a file is missing, broken or empty.
    """
    num_bytes: dict[np.dtype, int] = defaultdict(int)
    for tensor in stored_tensors(directory).values():
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


@dataclasses.dataclass(frozen=True)
class _Source:
    """A checkpoint that is being read."""

    tensors: dict[str, StoredTensor]
    bar: tqdm.tqdm

    def place(self, placement: Placement, memory: np.ndarray) -> None:
        """Reads the placement's tensor into its rows of `memory`, converting to its dtype.

        Raises:
          MoejaxError: a value is too large for float16.
        """
        tensor = self.tensors[placement.name]
        rows = placement.rows(memory)
        if tensor.dtype == rows.dtype:
            read_tensor(tensor, rows)
        else:
            stored = _read(tensor)
            with np.errstate(over="ignore"):
                np.copyto(rows, stored, casting="unsafe")
            if rows.dtype == np.float16 and np.isinf(rows).any():
                raise MoejaxError(
                    f"{tensor.name} does not fit float16 (largest {abs(stored).max()}); "
                    "load as bfloat16 or float32"
                )
        self.bar.update(tensor.num_bytes)


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
    is_stacked = plan[0].index != ()
    if is_stacked and not _is_host(device):
        return _fill_staged(shape, dtype, device, plan, source)
    return _fill_in_place(shape, dtype, device, plan, source)


def _fill_in_place(
    shape: tuple[int, ...],
    dtype: np.dtype,
    device: jax.Device,
    plan: list[Placement],
    source: _Source,
) -> jax.Array:
    """The leaf, filled in host memory; a CPU device takes that over."""
    leaf = aligned_empty(shape, dtype)
    for placement in plan:
        source.place(placement, leaf[placement.index])
    return jax.device_put(leaf, device)


def _fill_staged(
    shape: tuple[int, ...],
    dtype: np.dtype,
    device: jax.Device,
    plan: list[Placement],
    source: _Source,
) -> jax.Array:
    """The leaf on the device, by way of host memory for one layer."""
    by_layer = defaultdict(list)
    for placement in plan:
        by_layer[placement.index[0]].append(placement)
    leaf = jnp.zeros(shape, dtype, device=device)
    staged = np.empty(shape[1:], dtype)
    for layer, placements_of_layer in by_layer.items():
        for placement in placements_of_layer:
            source.place(placement, staged[placement.index[1:]])
        leaf = _with_layer(leaf, jax.device_put(staged, device), layer)
        leaf.block_until_ready()  # the staging memory is about to be written again
    return leaf


@functools.partial(jax.jit, donate_argnums=0)
def _with_layer(leaf: jax.Array, slab: jax.Array, layer: jax.Array) -> jax.Array:
    """`leaf` [L, ...] with `slab` [...] in the place of one layer, in place."""
    return jax.lax.dynamic_update_index_in_dim(leaf, slab, layer, 0)


def _plan(
    directory: Path, config: ModelConfig, tensors: dict[str, StoredTensor]
) -> dict[str, list[Placement]]:
    """What fills each leaf, after a check that the checkpoint holds it and nothing else.

    Raises:
      MoejaxError: tensors are missing, unexpected or wrongly shaped.
    """
    expected = list(placements(config, find_spelling(config.family, tensors)))
    by_name = {placement.name: placement for placement in expected}
    missing = [f"{p.name} {list(p.shape)}" for p in expected if p.name not in tensors]
    misshaped = [
        f"{p.name} is {list(tensors[p.name].shape)} in the file, {list(p.shape)} by config.json"
        for p in expected
        if p.name in tensors and tensors[p.name].shape != p.shape
    ]
    unexpected = [
        f"{name} {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name not in by_name and not is_ignored(name) and not _is_tied_head(config, tensor)
    ]
    faults = [
        f"{kind} ({len(found)}): {', '.join(found[:3])}{', ...' if len(found) > 3 else ''}"
        for kind, found in (
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("wrongly shaped tensors", misshaped),
        )
        if found
    ]
    if faults:
        raise MoejaxError(
            f"{directory} does not fit its config.json: {'; '.join(faults)}; download it again or "
            "mend config.json"
        )
    if config.tied_embeddings and _HEAD in tensors:
        _check_tied(tensors[_EMBEDDING], tensors[_HEAD])
    plan = defaultdict(list)
    for placement in expected:
        plan[placement.leaf].append(placement)
    return plan


def _is_tied_head(config: ModelConfig, tensor: StoredTensor) -> bool:
    shape = (config.vocab_size, config.model_dim)
    return config.tied_embeddings and tensor.name == _HEAD and tensor.shape == shape


def _check_tied(embedding: StoredTensor, head: StoredTensor) -> None:
    """Raises MoejaxError unless a head that is stored beside tied embeddings equals them."""
    if not np.array_equal(_read(embedding).view(np.uint8), _read(head).view(np.uint8)):
        raise MoejaxError(
            f"{head.path}: {head.name} differs from {embedding.name}, but config.json says "
            "tie_word_embeddings; set that to false"
        )


def _read(tensor: StoredTensor) -> np.ndarray:
    memory = np.empty(tensor.shape, tensor.dtype)
    read_tensor(tensor, memory)
    return memory
