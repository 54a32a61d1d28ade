"""Operands of the packed products: stacks of quantized matrices and their low-rank terms.

Axes: S slots (of a pool, or layers times experts of a stack), N outputs (rows), K inputs, G groups
of a row, W words of a row, R rows of a pool of low-rank factors.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout, mxfp4
from pallas_kernels.op import byte_pairs

PLAIN_BITS = 16
BITS = (*layout.BITS, PLAIN_BITS)


def _static() -> Any:
    return dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Refinement:
    """A plane of lower bits of S matrices, apart from their first plane: no scales, no zeros.

    `words` is uint32[P, N, W], a pool of planes, rows packed by `layout`; it may be the array of
    the first planes. `slots` is int32[S], the place of each matrix's plane in `words`; any number
    for a matrix that no product reads.
    """

    words: jax.Array
    slots: jax.Array


class _StoredPlane(NamedTuple):
    """A plane of a matrix, and where it lies."""

    plane: layout.Plane
    words: Any  # uint32[slots, N, words], or a kernel's reference
    slot: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedMatrices:
    """S matrices [N, K] of one stored form: w = (q - zero) scale, MXFP4, or plain bf16 or fp16.

    Invariants (`check`):
      * packed: `words` is uint32[P, N, W] of P >= S slots, rows packed by `layout`; `scales` is
        float16 or float32 [S, N, G]; `zeros` is of the scales' dtype (float zero points), uint8
        (integer ones), or None (symmetric, 2^(bits - 1));
      * MXFP4 (`pallas_kernels.mxfp4`, whose `arrange` the words passed): packed, 4 bits in groups
        of 32, with `scales` of uint8, no zeros and no refinements;
      * in planes that lie apart: `words` has the first plane, whose `scales` and float `zeros` give
        the product's by `layout.prefix_constants(bits)`; `refinements` has the other planes of
        `layout.PREFIX_PLANES[bits]`, in order;
      * plain, bits == 16: `words` is bfloat16 or float16 [S, N, K]; no scales, no zeros.
    A kernel may see MXFP4's scales two by two, as uint16 (`with_scale_pairs`).
    The arrays lie on the device, or in pinned host memory: rows of a host store, which kernels read
    in place.
    """

    words: jax.Array
    scales: jax.Array | None
    zeros: jax.Array | None
    num_inputs: int = _static()  # K
    bits: int = _static()  # 2, 3, 4, 8, or 16 for plain
    group_size: int = _static()  # 1..K
    refinements: tuple[Refinement, ...] = ()

    @property
    def num_slots(self) -> int:
        """Number of matrices, S."""
        return (self.words if self.scales is None else self.scales).shape[0]

    @property
    def num_outputs(self) -> int:
        """Rows per matrix, N."""
        return self.words.shape[1]

    @property
    def num_groups(self) -> int:
        """Groups per row, G; 0 if plain."""
        return 0 if self.scales is None else layout.num_groups(self.num_inputs, self.group_size)

    @property
    def is_mxfp4(self) -> bool:
        """Whether codes and scales are those of MXFP4."""
        return self.scales is not None and self.scales.dtype in (jnp.uint8, jnp.uint16)

    @property
    def zero_kind(self) -> str:
        """Kind of zeros: "float", "integer", "symmetric"; of plain matrices and MXFP4 "none"."""
        if self.bits == PLAIN_BITS or self.is_mxfp4:
            return "none"
        if self.zeros is None:
            return "symmetric"
        return "integer" if self.zeros.dtype == jnp.uint8 else "float"

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of each plane of a row, most significant first."""
        return (layout.PREFIX_PLANES if self.refinements else layout.PLANES)[self.bits]

    @property
    def constants(self) -> layout.PrefixConstants | None:
        """Constants of scale and zero point, or None if these are the stored ones."""
        return layout.prefix_constants(self.bits) if self.refinements else None

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one matrix: codes, scales and zeros."""
        parts = [self.words, self.scales, self.zeros, *(part.words for part in self.refinements)]
        return sum(part.nbytes // part.shape[0] for part in parts if part is not None)

    @property
    def arrays(self) -> list[jax.Array]:
        """Arrays in a fixed order: words, scales and zeros if any, refinements' words and slots."""
        stored = [part for part in (self.words, self.scales, self.zeros) if part is not None]
        return stored + [part for r in self.refinements for part in (r.words, r.slots)]

    def describe(self) -> str:
        """Describes the form in a few words, such as "int3g64 float"."""
        if self.bits == PLAIN_BITS:
            return str(self.words.dtype)
        if self.is_mxfp4:
            return "mxfp4"
        group = "row" if self.group_size == self.num_inputs else str(self.group_size)
        planes = "p" + "".join(map(str, self.widths)) if self.refinements else ""
        return f"int{self.bits}{planes}g{group} {self.zero_kind}"

    def check(self) -> None:
        """Raises ValueError naming the invariant that does not hold."""
        if self.bits not in BITS:
            raise ValueError(f"bits {self.bits} is none of {', '.join(map(str, BITS))}")
        slots, rows = self.num_slots, self.num_outputs
        if self.bits == PLAIN_BITS:
            if self.words.dtype not in (jnp.bfloat16, jnp.float16):
                raise ValueError(f"plain matrices are {self.words.dtype}, not bfloat16 or float16")
            if self.words.shape != (slots, rows, self.num_inputs):
                raise ValueError(f"plain matrices of {self.num_inputs} inputs: {self.words.shape}")
            if self.scales is not None or self.zeros is not None:
                raise ValueError("plain matrices have no scales and no zeros")
            if self.refinements:
                raise ValueError("plain matrices have no refinements")
            return
        num_words = layout.num_words(self.num_inputs, self.bits)
        if self.refinements:
            self._check_refinements()
            num_words = layout.num_plane_words(self.num_inputs, self.widths[0])
        words = (slots, rows, num_words)
        groups = (slots, rows, layout.num_groups(self.num_inputs, self.group_size))
        enough = self.words.shape[0] >= slots and self.words.shape[1:] == words[1:]
        if not enough or self.words.dtype != jnp.uint32:
            raise ValueError(f"words are {self.words.dtype}{self.words.shape}, not uint32{words}")
        if self.scales is None or self.scales.dtype not in (jnp.float16, jnp.float32, jnp.uint8):
            raise ValueError("scales are not float16, float32 or uint8")
        form = (self.bits, self.group_size, self.zeros, self.refinements)
        if self.is_mxfp4 and form != (mxfp4.BITS, mxfp4.GROUP_SIZE, None, ()):
            raise ValueError(
                f"scales are uint8, those of MXFP4, and codes of {self.bits} bits in groups of "
                f"{self.group_size}, or with zeros or refinements"
            )
        if self.scales.shape != groups:
            raise ValueError(f"scales have shape {self.scales.shape}, expected {groups}")
        if self.zeros is not None:
            if self.zeros.shape != groups:
                raise ValueError(f"zeros have shape {self.zeros.shape}, expected {groups}")
            if self.zeros.dtype not in (self.scales.dtype, jnp.uint8):
                raise ValueError(f"zeros are {self.zeros.dtype}, not {self.scales.dtype} or uint8")

    def _check_refinements(self) -> None:
        if len(layout.PREFIX_PLANES.get(self.bits, ())) != 1 + len(self.refinements):
            planes = f"{1 + len(self.refinements)} planes that lie apart"
            raise ValueError(f"matrices of {self.bits} bits are not stored as {planes}")
        if self.zero_kind != "float":
            raise ValueError(f"matrices with refinements have {self.zero_kind} zeros, not float")
        for width, part in zip(self.widths[1:], self.refinements, strict=True):
            words = (self.num_outputs, layout.num_plane_words(self.num_inputs, width))
            if part.words.dtype != jnp.uint32 or part.words.shape[1:] != words:
                found = f"{part.words.dtype}{part.words.shape}"
                raise ValueError(f"a refinement's words are {found}, not uint32[P, *{words}]")
            if part.slots.dtype != jnp.int32 or part.slots.shape != (self.num_slots,):
                found = f"{part.slots.dtype}{part.slots.shape}"
                raise ValueError(f"a refinement's slots are {found}, not int32[{self.num_slots}]")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank:
    """Terms U V added to rows `first_row`.. of S matrices [N, K], in two pools (MiLo eq. 12-13).

    Matrix s owns rows start[s] .. start[s] + rank[s] of both pools; the term of its row
    first_row + n is the sum over those rows r of u[r, n] v[r, k].

    Invariants (`check`): `u` is one PackedMatrices slot [1, R, num_rows] (U transposed) and `v` one
    slot [1, R, K]; `start` and `rank` are int32[S]; rank <= max_rank.
    """

    u: PackedMatrices
    v: PackedMatrices
    start: jax.Array
    rank: jax.Array
    first_row: int = _static()
    max_rank: int = _static()

    @property
    def num_rows(self) -> int:
        """Rows of a matrix that have a term."""
        return self.u.num_inputs

    def check(self, weights: PackedMatrices) -> None:
        """Raises ValueError unless the terms fit `weights`."""
        self.u.check()
        self.v.check()
        for name, part in (("u", self.u), ("v", self.v)):
            if part.num_slots != 1:
                raise ValueError(f"{name} has {part.num_slots} slots, expected one pool")
            if part.refinements:
                raise ValueError(f"{name} has refinements, low-rank factors have none")
        if self.v.num_inputs != weights.num_inputs:
            raise ValueError(f"v has {self.v.num_inputs} inputs, expected {weights.num_inputs}")
        if not 0 <= self.first_row <= weights.num_outputs - self.num_rows:
            last = self.first_row + self.num_rows
            raise ValueError(f"rows {self.first_row}..{last} of {weights.num_outputs}")
        if self.u.num_outputs != self.v.num_outputs:
            raise ValueError(f"pools of {self.u.num_outputs} and {self.v.num_outputs} rows")
        for name in ("start", "rank"):
            leaf = getattr(self, name)
            if leaf.shape != (weights.num_slots,) or leaf.dtype != jnp.int32:
                raise ValueError(f"{name} is {leaf.dtype}{leaf.shape}")


def plain(matrices: jax.Array) -> PackedMatrices:
    """Wraps bf16 or fp16 [S, N, K] as operands."""
    inputs = matrices.shape[-1]
    return PackedMatrices(
        words=matrices, scales=None, zeros=None, num_inputs=inputs, bits=PLAIN_BITS,
        group_size=inputs,
    )  # fmt: skip


def with_scale_pairs(weights: PackedMatrices) -> PackedMatrices:
    """Views MXFP4's scales [S, N, G] as uint16 [S, N, G / 2], if G is even (`op.byte_pairs`)."""
    if not weights.is_mxfp4:
        return weights
    return dataclasses.replace(weights, scales=byte_pairs(weights.scales))


def stored_planes(weights: PackedMatrices, slot: Any) -> list[_StoredPlane]:
    """Planes of the matrix at int32[...] `slot`; arrays may be references in a kernel."""
    if not weights.refinements:
        planes = layout.planes(weights.num_inputs, weights.bits)
        return [_StoredPlane(plane, weights.words, slot) for plane in planes]
    first, *others = layout.planes_apart(weights.num_inputs, weights.bits)
    found = [_StoredPlane(first, weights.words, slot)]
    for plane, part in zip(others, weights.refinements, strict=True):
        found.append(_StoredPlane(plane, part.words, part.slots[slot]))
    return found


def dequantize(weights: PackedMatrices, slots: jax.Array) -> jax.Array:
    """Dequantizes the matrices at int32[...] slots, float32[..., N, K], in plain jnp.

    Slots outside 0..S - 1 are clipped, as JAX does.
    """
    if weights.bits == PLAIN_BITS:
        return weights.words[slots].astype(jnp.float32)
    assert weights.scales is not None
    group = np.arange(weights.num_inputs) // weights.group_size
    if weights.is_mxfp4:
        scales = mxfp4.scale_values(weights.scales[slots])[..., group]
        return mxfp4.code_values(_codes(weights, slots)) * scales
    codes = _codes(weights, slots).astype(jnp.float32)
    scales = weights.scales[slots].astype(jnp.float32)[..., group]
    if weights.zeros is None:
        return (codes - np.float32(2 ** (weights.bits - 1))) * scales
    zeros = weights.zeros[slots].astype(jnp.float32)[..., group]
    if (derived := weights.constants) is not None:
        zeros = derived.zero_offset + derived.zero_factor * zeros
        scales = derived.scale_factor * scales
    return (codes - zeros) * scales


def _codes(weights: PackedMatrices, slots: jax.Array) -> jax.Array:
    """Unpacks the codes of the matrices at int32[...] slots, uint8[..., N, K]."""
    if not weights.refinements:
        of_slots = weights.words[slots]
        if weights.is_mxfp4:
            of_slots = mxfp4.packed(of_slots)
        return layout.unpack(of_slots, weights.bits, weights.num_inputs)
    words = [of.words[of.slot] for of in stored_planes(weights, slots)]
    return layout.unpack_planes(words, weights.bits, weights.num_inputs)


def low_rank_factors(terms: LowRank, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Factors of int32[...] slots: U^T float32[..., max_rank, num_rows], V [..., max_rank, K].

    Rows beyond a matrix's own rank are zero.
    """
    steps = jnp.arange(terms.max_rank, dtype=jnp.int32)
    used = steps < terms.rank[slots][..., None]
    rows = terms.start[slots][..., None] + jnp.where(used, steps, 0)
    taken = (_pool_rows(part, rows) for part in (terms.u, terms.v))
    u, v = (jnp.where(used[..., None], values, 0.0) for values in taken)
    return u, v


def _pool_rows(pool: PackedMatrices, rows: jax.Array) -> jax.Array:
    """Dequantizes rows int32[..., R] of a pool of one slot, float32[..., R, K], and no others."""
    flat = rows.reshape(-1, rows.shape[-1])
    taken = jax.tree.map(lambda leaf: leaf[0][flat], pool)
    return dequantize(taken, jnp.arange(flat.shape[0])).reshape(*rows.shape, pool.num_inputs)
