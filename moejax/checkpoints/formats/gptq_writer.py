"""Writes GPTQ version 2 (layout: `gptq.py`), which stores true zero points."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from moejax.checkpoints.formats import bitstream
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


def gptq_tensors(prefix: str, matrix: QTensor) -> dict[str, np.ndarray]:
    """Returns the tensors of a matrix in a GPTQ file.

    Args:
      prefix: the Hugging Face name of the matrix without ".weight".
      matrix: [N, K].

    Raises:
      MoejaxError: the format cannot hold it, with all the reasons.
    """
    reasons = common_refusals(prefix, matrix)
    scales = np.asarray(matrix.scales)
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    if not np.array_equal(halves.astype(np.float32), scales.astype(np.float32)):
        reasons.append("scales that float16 does not hold exactly (scale=float16)")
    for size, axis in zip(matrix.shape[-2:], ("outputs", "inputs"), strict=True):
        if size % bitstream.WORD_BITS:
            reasons.append(f"{size} {axis}, no multiple of {bitstream.WORD_BITS}")
    refuse(prefix, "gptq", reasons)
    codes = host_codes(matrix)
    groups = np.arange(matrix.num_inputs, dtype=np.int32) // np.int32(matrix.group_size)
    if matrix.permutation is not None:
        inverse = np.argsort(np.asarray(matrix.permutation))
        codes, groups = codes[:, inverse], groups[inverse]
    stored = {
        "qweight": bitstream.to_stream(codes, bits=matrix.bits).T,
        "qzeros": bitstream.to_stream(host_zeros(matrix).T, bits=matrix.bits),
        "scales": halves.T,
        "g_idx": groups,
    }
    return {f"{prefix}.{name}": np.ascontiguousarray(array) for name, array in stored.items()}


def gptq_config(kinds: Mapping[str, ExportedKind], plain: Collection[str]) -> dict[str, Any]:
    """The quantization_config of a GPTQ checkpoint.

    Args:
      kinds: kinds of the quantized matrices, by name without ".weight".
      plain: names of the other linear layers, such as routers and the head.
    """
    default = most_common(kinds)
    dynamic: dict[str, dict[str, Any]] = {
        f"-:{pattern}": {} for pattern in patterns(plain, kinds.keys())
    }
    odd: dict[tuple[int, int, bool], list[str]] = {}
    for name, kind in kinds.items():
        setting = (kind.bits, kind.stored_group_size, kind.symmetric)
        if setting != (default.bits, default.stored_group_size, default.symmetric):
            odd.setdefault(setting, []).append(name)
    for (bits, group_size, symmetric), names in odd.items():
        changed = {"bits": bits, "group_size": group_size, "sym": symmetric}
        others = kinds.keys() - set(names) | set(plain)
        dynamic |= {f"+:{pattern}": changed for pattern in patterns(names, others)}
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": default.bits,
        "group_size": default.stored_group_size,
        "sym": default.symmetric,
        "desc_act": any(kind.act_order for kind in kinds.values()),
        "lm_head": "lm_head" in kinds,
        "dynamic": dynamic,
    }
