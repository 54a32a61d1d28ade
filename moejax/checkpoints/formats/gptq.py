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

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moejax.checkpoints.formats import bitstream
from moejax.checkpoints.formats import config_fields as settings
from moejax.checkpoints.formats.interfaces import (
    FLOATS,
    Format,
    StoredMatrix,
    Tensors,
    codes_matrix,
    digest,
    read_permutation,
    scale_dtype,
)
from moejax.errors import MoejaxError
from moejax.weights.qtensor import CodesKind, QTensor
from pallas_kernels import layout

_V1, _V2 = ("", "gptq"), ("gptq_v2",)
Taken = Mapping[int, tuple[int, ...]]  # what version 1 subtracts from words, in turn, by bits
_TAKEN: Taken = {2: (0x55555555,), 4: (0x11111111,), 8: (0x01010101,)}
_OLD_TAKEN: Taken = {3: (0x24924924, 0x92492492, 0x49249249)}
_FIRST_MODULAR_GPTQMODEL = 7
Overrides = Sequence[tuple[re.Pattern[str], Mapping[str, Any]]]


def parse_gptq(fields: Mapping[str, Any]) -> Format:
    """Reads the quantization_config of a GPTQ checkpoint; raises MoejaxError."""
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
    is_old = _is_old_gptqmodel(fields)
    return gptq_format(fields, overrides, is_v1=version in _V1, is_old_gptqmodel=is_old)


def _is_old_gptqmodel(fields: Mapping[str, Any]) -> bool:
    """Whether `meta.quantizer`, such as ["gptqmodel:5.8.0"], names one of before version 7."""
    writers = str(settings.mapping(fields, "meta").get("quantizer"))
    found = re.search(r"gptqmodel:(\d+)\.", writers)
    return found is not None and int(found[1]) < _FIRST_MODULAR_GPTQMODEL


def gptq_format(
    default: Mapping[str, Any],  # bits, group size and symmetry of all modules
    overrides: Overrides,  # changes of them by expression; the first that matches a module counts
    *,
    is_v1: bool,  # whether zeros are of version 1, by the config
    # whether GPTQModel before version 7 wrote version 1 at 3 bits in its own way
    is_old_gptqmodel: bool = False,
) -> Format:
    """The reader of GPTQ's packing; raises MoejaxError if `default` is not understood."""
    settings_of = functools.partial(_settings_of, default, overrides)
    settings_of("")  # says what is not understood before anything is read
    taken = {**_TAKEN, **(_OLD_TAKEN if is_old_gptqmodel else {})} if is_v1 else None
    # Some writers give every module a bias of zeros.
    return Format(functools.partial(_find, settings_of, taken), extras=(".bias",))


def _settings_of(
    default: Mapping[str, Any], overrides: Overrides, prefix: str
) -> tuple[int, int | None, bool]:
    """Bits, group size (None: per channel) and symmetry of a module."""
    changed = next((changed for pattern, changed in overrides if pattern.match(prefix)), {})
    fields = {**default, **changed}
    symmetric = settings.flag(fields, "sym", default=True)
    return settings.bits(fields), settings.group_size(fields), symmetric


def _find(
    settings_of: Callable[[str], tuple[int, int | None, bool]],
    taken: Taken | None,
    prefix: str,
    shape: tuple[int, ...],
    tensors: Tensors,
) -> StoredMatrix | None:
    qweight, qzeros, scales, g_idx = (
        f"{prefix}.{x}" for x in ("qweight", "qzeros", "scales", "g_idx")
    )
    if qweight not in tensors:
        return None
    bits, stated_group, symmetric = settings_of(prefix)
    num_rows, num_inputs = shape
    for size, axis in ((num_rows, "outputs"), (num_inputs, "inputs")):
        if size * bits % bitstream.WORD_BITS:
            raise MoejaxError(
                f"{prefix} has {size} {axis}, which GPTQ words of {bits} bits cannot hold; "
                "config.json is not that of these weights"
            )
    group_size = min(stated_group or num_inputs, num_inputs)
    num_groups = layout.num_groups(num_inputs, group_size)
    fits = [
        tensors.fits(qweight, (bitstream.stream_words(num_inputs, bits), num_rows), ["int32"]),
        tensors.fits(qzeros, (num_groups, bitstream.stream_words(num_rows, bits)), ["int32"]),
        tensors.fits(scales, (num_groups, num_rows), FLOATS),
        g_idx not in tensors or tensors.fits(g_idx, (num_inputs,), ["int32", "int64"]),
    ]
    if not all(fits):
        return None

    def read_zeros() -> np.ndarray | None:
        return _true_zeros(tensors.read(qzeros).view(np.uint32), bits, num_rows, symmetric, taken)

    kind = CodesKind(
        bits=bits,
        group_size=group_size,
        zero_kind="symmetric" if read_zeros() is None else "integer",
        scale_dtype=scale_dtype(tensors[scales]),
    )

    def read() -> QTensor:
        permutation = read_permutation(g_idx, group_size, tensors)
        words = bitstream.repacked_stream(
            tensors.read(qweight), permutation, bits=bits, num_codes=num_inputs, is_transposed=True
        )
        stored = tensors.read(scales).T, read_zeros()
        return codes_matrix(kind, num_inputs, words, *stored, permutation)

    return StoredMatrix(
        names=tuple(name for name in (qweight, qzeros, scales, g_idx) if name in tensors),
        kind=kind,
        read=read,
        order=digest(read_permutation(g_idx, group_size, tensors)),
    )


def _true_zeros(
    words: np.ndarray, bits: int, num_rows: int, symmetric: bool, taken: Taken | None
) -> np.ndarray | None:
    """Zero points uint8[N, G]; None where all are 2^(bits - 1) and the config says so."""
    if symmetric and any(
        (words == constant).all() for constant in _symmetric_words(bits, words.shape[1])
    ):
        return None
    lowered = taken is not None
    if taken is not None and bits in taken:
        words = words + np.resize(np.array(taken[bits], np.uint32), words.shape[1])
        lowered = False
    zeros = bitstream.from_stream(words, bits=bits, num_codes=num_rows).T
    if lowered:
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
