"""The one definition of packed INT2, INT3, INT4 and INT8 weights.

A row of K codes lies in `num_words(K, bits)` words of 32 bits, exactly `bits` bits a code (K is
first padded to a multiple of 32 with zeros). A code is cut into planes, most significant first:

    INT2 (2,)    INT3 (2, 1)    INT4 (4,)    INT8 (8,)

The planes of a row follow each other. A plane of width w is cut into blocks of `BLOCK` = 256 codes,
the last of which may be shorter. A block of R codes has R w / 32 words; word j, half h and position
p hold the bits of the code

    k = block 256 + p (R w / 16) + 2 j + h        at bit 16 h + p w of the word.

So the codes of one position are a whole sub-tile of consecutive k in the arrangement of the words
themselves (a shift and a mask unpack it, nothing moves), adjacent k are the halves of one word (two
16-bit floats of a register), and in every full block a position's sub-tile (16 k or a multiple)
lies inside one quantization group of 32, 64 or 128. Rows stay rows: matrices that share K are
concatenated by concatenating their words.

Bit planes in arrays of their own let one stored copy serve several widths (`PREFIX_PLANES`):

    2 bits (2,)    3 bits (2, 1)    4 bits (2, 2)    8 bits (2, 2, 4)

The first plane is INT2 and has the scales a and float zero points z of the groups; refinements have
none. A prefix of B bits is s_B (q - z_B) with s_B and z_B linear in a and z (`prefix_constants`).

Functions take numpy or JAX arrays and return the same kind. Kernels use K for the inputs and N for
the outputs of a product; here k counts inputs.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LAYOUT = "planes-k256-v1"  # the version's tag; it is stored with whatever is packed
BLOCK = 256
WORD_BITS = 32
PLANES: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
BITS = tuple(PLANES)
# Widths of the planes of codes that are stored plane by plane; each width's is a prefix of a wider
# one's, but for 3 bits.
PREFIX_PLANES: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (2, 2), 8: (2, 2, 4)}
# Step of B bits over a / 2^(B - 2), the subdivided step of the base. A finer grid wants a wider
# range. Relative errors of B and 2 bits by joint least squares, Gaussian groups of 64, float64,
# weight .9 on B (.99 at 8 bits): 3 bits at 1.00 .1667 .339, 1.05 .1667 .336, 1.10 .1667 .338;
# 4 bits at 1.05 .0839 .340, 1.10 .0838 .339, 1.15 .0843 .342; 8 bits at 1.00 .0053 .352,
# 1.05 .0055 .345, 1.10 .0060 .344.
_STEP_RATIOS = {2: 1.0, 3: 1.05, 4: 1.1, 8: 1.05}


class Plane(NamedTuple):
    """One plane of a row."""

    width: int  # bits of a code that it holds
    shift: int  # of these bits in the code
    first_word: int  # in the row
    num_words: int


class PrefixConstants(NamedTuple):
    """Constants that make a prefix's scale s_B and zero point z_B of the base's a and z.

    s_B = scale_factor a and z_B = zero_offset + zero_factor z: both grids have one centre,
    s_B (c_B - z_B) = a (1.5 - z), where c_B = (2^B - 1) / 2.
    """

    scale_factor: float
    zero_offset: float
    zero_factor: float


def prefix_constants(bits: int) -> PrefixConstants:
    """Constants of the prefix of `bits` bits, 2, 3, 4 or 8; at 2 bits s_B = a and z_B = z."""
    _check_bits(bits)
    factor = _STEP_RATIOS[bits] / 2 ** (bits - 2)
    return PrefixConstants(factor, (2**bits - 1) / 2 - 1.5 / factor, 1 / factor)


def padded_length(num_codes: int) -> int:
    """Codes of a row with padding: the next multiple of 32."""
    return -(-num_codes // WORD_BITS) * WORD_BITS


def num_words(num_codes: int, bits: int) -> int:
    """Words of a row of `num_codes` codes."""
    _check_bits(bits)
    return num_plane_words(num_codes, bits)


def num_plane_words(num_codes: int, width: int) -> int:
    """Words of one plane of a row; planes of 1 bit included."""
    return padded_length(num_codes) * width // WORD_BITS


def num_groups(num_codes: int, group_size: int) -> int:
    """Quantization groups of a row; the last may be shorter.

    Raises:
      ValueError: the group size is not positive or longer than the row.
    """
    if not 1 <= group_size <= num_codes:
        raise ValueError(f"group_size {group_size} is not in 1..{num_codes}, the codes of a row")
    return -(-num_codes // group_size)


def planes(num_codes: int, bits: int) -> tuple[Plane, ...]:
    """Positions of a row's planes."""
    _check_bits(bits)
    found, first_word, shift = [], 0, bits
    for width in PLANES[bits]:
        shift -= width
        count = num_plane_words(num_codes, width)
        found.append(Plane(width, shift, first_word, count))
        first_word += count
    return tuple(found)


def planes_apart(num_codes: int, bits: int) -> tuple[Plane, ...]:
    """Positions of a row's planes, each in an array of its own (`PREFIX_PLANES`)."""
    _check_bits(bits)
    found, shift = [], bits
    for width in PREFIX_PLANES[bits]:
        shift -= width
        found.append(Plane(width, shift, 0, num_plane_words(num_codes, width)))
    return tuple(found)


def pack(codes: Any, bits: int) -> Any:
    """Packs rows of codes.

    Args:
      codes: uint8[..., K], each below 2^bits; higher bits are dropped.
      bits: 2, 3, 4 or 8.

    Returns:
      uint32[..., num_words(K, bits)].
    """
    _check_bits(bits)
    return _namespace(codes).concatenate(_pack_planes(codes, bits, PLANES[bits]), axis=-1)


def pack_planes(codes: Any, bits: int) -> tuple[Any, ...]:
    """Packs rows of codes uint8[..., K] plane by plane.

    Returns:
      An array uint32[..., num_plane_words(K, width)] for each width of `PREFIX_PLANES[bits]`. The
      first one is `pack(codes >> (bits - 2), 2)`.
    """
    _check_bits(bits)
    return tuple(_pack_planes(codes, bits, PREFIX_PLANES[bits]))


def unpack(words: Any, bits: int, num_codes: int) -> Any:
    """Unpacks rows of codes.

    Args:
      words: uint32[..., num_words(num_codes, bits)].
      bits: 2, 3, 4 or 8.

    Returns:
      uint8[..., K].

    Raises:
      ValueError: the rows have another number of words.
    """
    if words.shape[-1] != num_words(num_codes, bits):
        raise ValueError(
            f"rows of {num_codes} codes of {bits} bits have {num_words(num_codes, bits)} words, "
            f"got {words.shape[-1]}"
        )
    parts = [
        words[..., plane.first_word : plane.first_word + plane.num_words]
        for plane in planes(num_codes, bits)
    ]
    return _unpack_planes(parts, PLANES[bits], num_codes)


def unpack_planes(words: Sequence[Any], bits: int, num_codes: int) -> Any:
    """Unpacks rows of codes uint8[..., K] of `bits` bits from the planes of `pack_planes`.

    Planes beyond those of the width are not read: the base alone has the codes of 2 bits.

    Raises:
      ValueError: a plane is missing, or its rows have another number of words.
    """
    _check_bits(bits)
    widths = PREFIX_PLANES[bits]
    expected = [num_plane_words(num_codes, width) for width in widths]
    found = [part.shape[-1] for part in words[: len(widths)]]
    if found != expected:
        raise ValueError(
            f"the planes of {num_codes} codes of {bits} bits have {expected} words, got {found}"
        )
    return _unpack_planes(words, widths, num_codes)


def take_codes(
    words: Any, widths: Sequence[int], num_codes: int, start: int, stop: int, length: int
) -> Any:
    """Packs the codes start..stop of packed rows anew, followed by zeros.

    Args:
      words: uint32[..., W], planes of `widths` one after another, of `num_codes` codes.
      length: codes of the new rows, at least stop - start.

    Returns:
      uint32[..., W'], rows of `length` codes in the same planes.
    """
    xp = _namespace(words)
    found, first = [], 0
    for width in widths:
        count = num_plane_words(num_codes, width)
        plane = words[..., first : first + count]
        first += count
        # Whole blocks, or an end of the same length, lie the same in the new rows.
        if (
            start % BLOCK == 0
            and stop - start == length
            and (length % BLOCK == 0 or stop == num_codes)
        ):
            found.append(
                plane[..., start * width // WORD_BITS :][..., : num_plane_words(length, width)]
            )
            continue
        codes = _unpack_planes([plane], [width], num_codes)[..., start:stop]
        padding = [(0, 0)] * (codes.ndim - 1) + [(0, length - (stop - start))]
        found += _pack_planes(xp.pad(codes, padding), width, [width])
    return found[0] if len(found) == 1 else xp.concatenate(found, axis=-1)


def _check_bits(bits: int) -> None:
    if bits not in PLANES:
        raise ValueError(f"bits {bits} is none of {', '.join(map(str, BITS))}")


def _pack_planes(codes: Any, bits: int, widths: Sequence[int]) -> list[Any]:
    """Packs planes of these widths, most significant first, whose sum is `bits`."""
    xp = _namespace(codes)
    num_codes = codes.shape[-1]
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, padded_length(num_codes) - num_codes)]
    padded = xp.pad(codes.astype(xp.uint8), padding)
    packed, shift = [], bits
    for width in widths:
        shift -= width
        part = (padded >> xp.uint8(shift)) & xp.uint8((1 << width) - 1)
        spans = [
            _pack_blocks(part[..., first : first + size * repeats], width, repeats, xp)
            for first, size, repeats in _blocks(num_codes)
        ]
        packed.append(xp.concatenate(spans, axis=-1))
    return packed


def _unpack_planes(words: Sequence[Any], widths: Sequence[int], num_codes: int) -> Any:
    """Unpacks rows from planes of these widths, most significant first."""
    xp = _namespace(words[0])
    codes, shift = None, sum(widths)
    for plane, width in zip(words, widths, strict=False):
        parts, first_word = [], 0
        shift -= width
        for _, size, repeats in _blocks(num_codes):
            count = size * repeats * width // WORD_BITS
            span = plane[..., first_word : first_word + count]
            parts.append(_unpack_blocks(span, width, repeats, xp))
            first_word += count
        part = xp.concatenate(parts, axis=-1) << xp.uint8(shift)
        codes = part if codes is None else codes | part
    assert codes is not None
    return codes[..., :num_codes]


def _namespace(array: Any) -> ModuleType:
    return jnp if isinstance(array, jax.Array) else np


def _blocks(num_codes: int) -> list[tuple[int, int, int]]:
    """Runs (first code, codes per block, number of blocks): the full ones, then the short one."""
    length = padded_length(num_codes)
    full, rest = length // BLOCK, length % BLOCK
    runs = [(0, BLOCK, full)] if full else []
    return [*runs, (full * BLOCK, rest, 1)] if rest else runs


def _shifts(width: int, xp: ModuleType) -> Any:
    """Bit offsets uint32[positions, 1, 2]: where half h of position p begins in a word."""
    positions = 16 // width
    shifts = np.arange(positions)[:, None, None] * width + np.arange(2)[None, None] * 16
    return xp.asarray(shifts.astype(np.uint32))


def _pack_blocks(part: Any, width: int, repeats: int, xp: ModuleType) -> Any:
    lead = part.shape[:-1]
    tiles = part.reshape(*lead, repeats, 16 // width, -1, 2).astype(xp.uint32)
    shifts = _shifts(width, xp)
    placed = tiles << shifts.reshape((1,) * (tiles.ndim - 3) + shifts.shape)
    return placed.sum(axis=(-3, -1), dtype=xp.uint32).reshape(*lead, -1)


def _unpack_blocks(words: Any, width: int, repeats: int, xp: ModuleType) -> Any:
    lead = words.shape[:-1]
    tiles = words.reshape(*lead, repeats, 1, -1, 1)
    shifts = _shifts(width, xp)
    tiles = tiles >> shifts.reshape((1,) * (tiles.ndim - 3) + shifts.shape)
    return (tiles & xp.uint32((1 << width) - 1)).astype(xp.uint8).reshape(*lead, -1)
