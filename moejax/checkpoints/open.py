"""Opens a checkpoint of any kind by name."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from moejax.checkpoints.formats.registry import open_format, quantization_fields
from moejax.checkpoints.orbax_directory import (
    is_orbax_directory,
    load_orbax,
    read_orbax_description,
)
from moejax.checkpoints.reader import CheckpointReader, stored_dtype
from moejax.checkpoints.resolve import resolve_checkpoint
from moejax.devices import DeviceMesh, Place
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.hf.config import read_model_config
from moejax.models.leaf_kinds import EXPERT_BIASES, EXPERT_LEAVES
from moejax.text.tokenizer import read_eos_ids
from moejax.weights.qtensor import Weight

DTYPES = ("float32", "bfloat16", "float16")
# Leaves of sparse layers that devices of a mesh can have, a share or the whole.
MESH_LEAVES = (*EXPERT_LEAVES, *EXPERT_BIASES, "moe.router", "moe.router_bias", "moe.logit_bias")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk, its weights not yet read."""

    directory: Path
    config: ModelConfig
    eos_ids: tuple[int, ...]  # known without a tokenizer as well

    is_quantized: bool = False  # by its config.json
    planes: tuple[int, ...] = ()  # widths in which bit planes can be read, if there are any
    read_bits: int = 0  # the one in which they are; 0: the widest

    def load(
        self, *, dtype: str, device: jax.Device, progress: bool, experts: bool = True,
        mesh: DeviceMesh | None = None, places: Mapping[str, Place] = MappingProxyType({}),
    ) -> Mapping[str, Weight]:  # fmt: skip
        """Loads the leaves of `weight_shapes(self.config)`; packed ones stay packed.

        Args:
          dtype: name of a float type, or "auto": float32 on a CPU, the stored one elsewhere.
          progress: show a bar on stderr (not for an Orbax directory).
          experts: whether `EXPERT_LEAVES` are among them; without, see `open_experts`. An Orbax
            directory is loaded whole (MoejaxError).
          mesh: devices that have a share of every expert each, `device` the first; None: it alone.
          places: of leaves that do not go to `device`.
        """
        chosen = self.choose_dtype(dtype, device)
        if mesh is not None:
            others = [leaf for leaf in weight_shapes(self.config) if leaf.startswith("moe.")]
            if others := [leaf for leaf in others if leaf not in MESH_LEAVES]:
                raise MoejaxError(
                    f"{self.directory}: a mesh does not serve experts with {' and '.join(others)} "
                    "yet; leave it out"
                )
        if self.is_orbax:
            if mesh is not None:
                raise MoejaxError(
                    f"{self.directory}: an Orbax directory is loaded whole, and a mesh divides "
                    "experts: give the directory of safetensors, or leave the mesh out"
                )
            if not experts:
                raise self.orbax_is_whole()
            return load_orbax(self.directory, dtype=chosen, device=device)[1]
        place = device if mesh is None else mesh.replicated
        reader = self.reader(chosen)
        return reader.load(place, progress=progress, experts=experts, mesh=mesh, places=places)

    def reader(self, dtype: Any) -> CheckpointReader:
        """Opens a reader of its safetensors, of plain leaves in `dtype`."""
        return CheckpointReader(self.directory, self.config, dtype=dtype, read_bits=self.read_bits)

    @property
    def is_orbax(self) -> bool:
        """Whether it is a directory that `save_orbax` wrote."""
        return is_orbax_directory(self.directory)

    def orbax_is_whole(self) -> MoejaxError:
        """Error that an Orbax directory's experts cannot be read one by one."""
        return MoejaxError(
            f"{self.directory} is an Orbax directory, which is loaded whole; experts that do not "
            "fit the device are read from safetensors: name the checkpoint that it was made from"
        )

    def choose_dtype(self, name: str, device: jax.Device) -> jnp.dtype:
        """The type of a name, "auto" included; raises MoejaxError if there is none."""
        if name in DTYPES:
            return jnp.dtype(name)
        if name != "auto":
            raise MoejaxError(f"dtype {name!r} is none of auto, {', '.join(DTYPES)}")
        if device.platform == "cpu":
            return jnp.dtype(jnp.float32)
        if self.is_orbax:
            return read_orbax_description(self.directory)[1]
        return stored_dtype(self.directory, is_quantized=self.is_quantized)


def open_checkpoint(name: str, read_bits: int = 0) -> Checkpoint:
    """Opens the checkpoint of a name; see `resolve_checkpoint`.

    Args:
      read_bits: width in which bit planes are read; 0: the widest.

    Raises:
      MoejaxError: what describes it is broken or not supported, or it has no such width.
    """
    directory = resolve_checkpoint(name)
    fields = None
    planes: tuple[int, ...] = ()
    if is_orbax_directory(directory):
        config, _ = read_orbax_description(directory)
    else:
        config = read_model_config(directory)
        fields = quantization_fields(directory)
        if fields is not None:
            # What cannot be read is said before anything is.
            planes = open_format(directory, fields).planes
    eos_ids = read_eos_ids(directory, vocab_size=config.vocab_size)
    if read_bits and read_bits not in planes:
        raise MoejaxError(
            f"read_bits={read_bits} must be a width of every matrix by bit planes; {directory} has "
            f"{', '.join(map(str, planes)) or 'none'}; leave it out"
        )
    return Checkpoint(
        directory, config, eos_ids, is_quantized=fields is not None, planes=planes,
        read_bits=read_bits,
    )  # fmt: skip
