"""Tiny checkpoints for tests of experts that are read one at a time.

`STORES` are (name, function that makes the store, whether reading it computes by JAX).
"""

import json

import ml_dtypes
import numpy as np

from moejax.models.hf.config import to_hf_config
from moejax.weights.qtensor import from_codes
from tests.quantized_stores import (
    MIXTRAL,
    QWEN,
    Awq,
    CompressedTensors,
    Gptq,
    Hqq,
    Own,
    Store,
    matrix_tensors,
    seed_of,
)


class Plain(Store):
    """Weights as they are, in a type that float32 and float16 hold exactly."""

    def matrix(self, prefix, shape):
        rng = np.random.default_rng(seed_of(prefix))
        weights = rng.normal(size=shape).astype(ml_dtypes.bfloat16)
        return {"": weights} if len(shape) == 3 else {".weight": weights}, weights

    def save(self, directory):
        super().save(directory)
        fields = to_hf_config(self.model, dtype="bfloat16")
        (directory / "config.json").write_text(json.dumps(fields))


class Mixed(Own):
    """Some experts are symmetric, some have float zeros; scales of two types."""

    def matrix(self, prefix, shape):
        rng = np.random.default_rng(seed_of(prefix))
        is_even = seed_of(prefix) % 2 == 0 or "experts" not in prefix
        kind = {"bits": 4, "group_size": 32, "zero_kind": "float" if is_even else "symmetric"}
        size = (shape[0], shape[1] // 32)
        matrix = from_codes(
            rng.integers(0, 16, shape, dtype=np.uint8),
            rng.uniform(0.1, 1, size),
            rng.uniform(0, 15, size),
            scale_dtype=np.float16 if seed_of(prefix) % 3 else np.float32,
            **kind,
        )
        self.entries[f"{prefix}.weight"] = {"shape": list(shape), **kind}
        tensors = matrix_tensors(prefix, matrix)
        weights = np.asarray(matrix.dequantize())
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, weights


class MixedBits(Gptq):
    """Experts of two widths, which a stack cannot hold: they are dequantized."""

    def __init__(self, model):
        super().__init__(model)
        self.config["dynamic"] = {r"+:model\.layers\.2\.mlp\.": {"bits": 8}}

    def matrix(self, prefix, shape):
        self.bits = 8 if "layers.2.mlp" in prefix else 4
        return super().matrix(prefix, shape)


def plain(fused=False, model=QWEN):
    return Plain(model, fused=fused)


STORES = (
    ("own", lambda: Own(QWEN), False),
    ("own_int2", lambda: Own(MIXTRAL, bits=2), False),
    ("own_mixed_kinds", lambda: Mixed(QWEN), False),
    ("gptq", lambda: Gptq(QWEN), True),
    ("gptq_symmetric", lambda: Gptq(MIXTRAL, symmetric=True), True),
    ("awq", lambda: Awq(MIXTRAL), True),
    ("hqq", lambda: Hqq(QWEN), True),
    ("compressed_tensors", lambda: CompressedTensors(QWEN), True),
    ("mixed_bits", lambda: MixedBits(QWEN), True),
    ("plain", plain, False),
    ("plain_mixtral", lambda: plain(model=MIXTRAL), False),
    ("plain_fused", lambda: plain(fused=True), False),
)
