"""File formats of a quantized model: our own, and those of other engines.

Of those, GPTQ version 2, with true zero points, and compressed-tensors, "pack-quantized": the
readers in `moejax/checkpoints/formats` describe the layouts. `recipe.schemes` refuses what they
cannot hold.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moejax.checkpoints.formats import bitstream
from moejax.checkpoints.formats.compressed_tensors import PACKED, parse_compressed_tensors
from moejax.checkpoints.formats.gptq import parse_gptq
from moejax.checkpoints.formats.interfaces import Tensors
from moejax.checkpoints.formats.manifest import Manifest, matrix_entry, quantization_config
from moejax.checkpoints.formats.native import matrix_tensors, native_format
from moejax.checkpoints.safetensors_reader import read_header
from moejax.weights.qtensor import QTensor


class _ExportedKind(NamedTuple):
    """Settings of a matrix that is written, as its config states them."""

    bits: int
    group_size: int  # -1 where a group is a whole row
    symmetric: bool  # without zero points


def _gptq_tensors(prefix: str, matrix: QTensor) -> dict[str, np.ndarray]:
    """Returns the tensors of a matrix PREFIX [N, K], of a scheme for GPTQ files, in such a file."""
    codes, scales = _codes(matrix), np.asarray(matrix.scales)
    zeros = np.full(scales.shape, 2 ** (matrix.bits - 1), np.uint8)
    if matrix.zeros is not None:
        zeros = np.asarray(matrix.zeros)
    stored = {
        "qweight": bitstream.to_stream(codes, bits=matrix.bits).T,
        "qzeros": bitstream.to_stream(zeros.T, bits=matrix.bits),
        "scales": scales.T,
        "g_idx": np.arange(matrix.num_inputs, dtype=np.int32) // np.int32(matrix.group_size),
    }
    return {f"{prefix}.{name}": np.ascontiguousarray(array) for name, array in stored.items()}


def _compressed_tensors_tensors(prefix: str, matrix: QTensor) -> dict[str, np.ndarray]:
    """Returns the tensors of a matrix in a compressed-tensors file; see `_gptq_tensors`."""
    stored = {
        "packed": bitstream.to_stream(_codes(matrix), bits=matrix.bits),
        "scale": np.asarray(matrix.scales),
        "shape": np.array(matrix.shape, np.int64),
    }
    if matrix.zeros is not None:
        zeros = np.asarray(matrix.zeros).T
        stored["zero_point"] = bitstream.to_stream(zeros, bits=matrix.bits).T
    return {
        f"{prefix}.weight_{name}": np.ascontiguousarray(array) for name, array in stored.items()
    }


def _codes(matrix: QTensor) -> np.ndarray:
    """Codes uint8[N, K]."""
    words = np.asarray(matrix.words)
    return bitstream.unpacked(words, bits=matrix.bits, num_codes=matrix.num_inputs)


def _gptq_config(kinds: Mapping[str, _ExportedKind], plain: Collection[str]) -> dict[str, Any]:
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


def _compressed_tensors_config(
    kinds: Mapping[str, _ExportedKind], plain: Collection[str]
) -> dict[str, Any]:
    """The quantization_config of a compressed-tensors checkpoint; arguments as `_gptq_config`."""
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


def _by_kind(kinds: Mapping[str, _ExportedKind]) -> list[tuple[_ExportedKind, list[str]]]:
    """Names by kind: the most common one first, the others in the order of their first names."""
    names: dict[_ExportedKind, list[str]] = {}
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


Records = Mapping[str, Mapping[str, Any]]  # the manifest's, of tensors by name
# The tensors of a matrix in a file, by its name without ".weight".
WriteMatrix = Callable[[str, QTensor], Mapping[str, np.ndarray]]
WRITERS: dict[str, WriteMatrix] = {
    "moejax": matrix_tensors,
    "gptq": _gptq_tensors,
    "compressed-tensors": _compressed_tensors_tensors,
}
# Classes that other engines take for linear layers, so that a config has to say which are plain.
_LINEAR_KINDS = ("attention", "experts", "shared_experts", "mlp", "router", "head", "kept")


def config_of(target: str, records: Records) -> dict[str, Any]:
    """Builds the quantization_config of config.json; `target` is one of `WRITERS`."""
    if target == "moejax":
        return dict(quantization_config())
    kinds, plain = {}, []
    for name, record in records.items():
        prefix = name.removesuffix(".weight")
        if "bits" in record:
            group_size = record["group_size"]
            whole_row = group_size == record["shape"][1]
            kinds[prefix] = _ExportedKind(
                bits=record["bits"],
                group_size=-1 if whole_row else group_size,
                symmetric=record["zero_kind"] == "symmetric",
            )
        elif record["class"] in _LINEAR_KINDS:
            plain.append(prefix)
    write = {"gptq": _gptq_config, "compressed-tensors": _compressed_tensors_config}[target]
    return write(kinds, plain)


def read_back(path: Path, target: str, records: Records) -> dict[str, QTensor]:
    """Reads the matrices of a shard that was written in one of the formats, by name."""
    tensors = Tensors(read_header(path))
    quantized = {name: record for name, record in records.items() if "bits" in record}
    if target == "moejax":
        entries = {name: matrix_entry(path, name, record) for name, record in quantized.items()}
        form = native_format(Manifest(path=path, matrices=entries, files={}))
    else:
        parse = {"gptq": parse_gptq, "compressed-tensors": parse_compressed_tensors}[target]
        form = parse(config_of(target, records))
    matrices = {}
    for name, record in quantized.items():
        num_rows, num_inputs = record["shape"]
        found = form.find(name.removesuffix(".weight"), (num_rows, num_inputs), tensors)
        assert found is not None
        matrix = found.read()
        assert isinstance(matrix, QTensor)
        matrices[name] = matrix
    return matrices
