"""A Triton program's part of x W^T: a tile of outputs, some steps of K, in float32.

A step is some consecutive k of one block of the packed layout, unpacked in registers as the matrix
units take it (`_PackedCodes`), with an offset. Per quantization group

    products = sum_k (offset + q_k) x_k,   sums = sum_k x_k
    acc     += scale (products - (zero + offset) sums)

in float32: the scale meets the accumulator, never a code. `sums` come from the matrix units too (a
product with ones), which idle at decode, or are given, at prefill. Tiles of W are the left operand:
it is the one that the matrix units take from registers. MXFP4 has neither zeros nor offsets, and so
no sums.

Two codes lie side by side in a word once a shift and a mask have taken one position of it, and an
`or` makes floating point numbers of both: 0x4300 + q is the bfloat16 128 + q, 0x5400 + 16 q the
float16 64 + q; of two codes of MXFP4 `mxfp4.small_pairs` and one multiplication make their values.
Nothing moves between threads.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import layout, mxfp4
from pallas_kernels.op import offset_refusal
from pallas_kernels.packed import PLAIN_BITS, PackedMatrices, stored_planes
from pallas_kernels.triton.elements import Int, element_codes, iota, quotient, remainder

Ref = Any
CHUNK = 32  # codes; a group whose size is a multiple of it never ends inside one
MAX_WORDS = 32  # of a row, held at a time
# Bits of 2^126 and 2^14, by which `mxfp4.small_pairs` are too small.
FULL = {"bfloat16": 0x7E80, "float16": 0x7400}


def _position_codes(weights: PackedMatrices) -> int:
    """Consecutive k at one position of a block's words; with two planes, at two positions."""
    return layout.BLOCK * weights.widths[0] // 16 * len(weights.widths)


class _PackedCodes:
    """Codes of one packed matrix, taken in steps of `step` consecutive k.

    A step is cut into pieces, each of consecutive k of one quantization group; a product takes a
    piece at a time. `offset` is added to each code.
    """

    def __init__(
        self, weights: PackedMatrices, slot: Int, step: int, dtype: Any, *, interpret: bool
    ) -> None:
        self.weights, self.slot, self.step, self.dtype = weights, slot, step, dtype
        self.interpret = interpret
        # Where a code lies in its half, the exponent that is set above it, and what that adds. With
        # 1024 for short codes as well, sums in float32 lost four bits more.
        self.place, self.magic, self.offset = 0, 0x4300, 128
        self.two_values = weights.bits == 8 and dtype != jnp.float16
        if self.two_values:
            self.offset = 256  # bfloat16 has 7 bits of mantissa, see `values`
        elif dtype == jnp.float16:
            self.place, self.magic, self.offset = (0, 0x6400, 1024)
            if weights.bits < 8:
                self.place, self.magic, self.offset = (4, 0x5400, 64)
        if weights.is_mxfp4:
            self.place, self.magic, self.offset, self.two_values = 0, 0, 0, False
        self.by_row = weights.num_groups == 1
        self.planes = [] if weights.bits == PLAIN_BITS else stored_planes(weights, slot)

    def words(self, tiles: Sequence[jax.Array], block: Int) -> list[list[list[jax.Array]]]:
        """Words [tile][plane][chunk] uint32[rows, words] of a block; int32[rows] per tile."""
        found = []
        for rows in tiles:
            planes = []
            for plane, stored, slot in self.planes:
                count = layout.BLOCK * plane.width // layout.WORD_BITS
                first = plane.first_word + block * count
                width = self._chunk(count)
                planes.append([
                    _load_2d(stored, slot, rows, first + begin, width)
                    for begin in range(0, count, width)
                ])  # fmt: skip
            found.append(planes)
        return found

    def _chunk(self, count: int) -> int:
        """Words loaded together: their codes of a position lie in one group."""
        if self.weights.widths == (2, 1):
            return 8
        codes = 2 * count
        if not self.by_row:
            codes = math.gcd(codes, self.weights.group_size)
        return min(codes // 2, MAX_WORDS)

    def pieces(self) -> list[tuple[int, int, int]]:
        """Pieces (first k in the step, codes, id) of one product with x, by k."""
        widths = self.weights.widths
        if len(widths) == 2:  # a piece is some words of one position of the two-bit plane
            size = 2 * self._chunk(layout.BLOCK * widths[0] // layout.WORD_BITS)
            return [(k, size, k // size) for k in range(0, self.step, size)]
        count = layout.BLOCK * widths[0] // layout.WORD_BITS
        width = 2 * self._chunk(count)
        return [(k, width, i) for i, k in enumerate(range(0, self.step, width))]

    def _pairs(self, planes: list[list[jax.Array]], piece: int, first_position: Int) -> jax.Array:
        """Pairs uint32[rows, words]: two codes per word, `place` bits up in its halves."""
        bits = self.weights.bits
        if len(planes) == 2:
            high, low = planes
            position, chunk = divmod(piece, len(high))
            nibble, odd = divmod(position, 2)
            word = _nibbles(self.weights.widths[1], high[chunk], low[0], odd, chunk)
            return _field(word, first_position + nibble, 4, self.place)
        chunks = planes[0]
        at = first_position + piece // len(chunks)
        return _field(chunks[piece % len(chunks)], at, bits, self.place)

    def values(
        self, planes: list[list[jax.Array]], piece: int, first_position: Int
    ) -> list[jax.Array]:
        """Unpacks offset + q of one piece, as terms [rows, k] in x's dtype.

        Args:
          first_position: int32[] in the block, where the step begins.
        """
        if self.weights.is_mxfp4:
            [chunks] = planes
            at, chunk = divmod(piece, len(chunks))
            small = mxfp4.small_pairs(chunks[chunk], first_position + at, self.dtype)
            return [self._floats(_full_pairs(small, self.dtype, interpret=self.interpret))]
        codes = self._pairs(planes, piece, first_position)
        magic = _u32(self.magic * 0x10001)
        if not self.two_values:
            return [self._floats(codes | magic)]
        # 128 + the low 7 bits; and 128 (1 + bit 7), which is the exponent's last bit.
        low, high = codes & _u32(0x007F007F), codes & _u32(0x00800080)
        return [self._floats(low | magic), self._floats(high | magic)]

    def _floats(self, pairs: jax.Array) -> jax.Array:
        halves = (pairs.astype(jnp.uint16), (pairs >> _u32(16)).astype(jnp.uint16))
        even, odd = (jax.lax.bitcast_convert_type(half, self.dtype) for half in halves)
        return jnp.stack([even, odd], axis=-1).reshape(pairs.shape[0], 2 * pairs.shape[1])


def _full_pairs(small: jax.Array, dtype: Any, *, interpret: bool) -> jax.Array:
    """Multiplies `mxfp4.small_pairs` by what they are too small by: uint32[...] of two floats."""
    is_half = dtype == jnp.float16
    if not interpret:  # one instruction; it keeps subnormal operands
        factor, kind = FULL[jnp.dtype(dtype).name] * 0x10001, "f16x2" if is_half else "bf16x2"
        [full] = pltriton.elementwise_inline_asm(
            f"{{ .reg .b32 f, z; mov.b32 f, {factor}; mov.b32 z, 0x80008000; "
            f"fma.rn.{kind} $0, $1, f, z; }}",
            args=[small], constraints="=r,r", pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(small.shape, jnp.int32)],
        )  # fmt: skip
        return jax.lax.bitcast_convert_type(full, jnp.uint32)
    # A CPU takes bfloat16's subnormals for 0, and not float16's.
    signs, magnitudes = small & np.uint32(0x80008000), small & np.uint32(0x7FFF7FFF)
    halves = small if is_half else signs | (magnitudes << np.uint32(3))
    floats = jax.lax.bitcast_convert_type(halves, jnp.float16).astype(jnp.float32)
    return jax.lax.bitcast_convert_type((floats * np.float32(2**14)).astype(dtype), jnp.uint32)


def _u32(value: int) -> jax.Array:
    return jnp.uint32(value)


def _nibbles(width: int, high: jax.Array, low: jax.Array, odd: int, chunk: int) -> jax.Array:
    """Merges words of the two-bit plane with those of a plane of `width` 1 or 2 to nibbles.

    Even positions of the two-bit plane make one word, odd ones another. A word of one bit serves
    two words of two bits, a chunk apart: even bits the first, odd bits the second.
    """
    if width == 2:
        if odd:
            return (high & _u32(0xCCCCCCCC)) | ((low >> _u32(2)) & _u32(0x33333333))
        return ((high & _u32(0x33333333)) << _u32(2)) | (low & _u32(0x33333333))
    two = (high & _u32(0x33333333)) << _u32(1) if not odd else (high >> _u32(1)) & _u32(0x66666666)
    return two | ((low >> _u32(2 * odd + chunk)) & _u32(0x11111111))


def _field(word: jax.Array, position: Int, width: int, place: int) -> jax.Array:
    """Bits, `width` of them, at a position of both halves, moved to bit `place`."""
    mask = ((1 << width) - 1) * 0x10001
    if isinstance(position, int):
        shift = position * width - place
        moved = word >> _u32(shift) if shift >= 0 else word << _u32(-shift)
        return moved & _u32(mask << place)
    return ((word >> (position * width).astype(jnp.uint32)) & _u32(mask)) << _u32(place)


def _load_2d(ref: Ref, slot: Int, rows: jax.Array, first: Int, count: int) -> jax.Array:
    steps = first + iota(count)
    return ref[slot, rows[:, None], steps[None, :]]


class Columns(NamedTuple):
    """Rows of x that a program multiplies: the columns of its tile."""

    load: Callable[[Int, int], jax.Array]  # (first k, count) -> [columns, count]; 0 beyond K
    sums: Callable[[Int], jax.Array] | None  # index -> float32[columns], see `sums_of`
    dtype: Any


def columns_of(
    x_ref: Ref, sums_ref: Ref | None, rows: jax.Array, mask_m: jax.Array | None = None
) -> Columns:
    """Loads rows of x; those where the mask is not set, by default beyond the last, are zero."""
    num_rows, num_inputs = x_ref.shape
    mask_m = rows < num_rows if mask_m is None else mask_m

    def load(first: Any, count: int) -> jax.Array:
        k = first + iota(count)
        mask = mask_m[:, None] & (k < num_inputs)[None, :]
        return pltriton.load(x_ref.at[rows[:, None], k[None, :]], mask=mask, other=0.0)

    def sums(index: Any) -> jax.Array:
        assert sums_ref is not None
        return pltriton.load(sums_ref.at[index, rows], mask=mask_m, other=0.0)

    return Columns(load, None if sums_ref is None else sums, x_ref.dtype)


class Span(NamedTuple):
    """Part of K that a program sums: steps of whole blocks, and perhaps the short last one."""

    first: Int
    last: Int
    tail: jax.Array | bool


def refusal(weights: PackedMatrices) -> str | None:
    """Reason why a program cannot multiply by matrices of this form, or None."""
    size = weights.group_size
    if weights.bits != PLAIN_BITS and len(weights.widths) > 2:
        return f"it merges two planes, not {len(weights.widths)}"
    if weights.bits != PLAIN_BITS and weights.num_groups > 1 and size % CHUNK:
        return f"groups of {size} are no multiple of {CHUNK} and not a whole row"
    are_pairs = weights.is_mxfp4 and weights.num_groups % 2 == 0  # see `with_scale_pairs`
    for part in weights.arrays:
        reason = offset_refusal(part)
        if reason and not (are_pairs and part is weights.scales):
            return reason
    return None


def num_steps(weights: PackedMatrices, step: int) -> int:
    """Number of steps of whole blocks in K."""
    return weights.num_inputs // layout.BLOCK * (layout.BLOCK // step)


def sum_size(weights: PackedMatrices, step: int) -> int | None:
    """Consecutive k of one given sum of x (`sums_of`) with steps of `step`; None: none are given.

    A group that is longer than a step has one sum for each of its steps, one that is a whole row
    has one in all.
    """
    size, num_inputs = weights.group_size, weights.num_inputs
    is_short = num_inputs % size or num_inputs % layout.BLOCK
    if weights.bits == PLAIN_BITS or weights.is_mxfp4 or is_short:
        return None
    if weights.num_groups == 1:
        return size
    return min(size, step) if size % step == 0 or step % size == 0 else None


def sums_of(x: jax.Array, size: int) -> jax.Array:
    """Sums of the rows of x over each `size` consecutive k, float32[K / size, M]."""
    return jnp.sum(x.astype(jnp.float32).reshape(x.shape[0], -1, size), axis=-1).T


def rows_from(first: Int, count: int, num_rows: int) -> jax.Array:
    """Rows int32[count] from `first` on; those beyond the last are the last."""
    return jnp.minimum(first + iota(count), num_rows - 1)


def split(total: int, parts: int, part: Int) -> tuple[Int, Int]:
    """Steps first .. last of one of `parts` nearly equal parts."""
    return quotient(part * total, parts), quotient((part + 1) * total, parts)


def product(
    columns: Columns,
    weights: PackedMatrices,
    slot: Int,  # int32[]
    tiles: Sequence[jax.Array],  # int32[rows] of each tile, none beyond the last; all of one length
    span: Span,
    *,
    num_columns: int,
    step: int,  # codes per step; a power of two in `min_step(weights)` .. 256.
    interpret: bool,
) -> list[jax.Array]:
    """Multiplies each tile of rows: float32[rows, columns]."""
    shape = (tiles[0].shape[0], num_columns)
    kernel = _Product(columns, weights, slot, tiles, shape, step, interpret)
    return kernel.plain(span) if weights.bits == PLAIN_BITS else kernel.packed(span)


def min_step(weights: PackedMatrices) -> int:
    """Smallest step: codes of one position (with two planes: of a pair)."""
    return CHUNK if weights.bits == PLAIN_BITS else _position_codes(weights)


class _Product:
    """Arguments of `product`, while it is traced."""

    def __init__(
        self,
        columns: Columns,
        weights: PackedMatrices,
        slot: Int,
        tiles: Sequence[jax.Array],
        shape: tuple[int, int],
        step: int,
        interpret: bool,
    ) -> None:
        self.columns, self.weights, self.slot = columns, weights, slot
        self.shape, self.step, self.interpret = shape, step, interpret
        self.rows = list(tiles)
        self.codes = _PackedCodes(weights, slot, step, columns.dtype, interpret=interpret)
        self.by_row = weights.num_groups == 1
        self.by_pair = weights.scales is not None and weights.scales.dtype == jnp.uint16

    # Groups

    def _groups(self, first: Int, offsets: Sequence[int]) -> list[Int]:
        """Indices of the groups that begin at offsets; of pairs of them where scales are pairs."""
        size = self.weights.group_size
        if self.by_pair:
            size, offsets = 2 * size, offsets[::2]
        return [quotient(first + offset, size) for offset in offsets]

    def _scales(self, groups: Sequence[Int]) -> list[list[jax.Array]]:
        """Loads scales, then zeros if stored, of each index and tile, as stored."""
        stored = [leaf for leaf in (self.weights.scales, self.weights.zeros) if leaf is not None]
        return [
            [leaf[self.slot, rows, group] for leaf in stored for group in groups]
            for rows in self.rows
        ]

    def _scale(self, stored: Sequence[jax.Array], group: Int) -> jax.Array:
        """Takes a group's scales out of what `_scales` loaded; of int32[] `group`, of one load."""
        index = quotient(group, 2) if self.by_pair else group
        row = stored[index] if isinstance(index, int) else stored[0]
        if not self.by_pair:
            return row
        shift = remainder(group, 2) * 8
        shift = np.uint16(shift) if isinstance(shift, int) else shift.astype(jnp.uint16)
        return (row >> shift).astype(jnp.uint8)

    def _scaled(
        self, acc: jax.Array, products: jax.Array, sums: jax.Array | None, scale: jax.Array,
        zero: jax.Array | None, offset: int,
    ) -> jax.Array:  # fmt: skip
        """Computes acc + scale (products - (zero + offset) sums)."""

        def spread(row: jax.Array) -> jax.Array:
            if row.dtype == jnp.uint8 and self.weights.is_mxfp4:
                row = mxfp4.scale_values(row)
            return jnp.broadcast_to(row.astype(jnp.float32)[:, None], self.shape)

        if sums is not None:
            if zero is None:
                negative = jnp.full(self.shape, -self._center(offset), jnp.float32)
            elif (derived := self.weights.constants) is None:
                negative = spread(-(zero.astype(jnp.float32) + offset))
            else:
                shift, factor = -(derived.zero_offset + offset), -derived.zero_factor
                negative = spread(zero.astype(jnp.float32) * factor + shift)
            products = self._fma(negative, sums, products)
        return self._fma(spread(scale), products, acc)

    def _center(self, offset: int) -> float:
        return float(offset + 2 ** (self.weights.bits - 1))

    def _fma(self, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        # Triton's programs are compiled without contraction of a b + c.
        if self.interpret:
            return a * b + c
        [total] = pltriton.elementwise_inline_asm(
            "fma.rn.f32 $0, $1, $2, $3;", args=[a, b, c], constraints="=f,f,f,f", pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(c.shape, jnp.float32)],
        )  # fmt: skip
        return total

    # Products

    def _constant(self, count: int) -> jax.Array:
        """Constant multiplied by x for its sums: ones, or the center if it is constant."""
        value = -self._center(self.codes.offset) if self.weights.zeros is None else 1.0
        return jnp.full((self.shape[0], count), value, self.columns.dtype)

    def _step_groups(self) -> list[list[tuple[int, int, int]]]:
        """Pieces of a step, grouped by quantization group."""
        pieces, size = self.codes.pieces(), self.weights.group_size
        if self.by_row or size % self.step == 0:
            return [pieces]
        if self.step % size:
            return [[piece] for piece in pieces]
        return [[p for p in pieces if p[0] // size == g] for g in range(self.step // size)]

    def packed(self, span: Span) -> list[jax.Array]:
        if num_steps(self.weights, self.step) == 0:
            return self._scaled_by_factor(
                self._tail([jnp.zeros(self.shape, jnp.float32)] * len(self.rows), span)
            )
        groups = self._step_groups()
        offsets = [pieces[0][0] for pieces in groups]
        per_block = layout.BLOCK // self.step
        positions = self.step // _position_codes(self.weights)
        zero = jnp.zeros(self.shape, jnp.float32)

        def scales_of(index: Int) -> list[list[jax.Array]]:
            return [] if self.by_row else self._scales(self._groups(index * self.step, offsets))

        def body(index: Int, state: Any) -> Any:
            accs, row_sums, scales = state
            # Loads the next step's scales while this one is multiplied.
            upcoming = scales_of(jnp.minimum(index + 1, span.last - 1))
            block = quotient(index, per_block)
            position = remainder(index, per_block) * positions
            words = self.codes.words(self.rows, block)
            for i, pieces in enumerate(groups):
                products, sums = self._group(words, pieces, index * self.step, position)
                if self.by_row:
                    accs = [acc + p for acc, p in zip(accs, products, strict=True)]
                    if sums is not None:
                        row_sums = row_sums + sums
                    continue
                accs = [
                    self._scaled(
                        acc, p, sums, self._scale(s, i),
                        s[len(groups) + i] if len(s) > len(groups) else None,
                        self.codes.offset,
                    )
                    for acc, p, s in zip(accs, products, scales, strict=True)
                ]  # fmt: skip
            return accs, row_sums, upcoming

        state = ([zero] * len(self.rows), zero, scales_of(span.first))
        accs, row_sums, _ = jax.lax.fori_loop(span.first, span.last, body, state)
        if self.by_row:
            if self.columns.sums is not None:
                row_sums = jnp.broadcast_to(self.columns.sums(0)[None, :], self.shape)
            accs = self._by_row(accs, None if self._centered() else row_sums, self.codes.offset)
        return self._scaled_by_factor(self._tail(accs, span))

    def _scaled_by_factor(self, accs: list[jax.Array]) -> list[jax.Array]:
        """Multiplies by the factor of all scales, if they are derived."""
        derived = self.weights.constants
        return accs if derived is None else [acc * derived.scale_factor for acc in accs]

    def _centered(self) -> bool:
        """Whether products come without their offset and zero."""
        if self.weights.is_mxfp4:
            return True
        return self.weights.zeros is None and self.columns.sums is None

    def _by_row(
        self, accs: list[jax.Array], sums: jax.Array | None, offset: int
    ) -> list[jax.Array]:
        zero = jnp.zeros(self.shape, jnp.float32)
        return [
            self._scaled(zero, acc, sums, s[0], s[1] if len(s) > 1 else None, offset)
            for acc, s in zip(accs, self._scales([0]), strict=True)
        ]

    def _group(
        self, words: Any, pieces: Any, first: Int, position: Int
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """Products of each tile and sums of x, over one group's pieces of a step."""
        products: list[Any] = [None] * len(self.rows)
        sums = None
        for k, count, piece in pieces:
            x = self.columns.load(first + k, count).T
            if self.columns.sums is None and not self.weights.is_mxfp4:
                total = pltriton.dot(self._constant(count), x)
                sums = total if sums is None else sums + total
            for t, planes in enumerate(words):
                for values in self.codes.values(planes, piece, position):
                    part = pltriton.dot(values, x)
                    products[t] = part if products[t] is None else products[t] + part
        if self.weights.is_mxfp4:
            return products, None
        if self.columns.sums is not None:
            if self.by_row:  # they come at the end
                return products, None
            size = min(self.weights.group_size, self.step)
            index = quotient(first + pieces[0][0], size)
            return products, jnp.broadcast_to(self.columns.sums(index)[None, :], self.shape)
        if self.weights.zeros is None:
            return [p + sums for p in products], None
        return products, sums

    def _tail(self, accs: list[jax.Array], span: Span) -> list[jax.Array]:
        """Adds the short last block, a chunk at a time, each code looked up by itself."""
        weights = self.weights
        first = weights.num_inputs // layout.BLOCK * layout.BLOCK
        if first == weights.num_inputs:
            return accs
        num_chunks = -(-(weights.num_inputs - first) // CHUNK)
        steps = iota(CHUNK)
        dtype, is_mxfp4 = self.columns.dtype, weights.is_mxfp4
        ones = jnp.ones((self.shape[0], CHUNK), self.columns.dtype)

        def body(i: Int, accs: list[jax.Array]) -> list[jax.Array]:
            k = first + i * CHUNK
            x = self.columns.load(k, CHUNK).T
            sums = None if is_mxfp4 else pltriton.dot(ones, x)
            group = 0 if self.by_row else quotient(k, weights.group_size)
            index = quotient(group, 2) if self.by_pair else group
            added = []
            for rows, acc, s in zip(self.rows, accs, self._scales([index]), strict=True):
                codes = element_codes(weights, self.slot, rows[:, None], (k + steps)[None, :])
                if is_mxfp4:
                    small = mxfp4.small_floats(codes, dtype)
                    halves = _full_pairs(small, dtype, interpret=self.interpret)
                    values = jax.lax.bitcast_convert_type(halves.astype(jnp.uint16), dtype)
                else:
                    values = codes.astype(jnp.float32).astype(dtype)
                part = pltriton.dot(values, x)
                zero = s[1] if len(s) > 1 else None
                added.append(self._scaled(acc, part, sums, self._scale(s, group), zero, 0))
            return added

        return jax.lax.fori_loop(jnp.int32(0), _count(span, num_chunks), body, accs)

    def plain(self, span: Span) -> list[jax.Array]:
        """Multiplies plain matrices: one product per step."""
        weights = self.weights

        def body(index: Int, accs: list[jax.Array]) -> list[jax.Array]:
            return self._plain_step(accs, index * self.step, self.step, whole=True)

        accs = [jnp.zeros(self.shape, jnp.float32)] * len(self.rows)
        accs = jax.lax.fori_loop(span.first, span.last, body, accs)
        first = weights.num_inputs // layout.BLOCK * layout.BLOCK
        if first == weights.num_inputs:
            return accs

        def tail(i: Int, accs: list[jax.Array]) -> list[jax.Array]:
            return self._plain_step(accs, first + i * CHUNK, CHUNK, whole=False)

        num_chunks = -(-(weights.num_inputs - first) // CHUNK)
        return jax.lax.fori_loop(jnp.int32(0), _count(span, num_chunks), tail, accs)

    def _plain_step(
        self, accs: list[jax.Array], k: Int, count: int, *, whole: bool
    ) -> list[jax.Array]:
        x = self.columns.load(k, count)
        inputs = k + iota(count)
        inputs = inputs if whole else jnp.minimum(inputs, self.weights.num_inputs - 1)
        added = []
        for rows, acc in zip(self.rows, accs, strict=True):
            tile = self.weights.words[self.slot, rows[:, None], inputs[None, :]]
            if tile.dtype != x.dtype:  # TF32 holds both exactly
                part = pltriton.dot(
                    tile.astype(jnp.float32), x.astype(jnp.float32).T, allow_tf32=True
                )
            else:
                part = pltriton.dot(tile, x.T)
            added.append(acc + part)
        return added


def _count(span: Span, num_chunks: int) -> jax.Array:
    """Chunks of the short last block that are in a span."""
    return jnp.where(span.tail, jnp.int32(num_chunks), jnp.int32(0))
