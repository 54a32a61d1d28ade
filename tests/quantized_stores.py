"""Tiny quantized checkpoints of every format, with the weights that they stand for.

store = Gptq(QWEN, bits=4)
store.write(directory)     # safetensors and config.json
store.leaves()             # float32, placed as `weight_shapes` says
"""

import dataclasses
import hashlib
import json
import math
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.checkpoints.formats.interfaces import Tensors
from moejax.checkpoints.formats.manifest import quantization_config
from moejax.checkpoints.formats.native import matrix_tensors, whole_compensator
from moejax.checkpoints.formats.registry import open_format
from moejax.checkpoints.reader import CheckpointReader
from moejax.checkpoints.safetensors_reader import stored_tensors
from moejax.devices import choose_device
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.hf.config import to_hf_config
from moejax.models.hf.names import _Spelling, placements, published_spelling
from moejax.weights.qtensor import QTensor, from_codes
from tests import quantized_files as files
from tests.folder_case import FolderTestCase
from tests.packed_weights import values_of
from tests.random_checkpoints import TINY

QWEN = ModelConfig(
    **TINY | {"vocab_size": 96, "num_experts": 3, "mlp_dim": 64, "max_positions": 64}
)
MIXTRAL = dataclasses.replace(
    QWEN, family="mixtral", moe_layers=(0, 1, 2), mlp_dim=32, qk_norm=False
)
WIDE = dataclasses.replace(
    QWEN, model_dim=256, head_dim=64, expert_dim=128, mlp_dim=128, moe_layers=(0, 1)
)
PLAIN = ("norm", "router", "embed", "head")


def seed_of(name):
    return zlib.crc32(name.encode())


class Store:
    """Writes one checkpoint directory; a subclass says how a matrix is stored."""

    config: dict | None = None

    def __init__(self, model, *, fused=False):
        self.model = model
        spelling = published_spelling(model.family)
        self.spelling = _Spelling(spelling.moe_module, fused=True) if fused else spelling
        self.tensors, self.weights = {}, {}

    def matrix(self, prefix, shape):
        """Makes a matrix: its tensors by the end of their names, and its weights."""
        raise NotImplementedError

    def is_plain(self, placement):
        return any(part in placement.leaf for part in PLAIN)

    def write(self, directory):
        rng = np.random.default_rng(0)
        for placement in placements(self.model, self.spelling):
            name, prefix = placement.name, placement.name.removesuffix(".weight")
            if self.is_plain(placement):
                weights = rng.normal(size=placement.shape).astype(np.float32)
                stored = {name: weights}
            else:
                tensors, weights = self.matrix(prefix, placement.shape)
                stored = {f"{prefix}{end}": tensor for end, tensor in tensors.items()}
            self.tensors |= stored
            self.weights[name] = weights
        self.save(directory)
        return directory

    def save(self, directory):
        files.write(directory / "model.safetensors", self.tensors)
        fields = to_hf_config(self.model, dtype="bfloat16")
        fields["quantization_config"] = self.config
        (directory / "config.json").write_text(json.dumps(fields))

    def leaves(self):
        """float32 leaves, the weights placed as `weight_shapes` says."""
        leaves = {k: np.zeros(v, np.float32) for k, v in weight_shapes(self.model).items()}
        for p in placements(self.model, self.spelling):
            leaves[p.leaf][p.index][p.start : p.start + p.shape[0]] = self.weights[p.name]
        return leaves


def dotted(tensors):
    return {f".{name}": tensor for name, tensor in tensors.items()}


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


class Gptq(Store):
    def __init__(self, model, *, bits=4, act_order=False, symmetric=False, is_v1=True):
        super().__init__(model)
        self.bits, self.act_order, self.symmetric, self.is_v1 = bits, act_order, symmetric, is_v1
        self.config = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": 32,
            "sym": symmetric,
            "desc_act": act_order,
            "checkpoint_format": "gptq" if is_v1 else "gptq_v2",
        }

    def matrix(self, prefix, shape):
        # Matrices of equal inputs share an act-order; some layers have none.
        inputs = prefix.rpartition(".")[0]
        stored = files.random_matrix(
            shape,
            bits=self.bits,
            group_size=min(32, shape[1]),
            symmetric=self.symmetric,
            act_order=self.act_order and ".1." not in prefix,
            seed=seed_of(prefix),
            order_seed=seed_of(inputs),
        )
        return dotted(files.gptq(stored, self.bits, is_v1=self.is_v1)), stored.weights


class MixedBits(Gptq):
    """Experts of two widths, which a stack cannot hold: they are dequantized."""

    def __init__(self, model):
        super().__init__(model)
        self.config["dynamic"] = {r"+:model\.layers\.2\.mlp\.": {"bits": 8}}

    def matrix(self, prefix, shape):
        self.bits = 8 if "layers.2.mlp" in prefix else 4
        return super().matrix(prefix, shape)


class Awq(Store):
    config = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}  # noqa: RUF012

    def matrix(self, prefix, shape):
        stored = files.random_matrix(shape, bits=4, group_size=16, seed=seed_of(prefix))
        return dotted(files.awq(stored)), stored.weights


class CompressedTensors(Store):
    def __init__(self, model):
        super().__init__(model)
        weights = {"num_bits": 3, "type": "int", "symmetric": True, "strategy": "channel"}
        group = {"targets": ["Linear"], "weights": weights}
        self.config = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }

    def matrix(self, prefix, shape):
        stored = files.random_matrix(
            shape,
            bits=3,
            group_size=shape[1],
            symmetric=True,
            dtype=ml_dtypes.bfloat16,
            seed=seed_of(prefix),
        )
        return dotted(files.compressed_tensors(stored, 3, symmetric=True)), stored.weights


class Hqq(Store):
    """INT4 as the library packs it: the first half of the groups in the high nibbles."""

    config = {"quant_method": "hqq", "quant_config": {}}  # noqa: RUF012

    def matrix(self, prefix, shape):
        rng = np.random.default_rng(seed_of(prefix))
        codes = rng.integers(0, 16, (math.prod(shape) // 16, 16), dtype=np.uint8)
        half = len(codes) // 2
        scale, zero = rng.uniform(0.1, 15, (2, len(codes), 1)).astype(np.float16)
        weights = (codes.astype(np.float32) - zero) * scale.astype(np.float32)
        tensors = {
            "W_q": codes[:half] << np.uint8(4) | codes[half:],
            "scale": scale,
            "zero": zero,
            "nbits": np.array(4, np.int32),
            "axis": np.array(1, np.int32),
            "packing": np.frombuffer(b"4bit_u8", np.uint8),
        }
        return dotted(tensors), weights.reshape(shape)


class Fp8(Store):
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}  # noqa: RUF012

    def matrix(self, prefix, shape):
        tensors, weights = files.fp8(shape, seed_of(prefix))
        if len(shape) == 3:
            return {"": tensors["weight"], "_scale_inv": tensors["weight_scale_inv"]}, weights
        return dotted(tensors), weights


class Own(Store):
    """Float zeros, ragged ranks from 0 up, factors of INT3, of INT8 and of bfloat16."""

    config = quantization_config()

    def __init__(self, model, ranks=(0, 1, 3), factor_bits=(3, 8, 16), bits=3):
        super().__init__(model)
        self.ranks, self.factor_bits, self.bits = ranks, factor_bits, bits
        self.entries = {}

    def is_plain(self, placement):
        return "norm" in placement.leaf or "router" in placement.leaf

    def matrix(self, prefix, shape):
        rng = np.random.default_rng(seed_of(prefix))
        group_size = min(48, shape[1])
        groups = -(-shape[1] // group_size)
        matrix = from_codes(
            rng.integers(0, 2**self.bits, shape, dtype=np.uint8),
            rng.uniform(0.1, 1, (shape[0], groups)),
            rng.uniform(0, 2**self.bits, (shape[0], groups)),
            bits=self.bits,
            group_size=group_size,
            zero_kind="float",
        )
        weights = np.asarray(matrix.dequantize())
        rank = int(rng.choice(self.ranks))
        if rank:
            matrix, terms = self.compensated(rng, matrix, rank)
            weights = weights + terms
        tensors = matrix_tensors(prefix, matrix)
        self.entries[f"{prefix}.weight"] = {
            "shape": list(shape),
            "bits": self.bits,
            "group_size": group_size,
            "zero_kind": "float",
        }
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, weights

    def compensated(self, rng, matrix, rank):
        shape = matrix.shape
        factors = [self.factor(rng, rank, n, int(rng.choice(self.factor_bits))) for n in shape]
        if factors[0][2] != factors[1][2]:  # one width for both
            factors[1] = self.factor(rng, rank, shape[1], factors[0][2])
        (u, u_values, _), (v, v_values, _) = factors
        compensators = (whole_compensator(u, v),)
        matrix = dataclasses.replace(matrix, compensators=compensators)
        return matrix, u_values.T @ v_values

    def factor(self, rng, rank, length, bits):
        if bits == 16:
            values = rng.normal(size=(rank, length)).astype(ml_dtypes.bfloat16)
            return values, values.astype(np.float32), bits
        group_size = min(64, length)
        codes = rng.integers(0, 2**bits, (rank, length), dtype=np.uint8)
        scales = rng.uniform(0.1, 1, (rank, -(-length // group_size))).astype(np.float16)
        kind = {"bits": bits, "group_size": group_size, "zero_kind": "symmetric"}
        values = codes.astype(np.float32) - 2 ** (bits - 1)
        values *= scales.astype(np.float32).repeat(group_size, 1)[:, :length]
        return from_codes(codes, scales, None, **kind), values, bits

    def save(self, directory):
        super().save(directory)
        content = (directory / "model.safetensors").read_bytes()
        file = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest = {
            "layout": self.config["layout"],
            "tensors": self.entries,
            "files": {"model.safetensors": file, "config.json": {"size": 1, "sha256": ""}},
        }
        (directory / "quantization.json").write_text(json.dumps(manifest))


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


def dequantized(matrix):
    """By numpy, so far as there is no permutation."""
    return np.asarray(matrix.dequantize())


class FormatTestCase(FolderTestCase):
    def find(self, config, tensors, shape, prefix="a.b"):
        """The matrix `prefix` of a file that holds `tensors`, whose names are without prefix."""
        named = {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
        files.write(self.directory / "model.safetensors", named)
        stored = Tensors(stored_tensors(self.directory))
        found = open_format(self.directory, config).find(prefix, shape, stored)
        stored.check(self.directory)
        self.assertIsNotNone(found)
        return found

    def read(self, config, tensors, shape, prefix="a.b"):
        found = self.find(config, tensors, shape, prefix)
        names = {f"{prefix}.{name}" for name in tensors}
        self.assertLessEqual(set(found.names), names)
        matrix = found.read()
        matrix.check()
        if isinstance(matrix, QTensor):
            self.assertEqual(matrix.bits, found.kind.bits)
            self.assertEqual(matrix.zero_kind, found.kind.zero_kind)
            self.assertEqual(matrix.scales.dtype.name, found.kind.scale_dtype)
        return matrix

    def assert_reads(self, config, tensors, stored, prefix="a.b"):
        """The matrix that is read of a `quantized_files.Matrix`, which it stands for exactly."""
        matrix = self.read(config, tensors, stored.codes.shape, prefix)
        np.testing.assert_array_equal(dequantized(matrix), stored.weights)
        return matrix


class LoadingTestCase(FolderTestCase):
    def load(self, store, dtype=jnp.float32, device=None, **kwargs):
        reader = CheckpointReader(self.directory, store.model, dtype=dtype, **kwargs)
        return reader.load(device or choose_device("auto"), progress=False)

    def assert_refused(self, store, *messages, **kwargs):
        """Loading says all of the messages in one line."""
        with self.assert_one_line(*messages):
            self.load(store, **kwargs)

    def assert_loads(self, store, kind, quantized, *, rtol=0.0):
        """Leaves are of `kind` where `quantized`, and what they stand for is what was stored."""
        weights = self.load(store)
        expected = store.leaves()
        self.assertSameElements(weights, expected)
        for leaf, weight in weights.items():
            self.assertEqual(weight.shape, expected[leaf].shape)
            self.assertIsInstance(weight, kind if leaf in quantized else jax.Array, leaf)
            for array in jax.tree.leaves(weight):
                self.assertIsInstance(array, jax.Array)
            if not isinstance(weight, jax.Array):
                weight.check()
            found = values_of(weight)
            scale = np.abs(expected[leaf]).max()
            np.testing.assert_allclose(
                found, expected[leaf], rtol=0, atol=rtol * scale, err_msg=leaf
            )
        return weights
