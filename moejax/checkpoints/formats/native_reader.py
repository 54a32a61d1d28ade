"""Reads the package's own format; `native.py` has its tensors, the manifest its kinds."""

import dataclasses

import numpy as np

from moejax.checkpoints.formats.interfaces import (
    CodesKind,
    FactorsKind,
    StoredMatrix,
    Tensors,
    digest,
    scale_dtype,
)
from moejax.checkpoints.formats.manifest import Manifest, MatrixEntry
from moejax.checkpoints.formats.native import (
    bits_of_words,
    compensator_from_tensors,
    matrix_from_tensors,
)
from moejax.errors import MoejaxError
from moejax.weights.qtensor import Compensator, QTensor
from pallas_kernels import layout

_SCALES = ("float16", "float32")
BF16_BITS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnFormat:
    """The own format with the manifest of one checkpoint."""

    manifest: Manifest

    def extras(self, prefix: str) -> tuple[str, ...]:
        """Allows no extra tensors."""
        del prefix
        return ()

    def find(self, prefix: str, shape: tuple[int, ...], tensors: Tensors) -> StoredMatrix | None:
        """See `Format`."""
        words = f"{prefix}.words"
        if words not in tensors:
            return None
        entry = self._entry(prefix, shape)
        num_rows, num_inputs = matrix_shape = shape[0], shape[1]
        if entry.group_size > num_inputs:
            raise MoejaxError(
                f"{self.manifest.path}: {prefix} has group_size {entry.group_size}, but "
                f"{num_inputs} inputs"
            )
        groups = (num_rows, layout.num_groups(num_inputs, entry.group_size))
        num_words = layout.num_words(num_inputs, entry.bits)
        scales, zeros, permutation = (f"{prefix}.{x}" for x in ("scales", "zeros", "permutation"))
        fits = [
            tensors.fits(words, (num_rows, num_words), ["uint32"]),
            tensors.fits(scales, groups, _SCALES),
            permutation not in tensors or tensors.fits(permutation, (num_inputs,), ["int32"]),
        ]
        names = [words, scales]
        if entry.zero_kind != "symmetric":
            dtypes = ["uint8"] if entry.zero_kind == "integer" else _SCALES
            fits.append(tensors.fits(zeros, groups, dtypes))
            names.append(zeros)
        if permutation in tensors:
            names.append(permutation)
        factor_names, rank, factors = _factors(prefix, shape, entry, tensors)
        if not all(fits) or rank is None:
            return None
        names += factor_names
        order = digest(tensors.read(permutation)) if permutation in tensors else b""
        kind = CodesKind(
            bits=entry.bits,
            group_size=entry.group_size,
            zero_kind=entry.zero_kind,
            scale_dtype=scale_dtype(tensors[scales]),
        )

        def read() -> QTensor:
            try:
                return matrix_from_tensors(
                    prefix,
                    {name: tensors.read(name) for name in names},
                    num_inputs=num_inputs,
                    group_size=entry.group_size,
                    factor_group_size=entry.factor_group_size,
                )
            except ValueError as error:
                raise MoejaxError(f"{tensors[words].path}: {prefix}: {error}") from error

        def read_factors() -> Compensator:
            found = {name: tensors.read(name) for name in factor_names}
            try:
                return compensator_from_tensors(
                    prefix, found, matrix_shape, entry.factor_group_size
                )
            except ValueError as error:
                raise MoejaxError(f"{tensors[words].path}: {prefix}: {error}") from error

        parts = (words, scales, zeros, permutation)
        as_held = {name.rpartition(".")[2]: tensors[name] for name in parts if name in names}
        # Zero points of another float type than the scales are refused where the whole is read.
        is_held = zeros not in names or tensors[zeros].dtype in (tensors[scales].dtype, np.uint8)
        return StoredMatrix(
            names=tuple(names),
            kind=kind,
            read=read,
            factors=factors,
            rank=rank,
            order=order,
            as_held=as_held if is_held else None,
            read_factors=read_factors,
        )

    def _entry(self, prefix: str, shape: tuple[int, ...]) -> MatrixEntry:
        entry = self.manifest.matrices.get(f"{prefix}.weight")
        if entry is None:
            raise MoejaxError(
                f"{self.manifest.path} does not list {prefix}.weight; copy the whole checkpoint "
                "again"
            )
        if entry.shape != shape:
            raise MoejaxError(
                f"{self.manifest.path}: {prefix}.weight is {list(entry.shape)}, {list(shape)} by "
                "config.json"
            )
        return entry


def _factors(
    prefix: str, shape: tuple[int, ...], entry: MatrixEntry, tensors: Tensors
) -> tuple[list[str], int | None, FactorsKind | None]:
    """Names, rank and kind of a matrix's factors; rank None where they are broken."""
    lengths = {f"{prefix}.u": shape[0], f"{prefix}.v": shape[1]}
    u, v = lengths
    if u in tensors or v in tensors:
        first = u if u in tensors else v
        rank = tensors[first].shape[0] if tensors[first].shape else 0
        fits = [tensors.fits(name, (rank, size), ["bfloat16"]) for name, size in lengths.items()]
        kind = FactorsKind(bits=BF16_BITS, u_group_size=0, v_group_size=0, scale_dtype="bfloat16")
        return [u, v], rank if all(fits) else None, kind
    if f"{u}.words" not in tensors and f"{v}.words" not in tensors:
        return [], 0, None
    first = u if f"{u}.words" in tensors else v
    stored = tensors[f"{first}.words"]
    rank = stored.shape[0] if stored.shape else 0
    try:
        bits = bits_of_words(stored.shape[-1] if stored.shape else 0, lengths[first])
    except ValueError as error:
        raise MoejaxError(f"{stored.path}: {stored.name}: {error}") from error
    group_sizes = {name: min(entry.factor_group_size, size) for name, size in lengths.items()}
    fits = []
    for name, size in lengths.items():
        groups = layout.num_groups(size, group_sizes[name])
        fits += [
            tensors.fits(f"{name}.words", (rank, layout.num_words(size, bits)), ["uint32"]),
            tensors.fits(f"{name}.scales", (rank, groups), _SCALES),
        ]
    if not all(fits):
        return [], None, None
    dtypes = {scale_dtype(tensors[f"{name}.scales"]) for name in lengths}
    if len(dtypes) != 1:
        raise MoejaxError(f"{stored.path}: the factors of {prefix} have scales of two types")
    kind = FactorsKind(
        bits=bits,
        u_group_size=group_sizes[u],
        v_group_size=group_sizes[v],
        scale_dtype=dtypes.pop(),
    )
    names = [f"{name}.{part}" for name in lengths for part in ("words", "scales")]
    return names, rank, kind
