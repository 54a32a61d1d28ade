"""Reads GPTQ checkpoints, version 1 and 2, and AutoRound's in their packing.

    PREFIX.qweight  I32 [K b / 32, N], a bit stream along K
    PREFIX.qzeros   I32 [G, N b / 32], a bit stream along N: zero - 1 (v1) or zero (v2)
    PREFIX.scales   F16 [G, N]
    PREFIX.g_idx    I32 [K], the group of each input; absent: they follow each other

    w = (q - zero) scale, zero in 0 .. 2^b.

Files of symmetric weights tagged as v1 exist with zeros of both versions. There the constant tells:
2^(b-1) - 1 is v1, 2^(b-1) is v2.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from moejax.checkpoints.quantized import bitstream, settings
from moejax.checkpoints.quantized.stored import (
    FLOATS,
    CodesKind,
    StoredMatrix,
    Tensors,
    as_leaf,
    broken,
    digest,
    scale_dtype,
)
from moejax.errors import MoejaxError
from moejax.qtensor import QTensor
from pallas_kernels import layout

_V1, _V2 = ("", "gptq"), ("gptq_v2",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Bits, group size and symmetry of a checkpoint's modules."""

    default: Mapping[str, Any]
    overrides: tuple[tuple[re.Pattern[str], Mapping[str, Any]], ...] = ()

    def of(self, prefix: str) -> tuple[int, int | None, bool]:
        """Bits, group size (None: per channel) and whether it is symmetric."""
        fields = dict(self.default)
        for pattern, changed in self.overrides:
            if pattern.match(prefix):
                fields |= changed
                break
        symmetric = settings.flag(fields, "sym", default=True)
        return settings.bits(fields), settings.group_size(fields), symmetric


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptqFormat:
    """GPTQ with the settings of one checkpoint."""

    rules: Rules
    is_v1: bool  # what the config says of the zeros

    def extras(self, prefix: str) -> tuple[str, ...]:
        """A bias of zeros, which some writers give to every module."""
        return (f"{prefix}.bias",)

    def find(self, prefix: str, shape: tuple[int, ...], tensors: Tensors) -> StoredMatrix | None:
        """See `Format`."""
        qweight, qzeros, scales, g_idx = (
            f"{prefix}.{x}" for x in ("qweight", "qzeros", "scales", "g_idx")
        )
        if qweight not in tensors:
            return None
        bits, group_size, symmetric = self.rules.of(prefix)
        num_rows, num_inputs = shape
        for size, axis in ((num_rows, "outputs"), (num_inputs, "inputs")):
            if size * bits % bitstream.WORD_BITS:
                raise MoejaxError(
                    f"{prefix} has {size} {axis}, which GPTQ words of {bits} bits cannot hold; "
                    "config.json is not that of these weights"
                )
        group_size = min(group_size or num_inputs, num_inputs)
        num_groups = layout.num_groups(num_inputs, group_size)
        fits = [
            tensors.fits(qweight, (bitstream.stream_words(num_inputs, bits), num_rows), ["int32"]),
            tensors.fits(qzeros, (num_groups, bitstream.stream_words(num_rows, bits)), ["int32"]),
            tensors.fits(scales, (num_groups, num_rows), FLOATS),
            g_idx not in tensors or tensors.fits(g_idx, (num_inputs,), ["int32", "int64"]),
        ]
        if not all(fits):
            return None
        zeros = self._zeros(qzeros, bits, num_rows, symmetric, tensors)
        order = digest(read_permutation(g_idx, group_size, tensors))
        kind = CodesKind(
            bits=bits,
            group_size=group_size,
            zero_kind=zero_kind(zeros),
            scale_dtype=scale_dtype(tensors[scales]),
        )

        def read() -> QTensor:
            permutation = read_permutation(g_idx, group_size, tensors)
            words = bitstream.repacked_stream(
                tensors.read(qweight),
                permutation,
                bits=bits,
                num_codes=num_inputs,
                is_transposed=True,
            )
            found = self._zeros(qzeros, bits, num_rows, symmetric, tensors)
            return codes_matrix(kind, words, tensors.read(scales).T, found, permutation, num_inputs)

        names = [name for name in (qweight, qzeros, scales, g_idx) if name in tensors]
        return StoredMatrix(names=tuple(names), kind=kind, read=read, order=order)

    def _zeros(
        self, name: str, bits: int, num_rows: int, symmetric: bool, tensors: Tensors
    ) -> np.ndarray | None:
        """True zero points, int32[N, G]; None where all are 2^(bits - 1)."""
        words = tensors.read(name)
        middle = 2 ** (bits - 1)
        if symmetric and any(
            (words == _constant(value, bits, num_rows)).all() for value in (middle - 1, middle)
        ):
            return None
        stored = bitstream.from_stream(words, bits=bits, num_codes=num_rows)
        return stored.T.astype(np.int32) + np.int32(self.is_v1)


@functools.cache
def _constant(value: int, bits: int, num_codes: int) -> np.ndarray:
    """A bit stream [1, W] of one value."""
    return bitstream.to_stream(np.full((1, num_codes), value, np.uint8), bits=bits)


def parse_gptq(fields: Mapping[str, Any]) -> GptqFormat:
    """The reader for the quantization_config of a GPTQ checkpoint.

    Raises:
      MoejaxError: something in it is not understood.
    """
    version = settings.text(fields, "checkpoint_format", "format")
    if version not in _V1 + _V2 or fields.get("is_marlin_format"):
        raise MoejaxError(
            f"quantization_config has checkpoint_format {version or 'marlin'!r}; of gptq, 'gptq' "
            "and 'gptq_v2' can be read"
        )
    overrides = []
    for expression, changed in settings.mapping(fields, "dynamic").items():
        # "-:" names modules that are left alone; they are stored as plain weights.
        if not expression.startswith("-:") and isinstance(changed, dict):
            pattern = settings.pattern("dynamic", expression.removeprefix("+:"))
            overrides.append((pattern, changed))
    rules = Rules(default=fields, overrides=tuple(overrides))
    rules.of("")  # says what is not understood before anything is read
    return GptqFormat(rules=rules, is_v1=version in _V1)


def read_permutation(name: str, group_size: int, tensors: Tensors) -> np.ndarray | None:
    """The inputs in the order of their groups, from the group of each.

    Returns:
      int32[K]; None where the groups are runs of the inputs as they are, or `name` is not there.

    Raises:
      MoejaxError: the groups are not of `group_size` inputs each, the last one aside.
    """
    if name not in tensors:
        return None
    groups = tensors.read(name)
    order = np.argsort(groups, kind="stable").astype(np.int32)
    expected = np.arange(groups.size) // group_size
    if np.array_equal(groups, expected) or (groups == -1).all():
        return None
    if not np.array_equal(groups[order], expected):
        raise broken(tensors, name, f"has groups that are not of {group_size} inputs each")
    return order


def zero_kind(zeros: np.ndarray | None) -> str:
    """How QTensor holds integer zero points: as such if they fit a byte, else as floats."""
    if zeros is None:
        return "symmetric"
    return "integer" if zeros.max() < 256 else "float"  # 256 is a zero point of 8 bits in v1


def codes_matrix(
    kind: CodesKind,
    words: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    permutation: np.ndarray | None,
    num_inputs: int,
) -> QTensor:
    """A matrix of a kind, its scales and zeros in the types of that kind."""
    dtype = np.dtype(kind.scale_dtype)
    if zeros is not None:
        zeros = zeros.astype(np.uint8 if kind.zero_kind == "integer" else dtype)
    matrix = QTensor(
        words=as_leaf(words),
        scales=as_leaf(np.ascontiguousarray(scales).astype(dtype)),
        zeros=as_leaf(None if zeros is None else np.ascontiguousarray(zeros)),
        permutation=as_leaf(permutation),
        num_inputs=num_inputs,
        bits=kind.bits,
        group_size=kind.group_size,
    )
    matrix.check()
    return matrix
