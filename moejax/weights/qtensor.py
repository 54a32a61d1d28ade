"""Quantized weights as pytrees: the stored form, its bytes, and its values.

Axes: N outputs (rows), K inputs, G quantization groups of a row, W packed words, R rows of a pool
of low-rank factors. Leading axes (layers, experts) are written `...`.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout, mxfp4

FP8_BLOCK = 128
ZERO_KINDS = ("float", "integer", "symmetric")
FACTOR_GROUP_SIZE = 64  # of packed low-rank factors; shorter rows are one group
REFINEMENT = "refinement_"  # and its number from 1: an array of `CodesKind.arrays`

_packed = jax.jit(mxfp4.packed)  # step by step it takes a CPU 300 times as long


def _static(**kwargs: Any) -> Any:
    return dataclasses.field(metadata={"static": True}, **kwargs)


def planes_refusal(planes: Sequence[int]) -> str | None:
    """Reason why widths cannot be prefixes of one code, or None."""
    known = [layout.PREFIX_PLANES.get(bits) for bits in planes]
    if len(planes) > 1 and None not in known and list(planes) == sorted(set(planes)):
        widest = layout.PREFIX_PLANES[planes[-1]]
        if all(widest[: len(part or ())] == part for part in known):
            return None
    text = ",".join(map(str, planes))
    return f"planes={text} is none of 2,3, 2,4, 2,8, 4,8 and 2,4,8, the widths of one code"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodesKind:
    """Stored form of packed matrices; those of one kind can lie in one stack."""

    bits: int
    group_size: int
    zero_kind: str = "symmetric"  # one of `ZERO_KINDS`
    scale_dtype: str = "float16"  # "float32", or "uint8": exponents of `pallas_kernels.mxfp4`
    by_planes: bool = False  # bit planes in arrays of their own, with float zeros; at 2 bits none

    @property
    def is_mxfp4(self) -> bool:
        """Whether codes and scales are those of MXFP4."""
        return self.scale_dtype == "uint8"

    def prefix(self, bits: int) -> "CodesKind":
        """Stored form of the leading `bits` bits of matrices that are stored by planes."""
        return dataclasses.replace(self, bits=bits, by_planes=bits > 2)

    def arrays(self, shape: Sequence[int]) -> dict[str, jax.ShapeDtypeStruct]:
        """Arrays of matrices [..., N, K], without a permutation.

        By field of `QTensor`; its refinements are named `REFINEMENT` and their number.
        """
        *lead, inputs = shape
        base, *others = layout.PREFIX_PLANES[self.bits] if self.by_planes else (self.bits,)
        words = (*lead, layout.num_words(inputs, base))
        groups = (*lead, layout.num_groups(inputs, self.group_size))
        scales = jax.ShapeDtypeStruct(groups, np.dtype(self.scale_dtype))
        found = {"words": jax.ShapeDtypeStruct(words, np.dtype(np.uint32)), "scales": scales}
        if self.zero_kind != "symmetric":
            is_integer = self.zero_kind == "integer"
            found["zeros"] = (
                jax.ShapeDtypeStruct(groups, np.dtype(np.uint8)) if is_integer else scales
            )
        for i, width in enumerate(others, 1):
            words = (*lead, layout.num_plane_words(inputs, width))
            found[f"{REFINEMENT}{i}"] = jax.ShapeDtypeStruct(words, np.dtype(np.uint32))
        return found

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of `arrays`."""
        return sum(array.size * array.dtype.itemsize for array in self.arrays(shape).values())

    def tensor(
        self,
        num_inputs: int,
        arrays: Mapping[str, Any],
        compensators: tuple["Compensator", ...] = (),
    ) -> "QTensor":
        """Matrices of this kind from their arrays; checked (`QTensor.check`)."""
        own = {name: array for name, array in arrays.items() if not name.startswith(REFINEMENT)}
        fields: dict[str, Any] = {"zeros": None, **own, "compensators": compensators}
        tensor = QTensor(
            **fields,
            refinements=tuple(arrays[name] for name in sorted(arrays.keys() - own.keys())),
            num_inputs=num_inputs,
            bits=self.bits,
            group_size=self.group_size,
        )
        tensor.check()
        return tensor


MXFP4 = CodesKind(bits=mxfp4.BITS, group_size=mxfp4.GROUP_SIZE, scale_dtype="uint8")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QTensor:
    """Matrices [..., N, K] in groups of codes: w = (q - zero) scale, plus compensators.

    In MXFP4, which scales of uint8 tell, w is an E2M1 code's value times 2^(scale - 127).

    With refinements the codes lie by bit planes (`layout.pack_planes`): `words` is the plane of
    the two leading bits, and scales and zeros are those of 2 bits, from which
    `layout.prefix_constants` makes those of `bits`.

    Invariants (`check`):
      * `words` is uint32[..., N, W], rows packed by `pallas_kernels.layout` under `layout`, of
        MXFP4 by `pallas_kernels.mxfp4.arrange` too;
      * `scales` is float16 or float32 [..., N, G], G = ceil(K / group_size), or uint8 of 4 bits in
        groups of 32, symmetric and without refinements (MXFP4);
      * `zeros` has the shape of `scales` and is of its dtype (a float zero point), uint8 (an
        integer one), or None (symmetric: 2^(bits - 1));
      * `refinements` are none, or uint32[..., N, W'] for each further plane of
        `layout.PREFIX_PLANES[bits]`, and `zeros` are then floats;
      * `plane_slots`, int32[...], if any: matrix i has its refinements at `plane_slots[i]` of
        arrays uint32[P, N, W'], a pool of P planes;
      * `permutation`, int32[..., K], if any: code k of a row belongs to input `permutation[k]`
        (GPTQ's act-order, in which the groups are runs of the permuted inputs);
      * with a permutation there are no compensators.
    """

    words: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    refinements: tuple[jax.Array, ...] = ()
    plane_slots: jax.Array | None = None
    permutation: jax.Array | None = None
    compensators: tuple["Compensator", ...] = ()
    num_inputs: int = _static()  # K
    bits: int = _static()
    group_size: int = _static()  # 1..K; K is one group a row (per channel)
    layout: str = _static(default=layout.LAYOUT)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (..., N, K) of the dequantized matrices."""
        return (*self.words.shape[:-1], self.num_inputs)

    @property
    def ndim(self) -> int:
        """Number of axes of `shape`."""
        return self.words.ndim

    @property
    def zero_kind(self) -> str:
        """Kind of zero point, one of `ZERO_KINDS`."""
        if self.zeros is None:
            return "symmetric"
        return "integer" if self.zeros.dtype == jnp.uint8 else "float"

    @property
    def is_mxfp4(self) -> bool:
        """Whether codes and scales are those of MXFP4."""
        return self.scales.dtype == jnp.uint8

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, zeros, refinements, permutation and compensators."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def terms(self) -> tuple["Compensator", ...]:
        """Compensators that belong to its width, which are part of its values."""
        return tuple(c for c in self.compensators if c.bits in (0, self.bits))

    def check(self) -> None:
        """Raises ValueError naming the invariant that does not hold."""
        lead, (rows, inputs) = self.shape[:-2], self.shape[-2:]
        groups = layout.num_groups(inputs, self.group_size)
        planes = (self.words, *self.refinements)
        widths = layout.PREFIX_PLANES[self.bits] if self.refinements else (self.bits,)
        if len(planes) != len(widths):
            raise ValueError(f"{len(planes)} planes, expected {len(widths)} of {self.bits} bits")
        for i, (plane, width) in enumerate(zip(planes, widths, strict=True)):
            name = f"{REFINEMENT}{i}" if i else "words"
            words = layout.num_plane_words(inputs, width) if i else layout.num_words(inputs, width)
            axes = lead if not i or self.plane_slots is None else plane.shape[:1]
            self._expect(name, plane, (*axes, rows, words), (np.uint32,))
        if self.plane_slots is not None:
            self._expect("plane_slots", self.plane_slots, lead, (np.int32,))
        if self.refinements and self.zero_kind != "float":
            raise ValueError(f"refinements go with float zeros, these are {self.zero_kind}")
        allowed = (np.float16, np.float32, np.uint8)
        self._expect("scales", self.scales, (*lead, rows, groups), allowed)
        if self.is_mxfp4 and (
            (self.bits, self.group_size) != (mxfp4.BITS, mxfp4.GROUP_SIZE)
            or self.zeros is not None
            or self.refinements
        ):
            raise ValueError(
                f"scales are uint8, those of MXFP4, and codes {self.zero_kind} ones of {self.bits} "
                f"bits in groups of {self.group_size}"
            )
        if self.layout != layout.LAYOUT:
            raise ValueError(f"layout is {self.layout!r}, this version reads {layout.LAYOUT!r}")
        if self.zeros is not None:
            self._expect("zeros", self.zeros, (*lead, rows, groups), (self.scales.dtype, np.uint8))
        if self.permutation is not None:
            self._expect("permutation", self.permutation, (*lead, inputs), (np.int32,))
            if self.compensators:
                raise ValueError("compensators and a permutation exclude each other")
        for compensator in self.compensators:
            compensator.check(lead, rows, inputs)

    @staticmethod
    def _expect(name: str, leaf: Any, shape: tuple[int, ...], dtypes: tuple[Any, ...]) -> None:
        if tuple(leaf.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(leaf.shape)}, expected {shape}")
        if not any(leaf.dtype == dtype for dtype in dtypes):
            names = " or ".join(np.dtype(dtype).name for dtype in dtypes)
            raise ValueError(f"{name} is {leaf.dtype}, expected {names}")

    def __getitem__(self, index: Any) -> "QTensor":
        """Indexes the leading axes; factor pools stay whole, since matrices share them.

        Refinements of a pool are taken out of it.
        """
        of_plane = index if self.plane_slots is None else self.plane_slots[index]
        return dataclasses.replace(
            self,
            words=self.words[index],
            scales=self.scales[index],
            zeros=None if self.zeros is None else self.zeros[index],
            refinements=tuple(plane[of_plane] for plane in self.refinements),
            plane_slots=None,
            permutation=None if self.permutation is None else self.permutation[index],
            compensators=tuple(compensator[index] for compensator in self.compensators),
        )

    def prefix(self, bits: int) -> "QTensor":
        """Returns the matrices in the leading `bits` bits, without a copy.

        Compensators of other widths are left out. Raises ValueError unless the codes lie by planes
        and `bits` ends one.
        """
        if bits == self.bits:
            return self
        widths = layout.PREFIX_PLANES[self.bits] if self.refinements else (self.bits,)
        ends = np.cumsum(widths).tolist()
        if bits not in ends:
            raise ValueError(f"bits {bits} is no prefix of {self.bits} bits in planes {widths}")
        count = ends.index(bits)
        own = tuple(c for c in self.compensators if c.bits == bits)
        return dataclasses.replace(
            self, bits=bits, refinements=self.refinements[:count], compensators=own
        )

    def codes(self) -> jax.Array:
        """Unpacks codes, uint8[..., N, K], in the order of storage."""
        if self.refinements:
            planes = (self.words, *self.refinements)
            return layout.unpack_planes(planes, self.bits, self.num_inputs)
        words = _packed(self.words) if self.is_mxfp4 else self.words
        return layout.unpack(words, self.bits, self.num_inputs)

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """Dequantizes to [..., N, K] in `dtype`, computed in float32."""
        weights = self._values()
        if self.permutation is not None:
            inverse = jnp.argsort(self.permutation, axis=-1)[..., None, :]
            weights = jnp.take_along_axis(weights, inverse, axis=-1)
        for compensator in self.terms:
            weights = compensator._add_to(weights)
        return weights.astype(dtype)

    def _values(self) -> jax.Array:
        """float32[..., N, K], in the order of storage and without compensators."""
        group = np.arange(self.num_inputs) // self.group_size
        if self.is_mxfp4:
            scales = mxfp4.scale_values(self.scales)[..., group]
            return mxfp4.code_values(self.codes()) * scales
        scales = self.scales.astype(jnp.float32)[..., group]
        if self.zeros is None:
            zeros: jax.Array | np.float32 = np.float32(2 ** (self.bits - 1))
        else:
            zeros = self.zeros.astype(jnp.float32)[..., group]
        if self.refinements:
            constants = layout.prefix_constants(self.bits)
            scales = scales * np.float32(constants.scale_factor)
            zeros = zeros * np.float32(constants.zero_factor) + np.float32(constants.zero_offset)
        return (self.codes().astype(jnp.float32) - zeros) * scales


Factor = jax.Array | QTensor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Compensator:
    """Low-rank terms U V added to rows `first_row`.. of matrices [..., N, K] (MiLo eq. 12-13).

    Each matrix has its own rank. The factors of all matrices lie one below the other in two pools,
    U transposed, so that a rank costs exactly its own bytes.

    Invariants (`check`):
      * `u` is [R, num_rows] and `v` is [R, K], arrays or symmetric QTensors without compensators;
      * `start` and `rank` are int32[...]: matrix i owns rows start[i] .. start[i] + rank[i] of
        both;
      * `rank <= max_rank`.
    """

    u: Factor
    v: Factor
    start: jax.Array
    rank: jax.Array
    first_row: int = _static()
    num_rows: int = _static()
    max_rank: int = _static()
    # Width of the prefix that they were fitted to, and that alone has them; 0: the whole code.
    bits: int = _static(default=0)

    def check(self, lead: tuple[int, ...], rows: int, inputs: int) -> None:
        """Raises ValueError unless the terms fit matrices [*lead, rows, inputs]."""
        if not 0 <= self.first_row <= self.first_row + self.num_rows <= rows:
            last = self.first_row + self.num_rows
            raise ValueError(f"a compensator of rows {self.first_row}..{last} of {rows}")
        if self.u.ndim != 2 or self.v.ndim != 2 or self.u.shape[0] != self.v.shape[0]:
            raise ValueError(f"factors of shapes {self.u.shape} and {self.v.shape}")
        if self.u.shape[1] != self.num_rows or self.v.shape[1] != inputs:
            raise ValueError(
                f"factors of {self.u.shape[1]} rows and {self.v.shape[1]} inputs, expected "
                f"{self.num_rows} and {inputs}"
            )
        for name in ("start", "rank"):
            leaf = getattr(self, name)
            if leaf.shape != lead or leaf.dtype != jnp.int32:
                raise ValueError(f"{name} is {leaf.dtype}{leaf.shape}, expected int32{lead}")

    def __getitem__(self, index: Any) -> "Compensator":
        return dataclasses.replace(self, start=self.start[index], rank=self.rank[index])

    def factors(self) -> tuple[jax.Array, jax.Array]:
        """Factors of one matrix: U transposed float32[max_rank, num_rows], V float32[max_rank, K].

        Rows beyond the matrix's own rank are zero. `start` and `rank` have no axes here.
        """
        steps = jnp.arange(self.max_rank, dtype=jnp.int32)
        used = (steps < self.rank)[:, None]
        places = jnp.clip(self.start + steps, 0, max(0, self.u.shape[0] - 1))
        taken = (
            part[places].dequantize() if isinstance(part, QTensor) else part[places]
            for part in (self.u, self.v)
        )
        u, v = (jnp.where(used, part.astype(jnp.float32), 0.0) for part in taken)
        return u, v

    def _add_to(self, weights: jax.Array) -> jax.Array:
        """Adds the terms to float32[..., N, K]."""
        if self.max_rank == 0:
            return weights
        if self.start.ndim:
            lead = self.start.shape
            flat = weights.reshape(-1, *weights.shape[len(lead) :])
            places = self.start.reshape(-1), self.rank.reshape(-1)

            def one(weights: jax.Array, start: jax.Array, rank: jax.Array) -> jax.Array:
                return dataclasses.replace(self, start=start, rank=rank)._add_to(weights)

            return jax.vmap(one)(flat, *places).reshape(weights.shape)
        u, v = self.factors()
        product = jnp.einsum("rn,rk->nk", u, v, precision="highest")
        return weights.at[self.first_row : self.first_row + self.num_rows].add(product)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Tensor:
    """Matrices [..., N, K] in float8_e4m3fn, one float32 scale per block of 128 x 128.

    Invariants (`check`): `values` is float8_e4m3fn[..., N, K]; `scales` is float32
    [..., ceil(N / 128), ceil(K / 128)]; w = values scales.
    """

    values: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (..., N, K) of the dequantized matrices."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """Number of axes of `shape`."""
        return self.values.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def check(self) -> None:
        """Raises ValueError naming the invariant that does not hold."""
        *lead, rows, inputs = self.shape
        blocks = (*lead, -(-rows // FP8_BLOCK), -(-inputs // FP8_BLOCK))
        if tuple(self.scales.shape) != blocks:
            raise ValueError(f"scales have shape {self.scales.shape}, expected {blocks}")
        if self.values.dtype != jnp.float8_e4m3fn or self.scales.dtype != jnp.float32:
            raise ValueError(f"values are {self.values.dtype}, scales {self.scales.dtype}")

    def __getitem__(self, index: Any) -> "Fp8Tensor":
        return Fp8Tensor(values=self.values[index], scales=self.scales[index])

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """Dequantizes to [..., N, K] in `dtype`, computed in float32."""
        rows = np.arange(self.shape[-2]) // FP8_BLOCK
        inputs = np.arange(self.shape[-1]) // FP8_BLOCK
        scales = self.scales[..., rows, :][..., inputs]
        return (self.values.astype(jnp.float32) * scales).astype(dtype)


Weight = jax.Array | QTensor | Fp8Tensor


@dataclasses.dataclass(frozen=True)
class RecordedInput:
    """A plain weight that records the inputs it multiplies, for calibration.

    It replaces the weight in a module, within one trace.
    """

    weight: jax.Array  # [L, N, K], the replaced one
    record: Callable[[jax.Array], None]  # called with x [..., K] of every `linear`

    def __getitem__(self, index: types.EllipsisType) -> "RecordedInput":
        """Returns itself: indexing single layers would record nothing."""
        if index is not ...:
            raise TypeError("a watched weight is for `ops.linear` alone")
        return self


def dense(weight: Weight, dtype: Any) -> jax.Array:
    """Returns a weight as a plain array: itself, or dequantized to `dtype`."""
    return weight if isinstance(weight, jax.Array) else weight.dequantize(dtype)


def from_codes(
    codes: Any,  # uint8[..., N, K]
    scales: Any,  # float[..., N, G]
    # float[..., N, G] in units of codes; ignored where `zero_kind` is "symmetric"
    zeros: Any | None,
    *,
    bits: int,
    group_size: int,
    zero_kind: str,  # one of `ZERO_KINDS`; "integer" rounds and stores uint8
    scale_dtype: Any = jnp.float16,
    by_planes: bool = False,
) -> QTensor:
    """Packs a quantizer's output; numpy arrays give numpy leaves, JAX arrays JAX leaves.

    By planes the scales and zeros are stored as those of 2 bits (`QTensor`).

    Raises:
      ValueError: shapes do not fit (`QTensor.check`).
    """
    if by_planes:
        assert zeros is not None
        constants = layout.prefix_constants(bits)
        scales = scales / np.float32(constants.scale_factor)
        zeros = (zeros - np.float32(constants.zero_offset)) / np.float32(constants.zero_factor)
    arrays = {}
    if zero_kind != "symmetric":
        assert zeros is not None
        xp = jnp if isinstance(zeros, jax.Array) else np
        is_integer = zero_kind == "integer"
        arrays["zeros"] = (
            xp.round(zeros).astype(xp.uint8) if is_integer else zeros.astype(scale_dtype)
        )
    planes = layout.pack_planes(codes, bits) if by_planes else (layout.pack(codes, bits),)
    arrays |= {"words": planes[0], "scales": scales.astype(scale_dtype)}
    arrays |= {f"{REFINEMENT}{i}": plane for i, plane in enumerate(planes) if i}
    kind = CodesKind(bits=bits, group_size=group_size, by_planes=by_planes)
    return kind.tensor(codes.shape[-1], arrays)
