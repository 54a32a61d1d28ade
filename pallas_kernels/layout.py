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

Planes may also lie apart, each in an array of its own, so that the first ones are a narrower matrix
(`PREFIXES`): the first B bits of a code q, with the scale a and zero point z that the first plane
has, are the value f a (q - (alpha + beta z)), with the constants of `derivation(B)`.

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
BASE_BITS = 2  # of the first plane of matrices whose planes lie apart
PREFIXES: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (2, 2), 8: (2, 2, 4)}
# Steps of a prefix that lie in one step of its first plane, times their size, over that step.
_SPREAD = {2: 1.0, 3: 1.1, 4: 1.1, 8: 1.1}


class Plane(NamedTuple):
    """One plane of a row."""

    width: int  # bits of a code that it holds
    shift: int  # of these bits in the code
    first_word: int  # in the row
    num_words: int


class Derivation(NamedTuple):
    """Scale and zero point of a prefix, from those of its first plane."""

    scale_factor: float  # f: its scale is f a
    zero_offset: float  # alpha: its zero point is alpha + beta z
    zero_factor: float  # beta


def derivation(bits: int) -> Derivation:
    """Constants of the prefix of `bits` bits; the middle of its values is the first plane's."""
    factor = _SPREAD[bits] * 2.0 ** (BASE_BITS - bits)
    middle, base = (2.0**bits - 1) / 2, (2.0**BASE_BITS - 1) / 2
    return Derivation(factor, middle - base / factor, 1 / factor)


def plane_words(num_codes: int, width: int) -> int:
    """Words of a row of a plane of `width` bits."""
    return padded_length(num_codes) * width // WORD_BITS


def padded_length(num_codes: int) -> int:
    """Codes of a row with padding: the next multiple of 32."""
    return -(-num_codes // WORD_BITS) * WORD_BITS


def num_words(num_codes: int, bits: int) -> int:
    """Words of a row of `num_codes` codes."""
    _check_bits(bits)
    return padded_length(num_codes) * bits // WORD_BITS


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
    found, first_word = [], 0
    for plane in planes_apart(num_codes, PLANES[bits]):
        found.append(plane._replace(first_word=first_word))
        first_word += plane.num_words
    return tuple(found)


def planes_apart(num_codes: int, widths: Sequence[int]) -> tuple[Plane, ...]:
    """Planes of a row where each lies in an array of its own."""
    found, shift = [], sum(widths)
    for width in widths:
        shift -= width
        found.append(Plane(width, shift, 0, plane_words(num_codes, width)))
    return tuple(found)


def pack(codes: Any, bits: int) -> Any:
    """Packs rows of codes.

    Args:
      codes: uint8[..., K], each below 2^bits; higher bits are dropped.
      bits: 2, 3, 4 or 8.

    Returns:
      uint32[..., num_words(K, bits)].
    """
    xp, num_codes = _namespace(codes), codes.shape[-1]
    return xp.concatenate(_pack(codes, planes(num_codes, bits)), axis=-1)


def pack_apart(codes: Any, widths: Sequence[int]) -> list[Any]:
    """Packs rows of codes [..., K] as planes, each in an array of its own: [..., words] each."""
    xp, planes = _namespace(codes), planes_apart(codes.shape[-1], widths)
    return [xp.concatenate(_pack(codes, [plane]), axis=-1) for plane in planes]


def _pack(codes: Any, planes: Sequence[Plane]) -> list[Any]:
    """Packs planes, one after the other: their blocks' words in order."""
    xp, num_codes = _namespace(codes), codes.shape[-1]
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, padded_length(num_codes) - num_codes)]
    padded = xp.pad(codes.astype(xp.uint8), padding)
    packed = []
    for plane in planes:
        part = (padded >> xp.uint8(plane.shift)) & xp.uint8((1 << plane.width) - 1)
        for first, size, repeats in _blocks(num_codes):
            span = part[..., first : first + size * repeats]
            packed.append(_pack_blocks(span, plane.width, repeats, xp))
    return packed


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
    return unpack_apart([(words, plane) for plane in planes(num_codes, bits)], num_codes)


def unpack_apart(stored: Sequence[tuple[Any, Plane]], num_codes: int) -> Any:
    """Unpacks rows of codes uint8[..., K] from planes, each with the array that has its words."""
    codes = None
    for words, plane in stored:
        xp, parts, first_word = _namespace(words), list[Any](), plane.first_word
        for _, size, repeats in _blocks(num_codes):
            count = size * repeats * plane.width // WORD_BITS
            span = words[..., first_word : first_word + count]
            parts.append(_unpack_blocks(span, plane.width, repeats, xp))
            first_word += count
        part = xp.concatenate(parts, axis=-1) << xp.uint8(plane.shift)
        codes = part if codes is None else codes | part
    assert codes is not None
    return codes[..., :num_codes]


def _check_bits(bits: int) -> None:
    if bits not in PLANES:
        raise ValueError(f"bits {bits} is none of {', '.join(map(str, BITS))}")


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
