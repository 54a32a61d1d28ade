"""Writes compressed-tensors, "pack-quantized" (`compressed_tensors.py` describes the layout)."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from moejax.checkpoints.formats import bitstream
from moejax.checkpoints.formats.compressed_tensors import PACKED
from moejax.checkpoints.formats.export_kinds import (
    ExportedKind,
    common_refusals,
    host_codes,
    host_zeros,
    most_common,
    patterns,
    refuse,
)
from moejax.weights.qtensor import QTensor


def compressed_tensors_tensors(prefix: str, matrix: QTensor) -> dict[str, np.ndarray]:
    """Returns the tensors of a matrix in a compressed-tensors file.

    Args:
      prefix: the Hugging Face name of the matrix without ".weight".
      matrix: [N, K].

    Raises:
      MoejaxError: the format cannot hold it, with all the reasons.
    """
    reasons = common_refusals(prefix, matrix)
    if matrix.permutation is not None:
        reasons.append("an act-order, which compressed-tensors gave up in 2026 (format=gptq)")
    refuse(prefix, "compressed-tensors", reasons)
    stored = {
        "packed": bitstream.to_stream(host_codes(matrix), bits=matrix.bits),
        "scale": np.asarray(matrix.scales),
        "shape": np.array(matrix.shape, np.int64),
    }
    if matrix.zeros is not None:
        stored["zero_point"] = bitstream.to_stream(host_zeros(matrix).T, bits=matrix.bits).T
    return {
        f"{prefix}.weight_{name}": np.ascontiguousarray(array) for name, array in stored.items()
    }


def compressed_tensors_config(
    kinds: Mapping[str, ExportedKind], plain: Collection[str]
) -> dict[str, Any]:
    """The quantization_config of a compressed-tensors checkpoint; arguments as `gptq_config`."""
    default = most_common(kinds)
    names_of: dict[tuple[int, int, bool], list[str]] = {}
    for name, kind in kinds.items():
        setting = (kind.bits, kind.stored_group_size, kind.symmetric)
        names_of.setdefault(setting, []).append(name)
    usual = (default.bits, default.stored_group_size, default.symmetric)
    groups = {}
    # A module belongs to what names it before what names its class.
    for i, (setting, names) in enumerate(sorted(names_of.items(), key=lambda x: x[0] != usual)):
        others = kinds.keys() - set(names) | set(plain)
        targets = [f"re:{pattern}" for pattern in patterns(names, others)]
        groups[f"group_{i}"] = {
            "targets": ["Linear"] if setting == usual else targets,
            "weights": _weights(*setting),
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [f"re:{pattern}" for pattern in patterns(plain, kinds.keys())],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _weights(bits: int, group_size: int, symmetric: bool) -> dict[str, Any]:
    per_channel = group_size == -1
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if per_channel else "group",
        "group_size": None if per_channel else group_size,
        "actorder": None,
        "dynamic": False,
    }
