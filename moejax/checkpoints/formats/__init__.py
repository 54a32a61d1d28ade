"""Quantized checkpoints: the formats that users have, read without loss, and three written."""

from moejax.checkpoints.formats.compressed_tensors_writer import (
    compressed_tensors_config as compressed_tensors_config,
)
from moejax.checkpoints.formats.compressed_tensors_writer import (
    compressed_tensors_tensors as compressed_tensors_tensors,
)
from moejax.checkpoints.formats.export_kinds import ExportedKind as ExportedKind
from moejax.checkpoints.formats.gptq_writer import gptq_config as gptq_config
from moejax.checkpoints.formats.gptq_writer import gptq_tensors as gptq_tensors
from moejax.checkpoints.formats.manifest import MANIFEST_FILE as MANIFEST_FILE
from moejax.checkpoints.formats.manifest import quantization_config as quantization_config
from moejax.checkpoints.formats.native import matrix_from_tensors as matrix_from_tensors
from moejax.checkpoints.formats.native import matrix_tensors as matrix_tensors
from moejax.checkpoints.formats.registry import quantization_fields as quantization_fields
