"""Operands of the packed products: stacks of quantized matrices and their low-rank terms.

Axes: S slots (of a pool, or layers times experts of a stack), N outputs (rows), K inputs, G groups
of a row, W words of a row, R rows of a pool of low-rank factors.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout

PLAIN_BITS = 16
BITS = (*layout.BITS, PLAIN_BITS)


def _static() -> Any:
    return dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedMatrices:
    """S matrices [N, K] of one stored form: w = (q - zero) scale, or plain bf16 or fp16.

    Invariants (`check`):
      * packed: `words` is uint32[S, N, W], rows packed by `layout`; `scales` is float16 or
        float32 [S, N, G]; `zeros` is of the scales' dtype (float zero points), uint8 (integer
        ones), or None (symmetric, 2^(bits - 1));
      * plain, bits == 16: `words` is bfloat16 or float16 [S, N, K]; no scales, no zeros.
    The arrays lie on the device, or in pinned host memory: rows of a host store, which kernels read
    in place.
    """

    words: jax.Array
    scales: jax.Array | None
    zeros: jax.Array | None
    num_inputs: int = _static()  # K
    bits: int = _static()  # 2, 3, 4, 8, or 16 for plain
    group_size: int = _static()  # 1..K

    @property
    def num_slots(self) -> int:
        """Number of matrices, S."""
        return self.words.shape[0]

    @property
    def num_outputs(self) -> int:
        """Rows per matrix, N."""
        return self.words.shape[1]

    @property
    def num_groups(self) -> int:
        """Groups per row, G; 0 if plain."""
        return 0 if self.scales is None else self.scales.shape[2]

    @property
    def zero_kind(self) -> str:
        """Kind of zeros: "float", "integer", "symmetric" or, for plain matrices, "none"."""
        if self.bits == PLAIN_BITS:
            return "none"
        if self.zeros is None:
            return "symmetric"
        return "integer" if self.zeros.dtype == jnp.uint8 else "float"

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one matrix: codes, scales and zeros."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self)) // self.num_slots

    def describe(self) -> str:
        """Describes the form in a few words, such as "int3g64 float"."""
        if self.bits == PLAIN_BITS:
            return str(self.words.dtype)
        group = "row" if self.group_size == self.num_inputs else str(self.group_size)
        return f"int{self.bits}g{group} {self.zero_kind}"

    def check(self) -> None:
        """Raises ValueError naming the invariant that does not hold."""
        if self.bits not in BITS:
            raise ValueError(f"bits {self.bits} is none of {', '.join(map(str, BITS))}")
        slots, rows = self.words.shape[:2]
        if self.bits == PLAIN_BITS:
            if self.words.dtype not in (jnp.bfloat16, jnp.float16):
                raise ValueError(f"plain matrices are {self.words.dtype}, not bfloat16 or float16")
            if self.words.shape != (slots, rows, self.num_inputs):
                raise ValueError(f"plain matrices of {self.num_inputs} inputs: {self.words.shape}")
            if self.scales is not None or self.zeros is not None:
                raise ValueError("plain matrices have no scales and no zeros")
            return
        words = (slots, rows, layout.num_words(self.num_inputs, self.bits))
        groups = (slots, rows, layout.num_groups(self.num_inputs, self.group_size))
        if self.words.shape != words or self.words.dtype != jnp.uint32:
            raise ValueError(f"words are {self.words.dtype}{self.words.shape}, not uint32{words}")
        if self.scales is None or self.scales.dtype not in (jnp.float16, jnp.float32):
            raise ValueError("scales are not float16 or float32")
        if self.scales.shape != groups:
            raise ValueError(f"scales have shape {self.scales.shape}, expected {groups}")
        if self.zeros is not None:
            if self.zeros.shape != groups:
                raise ValueError(f"zeros have shape {self.zeros.shape}, expected {groups}")
            if self.zeros.dtype not in (self.scales.dtype, jnp.uint8):
                raise ValueError(f"zeros are {self.zeros.dtype}, not {self.scales.dtype} or uint8")


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


def dequantize(weights: PackedMatrices, slots: jax.Array) -> jax.Array:
    """Dequantizes the matrices at int32[...] slots, float32[..., N, K], in plain jnp.

    Slots outside 0..S - 1 are clipped, as JAX does.
    """
    words = weights.words[slots]
    if weights.bits == PLAIN_BITS:
        return words.astype(jnp.float32)
    assert weights.scales is not None
    group = np.arange(weights.num_inputs) // weights.group_size
    codes = layout.unpack(words, weights.bits, weights.num_inputs).astype(jnp.float32)
    scales = weights.scales[slots].astype(jnp.float32)[..., group]
    if weights.zeros is None:
        return (codes - np.float32(2 ** (weights.bits - 1))) * scales
    zeros = weights.zeros[slots].astype(jnp.float32)[..., group]
    return (codes - zeros) * scales


def low_rank_factors(terms: LowRank, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Factors of int32[...] slots: U^T float32[..., max_rank, num_rows], V [..., max_rank, K].

    Rows beyond a matrix's own rank are zero.
    """
    steps = jnp.arange(terms.max_rank, dtype=jnp.int32)
    used = steps < terms.rank[slots][..., None]
    rows = terms.start[slots][..., None] + jnp.where(used, steps, 0)
    pools = (dequantize(part, jnp.zeros((), jnp.int32)) for part in (terms.u, terms.v))
    u, v = (jnp.where(used[..., None], pool[rows], 0.0) for pool in pools)
    return u, v
