"""Random operands of the packed products, their values bit by bit, and THE check of a product.

    weights = random_matrices(rng, Form(3, 64), num_slots=3, shape=(40, 800), used={1})
    expected, slack = product(x, weights, slot=1)
    violation(found, expected, slack, "bfloat16")  # None, or what is wrong

Arrays are numpy's. Values are float64, by the formula in the docstring of `pallas_kernels.layout`
and not by its code. What a product has no business to read is NaN: slots and rows of factor pools
that are not `used`.
"""

import itertools
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import mxfp4
from pallas_kernels.packed import LowRank, PackedMatrices, Refinement
from tests.kernel_contract import UNIT_ROUNDOFF, outside

WIDTHS = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,), 16: (16,)}  # of the planes
APART = {3: (2, 1), 4: (2, 2), 8: (2, 2, 4)}  # where they lie apart
STEPS = {3: 1.05, 4: 1.1, 8: 1.05}  # 2^(B - 2) steps of B bits, over one of the first plane
# Where a word of MXFP4 has the bits of the first half's codes, lowest first, by position.
MXFP4_BITS = ((6, 7, 8, 15), (0, 1, 2, 9), (28, 29, 30, 5), (26, 3, 4, 11))
# Values of MXFP4's codes, as the OCP Microscaling Formats 1.0 list them (section 5.3.3).
E2M1 = np.array([*(s * m for s in (1, -1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6))])
# Half the distance from 1 to the next number.
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
FROBENIUS = {"bfloat16": 3e-3, "float16": 5e-4, "float32": 1e-5}  # relative error, by x's dtype
# Codes may be multiplied as 128 + q or 1024 + q, which a shift and an or make; the sums are larger.
CODE_OFFSET = {"bfloat16": 128, "float16": 1024, "float32": 0}
# Standard deviations of float32's rounding that are allowed; matrix units round sums towards zero.
DEVIATIONS = 8
# Unit roundoffs of what is rounded on its way to a matrix unit that are allowed; over mantissas a
# rounding's standard deviation is 0.43 of one, so that this is 7 of them.
ROUNDINGS = 3


class Form(NamedTuple):
    """One stored form of matrices; `group_size` 0, or a longer one than a row, is one a row.

    MXFP4 is `Form(4, 32, "mxfp4")`.
    """

    bits: int
    group_size: int = 64
    zero_kind: str = "float"
    dtype: str = "float16"  # of scales; of the values where plain (16 bits)
    apart: str = ""  # planes in arrays of their "own" or in a "shared" pool; "": in one row

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of each plane."""
        return APART[self.bits] if self.apart else WIDTHS[self.bits]


class Terms(NamedTuple):
    """Low-rank terms of rows first_row .. first_row + num_rows."""

    form: Form  # of both factors
    ranks: tuple[int, ...]  # of each slot
    max_rank: int
    first_row: int = 0
    num_rows: int | None = None  # None: to the last


def seed(name: str) -> int:
    """Seed from a test's name, so that no two tests draw equal numbers."""
    return zlib.crc32(name.encode())


def random_activations(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Standard normal values."""
    return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def random_matrices(
    rng: np.random.Generator,
    form: Form,
    *,
    num_slots: int,
    shape: tuple[int, int],
    used: Collection[int],
    size: float | None = None,
    codes: np.ndarray | None = None,
) -> PackedMatrices:
    """Matrices [N, K] whose values have deviation `size`, 1 / sqrt(K) by custom.

    Args:
      rng: drawn from.
      form: how they are stored.
      num_slots: S.
      shape: N and K.
      used: slots that are no NaN.
      size: of the values.
      codes: [N, K] of every slot; None for random words.
    """
    num_rows, num_inputs = shape
    size = num_inputs**-0.5 if size is None else size
    unused = [slot for slot in range(num_slots) if slot not in used]
    if form.bits == 16:
        plain: Any = rng.standard_normal((num_slots, num_rows, num_inputs), np.float32)
        plain[unused] = np.nan
        plain = (np.float32(size) * plain).astype(jnp.dtype(form.dtype))
        return PackedMatrices(
            words=plain, scales=None, zeros=None, num_inputs=num_inputs, bits=16,
            group_size=num_inputs,
        )  # fmt: skip
    group_size = min(form.group_size or num_inputs, num_inputs)
    groups = (num_slots, num_rows, -(-num_inputs // group_size))
    stored_bits = form.widths[0] if form.apart else form.bits  # whose the constants are
    step = size * 12**0.5 / 2**stored_bits
    scales: Any = (step * rng.uniform(0.6, 1.4, groups)).astype(form.dtype)
    top = 2**stored_bits - 1
    zeros: Any = None
    if form.zero_kind == "integer":
        zeros = rng.integers(0, top + 1, groups).astype(np.uint8)
    elif form.zero_kind == "float":  # HQQ's lie outside the codes at times
        zeros = (rng.uniform(-0.2, 1.2, groups) * top).astype(form.dtype)
        zeros[unused] = np.nan
    if form.zero_kind == "mxfp4":
        middle = 127 + round(np.log2(size / E2M1.std()))
        scales = rng.integers(middle - 1, middle + 2, groups).astype(np.uint8)
    scales[unused] = 255 if form.zero_kind == "mxfp4" else np.nan
    words: Any
    refinements: tuple[Refinement, ...] = ()
    if form.apart:
        words, refinements = _random_planes(rng, form, (num_slots, *shape), used, codes)
    elif codes is None:
        words = _random_words(rng, (num_slots, num_rows), num_inputs, form.widths)
    else:
        row_words = pack(codes, form.widths)
        if form.zero_kind == "mxfp4":
            row_words = mxfp4.arrange(row_words)
        words = np.broadcast_to(row_words, (num_slots, *row_words.shape))
    return PackedMatrices(
        words=words, scales=scales, zeros=zeros, num_inputs=num_inputs,
        bits=form.bits, group_size=group_size, refinements=refinements,
    )  # fmt: skip


def _random_planes(
    rng: np.random.Generator, form: Form, shape: tuple[int, int, int], used: Collection[int],
    codes: np.ndarray | None,
) -> tuple[np.ndarray, tuple[Refinement, ...]]:  # fmt: skip
    """Words of the first plane, and refinements in other slots; unused matrices have none."""
    num_slots, num_rows, num_inputs = shape
    if codes is None:
        rows = _random_words(rng, (num_slots, num_rows), num_inputs, form.widths)
    else:
        packed = pack(codes, form.widths)
        rows = np.broadcast_to(packed, (num_slots, *packed.shape))
    ends = np.cumsum([-(-num_inputs // 32) * width for width in form.widths])
    first, *others = np.split(rows, ends[:-1], axis=-1)
    pool, begin = first, 0
    found = []
    for part in others:
        if form.apart == "shared":
            begin = len(pool)
        else:
            pool = np.empty((0, *part.shape[1:]), np.uint32)
        spare = rng.integers(0, 2**32, (num_slots + 1, *part.shape[1:]), np.uint32)
        slots = begin + rng.permutation(num_slots + 1)[:num_slots].astype(np.int32)
        spare[slots - begin] = part
        pool = np.concatenate([pool, spare])
        slots[[slot for slot in range(num_slots) if slot not in used]] = 1 << 20
        found.append((pool, slots))
    if form.apart == "shared":
        return pool, tuple(Refinement(words=pool, slots=slots) for _, slots in found)
    return first, tuple(Refinement(words=words, slots=slots) for words, slots in found)


def random_terms(
    rng: np.random.Generator, terms: Terms, weights: PackedMatrices, used: Collection[int]
) -> LowRank:
    """Terms about a third the size of the product; later slots own earlier rows of the pools."""
    ranks: Any = np.asarray(terms.ranks, np.int32)
    start: Any = (np.cumsum(ranks[::-1])[::-1] - ranks).astype(np.int32)
    owned = {start[slot] + r for slot in used for r in range(ranks[slot])}
    num_rows = terms.num_rows or weights.num_outputs - terms.first_row
    total = max(1, int(ranks.sum()))

    form = terms.form._replace(zero_kind="symmetric")
    size = 0.3 / max(1, terms.max_rank) ** 0.5
    inputs = weights.num_inputs
    return LowRank(
        u=random_pool(rng, form, (total, num_rows), owned, size),
        v=random_pool(rng, form, (total, inputs), owned, inputs**-0.5),
        start=start, rank=ranks, first_row=terms.first_row, max_rank=terms.max_rank,
    )  # fmt: skip


def random_pool(
    rng: np.random.Generator,
    form: Form,
    shape: tuple[int, int],
    owned: Collection[int],
    size: float,
) -> PackedMatrices:
    """One slot [1, R, length] of values of deviation `size`; rows that are not `owned` are NaN."""
    rows = random_matrices(
        rng, form, num_slots=shape[0], shape=(1, shape[1]), used=owned, size=size
    )
    return jax.tree.map(lambda leaf: leaf.transpose(1, 0, 2), rows)


class Place(NamedTuple):
    """Where one plane of each code k of a row lies."""

    width: int
    shift: int  # of its bits in the code
    word: np.ndarray  # int[K]
    bit: np.ndarray  # uint32[K]


def places(num_codes: int, widths: Sequence[int]) -> Iterator[Place]:
    """By `layout`: code 256 block + p (R w / 16) + 2 j + h is at bit 16 h + p w of word j."""
    padded = -(-num_codes // 32) * 32
    k = np.arange(num_codes)
    first = k // 256 * 256
    length = np.minimum(256, padded - first)  # R
    first_word, shift = 0, sum(widths)
    for width in widths:
        shift -= width
        position, rest = np.divmod(k - first, length * width // 16)
        word, half = np.divmod(rest, 2)
        word += first_word + first * width // 32
        yield Place(width, shift, word, (16 * half + position * width).astype(np.uint32))
        first_word += padded * width // 32


def pack(codes: np.ndarray, widths: Sequence[int]) -> np.ndarray:
    """uint32[N, W] of codes [N, K], planes of these widths in a row."""
    num_codes = codes.shape[1]
    words = np.zeros((len(codes), -(-num_codes // 32) * sum(widths)), np.uint32)
    for place in places(num_codes, widths):
        field = codes.astype(np.uint32) >> np.uint32(place.shift) & np.uint32(2**place.width - 1)
        for k in range(num_codes):
            words[:, place.word[k]] |= field[:, k] << place.bit[k]
    return words


def unpack(words: np.ndarray, widths: Sequence[int], num_codes: int) -> np.ndarray:
    """uint8[..., K] of words [..., W], planes of these widths in a row."""
    codes = np.zeros((*words.shape[:-1], num_codes), np.uint8)
    for place in places(num_codes, widths):
        field = words[..., place.word] >> place.bit & np.uint32(2**place.width - 1)
        codes |= (field << np.uint32(place.shift)).astype(np.uint8)
    return codes


def words_of_mxfp4(stored: np.ndarray) -> np.ndarray:
    """Words with each code's four bits together, of words as MXFP4's are stored, bit by bit."""
    found = np.zeros_like(stored)
    for half, position, bit in itertools.product(range(2), range(4), range(4)):
        here = np.uint32((MXFP4_BITS[position][bit] + 16 * half) % 32)
        found |= (stored >> here & np.uint32(1)) << np.uint32(16 * half + 4 * position + bit)
    return found


def values(weights: PackedMatrices, slot: int) -> np.ndarray:
    """float64[N, K]: (q - zero) scale of one matrix."""
    blocks = _blocks(weights.num_outputs)
    return np.concatenate([_values_and_summands(weights, slot, 0, rows)[0] for rows in blocks])


def dense(weights: PackedMatrices, slot: int, low_rank: tuple[LowRank, ...] = ()) -> np.ndarray:
    """float64[N, K]: one matrix with its terms."""
    matrix = values(weights, slot)
    for terms in low_rank:
        u, v = _factors(terms, slot, 0)
        matrix[terms.first_row : terms.first_row + terms.num_rows] += u[0].T @ v[0]
    return matrix


def product(
    x: np.ndarray,
    weights: PackedMatrices,
    slot: int,
    low_rank: tuple[LowRank, ...] = (),
    rounds_weights: bool = False,
    rounds_factors: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """float64[M, N] of x W^T, and how far a right float32 product may be from it before rounding.

    Partial sums of n products of independent signs have deviation sqrt(n) times that of a product,
    and each of the n additions errs by at most u times the sum: sqrt(n) u sqrt(sum of squares) in
    all. Groups are summed apart, since they have their own scales. The thin product x V^T may be
    rounded to x's dtype on its way to a matrix unit. A kernel that `rounds_weights` rounds every
    packed weight to x's dtype, once: errors of independent signs, of variance u_w^2 sum (x w)^2.
    One that `rounds_factors` does so with low-rank factors.
    """
    dtype = x.dtype.name
    offset, roundoff = CODE_OFFSET[dtype], ROUNDINGS * ROUNDOFF[dtype]
    x = x.astype(np.float64)
    y, variance = (np.empty((len(x), weights.num_outputs)) for _ in range(2))
    for rows in _blocks(weights.num_outputs):
        matrix, summands = _values_and_summands(weights, slot, offset, rows)
        y[:, rows], variance[:, rows] = _sums(x, matrix, summands, weights.group_size)
        if rounds_weights and weights.bits < 16:
            variance[:, rows] += roundoff**2 * (x**2 @ (matrix**2).T)
    for terms in low_rank:
        u, v = _factors(terms, slot, offset)
        thin, thin_variance = _sums(x, *v, terms.v.group_size)
        term, term_variance = _sums(thin, u[0].T, u[1].T, max(1, len(u[0])))
        thin_variance += (roundoff * thin) ** 2
        if rounds_factors:
            thin_variance += roundoff**2 * (x**2 @ (v[0] ** 2).T)
            term_variance += roundoff**2 * (thin**2 @ u[0] ** 2)
        span = slice(terms.first_row, terms.first_row + terms.num_rows)
        y[:, span] += term
        variance[:, span] += term_variance + thin_variance @ u[0] ** 2
    return y, np.sqrt(variance)


def violation(
    found: Any, expected: np.ndarray, slack: np.ndarray, x_dtype: str, num_products: int = 1
) -> str | None:
    """THE check: why `found` is not the rounded product, or None; NaN is never right.

    Each element is within `slack` and one rounding of the value, and the relative Frobenius error
    of all of them is at most that of `FROBENIUS`. That is one product's share; independent errors
    of several products add up in squares.
    """
    if found.shape != expected.shape:
        return f"{found.shape} in place of {expected.shape}"
    dtype = found.dtype.name
    if dtype not in ROUNDOFF:
        return f"a result in {dtype}"
    tolerance = slack + ROUNDOFF[dtype] * (np.abs(expected) + slack)
    # Below the normal numbers rounding is no longer relative.
    tolerance += float(ml_dtypes.finfo(dtype).smallest_subnormal)
    if reason := outside("values", found, expected, tolerance):
        return reason
    error = np.abs(np.asarray(found).astype(np.float64) - expected)
    size = float(np.linalg.norm(expected))
    relative = float(np.linalg.norm(error)) / max(size, 1e-300)
    allowed = FROBENIUS[x_dtype] * num_products**0.5
    if relative > allowed:
        return f"relative Frobenius error {relative:.3g}, allowed {allowed:.3g}"
    return None


def _random_words(
    rng: np.random.Generator, lead: tuple[int, int], num_codes: int, widths: Sequence[int]
) -> np.ndarray:
    if num_codes % 32:  # its padding is zero
        codes = rng.integers(0, 2 ** sum(widths), (lead[0] * lead[1], num_codes))
        return pack(codes, widths).reshape(*lead, -1)
    return rng.integers(0, 2**32, (*lead, num_codes * sum(widths) // 32), np.uint32)


def _values_and_summands(
    weights: PackedMatrices, slot: int, offset: float, row: Any = slice(None)
) -> tuple[np.ndarray, np.ndarray]:
    """float64[N, K] twice: the values, and the sizes of what a kernel sums in their place."""
    if weights.bits == 16:
        plain = np.asarray(weights.words[slot, row]).astype(np.float64)
        return plain, np.abs(plain)
    widths = APART[weights.bits] if weights.refinements else WIDTHS[weights.bits]
    parts = [weights.words[slot, row]]
    parts += [of.words[int(of.slots[slot]), row] for of in weights.refinements]
    words = np.concatenate(parts, axis=-1)
    if weights.is_mxfp4:
        words = words_of_mxfp4(words)
    codes = unpack(words, widths, weights.num_inputs)
    group = np.arange(weights.num_inputs) // weights.group_size
    assert weights.scales is not None
    scales = np.asarray(weights.scales[slot, row]).astype(np.float64)[:, group]
    if weights.scales.dtype == np.uint8:  # MXFP4
        found = E2M1[codes] * 2.0 ** (scales - 127)
        return found, np.abs(found)
    zeros: Any = np.float64(2 ** (weights.bits - 1))
    if weights.zeros is not None:
        zeros = np.asarray(weights.zeros[slot, row]).astype(np.float64)[:, group]
    if weights.refinements:  # the value halfway between the first and the last code stays
        finer = STEPS[weights.bits] / 2 ** (weights.bits - 2)
        zeros = (2**weights.bits - 1) / 2 - (1.5 - zeros) / finer
        scales = scales * finer
    return (codes - zeros) * scales, (codes + np.abs(zeros) + offset) * np.abs(scales)


def _blocks(num_rows: int) -> Iterator[slice]:
    """Rows, so many at a time that their float64 values stay in a core's cache."""
    for first in range(0, num_rows, 32):
        yield slice(first, min(first + 32, num_rows))


def _factors(
    terms: LowRank, slot: int, offset: float
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    first = int(terms.start[slot])
    rows = slice(first, first + int(terms.rank[slot]))
    u, v = (_values_and_summands(part, 0, offset, rows) for part in (terms.u, terms.v))
    return u, v


def _sums(
    x: np.ndarray, weights: np.ndarray, summands: np.ndarray, run: int
) -> tuple[np.ndarray, np.ndarray]:
    """x W^T, and the square of what sums of `run` products in float32 may err by."""
    allowed = DEVIATIONS * UNIT_ROUNDOFF
    return x @ weights.T, allowed**2 * run * (x**2 @ (summands**2).T)
