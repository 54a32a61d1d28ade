"""Reads GPTQ checkpoints, version 1 and 2, and AutoRound's in their packing.

    PREFIX.qweight  I32 [K b / 32, N], a bit stream along K
    PREFIX.qzeros   I32 [G, N b / 32], a bit stream along N: zero - 1 (v1) or zero (v2)
    PREFIX.scales   F16 [G, N]
    PREFIX.g_idx    I32 [K], the group of each input; absent: they follow each other

    w = (q - zero) scale, zero in 0 .. 2^b - 1.

Version 1 at 2, 4 and 8 bits takes one from every field of a word by one subtraction: below a zero
of 0 a borrow goes on to the next field, and the same sum gives all of them back. At 3 bits, where
fields straddle words, each is lowered by itself, modulo 8. GPTQModel before version 7 subtracted
three constants there that are no ones of fields; its files say which version wrote them.

Files of symmetric weights tagged as v1 exist with zeros of both versions. There the constant tells:
2^(b-1) - 1 is v1, 2^(b-1) is v2.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from moejax.checkpoints.formats import bitstream
from moejax.checkpoints.formats import config_fields as settings
from moejax.checkpoints.formats.interfaces import (
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
from moejax.weights.qtensor import QTensor
from pallas_kernels import layout

_V1, _V2 = ("", "gptq"), ("gptq_v2",)
# Version 1 subtracts these from words, in turn.
_TAKEN = {2: (0x55555555,), 4: (0x11111111,), 8: (0x01010101,)}
_OLD_TAKEN = {3: (0x24924924, 0x92492492, 0x49249249)}
_FIRST_MODULAR_GPTQMODEL = 7


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
    is_old_gptqmodel: bool = False  # which wrote version 1 at 3 bits in a way of its own

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
            zero_kind="symmetric" if zeros is None else "integer",
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
        """True zero points, uint8[N, G]; None where all are 2^(bits - 1) and the config says so."""
        words = tensors.read(name).view(np.uint32)
        if symmetric and any(
            (words == constant).all() for constant in _symmetric_words(bits, words.shape[1])
        ):
            return None
        taken = _TAKEN | (_OLD_TAKEN if self.is_old_gptqmodel else {})
        is_by_word = self.is_v1 and bits in taken
        if is_by_word:
            words = words + np.resize(np.array(taken[bits], np.uint32), words.shape[1])
        zeros = bitstream.from_stream(words, bits=bits, num_codes=num_rows).T
        if self.is_v1 and not is_by_word:
            zeros = (zeros + np.uint8(1)) & np.uint8(2**bits - 1)
        return None if symmetric and (zeros == 2 ** (bits - 1)).all() else zeros


@functools.cache
def _symmetric_words(bits: int, num_words: int) -> tuple[np.ndarray, ...]:
    """uint32[num_words] of zeros 2^(bits - 1): versions 2 and 1, and GPTQModel's old one."""
    num_codes = bitstream.WORD_BITS * num_words // bits
    middle = np.full(num_codes, 2 ** (bits - 1), np.uint8)
    v2, v1 = (
        bitstream.to_stream(codes, bits=bits).view(np.uint32) for codes in (middle, middle - 1)
    )
    if bits not in _OLD_TAKEN:
        return v2, v1
    return v2, v1, v2 - np.resize(np.array(_OLD_TAKEN[bits], np.uint32), num_words)


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
    return GptqFormat(rules=rules, is_v1=version in _V1, is_old_gptqmodel=_is_old_gptqmodel(fields))


def _is_old_gptqmodel(fields: Mapping[str, Any]) -> bool:
    """Whether `meta.quantizer`, such as ["gptqmodel:5.8.0"], names one of before version 7."""
    writers = str(settings.mapping(fields, "meta").get("quantizer"))
    found = re.search(r"gptqmodel:(\d+)\.", writers)
    return found is not None and int(found[1]) < _FIRST_MODULAR_GPTQMODEL


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
