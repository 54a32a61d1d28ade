"""File formats of a quantized model: our own, and those of other engines."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moejax.checkpoints.formats.compressed_tensors import parse_compressed_tensors
from moejax.checkpoints.formats.compressed_tensors_writer import (
    compressed_tensors_config,
    compressed_tensors_tensors,
)
from moejax.checkpoints.formats.export_kinds import ExportedKind
from moejax.checkpoints.formats.gptq import parse_gptq
from moejax.checkpoints.formats.gptq_writer import gptq_config, gptq_tensors
from moejax.checkpoints.formats.interfaces import Format, Tensors
from moejax.checkpoints.formats.manifest import quantization_config
from moejax.checkpoints.formats.native import matrix_from_tensors, matrix_tensors
from moejax.weights.qtensor import QTensor

# The tensors of a matrix in a file, by its name without ".weight".
WriteMatrix = Callable[[str, QTensor], Mapping[str, np.ndarray]]
WRITERS: dict[str, WriteMatrix] = {
    "moejax": matrix_tensors,
    "gptq": gptq_tensors,
    "compressed-tensors": compressed_tensors_tensors,
}
# Classes that other engines take for linear layers, so that a config has to say which are plain.
_LINEAR_KINDS = ("attention", "experts", "shared_experts", "mlp", "router", "head", "kept")


def config_of(target: str, records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Builds the quantization_config of config.json.

    Args:
      target: one of `WRITERS`.
      records: the manifest's, of all tensors by name.
    """
    if target == "moejax":
        return dict(quantization_config())
    kinds = {
        name.removesuffix(".weight"): ExportedKind(
            bits=record["bits"],
            group_size=record["group_size"],
            num_inputs=record["shape"][1],
            zero_kind=record["zero_kind"],
        )
        for name, record in records.items()
        if "bits" in record
    }
    plain = [
        name.removesuffix(".weight")
        for name, record in records.items()
        if "bits" not in record and record["class"] in _LINEAR_KINDS
    ]
    write = {"gptq": gptq_config, "compressed-tensors": compressed_tensors_config}[target]
    return write(kinds, plain)


def read_back(
    target: str, records: Mapping[str, Mapping[str, Any]], name: str, tensors: Tensors
) -> QTensor:
    """Reads a matrix that was written in one of the formats.

    Args:
      target: one of `WRITERS`.
      records: those of its shard at least, by name.
      name: the matrix's, with ".weight".
    """
    prefix, record = name.removesuffix(".weight"), records[name]
    num_rows, num_inputs = record["shape"]
    if target == "moejax":
        return matrix_from_tensors(
            prefix,
            {n: tensors.read(n) for n in tensors.stored if n.startswith(prefix + ".")},
            num_inputs=num_inputs,
            group_size=record["group_size"],
        )
    parsers: dict[str, Callable[[Mapping[str, Any]], Format]] = {
        "gptq": parse_gptq,
        "compressed-tensors": parse_compressed_tensors,
    }
    form = parsers[target](config_of(target, records))
    found = form.find(prefix, (num_rows, num_inputs), tensors)
    assert found is not None
    matrix = found.read()
    assert isinstance(matrix, QTensor)
    return matrix
