"""Plans a checkpoint's leaves: which tensors fill which rows, in which form.

Loading, reading one expert, sizes and quantization stand on it. It is made from the headers of the
files, and little more: kinds of zero points and act-orders are read where a format needs them.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from moejax.checkpoints.formats.interfaces import (
    FactorKinds,
    Format,
    Fp8Kind,
    Kind,
    StoredMatrix,
    Tensors,
)
from moejax.checkpoints.formats.registry import open_format, quantization_fields
from moejax.checkpoints.safetensors_reader import StoredTensor, check_floats
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig, leaf_dtype, weight_shapes
from moejax.models.hf.names import Placement, find_spelling, ignored, placements
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.weights.qtensor import FP8_BLOCK, ZERO_KINDS, CodesKind, Fp8Tensor, Weight

_MOST_MISSING = 20_000  # tensors that are listed though they are not there
_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Part:
    """A matrix or vector of a checkpoint, and its rows of a leaf."""

    placement: Placement
    stored: StoredTensor | StoredMatrix  # a plain tensor, or a quantized matrix
    num_bytes: int  # in the files

    @property
    def index(self) -> tuple[int, ...]:
        """Layer, then expert."""
        return self.placement.index

    @property
    def tensor(self) -> StoredTensor | None:
        """The tensor, if it is plain."""
        return self.stored if isinstance(self.stored, StoredTensor) else None

    @property
    def matrix(self) -> StoredMatrix | None:
        """The quantized matrix, if it is one."""
        return self.stored if isinstance(self.stored, StoredMatrix) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafPlan:
    """The stored form of a leaf, and the parts that fill it."""

    name: str  # key in `weight_shapes`
    shape: tuple[int, ...]  # [..., N, K], or a vector's
    dtype: np.dtype  # of a plain leaf
    kind: Kind | None = None  # how its matrices are packed; None: it is plain
    parts: Sequence[Part] = ()  # empty for a model without a checkpoint
    mixture: str = ""  # why packed matrices are dequantized to a plain leaf, if they are

    @functools.cached_property
    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays that hold the leaf, by field of `QTensor` or `Fp8Tensor`; "array" if plain."""
        if self.kind is None:
            return {"array": jax.ShapeDtypeStruct(self.shape, self.dtype)}
        if isinstance(self.kind, Fp8Kind):
            *lead, rows, inputs = self.shape
            blocks = (*lead, -(-rows // FP8_BLOCK), -(-inputs // FP8_BLOCK))
            return {
                "values": jax.ShapeDtypeStruct(self.shape, np.dtype(ml_dtypes.float8_e4m3fn)),
                "scales": jax.ShapeDtypeStruct(blocks, np.dtype(np.float32)),
            }
        found = self.kind.arrays(self.shape)
        if self._has_order:
            *lead, _, inputs = self.shape
            found["permutation"] = jax.ShapeDtypeStruct((*lead, inputs), np.dtype(np.int32))
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of `arrays`, without low-rank factors."""
        return sum(array.size * array.dtype.itemsize for array in self.arrays.values())

    @functools.cached_property
    def _has_order(self) -> bool:
        """Whether a matrix is stored in GPTQ's act-order."""
        return any(part.matrix is not None and part.matrix.order for part in self.parts)

    @property
    def form(self) -> str:
        """Name of the stored form for people, such as "int4"."""
        if isinstance(self.kind, CodesKind):
            return "mxfp4" if self.kind.is_mxfp4 else f"int{self.kind.bits}"
        return f"{8 * self.dtype.itemsize}-bit floats" if self.kind is None else "fp8"

    @property
    def refusal(self) -> str | None:
        """Name of the form if expert slots cannot hold it, or None."""
        fused = any(part.matrix is not None and len(part.index) < 2 for part in self.parts)
        if isinstance(self.kind, Fp8Kind) or fused:
            return "FP8"
        return "permuted by GPTQ's act-order" if self.kind is not None and self._has_order else None

    @property
    def splits_by_rows(self) -> bool:
        """Whether each of its arrays has a row for each of the leaf's: no FP8, terms or order."""
        return not (isinstance(self.kind, Fp8Kind) or self._has_order or self.factor_pools)

    @functools.cached_property
    def factor_pools(self) -> tuple["FactorPool", ...]:
        """Low-rank factors beside packed matrices: a pool for equal rows and kinds of factors."""
        owners: dict[tuple[int, FactorKinds], list[Part]] = {}
        for part in self.parts if isinstance(self.kind, CodesKind) else ():
            matrix = part.matrix
            if matrix is not None and matrix.factors is not None and matrix.rank:
                owners.setdefault((part.placement.start, matrix.factors), []).append(part)
        return tuple(FactorPool(kinds, self.shape, found) for (_, kinds), found in owners.items())

    def rows(self, name: str, array: np.ndarray, part: Part) -> np.ndarray:
        """View of a part's rows of `array`, which is `arrays[name]` at its index."""
        if name == "permutation":
            return array
        placement = part.placement
        if placement.is_interleaved or placement.is_transposed:
            return placement.rows(array)
        start, shape = placement.start, placement.shape
        stop = start + shape[0]
        if name == "scales" and isinstance(self.kind, Fp8Kind) and len(shape) == 2:
            start, stop = start // FP8_BLOCK, -(-stop // FP8_BLOCK)
        return array[start:stop]

    def default(self, name: str) -> Any:
        """Fills an array for a matrix of which no such array is stored."""
        if name == "permutation":
            return np.arange(self.shape[-1])
        assert isinstance(self.kind, CodesKind) and name == "zeros"
        return 2 ** (self.kind.bits - 1)  # it is symmetric

    def assemble(self, arrays: Mapping[str, Any]) -> Weight:
        """The leaf, or its template, from the arrays of `arrays`, without terms; checked."""
        if self.kind is None:
            array: jax.Array = arrays["array"]
            return array
        if isinstance(self.kind, Fp8Kind):
            fp8 = Fp8Tensor(**arrays)
            fp8.check()
            return fp8
        return self.kind.tensor(self.shape[-1], arrays)


@dataclasses.dataclass(frozen=True)
class FactorPool:
    """The low-rank factors of one kind of the matrices that lie at the same rows of a leaf."""

    kinds: FactorKinds
    shape: tuple[int, ...]  # of the leaf
    owners: Sequence[Part]

    @property
    def num_rows(self) -> int:
        """Rows of each matrix that the terms are added to."""
        return self.owners[0].placement.shape[0]

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each owner."""
        return tuple(part.matrix.rank if part.matrix else 0 for part in self.owners)

    def factor(self, name: str) -> LeafPlan:
        """Leaf plan of one factor's pool, "u" or "v": a row for each rank."""
        i = "uv".index(name)
        shape = (sum(self.ranks), (self.num_rows, self.shape[-1])[i])
        dtype = np.dtype(ml_dtypes.bfloat16)
        return LeafPlan(name=name, shape=shape, dtype=dtype, kind=self.kinds[i])

    @property
    def nbytes(self) -> int:
        """Bytes of both factors, and of each matrix's start and rank."""
        where = 2 * np.dtype(np.int32).itemsize * math.prod(self.shape[:-2])
        return self.factor("u").nbytes + self.factor("v").nbytes + where


def split_experts(part: Part) -> Iterator[Part]:
    """A part for each expert, where all experts of a layer lie together; else the part.

    Slices have no checksum of their own.
    """
    placement, stored = part.placement, part.stored
    is_whole = isinstance(stored, StoredMatrix) and stored.expert is None
    if placement.leaf not in EXPERT_LEAVES or len(placement.shape) < 3 or is_whole:
        yield part
        return
    num_experts, *shape = placement.shape
    for expert in range(num_experts):
        own = dataclasses.replace(placement, index=(*placement.index, expert), shape=tuple(shape))
        if isinstance(stored, StoredTensor):
            one: StoredTensor | StoredMatrix = stored.part(expert, own.shape)
        else:
            assert stored.expert is not None
            one = stored.expert(expert)
        yield Part(own, one, part.num_bytes // num_experts)


def plan_leaves(
    directory: Path,
    config: ModelConfig,
    stored: Mapping[str, StoredTensor],
    *,
    dtype: Any,
    read_bits: int = 0,
) -> dict[str, LeafPlan]:
    """Plans every leaf of `weight_shapes(config)`, for plain and quantized checkpoints.

    A leaf is packed where all its matrices are stored in one kind (bits, group size, act-order),
    plain, in `dtype`, where none is quantized. Where they differ they are dequantized. MoejaxError
    if the format cannot be read, or tensors do not fit config.json.
    """
    fields = quantization_fields(directory)
    form = None if fields is None else open_format(directory, fields, read_bits=read_bits)
    parts = _plan_parts(directory, config, form, Tensors(stored))
    plans = {
        leaf: _plan_leaf(leaf, shape, np.dtype(leaf_dtype(leaf, dtype)), parts[leaf])
        for leaf, shape in weight_shapes(config).items()
    }
    matrices = (part.matrix for plan in plans.values() for part in plan.parts)
    if fields is not None and all(matrix is None for matrix in matrices):
        raise MoejaxError(
            f"{directory / 'config.json'} has a quantization_config, quant_method "
            f"{fields.get('quant_method')!r}, but no tensor is quantized; take the field out if "
            "these are the weights that are meant"
        )
    return plans


def _plan_leaf(name: str, shape: tuple[int, ...], dtype: np.dtype, parts: list[Part]) -> LeafPlan:
    found = _common_kind(parts) if any(part.matrix is not None for part in parts) else None
    kind, mixture = (None, found) if isinstance(found, str) else (found, "")
    return LeafPlan(name=name, shape=shape, dtype=dtype, kind=kind, parts=parts, mixture=mixture)


def _common_kind(parts: Sequence[Part]) -> Kind | str:
    """Returns a kind that holds all parts without loss, or why there is none.

    Scales become float32 where some are, and zero points integers or floats where some are.
    """
    kinds = {part.matrix.kind if part.matrix else None for part in parts}
    if kinds == {Fp8Kind()}:
        whole = all(part.placement.start % FP8_BLOCK == 0 for part in parts)
        return Fp8Kind() if whole else f"its parts are no multiples of {FP8_BLOCK} rows"
    codes = [kind for kind in kinds if isinstance(kind, CodesKind)]
    if len(codes) < len(kinds):
        return "some of its matrices are quantized and some are not"
    for name in ("bits", "group_size"):
        values = sorted({getattr(kind, name) for kind in codes})
        if len(values) > 1:
            return f"its matrices have {name} {' and '.join(map(str, values))}"
    if len({kind.is_mxfp4 for kind in codes}) > 1:
        return "some of its matrices are MXFP4 and some are not"
    if len({kind.by_planes for kind in codes}) > 1:
        return "some of its matrices lie by bit planes and some do not"
    orders: dict[tuple[int, ...], set[bytes]] = {}
    for part in parts:
        assert part.matrix is not None
        orders.setdefault(part.index, set()).add(part.matrix.order)
    if any(len(found) > 1 for found in orders.values()):
        return "parts of one matrix have different act-orders"
    has_order = any(found != {b""} for found in orders.values())
    if has_order and any(part.matrix and part.matrix.rank for part in parts):
        return "some of its matrices have an act-order and some a compensator"
    return dataclasses.replace(
        codes[0],
        # Each kind of zero point can be written as the one before it.
        zero_kind=min((kind.zero_kind for kind in codes), key=ZERO_KINDS.index),
        scale_dtype=max(kind.scale_dtype for kind in codes),  # "float16" < "float32"; one "uint8"
    )


def _plan_parts(
    directory: Path, config: ModelConfig, form: Format | None, tensors: Tensors
) -> dict[str, list[Part]]:
    """Returns the parts of each leaf; faults are tensors missing or left over."""
    parts: dict[str, list[Part]] = defaultdict(list)
    plain: list[StoredTensor] = []
    used: set[str] = set()
    extras: set[str] = set()
    is_broken = False
    for placement in _expected_placements(directory, config, tensors.stored):
        prefix, matrix = placement.name.removesuffix(".weight"), None
        num_faults = tensors.num_faults
        if form is not None and len(placement.shape) > 1:
            matrix = form.find(prefix, placement.by_rows.shape, tensors)
        if matrix is not None:
            placement = placement.by_rows
            used.update((*matrix.names, *matrix.unread))
            extras.update(prefix + end for end in (form.extras if form is not None else ()))
            num_bytes = sum(tensors[name].num_bytes for name in matrix.names)
            parts[placement.leaf] += split_experts(Part(placement, matrix, num_bytes))
        elif num_faults < tensors.num_faults:
            is_broken = True
        else:
            used.add(placement.name)
            if tensors.fits(placement.name, placement.shape):
                tensor = tensors[placement.name]
                plain.append(tensor)
                parts[placement.leaf].append(Part(placement, tensor, tensor.num_bytes))
    left_out = ignored(config, tensors.stored)
    embedding = (config.vocab_size, config.model_dim)
    if config.tied_embeddings and _HEAD in tensors and tensors[_HEAD].shape == embedding:
        left_out.add(_HEAD)  # stored, though tied
    # With a tensor of a quantized matrix missing or misshaped, its others were not asked for.
    others = () if is_broken else tensors.stored.keys() - used - left_out
    tensors.faults["unexpected tensors"].extend(
        f"{name} {list(tensors.stored[name].shape)}"
        for name in sorted(others)
        if name not in extras or not _is_without_effect(name, tensors)
    )
    tensors.check(directory)
    check_floats(plain)
    return parts


def _expected_placements(
    directory: Path, config: ModelConfig, names: Collection[str]
) -> Iterator[Placement]:
    """The placements of a checkpoint with tensors of these names.

    Raises MoejaxError where listing what config.json asks for would take long.
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


def _is_without_effect(name: str, tensors: Tensors) -> bool:
    """Whether leaving out a tensor that a format allows changes nothing: a bias must be zero."""
    return not name.endswith(".bias") or not np.any(tensors.read(name))
