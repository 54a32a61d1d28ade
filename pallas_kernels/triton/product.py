"""A Triton program's part of x W^T: a tile of outputs, some steps of K, in float32.

A step is some consecutive k of one block of the packed layout, unpacked in registers as the matrix
units take it (`triton_codes`), with an offset. Per quantization group

    products = sum_k (offset + q_k) x_k,   sums = sum_k x_k
    acc     += scale (products - (zero + offset) sums)

in float32: the scale meets the accumulator, never a code. `sums` come from the matrix units too (a
product with ones), which idle at decode, or are given, at prefill. Tiles of W are the left operand:
it is the one that the matrix units take from registers. MXFP4 has neither zeros nor offsets, and so
no sums.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import layout, mxfp4
from pallas_kernels.op import offset_refusal
from pallas_kernels.packed import PLAIN_BITS, PackedMatrices
from pallas_kernels.triton.codes import PackedCodes, full_pairs, position_codes
from pallas_kernels.triton.elements import Int, element_codes, quotient, remainder

Ref = Any
CHUNK = 32  # codes; a group whose size is a multiple of it never ends inside one


class Columns(NamedTuple):
    """Rows of x that a program multiplies: the columns of its tile."""

    load: Callable[[Int, int], jax.Array]  # (first k, count) -> [columns, count]; 0 beyond K
    sums: Callable[[Int], jax.Array] | None  # index -> float32[columns], see `sums_of`
    dtype: Any


def columns_of(x_ref: Ref, sums_ref: Ref | None, rows: jax.Array) -> Columns:
    """Loads rows of x; those beyond the last are zero."""
    num_rows, num_inputs = x_ref.shape
    mask_m = rows < num_rows

    def load(first: Any, count: int) -> jax.Array:
        k = first + jax.lax.broadcasted_iota(jnp.int32, (count,), 0)
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


def indices(tile: Int, count: int) -> jax.Array:
    """Indices int32[count] of one tile of `count` rows or columns."""
    return tile * count + jax.lax.broadcasted_iota(jnp.int32, (count,), 0)


def rows_from(first: Int, count: int, num_rows: int) -> jax.Array:
    """Rows int32[count] from `first` on; those beyond the last are the last."""
    return jnp.minimum(first + indices(0, count), num_rows - 1)


def split(total: int, parts: int, part: Int) -> tuple[Int, Int]:
    """Steps first .. last of one of `parts` nearly equal parts."""
    return quotient(part * total, parts), quotient((part + 1) * total, parts)


def product(
    columns: Columns,
    weights: PackedMatrices,
    slot: Int,
    tiles: Sequence[jax.Array],
    span: Span,
    *,
    num_columns: int,
    step: int,
    interpret: bool,
) -> list[jax.Array]:
    """Multiplies each tile of rows: float32[rows, columns].

    Args:
      slot: int32[].
      tiles: int32[rows] of each tile, none beyond the last; all of one length.
      step: codes per step; a power of two in `min_step(weights)` .. 256.
    """
    shape = (tiles[0].shape[0], num_columns)
    kernel = _Product(columns, weights, slot, tiles, shape, step, interpret)
    return kernel.plain(span) if weights.bits == PLAIN_BITS else kernel.packed(span)


def min_step(weights: PackedMatrices) -> int:
    """Smallest step: codes of one position (with two planes: of a pair)."""
    return CHUNK if weights.bits == PLAIN_BITS else position_codes(weights)


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
        self.codes = PackedCodes(weights, slot, step, columns.dtype, interpret=interpret)
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
        positions = self.step // position_codes(self.weights)
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
        steps = jax.lax.broadcasted_iota(jnp.int32, (CHUNK,), 0)
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
                    small = mxfp4.small_pairs(codes, 0, dtype)
                    halves = full_pairs(small, dtype, interpret=self.interpret)
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
        inputs = k + jax.lax.broadcasted_iota(jnp.int32, (count,), 0)
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
