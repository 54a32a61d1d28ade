"""Writes GPTQ version 2, with true zero points, and compressed-tensors, "pack-quantized".

`gptq.py` and `compressed_tensors.py` describe the layouts.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from moejax.checkpoints.formats import bitstream
from moejax.checkpoints.formats.compressed_tensors import PACKED
from moejax.errors import MoejaxError
from moejax.weights.qtensor import QTensor

_EMBEDDING = "model.embed_tokens"


class ExportedKind(NamedTuple):
    """Settings of a matrix that is written, as its config states them."""

    bits: int
    group_size: int  # -1 where a group is a whole row
    symmetric: bool  # without zero points


def gptq_tensors(prefix: str, matrix: QTensor) -> dict[str, np.ndarray]:
    """Returns the tensors of the matrix PREFIX [N, K] in a GPTQ file.

    MoejaxError, with all the reasons, where the format cannot hold it.
    """
    reasons = []
    scales = np.asarray(matrix.scales)
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    if not np.array_equal(halves.astype(np.float32), scales.astype(np.float32)):
        reasons.append("scales that float16 does not hold exactly (scale=float16)")
    for size, axis in zip(matrix.shape[-2:], ("outputs", "inputs"), strict=True):
        if size % bitstream.WORD_BITS:
            reasons.append(f"{size} {axis}, no multiple of {bitstream.WORD_BITS}")
    codes, zeros = _codes_and_zeros(prefix, matrix, "gptq", reasons)
    if zeros is None:
        zeros = np.full(scales.shape, 2 ** (matrix.bits - 1), np.uint8)
    stored = {
        "qweight": bitstream.to_stream(codes, bits=matrix.bits).T,
        "qzeros": bitstream.to_stream(zeros.T, bits=matrix.bits),
        "scales": halves.T,
        "g_idx": np.arange(matrix.num_inputs, dtype=np.int32) // np.int32(matrix.group_size),
    }
    return {f"{prefix}.{name}": np.ascontiguousarray(array) for name, array in stored.items()}


def compressed_tensors_tensors(prefix: str, matrix: QTensor) -> dict[str, np.ndarray]:
    """Returns the tensors of a matrix in a compressed-tensors file; see `gptq_tensors`."""
    codes, zeros = _codes_and_zeros(prefix, matrix, "compressed-tensors", [])
    stored = {
        "packed": bitstream.to_stream(codes, bits=matrix.bits),
        "scale": np.asarray(matrix.scales),
        "shape": np.array(matrix.shape, np.int64),
    }
    if zeros is not None:
        stored["zero_point"] = bitstream.to_stream(zeros.T, bits=matrix.bits).T
    return {
        f"{prefix}.weight_{name}": np.ascontiguousarray(array) for name, array in stored.items()
    }


def _codes_and_zeros(
    prefix: str, matrix: QTensor, form: str, own_reasons: list[str]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes uint8[N, K] and zeros uint8[N, G], if any, of a matrix that both formats can hold."""
    reasons = []
    if matrix.ndim != 2:
        reasons.append(f"a stack {matrix.shape}")
    if matrix.compensators:
        reasons.append("a low-rank compensator, which only the moejax format has")
    if matrix.zero_kind == "float":
        reasons.append("float zero points, where they have integers (zero=integer or symmetric)")
    if matrix.num_inputs % matrix.group_size:
        reasons.append(
            f"a shorter last group (K = {matrix.num_inputs}, group_size {matrix.group_size})"
        )
    zeros = None if matrix.zeros is None else np.asarray(matrix.zeros)
    if zeros is not None and zeros.dtype == np.uint8 and int(zeros.max()) >= 2**matrix.bits:
        reasons.append(f"a zero point of {2**matrix.bits}, beyond {matrix.bits} bits")
    if prefix == _EMBEDDING:
        reasons.append("an embedding, where only linear layers can be quantized")
    if matrix.permutation is not None:
        reasons.append("an act-order")
    if reasons := reasons + own_reasons:
        raise MoejaxError(f"{form} cannot hold {prefix}: it has {'; '.join(reasons)}")
    words = np.asarray(matrix.words)
    return bitstream.unpacked(words, bits=matrix.bits, num_codes=matrix.num_inputs), zeros


def gptq_config(kinds: Mapping[str, ExportedKind], plain: Collection[str]) -> dict[str, Any]:
    """The quantization_config of a GPTQ checkpoint.

    `kinds` are of the quantized matrices, by name without ".weight"; `plain` are the names of the
    other linear layers, such as routers and the head.
    """
    (usual, _), *others = _by_kind(kinds)
    dynamic: dict[str, dict[str, Any]] = {
        f"-:{pattern}": {} for pattern in _patterns(plain, kinds.keys())
    }
    for kind, names in others:
        changed = {"bits": kind.bits, "group_size": kind.group_size, "sym": kind.symmetric}
        rest = kinds.keys() - set(names) | set(plain)
        dynamic |= {f"+:{pattern}": changed for pattern in _patterns(names, rest)}
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": usual.bits,
        "group_size": usual.group_size,
        "sym": usual.symmetric,
        "desc_act": False,
        "lm_head": "lm_head" in kinds,
        "dynamic": dynamic,
    }


def compressed_tensors_config(
    kinds: Mapping[str, ExportedKind], plain: Collection[str]
) -> dict[str, Any]:
    """The quantization_config of a compressed-tensors checkpoint; arguments as `gptq_config`."""
    groups = {}
    # A module belongs to what names it before what names its class.
    for i, (kind, names) in enumerate(_by_kind(kinds)):
        rest = kinds.keys() - set(names) | set(plain)
        per_channel = kind.group_size == -1
        groups[f"group_{i}"] = {
            "targets": [f"re:{pattern}" for pattern in _patterns(names, rest)] if i else ["Linear"],
            "weights": {
                "num_bits": kind.bits,
                "type": "int",
                "symmetric": kind.symmetric,
                "strategy": "channel" if per_channel else "group",
                "group_size": None if per_channel else kind.group_size,
                "actorder": None,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [f"re:{pattern}" for pattern in _patterns(plain, kinds.keys())],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _by_kind(kinds: Mapping[str, ExportedKind]) -> list[tuple[ExportedKind, list[str]]]:
    """Names by kind: the most common one first, the others in the order of their first names."""
    names: dict[ExportedKind, list[str]] = {}
    for name, kind in kinds.items():
        names.setdefault(kind, []).append(name)
    usual = Counter(kinds.values()).most_common(1)[0][0]
    return sorted(names.items(), key=lambda item: item[0] != usual)


def _patterns(names: Collection[str], others: Collection[str]) -> list[str]:
    """Regular expressions of modules, one for all layers where it concerns none of `others`."""
    found: dict[str, None] = {}
    for name in names:
        exact = f"^{re.escape(name)}$"
        general = re.sub(r"\\\.\d+(?=\\\.)", r"\\.\\d+", exact)
        fits = not any(re.match(general, other) for other in others)
        found[general if fits else exact] = None
    return list(found)
