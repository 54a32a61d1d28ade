"""Converts packed words to matrix unit operands in registers; no value moves between lanes.

A warp takes 16 rows and a block of K. In every full block the codes of 32 consecutive k (a step)
lie at one position of 16 words (`layout`); lane (g, t) reads words 4t..4t+3 of rows g and g + 8, in
16 bytes each. Halves of word 4t+i are k = 8t + 2i and 8t + 2i + 1 of the step. So with the order of
k within a step that gives a lane its words 0, 1 in the first m16n8k16 and 2, 3 in the second, a
mask makes the operand, and x in its natural order, 16 bytes a lane at k = 8t, is the other one.

A field of w bits at bit i of a half, put under the bits of 2^m (m the stored bits of the mantissa),
is the number 2^m + q 2^i exactly: 128 + q 2^i in bf16, 1024 + q in fp16. The product compensates
with x 2^-i, and the offset is subtracted through a sum of x that the matrix units compute too.

A last block of 128 or 64 codes has fewer words, whose positions have fewer k. It runs as a full one
whose other words are zeros: each field meets the x of its own k (`CodeFormat.short_block`), and
what has no codes meets zeros.

Codes of MXFP4 become floats by moving their bits (`_floats_of_mxfp4`). These are too small by a
power of two: x is multiplied by a part of it (`CodeFormat.x_power`), each scale by the rest.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from pallas_kernels import layout, mxfp4
from pallas_kernels.mosaic_decode.emit import Mlir, Value
from pallas_kernels.packed import PLAIN_BITS

STEP = 32  # k of a step: two m16n8k16
MANTISSA = {"bf16": 7, "f16": 10}
MAGIC = {"bf16": 0x4300, "f16": 0x6400}  # 128 and 1024
ONE = {"bf16": 0x3F80, "f16": 0x3C00}


class _Field(NamedTuple):
    """Position of a step's codes: field of `chunk` after a shift, at bit `exponent`."""

    chunk: int  # which 4 words of the lane
    shift: int  # to the right, of the whole word
    exponent: int


@dataclasses.dataclass(frozen=True)
class CodeFormat:
    """Facts of a stored form for the kernel; `kind`, of x, is "bf16" or "f16"."""

    bits: int
    kind: str
    apart: bool = False  # planes lie in arrays of their own
    is_mxfp4: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of each plane of a row."""
        if self.bits == PLAIN_BITS:
            return (PLAIN_BITS,)
        return (layout.PREFIX_PLANES if self.apart else layout.PLANES)[self.bits]

    @property
    def block(self) -> int:
        """Codes k that a lane loads at once."""
        return 64 if self.bits == PLAIN_BITS else layout.BLOCK

    @property
    def steps(self) -> int:
        """Steps per block."""
        return self.block // STEP

    @property
    def chunks(self) -> int:
        """16-byte loads of a row's block, without a second plane's, which is one."""
        return {2: 1, 4: 2, 8: 4, PLAIN_BITS: 2}[self.widths[0]]

    @property
    def planes(self) -> int:
        """Planes of a row."""
        return len(self.widths)

    @property
    def offset(self) -> int:
        """Offset in every unpacked value."""
        is_plain = self.bits == PLAIN_BITS or self.is_mxfp4
        exact = is_plain or (self.bits == 8 and self.kind == "bf16")
        return 0 if exact else 1 << MANTISSA[self.kind]

    @property
    def x_power(self) -> int:
        """Exponent of the power of two by which x is multiplied for all steps.

        Products of MXFP4's small floats and x as it is would be subnormal in float32 for bf16: with
        this |x| < 2^48 stays finite, and products with |x| > 2^-79 keep all bits.
        """
        return 80 if self.is_mxfp4 and self.kind == "bf16" else 0

    @property
    def scale_power(self) -> int:
        """Exponent of the power of two by which MXFP4's scales are multiplied.

        Those of an exponent of at most `mxfp4.LARGEST` stay finite.
        """
        return {"bf16": 126, "f16": 14}[self.kind] - self.x_power

    def field(self, step: int) -> _Field:
        """Position of a step's codes (of two planes, in the nibbles that `prepare` makes).

        For fp16 every field is shifted to bit 0: x 2^-i would leave fp16's normal numbers for small
        x (5 bits of exponent), which bf16 does not.
        """
        if self.bits in (PLAIN_BITS, 8):
            position, chunk = divmod(step, self.chunks)
            return _Field(chunk, 8 * position if self.bits == 8 else 0, 0)
        if self.planes == 2:
            nibble = step // 2
            if self.kind == "f16" or self.bits == 4:  # 7 bits of mantissa hold no second nibble
                return _Field(step % 2, 4 * nibble, 0)
            return _Field(step % 2, 8 * (nibble // 2), 4 * (nibble % 2))
        position, chunk = divmod(step, self.chunks)
        # Positions that one shift serves.
        in_place = 1 if self.kind == "f16" else MANTISSA[self.kind] // self.bits
        stage, within = divmod(position, in_place)
        return _Field(chunk, self.bits * in_place * stage, self.bits * within)

    def in_position(self, size: int) -> int:
        """Codes of a position of the first plane, in a block of `size`."""
        return size * self.widths[0] // 16

    def short_block(self, size: int, step: int) -> tuple[int, bool, bool]:
        """Place in a block of `size` codes of what is a step of a full one.

        Returns:
          The first k of lane t = 0, whether there is any, and whether lanes t < 2 alone have codes
          (eight words of a position, not sixteen).
        """
        (position, chunk), codes = divmod(step, self.chunks), self.in_position(size)
        chunks = max(1, codes // STEP)
        first = codes * position + STEP * (chunk % chunks)
        return first, chunk < chunks, codes < STEP


def pair(kind: str, power: int, negative: bool = False) -> int:
    """Word whose halves are both +-2^power."""
    half = ONE[kind] + (power << MANTISSA[kind]) | (0x8000 if negative else 0)
    return half * 0x10001


def number_of(e: Mlir, words: Sequence[Value], index: int, size: int) -> Value:
    """Reads a scale or zero of `size` bytes as float32 among words in memory order."""
    word, within = divmod(index * size, 4)
    if size == 4:
        return e.f32_of_bits(words[word])
    if size == 1:
        return e.byte_to_f32(words[word], within)
    return e.half_to_f32(words[word], within // 2)


def prepare(e: Mlir, form: CodeFormat, raw: list[Value], high: Value) -> list[Value]:
    """Converts a row's registers for `values`; only those of two planes change.

    Words of two planes are merged into nibbles: first the even positions of the first plane, which
    has two bits, then the odd ones. A second plane of two bits has the same positions in the same
    words. Bit 2p of a one-bit plane's word j is the lowest bit of position p of word j, bit 2p + 1
    that of word j + 8, which lanes with t >= 2 have.
    """
    if form.planes == 1:
        return raw
    even, odd = [], []
    if form.widths[1] == 2:
        for two, low in zip(raw[:4], raw[4:], strict=True):
            even.append(e.merge(e.shl(two, 2), 0xCCCCCCCC, low, "select"))
            odd.append(e.merge(two, 0xCCCCCCCC, e.shr(low, 2), "select"))
        return even + odd
    later = e.add(high, 2)
    for two, one in zip(raw[:4], raw[4:], strict=True):
        # The fourth bit of each nibble is left as it comes: no field takes it.
        even.append(e.merge(e.shl(two, 1), 0x66666666, e.shr(one, high), "select"))
        odd.append(e.merge(e.shr(two, 1), 0x66666666, e.shr(one, later), "select"))
    return even + odd


def values(e: Mlir, form: CodeFormat, prepared: list[Value], step: int) -> list[Value]:
    """Unpacks four words of pairs: offset + q 2^exponent (`CodeFormat.field`), or plain weights."""
    field = form.field(step)
    words = prepared[4 * field.chunk : 4 * field.chunk + 4]
    if form.bits == PLAIN_BITS:
        return words
    if form.is_mxfp4:
        return [_floats_of_mxfp4(e, form.kind, word, step // form.chunks) for word in words]
    shifted = [e.shr(word, field.shift) for word in words]
    if form.bits == 8 and form.kind == "bf16":
        return [_byte_pairs(e, word) for word in shifted]
    mask = ((1 << form.bits) - 1 << field.exponent) * 0x10001
    magic = MAGIC[form.kind] * 0x10001
    return [e.merge(word, mask, magic, "or") for word in shifted]


def _floats_of_mxfp4(e: Mlir, kind: str, word: Value, position: int) -> Value:
    """Makes a pair of small floats of a position's codes (`mxfp4.small_pairs`).

    0.5 becomes a subnormal float, which the matrix units take as it is.
    """
    (count, mask), *others = mxfp4.PIECES[position]
    floats = e.band(e.rotate(word, count), mask)
    for count, mask in others:
        floats = e.merge(e.rotate(word, count), mask, floats, "or")
    if kind == "bf16":
        return floats
    signs = e.band(floats, mxfp4.SIGNS)
    return e.merge(e.shl(floats, 3), mxfp4.REST << 3, signs, "or")


def _byte_pairs(e: Mlir, word: Value) -> Value:
    """Converts 8-bit codes to bf16 pairs as 16 high + low; one step would exceed its mantissa."""
    low = e.merge(word, 0x000F000F, 0x43004300, "or")  # 128 + low
    high = e.merge(e.shr(word, 4), 0x000F000F, 0x43004300, "or")  # 128 + high
    # 16 (128 + high) - 2176 = 16 high - 128, then + 128 + low: every step is exact.
    moved = e.fma_pair("bf16", high, 0x41804180, 0xC508C508)
    return e.fma_pair("bf16", low, 0x3F803F80, moved)
