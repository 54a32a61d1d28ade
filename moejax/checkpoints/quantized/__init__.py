"""Quantized checkpoints: the formats that users have, read without loss, and three written."""

from moejax.checkpoints.quantized.compressed_tensors_writer import (
    compressed_tensors_config as compressed_tensors_config,
)
from moejax.checkpoints.quantized.compressed_tensors_writer import (
    compressed_tensors_tensors as compressed_tensors_tensors,
)
from moejax.checkpoints.quantized.exported import ExportedKind as ExportedKind
from moejax.checkpoints.quantized.formats import quantization_fields as quantization_fields
from moejax.checkpoints.quantized.gptq_writer import gptq_config as gptq_config
from moejax.checkpoints.quantized.gptq_writer import gptq_tensors as gptq_tensors
from moejax.checkpoints.quantized.load import load_quantized_weights as load_quantized_weights
from moejax.checkpoints.quantized.manifest import MANIFEST_FILE as MANIFEST_FILE
from moejax.checkpoints.quantized.manifest import quantization_config as quantization_config
from moejax.checkpoints.quantized.own import matrix_from_tensors as matrix_from_tensors
from moejax.checkpoints.quantized.own import matrix_tensors as matrix_tensors
