"""Reads compressed-tensors checkpoints of the format "pack-quantized".

    PREFIX.weight_packed      I32 [N, ceil(K b / 32)], a bit stream along K of q + 2^(b-1)
    PREFIX.weight_scale       F16, BF16 or F32 [N, G]; per channel [N, 1]
    PREFIX.weight_zero_point  I32 [ceil(N b / 32), G], a bit stream along N; absent: symmetric
    PREFIX.weight_g_idx       I32 [K], the group of each input; absent: they follow each other
    PREFIX.weight_shape       I64 [2], N and K

    w = (q - zero) scale; both are offset alike, so QTensor's unsigned codes and zeros are those
    that are packed.

Older versions hold 3-bit codes ten a word and not as a stream; the width of the tensor tells.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moejax.checkpoints.formats import bitstream
from moejax.checkpoints.formats import config_fields as settings
from moejax.checkpoints.formats.interfaces import (
    FLOATS,
    Format,
    StoredMatrix,
    Tensors,
    broken,
    codes_matrix,
    digest,
    read_permutation,
    scale_dtype,
)
from moejax.errors import MoejaxError
from moejax.weights.qtensor import CodesKind, QTensor
from pallas_kernels import layout

PACKED = "pack-quantized"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scheme:
    """One group of the config: how its modules' weights are quantized."""

    targets: tuple[str, ...]  # names, "re:" and an expression, or classes such as "Linear"
    bits: int
    group_size: int | None  # None: per channel
    symmetric: bool

    def specificity(self, prefix: str) -> int:
        """Rank of the match with a module: 2 by name or expression, 1 by class, 0 none."""
        for target in self.targets:
            if target.startswith("re:"):
                if settings.pattern("config_groups", target[3:]).match(prefix):
                    return 2
            elif target == prefix or prefix.endswith("." + target):
                return 2
        return 1 if "Linear" in self.targets else 0


def parse_compressed_tensors(fields: Mapping[str, Any]) -> Format:
    """Reads the quantization_config of a compressed-tensors checkpoint; raises MoejaxError."""
    default = settings.text(fields, "format")
    schemes = []
    for name, group in settings.mapping(fields, "config_groups").items():
        if not isinstance(group, dict):
            raise MoejaxError(f"quantization_config.config_groups.{name} is {group!r}")
        form = settings.text(group, "format", default=default)
        if form != PACKED:
            raise MoejaxError(
                f"quantization_config has format {form!r}; of compressed-tensors, {PACKED!r} can "
                "be read"
            )
        schemes.append(_scheme(name, group))
    if not schemes:
        raise MoejaxError("quantization_config has no config_groups")
    return Format(functools.partial(_find, schemes))


def _scheme(name: str, group: Mapping[str, Any]) -> _Scheme:
    weights = settings.mapping(group, "weights")
    strategy = settings.text(weights, "strategy")
    if settings.text(weights, "type", default="int") != "int" or strategy not in (
        "group",
        "channel",
    ):
        raise MoejaxError(
            f"quantization_config.config_groups.{name} has weights of type "
            f"{weights.get('type')!r} by {strategy!r}; 'int' by 'group' or 'channel' can be read"
        )
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise MoejaxError(f"quantization_config.config_groups.{name} has targets {targets!r}")
    return _Scheme(
        targets=tuple(targets),
        bits=settings.bits(weights, "num_bits"),
        group_size=settings.group_size(weights) if strategy == "group" else None,
        symmetric=settings.flag(weights, "symmetric", default=True),
    )


def _find(
    schemes: Sequence[_Scheme], prefix: str, shape: tuple[int, ...], tensors: Tensors
) -> StoredMatrix | None:
    packed, scale, zero_point, g_idx, stored_shape = (
        f"{prefix}.weight_{x}" for x in ("packed", "scale", "zero_point", "g_idx", "shape")
    )
    if packed not in tensors:
        return None
    scheme = max(schemes, key=lambda scheme: scheme.specificity(prefix))
    if not scheme.specificity(prefix):
        raise MoejaxError(f"{prefix} is quantized, but no group of config_groups names it")
    bits, (num_rows, num_inputs) = scheme.bits, shape
    group_size = min(scheme.group_size or num_inputs, num_inputs)
    num_groups = layout.num_groups(num_inputs, group_size)
    num_words = _num_words(packed, num_rows, num_inputs, bits, tensors)
    zero_words = bitstream.stream_words(num_rows, bits)
    if zero_point in tensors and _is_sparse(tensors[zero_point].shape[0], num_rows, bits):
        zero_words = tensors[zero_point].shape[0]
    fits = [
        tensors.fits(packed, (num_rows, num_words), ["int32"]),
        tensors.fits(scale, (num_rows, num_groups), FLOATS),
        scheme.symmetric or tensors.fits(zero_point, (zero_words, num_groups), ["int32"]),
        g_idx not in tensors or tensors.fits(g_idx, (num_inputs,), ["int32", "int64"]),
        stored_shape not in tensors or tensors.fits(stored_shape, (2,), ["int64", "int32"]),
    ]
    if not all(fits):
        return None
    kind = CodesKind(
        bits=bits,
        group_size=group_size,
        zero_kind="symmetric" if scheme.symmetric else "integer",
        scale_dtype=scale_dtype(tensors[scale]),
    )

    def read() -> QTensor:
        permutation = read_permutation(g_idx, group_size, tensors)
        if stored_shape in tensors and tuple(tensors.read(stored_shape)) != shape:
            said = tensors.read(stored_shape).tolist()
            raise broken(tensors, stored_shape, f"says {said}, config.json {list(shape)}")
        words = _dense(tensors.read(packed), bits, num_inputs)
        words = bitstream.repacked_stream(words, permutation, bits=bits, num_codes=num_inputs)
        found = None if scheme.symmetric else _zeros(zero_point, bits, num_rows, tensors)
        return codes_matrix(kind, num_inputs, words, tensors.read(scale), found, permutation)

    used = (packed, scale, stored_shape, g_idx) + (() if scheme.symmetric else (zero_point,))
    return StoredMatrix(
        names=tuple(name for name in used if name in tensors),
        kind=kind,
        read=read,
        order=digest(read_permutation(g_idx, group_size, tensors)),
    )


def _num_words(name: str, num_rows: int, num_inputs: int, bits: int, tensors: Tensors) -> int:
    """Words of a row: the stream's, or the older width if the tensor has it."""
    shape = tensors[name].shape
    if shape[:1] == (num_rows,) and len(shape) == 2 and _is_sparse(shape[1], num_inputs, bits):
        return shape[1]
    return bitstream.stream_words(num_inputs, bits)


def _is_sparse(num_words: int, num_codes: int, bits: int) -> bool:
    """Whether words hold whole codes only, which makes a difference at 3 bits."""
    dense = bitstream.stream_words(num_codes, bits)
    return num_words == math.ceil(num_codes / (bitstream.WORD_BITS // bits)) != dense


def _dense(words: np.ndarray, bits: int, num_codes: int) -> np.ndarray:
    """Converts rows of words to a bit stream."""
    if not _is_sparse(words.shape[-1], num_codes, bits):
        return words
    shifts = np.arange(bitstream.WORD_BITS // bits, dtype=np.uint32) * np.uint32(bits)
    codes = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    flat = codes.reshape(*words.shape[:-1], -1)[..., :num_codes].astype(np.uint8)
    return bitstream.to_stream(flat, bits=bits)


def _zeros(name: str, bits: int, num_rows: int, tensors: Tensors) -> np.ndarray:
    """uint8[N, G], offset as the codes are."""
    words = np.ascontiguousarray(tensors.read(name).T)
    words = _dense(words, bits, num_rows)
    return bitstream.from_stream(words, bits=bits, num_codes=num_rows).T
