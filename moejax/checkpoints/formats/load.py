"""Streams a quantized checkpoint of any format into layer-stacked leaves, matrix by matrix.

As `moejax.checkpoints.load`: on the CPU the leaves are filled in place and given to JAX without a
copy, on an accelerator one layer at a time is staged in host memory. The host never holds more than
the leaves and one matrix with what its conversion takes.
"""

import math
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import logging

from moejax.checkpoints.formats.bitstream import on_host
from moejax.checkpoints.formats.interfaces import FLOATS, CodesKind, Format, Fp8Kind, Tensors
from moejax.checkpoints.formats.leaves import Part, common_kind, fill_codes, fill_fp8
from moejax.checkpoints.formats.registry import open_format, quantization_fields
from moejax.checkpoints.load import (
    LeafMemory,
    by_layer,
    check_tied,
    convert_floats,
    expected_placements,
    is_tied_head,
    log_multi_token,
    place_floats,
    wanted_leaves,
)
from moejax.checkpoints.safetensors_reader import stored_tensors
from moejax.devices import choose_device
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig, leaf_dtype, weight_shapes
from moejax.models.hf.names import ignored
from moejax.weights.qtensor import Fp8Tensor, QTensor, Weight


def load_quantized_weights(
    directory: Path,
    config: ModelConfig,
    *,
    dtype: jnp.dtype,
    device: jax.Device | None = None,
    progress: bool = True,
    verify_checksums: bool = False,
    experts: bool = True,
) -> dict[str, Weight]:
    """The leaves of `weight_shapes(config)` on `device`; those that can be are kept quantized.

    A leaf is a QTensor or an Fp8Tensor where all its matrices are stored in one kind (bits, group
    size, act-order), plain where none is quantized. Where they differ it is dequantized, and a
    warning says so.

    Args:
      directory: holds safetensors and a config.json with a quantization_config.
      config: what config.json says of the model.
      dtype: float32, bfloat16 or float16, of what is not quantized.
      device: None means JAX's default device.
      progress: show a bar over the bytes read on stderr.
      verify_checksums: see `open_format`.
      experts: whether `EXPERT_LEAVES` are loaded; they are checked in either case.

    Raises:
      MoejaxError: the format cannot be read; a file is missing or broken; tensors are missing,
        unexpected or of another shape than `config` says; a value does not fit float16.
    """
    device = device or choose_device("auto")
    tensors = Tensors(stored_tensors(directory))
    plan = plan_parts(directory, config, tensors, verify_checksums=verify_checksums)
    _log_share(config, plan)
    log_multi_token(directory, config, tensors.stored)
    plan = wanted_leaves(plan, experts=experts)
    num_bytes = sum(_num_bytes(part, tensors) for parts in plan.values() for part in parts)
    with tqdm.tqdm(
        total=num_bytes, desc="loading", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        reader = _Reader(tensors, bar)
        return {
            leaf: reader.fill(leaf, shape, leaf_dtype(leaf, dtype), device, plan[leaf])
            for leaf, shape in wanted_leaves(weight_shapes(config), experts=experts).items()
        }


def plan_parts(
    directory: Path, config: ModelConfig, tensors: Tensors, *, verify_checksums: bool = False
) -> dict[str, list[Part]]:
    """What fills each leaf of a quantized checkpoint; from the headers, and little more.

    Raises:
      MoejaxError: as `load_quantized_weights`.
    """
    fields = quantization_fields(directory)
    if fields is None:
        raise MoejaxError(f"{directory / 'config.json'} has no quantization_config")
    form = open_format(directory, fields, verify_checksums=verify_checksums)
    plan = _plan(directory, config, form, tensors)
    if all(part.matrix is None for parts in plan.values() for part in parts):
        raise MoejaxError(
            f"{directory / 'config.json'} has a quantization_config, quant_method "
            f"{fields.get('quant_method')!r}, but no tensor is quantized; take the field out if "
            "these are the weights that are meant"
        )
    return plan


class _Reader:
    """A checkpoint that is being read."""

    def __init__(self, tensors: Tensors, bar: tqdm.tqdm) -> None:
        self._tensors, self._bar = tensors, bar

    def fill(
        self,
        leaf: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        device: jax.Device,
        parts: list[Part],
    ) -> Weight:
        """One leaf."""
        if all(part.matrix is None for part in parts):
            return self._fill_floats(shape, dtype, device, parts)
        kind = common_kind(parts)
        if isinstance(kind, CodesKind):
            return fill_codes(shape, kind, parts, device, self._advance)
        if isinstance(kind, Fp8Kind):
            return fill_fp8(shape, parts, device, self._advance)
        logging.warning("%s is dequantized to %s while it is loaded: %s", leaf, dtype.name, kind)
        return self._fill_floats(shape, dtype, device, parts)

    def _fill_floats(
        self, shape: tuple[int, ...], dtype: np.dtype, device: jax.Device, parts: list[Part]
    ) -> jax.Array:
        memory = LeafMemory(shape, dtype, device, is_stacked=parts[0].index != ())
        for layer, parts_of_layer in by_layer(parts).items():
            for part in parts_of_layer:
                rows = part.placement.rows(memory.part(part.index))
                if part.matrix is None:
                    place_floats(self._tensors[part.placement.name], rows)
                else:
                    values = dequantized(part.matrix.read())
                    convert_floats(part.placement.name, values, rows)
                self._advance(part)
            memory.finish_layer(layer)
        return memory.finish()

    def _advance(self, part: Part) -> None:
        self._bar.update(_num_bytes(part, self._tensors))


def _num_bytes(part: Part, tensors: Tensors) -> int:
    names = part.matrix.names if part.matrix else (part.placement.name,)
    return sum(tensors[name].num_bytes for name in names)


@on_host
@jax.jit
def dequantized(matrix: QTensor | Fp8Tensor) -> jax.Array:
    """float32[N, K] of a matrix that was read, by the CPU."""
    return matrix.dequantize()


def _plan(
    directory: Path, config: ModelConfig, form: Format, tensors: Tensors
) -> dict[str, list[Part]]:
    """What fills each leaf.

    Raises:
      MoejaxError: tensors are missing, unexpected, wrongly shaped or of types that do not fit.
    """
    plan: dict[str, list[Part]] = defaultdict(list)
    used: set[str] = set()
    extras: set[str] = set()
    for placement in expected_placements(directory, config, tensors.stored):
        prefix, matrix = placement.name.removesuffix(".weight"), None
        num_faults = tensors.faults.count
        if len(placement.shape) > 1:
            matrix = form.find(prefix, placement.shape, tensors)
        if matrix is not None:
            used.update(matrix.names)
            extras.update(form.extras(prefix))
        elif num_faults == tensors.faults.count:  # so it is no broken quantized matrix
            tensors.fits(placement.name, placement.shape, FLOATS)
            used.add(placement.name)
        plan[placement.leaf].append(Part(placement, matrix))
    left_out = ignored(config, tensors.stored)
    unexpected = [
        f"{name} {list(tensor.shape)}"
        for name, tensor in tensors.stored.items()
        if name not in used
        and name not in left_out
        and not is_tied_head(config, tensor)
        and not (name in extras and _says_nothing(name, tensors))
    ]
    # With a tensor of a matrix missing or misshaped, its others were not asked for.
    if not tensors.faults.count:
        tensors.faults.unexpected.extend(unexpected)
    tensors.faults.check(directory)
    check_tied(config, tensors.stored)
    return plan


def _says_nothing(name: str, tensors: Tensors) -> bool:
    """Whether leaving out a tensor that a format allows changes nothing: a bias must be zero."""
    return not name.endswith(".bias") or not np.any(tensors.read(name))


def _log_share(config: ModelConfig, plan: dict[str, list[Part]]) -> None:
    shapes = weight_shapes(config)
    total = sum(math.prod(shape) for shape in shapes.values())
    quantized = sum(
        math.prod(part.placement.shape) for parts in plan.values() for part in parts if part.matrix
    )
    logging.info("%.2f %% of the parameters are quantized", 100 * quantized / total)
