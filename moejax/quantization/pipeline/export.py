"""File formats of a quantized model: our own, and those of other engines."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moejax.checkpoints.formats.compressed_tensors import parse_compressed_tensors
from moejax.checkpoints.formats.gptq import parse_gptq
from moejax.checkpoints.formats.interfaces import Tensors
from moejax.checkpoints.formats.manifest import Manifest, matrix_entry, quantization_config
from moejax.checkpoints.formats.native import matrix_tensors, native_format
from moejax.checkpoints.formats.writers import (
    ExportedKind,
    compressed_tensors_config,
    compressed_tensors_tensors,
    gptq_config,
    gptq_tensors,
)
from moejax.weights.qtensor import QTensor

Records = Mapping[str, Mapping[str, Any]]  # the manifest's, of tensors by name
# The tensors of a matrix in a file, by its name without ".weight".
WriteMatrix = Callable[[str, QTensor], Mapping[str, np.ndarray]]
WRITERS: dict[str, WriteMatrix] = {
    "moejax": matrix_tensors,
    "gptq": gptq_tensors,
    "compressed-tensors": compressed_tensors_tensors,
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
            kinds[prefix] = ExportedKind(
                bits=record["bits"],
                group_size=-1 if whole_row else group_size,
                symmetric=record["zero_kind"] == "symmetric",
            )
        elif record["class"] in _LINEAR_KINDS:
            plain.append(prefix)
    write = {"gptq": gptq_config, "compressed-tensors": compressed_tensors_config}[target]
    return write(kinds, plain)


def read_back(path: Path, target: str, records: Records, tensors: Tensors) -> dict[str, QTensor]:
    """Reads the matrices of a shard that was written in one of the formats, by name."""
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
