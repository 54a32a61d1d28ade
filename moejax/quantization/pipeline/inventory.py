"""The contents of a Hugging Face checkpoint: every tensor, its class, and its output shard.

Tensors carry their published names, one an expert and projection, whatever the source's spelling:
a matrix of transformers' fused experts is a slice of the source's file, and one of gpt-oss, plain
or in MXFP4, is converted while it is read.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from moejax.checkpoints.formats.registry import quantization_fields
from moejax.checkpoints.leaves import LeafPlan, Part, split_experts
from moejax.checkpoints.orbax_directory import is_orbax_directory
from moejax.checkpoints.reader import CheckpointReader, fill_part
from moejax.checkpoints.safetensors_reader import (
    StoredTensor,
    check_floats,
    read_matrix,
    read_tensor,
)
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.models.hf.config import read_model_config
from moejax.models.hf.names import Placement, expert_spelling, placements
from moejax.models.leaf_kinds import kind_of, layers_of

METHODS = ("mxfp4",)  # quantized checkpoints that can be quantized anew
# Of the model's size in bytes: enough to tell a fine-tuned model from its base.
_SAMPLE_BYTES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of the model."""

    name: str  # published, with ".weight" where it has that
    kind: str  # one of `leaf_kinds.KINDS`
    leaf: str  # of `weight_shapes` that it is part of, from row `start` on
    start: int
    layer: int | None
    expert: int | None
    # Under the published name; of fused experts the slice. Where `arranged` is given, its shape and
    # size are right, but its bytes lie in another order, or are codes, of which it is bfloat16.
    source: StoredTensor
    # Where rows of other matrices lie between its own, inputs before outputs, or codes: the leaf,
    # and the part of it that is read.
    arranged: tuple[LeafPlan, Part] | None = None

    @property
    def prefix(self) -> str:
        """The name without ".weight"."""
        return self.name.removesuffix(".weight")

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K) of a matrix."""
        return self.source.shape

    def read(self, rows: np.ndarray | None = None, first_row: int = 0) -> np.ndarray:
        """Reads float32 values of the matrix as `read_matrix`; MoejaxError as `fill_part`, too."""
        if self.arranged is None:
            return read_matrix(self.source, rows, first_row)
        plan, part = self.arranged
        plain = dataclasses.replace(plan, kind=None, dtype=np.dtype(np.float32))
        whole = np.empty(plan.shape[2:], np.float32)
        fill_part(plain, part, {"array": whole}, read_tensor)
        values = whole[self.start : self.start + self.shape[0]]
        if rows is None:
            return values
        rows[...] = values[first_row : first_row + len(rows)]
        return rows

    def stored(self) -> StoredTensor | np.ndarray:
        """Returns the tensor as a file stores it unquantized."""
        if self.arranged is None:
            return self.source
        return self.read().astype(self.source.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """One output file: a layer, or all that belongs to none."""

    file: str
    title: str  # "layer 3"
    layer: int | None
    entries: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inventory:
    """A checkpoint that is to be quantized."""

    directory: Path
    config: ModelConfig
    shards: tuple[Shard, ...]  # layers in order, the rest last

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All tensors."""
        return tuple(entry for shard in self.shards for entry in shard.entries)


def take_inventory(directory: Path) -> Inventory:
    """Every tensor of the checkpoint in `directory`, from its headers alone.

    MoejaxError if it is broken, no Hugging Face directory, or quantized already.
    """
    if is_orbax_directory(directory):
        raise MoejaxError(f"{directory} holds Orbax weights; give the Hugging Face directory")
    quantization = quantization_fields(directory)
    if quantization is not None and quantization.get("quant_method") not in METHODS:
        raise MoejaxError(
            f"{directory} is quantized already (quant_method {quantization.get('quant_method')!r})"
            "; give the checkpoint that it was made from"
        )
    config = read_model_config(directory)
    reader = CheckpointReader(directory, config, dtype=np.float32)
    reader.check_left_out()
    if quantization is None:
        check_floats(reader.stored.values())
    entries = _entries(reader)
    layers: list[int | None] = [*range(config.num_layers), None]
    shards = tuple(
        Shard(
            file=f"model-{i:05}-of-{len(layers):05}.safetensors",
            title="embedding, head and norm" if layer is None else f"layer {layer}",
            layer=layer,
            entries=tuple(entry for entry in entries if entry.layer == layer),
        )
        for i, layer in enumerate(layers, start=1)
    )
    return Inventory(directory=directory, config=config, shards=shards)


def source_fingerprint(inventory: Inventory) -> str:
    """Hex digest of config.json and of names, shapes, types and some bytes of all tensors."""
    digest = hashlib.sha256((inventory.directory / "config.json").read_bytes())
    by_file: dict[Path, list[StoredTensor]] = {}
    for entry in inventory.entries:
        tensor = entry.source
        digest.update(f"{tensor.name} {tensor.shape} {tensor.dtype}\n".encode())
        by_file.setdefault(tensor.path, []).append(tensor)
    for path in sorted(by_file):
        with path.open("rb") as file:
            for tensor in sorted(by_file[path], key=lambda tensor: tensor.offset):
                # The middle: the beginning of an embedding may be the same in two models.
                file.seek(tensor.offset + max(0, tensor.num_bytes // 2 - _SAMPLE_BYTES // 2))
                digest.update(file.read(min(_SAMPLE_BYTES, tensor.num_bytes)))
    return digest.hexdigest()


def _entries(reader: CheckpointReader) -> list[Entry]:
    """The published tensors, each with where its rows lie in the source."""
    # What fills which place of the leaves, in the source's spelling.
    sources = {
        (plan.name, part.index, part.placement.start): part
        for plan in reader.leaves.values()
        for whole in plan.parts
        for part in split_experts(whole)
    }
    config = reader.config
    return [
        _entry(reader, placement, sources)
        for placement in placements(config, expert_spelling(config.family))
    ]


def _entry(
    reader: CheckpointReader,
    placement: Placement,
    sources: Mapping[tuple[str, tuple[int, ...], int], Part],
) -> Entry:
    leaf, index, start = placement.leaf, placement.index, placement.start
    part, arranged = sources.get((leaf, index, start)) or sources[leaf, index, 0], None
    found, config = part.placement, reader.config
    is_bias = len(placement.shape) == len(found.shape) and found.name == placement.name
    if part.tensor is not None and (is_bias or not (found.is_interleaved or found.is_transposed)):
        source = part.tensor
        if source.shape != placement.shape:
            source = source.part(start, placement.shape)
    else:
        arranged = reader.leaves[leaf], part
        if part.tensor is not None:
            source, dtype = part.tensor, part.tensor.dtype
        else:  # the first of the tensors that its codes lie in
            assert part.matrix is not None
            whole = reader.stored[part.matrix.names[0]]
            source, dtype = whole.part(index[1], whole.shape[1:]), np.dtype(ml_dtypes.bfloat16)
        source = dataclasses.replace(source, shape=placement.shape, dtype=dtype, checksum=None)
    return Entry(
        name=placement.name,
        kind=kind_of(leaf),
        leaf=leaf,
        start=start,
        layer=layers_of(config, leaf)[index[0]] if index else None,
        expert=index[1] if len(index) > 1 else None,
        source=dataclasses.replace(source, name=placement.name),
        arranged=arranged,
    )
