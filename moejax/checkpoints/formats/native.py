"""The package's own format: the tensors of one quantized matrix, there and back.

    PREFIX.words        U32 [N, W], rows packed by `pallas_kernels.layout`
    PREFIX.scales       F16 or F32 [N, G]
    PREFIX.zeros        of the scales' dtype (float zero point) or U8 (integer); absent: symmetric
    PREFIX.permutation  I32 [K], GPTQ's act-order; absent: none
    PREFIX.u, PREFIX.v  BF16 [r, N] (U transposed) and [r, K], the compensator of rank r; or packed
    PREFIX.u.words, PREFIX.u.scales, PREFIX.v.words, PREFIX.v.scales
                        rows of symmetric codes, again by the layout
    PREFIX.u_B, ...     the same of bit planes read in B bits, where PREFIX.u is that of fewer bits

The manifest has each matrix's kind; ranks and the bits of factors follow from the shapes.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from moejax.checkpoints.formats.interfaces import (
    FactorKinds,
    Format,
    StoredMatrix,
    Tensors,
    digest,
    scale_dtype,
)
from moejax.checkpoints.formats.manifest import Manifest, MatrixEntry
from moejax.errors import MoejaxError
from moejax.weights.qtensor import REFINEMENT, CodesKind, Compensator, Factor, QTensor
from pallas_kernels import layout

_BF16 = np.dtype(ml_dtypes.bfloat16)
_SCALES = ("float16", "float32")


def matrix_tensors(prefix: str, matrix: QTensor) -> dict[str, np.ndarray]:
    """Returns the tensors that store the matrix PREFIX [N, K] in a safetensors file.

    It has at most one compensator of a width, of all rows. The file gets only the rows of the
    factor pools that the matrix owns, and none where its rank is 0.

    Raises:
      ValueError: `matrix` is not whole (`QTensor.check`).
    """
    matrix.check()
    tensors = {"words": matrix.words, "scales": matrix.scales}
    if matrix.zeros is not None:
        tensors["zeros"] = matrix.zeros
    for i, plane in enumerate(matrix.refinements, 1):
        tensors[f"{REFINEMENT}{i}"] = plane
    if matrix.permutation is not None:
        tensors["permutation"] = matrix.permutation
    narrowest = min((compensator.bits for compensator in matrix.compensators), default=0)
    for compensator in matrix.compensators:
        suffix = "" if compensator.bits == narrowest else f"_{compensator.bits}"
        tensors |= _factor_tensors(compensator, suffix)
    return {
        f"{prefix}.{name}": np.ascontiguousarray(tensor)  # from the device as well
        for name, tensor in tensors.items()
    }


def _factor_tensors(compensator: Compensator, suffix: str) -> dict[str, Any]:
    start, rank = int(compensator.start), int(compensator.rank)
    tensors: dict[str, Any] = {}
    for name, factor in ((f"u{suffix}", compensator.u), (f"v{suffix}", compensator.v)):
        if not rank:
            continue
        rows = slice(start, start + rank)
        if not isinstance(factor, QTensor):
            tensors[name] = np.asarray(factor[rows]).astype(_BF16)
        else:
            tensors |= {f"{name}.words": factor.words[rows], f"{name}.scales": factor.scales[rows]}
    return tensors


def whole_compensator(u: Any, v: Any, bits: int = 0) -> Compensator:
    """Builds the compensator of all rows of one matrix from U transposed, [r, N], and V, [r, K].

    `bits` is the width of the prefix that it belongs to; 0: the whole code.
    """
    rank, num_rows = u.shape
    owned: dict[str, Any] = {"start": np.zeros((), np.int32), "rank": np.array(rank, np.int32)}
    return Compensator(u=u, v=v, **owned, first_row=0, num_rows=num_rows, max_rank=rank, bits=bits)


def native_format(manifest: Manifest, read_bits: int = 0) -> Format:
    """The reader of the matrices of a manifest.

    Matrices by bit planes are read in `read_bits` bits, one of `Format.planes`; 0: in the most that
    they have.
    """
    found = sorted({entry.planes for entry in manifest.matrices.values() if entry.planes})
    planes = tuple(sorted(set(found[0]).intersection(*found))) if found else ()
    return Format(functools.partial(_find, manifest, read_bits), planes=planes)


def _find(
    manifest: Manifest, read_bits: int, prefix: str, shape: tuple[int, ...], tensors: Tensors
) -> StoredMatrix | None:
    if f"{prefix}.words" not in tensors:
        return None
    entry, num_inputs = _entry(manifest, prefix, shape), shape[1]
    kind = CodesKind(
        bits=entry.bits, group_size=entry.group_size, zero_kind=entry.zero_kind,
        by_planes=bool(entry.planes),
    )  # fmt: skip
    dtypes = {
        "words": ["uint32"],
        "scales": _SCALES,
        "zeros": ["uint8"] if entry.zero_kind == "integer" else _SCALES,
    }
    parts = {name: f"{prefix}.{name}" for name in kind.arrays(shape)}
    fits = [
        tensors.fits(parts[name], array.shape, dtypes.get(name, ["uint32"]))
        for name, array in kind.arrays(shape).items()
    ]
    permutation = f"{prefix}.permutation"
    if permutation in tensors:
        fits.append(tensors.fits(permutation, (num_inputs,), ["int32"]))
        parts["permutation"] = permutation
    by_width = {
        bits: _factors(ends, shape, entry, tensors) for bits, ends in _ends(prefix, entry).items()
    }
    if not all(fits) or None in (found.rank for found in by_width.values()):
        return None
    unread: list[str] = []
    if entry.planes:
        kind = kind.prefix(read_bits or entry.bits)
        own = kind.arrays(shape).keys() | {"permutation"}
        unread = [parts.pop(name) for name in list(parts) if name not in own]
    width = kind.bits if entry.planes else 0
    ends = _ends(prefix, entry).get(width, ())
    factor_names, rank, factors = by_width.pop(width, _StoredFactors([], 0, None))
    unread += [name for others in by_width.values() for name in others.names]
    path = tensors[parts["words"]].path

    def read_factors() -> Compensator:
        assert factors is not None
        try:
            u, v = (
                _factor(name, kind, length, tensors)
                for name, kind, length in zip(ends, factors, shape, strict=True)
            )
        except ValueError as error:
            raise MoejaxError(f"{path}: {prefix}: {error}") from error
        return whole_compensator(u, v)

    def read() -> QTensor:
        arrays = {name: tensors.read(tensor) for name, tensor in parts.items()}
        compensators = (read_factors(),) if factor_names else ()
        try:
            return kind.tensor(num_inputs, arrays, compensators)
        except ValueError as error:
            raise MoejaxError(f"{path}: {prefix}: {error}") from error

    as_held = {name: tensors[tensor] for name, tensor in parts.items()}
    # Zero points of another float type than the scales are refused where the whole is read.
    is_held = "zeros" not in parts or as_held["zeros"].dtype in (as_held["scales"].dtype, np.uint8)
    return StoredMatrix(
        names=(*parts.values(), *factor_names),
        unread=tuple(unread),
        kind=dataclasses.replace(kind, scale_dtype=scale_dtype(as_held["scales"])),
        read=read,
        factors=factors,
        rank=rank or 0,
        order=digest(tensors.read(permutation)) if permutation in tensors else b"",
        as_held=as_held if is_held else None,
        read_factors=read_factors,
    )


def _entry(manifest: Manifest, prefix: str, shape: tuple[int, ...]) -> MatrixEntry:
    entry = manifest.matrices.get(f"{prefix}.weight")
    if entry is None:
        raise MoejaxError(
            f"{manifest.path} does not list {prefix}.weight; copy the whole checkpoint again"
        )
    if entry.shape != shape:
        raise MoejaxError(
            f"{manifest.path}: {prefix}.weight is {list(entry.shape)}, {list(shape)} by config.json"
        )
    if entry.group_size > shape[1]:
        raise MoejaxError(
            f"{manifest.path}: {prefix} has group_size {entry.group_size}, but {shape[1]} inputs"
        )
    return entry


class _StoredFactors(NamedTuple):
    """The tensors of one compensator."""

    names: list[str]
    rank: int | None  # None where they are broken
    kinds: FactorKinds | None


def _ends(prefix: str, entry: MatrixEntry) -> dict[int, tuple[str, str]]:
    """Names of U and V, by the width of bit planes that they belong to; of other codes by 0."""
    names = {entry.compensated_bits or min(entry.planes): ""} if entry.planes else {0: ""}
    names = {bits: f"_{bits}" for bits in entry.planes} | names
    return {bits: (f"{prefix}.u{end}", f"{prefix}.v{end}") for bits, end in names.items()}


def _factors(
    of: tuple[str, str], shape: tuple[int, ...], entry: MatrixEntry, tensors: Tensors
) -> _StoredFactors:
    """The factors U and V of these names, as far as they are there."""
    lengths = dict(zip(of, shape, strict=True))
    if found := [name for name in lengths if name in tensors]:
        rank = (*tensors[found[0]].shape, 0)[0]
        fits = [tensors.fits(name, (rank, size), ["bfloat16"]) for name, size in lengths.items()]
        return _StoredFactors(list(lengths), rank if all(fits) else None, (None, None))
    found = [name for name in lengths if f"{name}.words" in tensors]
    if not found:
        return _StoredFactors([], 0, None)
    stored = tensors[f"{found[0]}.words"]
    rank, num_words = (stored.shape[0], stored.shape[-1]) if stored.shape else (0, 0)
    codes = lengths[found[0]]
    widths = [bits for bits in layout.BITS if layout.num_words(codes, bits) == num_words]
    if not widths:
        raise MoejaxError(
            f"{stored.path}: {stored.name}: {num_words} words hold {codes} codes of no width"
        )
    dtypes = {"words": ["uint32"], "scales": _SCALES}
    kinds, names, fits = [], [], []
    for name, size in lengths.items():
        kind = CodesKind(bits=widths[0], group_size=min(entry.factor_group_size, size))
        for part, array in kind.arrays((rank, size)).items():
            names.append(f"{name}.{part}")
            fits.append(tensors.fits(names[-1], array.shape, dtypes[part]))
        kinds.append(kind)
    if not all(fits):
        return _StoredFactors([], None, None)
    scales = [scale_dtype(tensors[f"{name}.scales"]) for name in lengths]
    if scales[0] != scales[1]:
        raise MoejaxError(f"{stored.path}: {' and '.join(of)} have scales of two types")
    u, v = (dataclasses.replace(kind, scale_dtype=scales[0]) for kind in kinds)
    return _StoredFactors(names, rank, (u, v))


def _factor(name: str, kind: CodesKind | None, length: int, tensors: Tensors) -> Factor:
    if kind is None:
        array: Any = tensors.read(name)
        return array
    parts = {part: tensors.read(f"{name}.{part}") for part in ("words", "scales")}
    return kind.tensor(length, parts)
