"""Quantized weights as pytrees: the stored form, its bytes, and its values.

Axes: N outputs (rows), K inputs, G quantization groups of a row, W packed words, R rows of a pool
of low-rank factors. Leading axes (layers, experts) are written `...`.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout

FP8_BLOCK = 128
ZERO_KINDS = ("float", "integer", "symmetric")
FACTOR_GROUP_SIZE = 64  # of packed low-rank factors; shorter rows are one group


def _static(**kwargs: Any) -> Any:
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodesKind:
    """Stored form of packed matrices; those of one kind can lie in one stack."""

    bits: int
    group_size: int
    zero_kind: str = "symmetric"  # one of `ZERO_KINDS`
    scale_dtype: str = "float16"  # or "float32"

    def arrays(self, shape: Sequence[int]) -> dict[str, jax.ShapeDtypeStruct]:
        """Arrays of matrices [..., N, K] by field of `QTensor`, without a permutation."""
        *lead, inputs = shape
        words = (*lead, layout.num_words(inputs, self.bits))
        groups = (*lead, layout.num_groups(inputs, self.group_size))
        scales = jax.ShapeDtypeStruct(groups, np.dtype(self.scale_dtype))
        found = {"words": jax.ShapeDtypeStruct(words, np.dtype(np.uint32)), "scales": scales}
        if self.zero_kind != "symmetric":
            is_integer = self.zero_kind == "integer"
            found["zeros"] = (
                jax.ShapeDtypeStruct(groups, np.dtype(np.uint8)) if is_integer else scales
            )
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
        fields: dict[str, Any] = {"zeros": None, **arrays, "compensators": compensators}
        tensor = QTensor(
            **fields, num_inputs=num_inputs, bits=self.bits, group_size=self.group_size
        )
        tensor.check()
        return tensor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QTensor:
    """Matrices [..., N, K] in groups of codes: w = (q - zero) scale, plus compensators.

    Invariants (`check`):
      * `words` is uint32[..., N, W], rows packed by `pallas_kernels.layout` under `layout`;
      * `scales` is float16 or float32 [..., N, G], G = ceil(K / group_size);
      * `zeros` has the shape of `scales` and is of its dtype (a float zero point), uint8 (an
        integer one), or None (symmetric: 2^(bits - 1));
      * `permutation`, int32[..., K], if any: code k of a row belongs to input `permutation[k]`
        (GPTQ's act-order, in which the groups are runs of the permuted inputs);
      * with a permutation there are no compensators.
    """

    words: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
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
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def zero_kind(self) -> str:
        """Kind of zero point, one of `ZERO_KINDS`."""
        if self.zeros is None:
            return "symmetric"
        return "integer" if self.zeros.dtype == jnp.uint8 else "float"

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, zeros, permutation and compensators."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def check(self) -> None:
        """Raises ValueError naming the invariant that does not hold."""
        lead, (rows, inputs) = self.shape[:-2], self.shape[-2:]
        groups = layout.num_groups(inputs, self.group_size)
        words = layout.num_words(inputs, self.bits)
        self._expect("words", self.words, (*lead, rows, words), (np.uint32,))
        self._expect("scales", self.scales, (*lead, rows, groups), (np.float16, np.float32))
        if self.layout != layout.LAYOUT:
            raise ValueError(f"layout is {self.layout!r}, this version reads {layout.LAYOUT!r}")
        if self.zeros is not None:
            allowed = (self.scales.dtype, np.uint8)
            self._expect("zeros", self.zeros, (*lead, rows, groups), allowed)
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
        """Indexes the leading axes; factor pools stay whole, since matrices share them."""
        return dataclasses.replace(
            self,
            words=self.words[index],
            scales=self.scales[index],
            zeros=None if self.zeros is None else self.zeros[index],
            permutation=None if self.permutation is None else self.permutation[index],
            compensators=tuple(compensator[index] for compensator in self.compensators),
        )

    def codes(self) -> jax.Array:
        """Unpacks codes, uint8[..., N, K], in the order of storage."""
        return layout.unpack(self.words, self.bits, self.num_inputs)

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """Dequantizes to [..., N, K] in `dtype`, computed in float32."""
        group = np.arange(self.num_inputs) // self.group_size
        scales = self.scales.astype(jnp.float32)[..., group]
        if self.zeros is None:
            zeros: jax.Array | np.float32 = np.float32(2 ** (self.bits - 1))
        else:
            zeros = self.zeros.astype(jnp.float32)[..., group]
        weights = (self.codes().astype(jnp.float32) - zeros) * scales
        if self.permutation is not None:
            inverse = jnp.argsort(self.permutation, axis=-1)[..., None, :]
            weights = jnp.take_along_axis(weights, inverse, axis=-1)
        for compensator in self.compensators:
            weights = compensator.add_to(weights)
        return weights.astype(dtype)


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

    def add_to(self, weights: jax.Array) -> jax.Array:
        """Adds the terms to float32[..., N, K]."""
        if self.max_rank == 0:
            return weights
        if self.start.ndim:
            lead = self.start.shape
            flat = weights.reshape(-1, *weights.shape[len(lead) :])
            places = self.start.reshape(-1), self.rank.reshape(-1)
            one = lambda w, s, r: dataclasses.replace(self, start=s, rank=r).add_to(w)  # noqa: E731
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
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

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
    codes: Any,
    scales: Any,
    zeros: Any | None,
    *,
    bits: int,
    group_size: int,
    zero_kind: str,
    scale_dtype: Any = jnp.float16,
) -> QTensor:
    """Packs a quantizer's output; numpy arrays give numpy leaves, JAX arrays JAX leaves.

    Args:
      codes: uint8[..., N, K].
      scales: float[..., N, G].
      zeros: float[..., N, G] in units of codes; ignored where `zero_kind` is "symmetric".
      zero_kind: one of `ZERO_KINDS`; "integer" rounds and stores uint8.

    Raises:
      ValueError: an unknown zero kind, or shapes that do not fit (`QTensor.check`).
    """
    if zero_kind not in ZERO_KINDS:
        raise ValueError(f"zero_kind {zero_kind!r} is none of {', '.join(ZERO_KINDS)}")
    arrays = {}
    if zero_kind != "symmetric":
        assert zeros is not None
        xp = jnp if isinstance(zeros, jax.Array) else np
        is_integer = zero_kind == "integer"
        arrays["zeros"] = (
            xp.round(zeros).astype(xp.uint8) if is_integer else zeros.astype(scale_dtype)
        )
    arrays |= {"words": layout.pack(codes, bits), "scales": scales.astype(scale_dtype)}
    return CodesKind(bits=bits, group_size=group_size).tensor(codes.shape[-1], arrays)
