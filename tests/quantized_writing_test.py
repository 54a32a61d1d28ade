"""Written quantized matrices: our format there and back, GPTQ v2, compressed-tensors."""

import dataclasses
import json

import ml_dtypes
import numpy as np
from absl.testing import parameterized

from moejax.checkpoints.formats.manifest import MANIFEST_FILE, quantization_config
from moejax.checkpoints.formats.native import matrix_tensors, whole_compensator
from moejax.quantization.pipeline.export import (
    _compressed_tensors_config,
    _compressed_tensors_tensors,
    _ExportedKind,
    _gptq_config,
    _gptq_tensors,
)
from moejax.weights.qtensor import from_codes
from tests import quantized_files as files
from tests.quantized_stores import FormatTestCase, dequantized


class OwnTest(FormatTestCase):
    @parameterized.product(
        bits=[2, 3, 4, 8],
        zero_kind_and_factor_bits=[
            ("float", None),
            ("float", 3),
            ("integer", 4),
            ("float", 8),
            ("symmetric", 16),
        ],
    )
    def test_round_trip(self, bits, zero_kind_and_factor_bits):
        zero_kind, factor_bits = zero_kind_and_factor_bits
        rng = np.random.default_rng(bits)
        shape, group_size, rank = (45, 100), 64, 5
        size = (45, 2)
        matrix = from_codes(
            rng.integers(0, 2**bits, shape, dtype=np.uint8),
            rng.uniform(0.1, 1, size),
            rng.uniform(0, 3, size),
            bits=bits,
            group_size=group_size,
            zero_kind=zero_kind,
        )
        if factor_bits:
            # Pools of a stack: the matrix owns rows 2 to 7 of them.
            u, v = (self._factor(rng, length, factor_bits) for length in shape)
            compensator = dataclasses.replace(
                whole_compensator(u, v), start=np.array(2, np.int32), rank=np.array(rank, np.int32)
            )
            matrix = dataclasses.replace(matrix, compensators=(compensator,))
        tensors = matrix_tensors("a.b", matrix)
        num_bytes = matrix.words.nbytes + matrix.scales.nbytes
        num_bytes += 0 if matrix.zeros is None else matrix.zeros.nbytes
        if factor_bits == 16:
            num_bytes += 2 * rank * sum(shape)
        elif factor_bits:
            words = (64 + 128) * factor_bits // 32  # rows are padded to 32 codes
            num_bytes += rank * (4 * words + 2 * (1 + 2))
        self.assertEqual(sum(tensor.nbytes for tensor in tensors.values()), num_bytes)
        entry = {"shape": shape, "bits": bits, "group_size": group_size, "zero_kind": zero_kind}
        config = quantization_config()
        manifest = {"layout": config["layout"], "tensors": {"a.b.weight": entry}, "files": {}}
        (self.directory / MANIFEST_FILE).write_text(json.dumps(manifest))
        named = {name.removeprefix("a.b."): tensor for name, tensor in tensors.items()}
        found = self.read(config, named, shape)
        self.assertEqual(found.zero_kind, zero_kind)
        bare = [dataclasses.replace(m, compensators=()) for m in (found, matrix)]
        np.testing.assert_array_equal(dequantized(bare[0]), dequantized(bare[1]))
        self.assertLen(found.compensators, int(factor_bits is not None))
        for compensator in found.compensators:
            self.assertEqual((int(compensator.start), int(compensator.rank)), (0, rank))
            for part, pool in ((compensator.u, u), (compensator.v, v)):
                values = [
                    np.asarray(x if factor_bits == 16 else x.dequantize()) for x in (part, pool)
                ]
                np.testing.assert_array_equal(values[0], values[1][2 : 2 + rank])

    def _factor(self, rng, length, bits):
        if bits == 16:
            return rng.normal(size=(9, length)).astype(ml_dtypes.bfloat16)
        groups = -(-length // min(64, length))
        return from_codes(
            rng.integers(0, 2**bits, (9, length), dtype=np.uint8),
            rng.uniform(0.1, 1, (9, groups)),
            None,
            bits=bits,
            group_size=min(64, length),
            zero_kind="symmetric",
        )

    def test_no_factors_of_rank_0(self):
        rng = np.random.default_rng(0)
        factors = [rng.normal(size=(0, n)).astype(ml_dtypes.bfloat16) for n in (4, 32)]
        matrix = dataclasses.replace(
            files_matrix(files.random_matrix((4, 32), bits=4, group_size=32), 4),
            compensators=(whole_compensator(*factors),),
        )
        self.assertSameElements(matrix_tensors("a", matrix), ["a.words", "a.scales", "a.zeros"])


def files_matrix(stored, bits, symmetric=False):
    """A QTensor of what `random_matrix` drew, its act-order included."""
    order = np.argsort(stored.groups, kind="stable").astype(np.int32)
    matrix = from_codes(
        stored.codes[:, order],
        stored.scales,
        stored.zeros,
        bits=bits,
        group_size=int((stored.groups == 0).sum()),
        zero_kind="symmetric" if symmetric else "integer",
    )
    if np.array_equal(order, np.arange(len(order))):
        return matrix
    return dataclasses.replace(matrix, permutation=order)


def kind_of(matrix):
    """The settings of a matrix as configs have them."""
    per_channel = matrix.group_size == matrix.num_inputs
    return _ExportedKind(
        matrix.bits, -1 if per_channel else matrix.group_size, matrix.zeros is None
    )


class WriterTest(FormatTestCase):
    @parameterized.product(bits=[2, 3, 4, 8], symmetric=[True, False], group_size=[32, 96])
    def test_gptq(self, bits, symmetric, group_size):
        shape = (32, 96)
        stored = files.random_matrix(shape, bits=bits, group_size=group_size, symmetric=symmetric)
        matrix = files_matrix(stored, bits, symmetric)
        tensors = {k.removeprefix("a.b."): v for k, v in _gptq_tensors("a.b", matrix).items()}
        expected = files.gptq(stored, bits, is_v1=False)
        self.assertSameElements(tensors, expected)
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, expected[name], err_msg=name)
            self.assertEqual(tensor.dtype, expected[name].dtype)
        config = _gptq_config({"a.b": kind_of(matrix)}, [])
        again = self.read(config, tensors, shape)
        np.testing.assert_array_equal(dequantized(again), stored.weights)

    @parameterized.product(bits=[2, 3, 4, 8], symmetric=[True, False], group_size=[25, 100])
    def test_compressed_tensors(self, bits, symmetric, group_size):
        shape = (13, 100)
        stored = files.random_matrix(shape, bits=bits, group_size=group_size, symmetric=symmetric)
        matrix = files_matrix(stored, bits, symmetric)
        written = _compressed_tensors_tensors("a.b", matrix)
        tensors = {k.removeprefix("a.b."): v for k, v in written.items()}
        expected = files.compressed_tensors(stored, bits, symmetric=symmetric)
        self.assertSameElements(tensors, expected)
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, expected[name], err_msg=name)
            self.assertEqual(tensor.dtype, expected[name].dtype)
        config = _compressed_tensors_config({"a.b": kind_of(matrix)}, [])
        again = self.read(config, tensors, shape)
        np.testing.assert_array_equal(dequantized(again), stored.weights)

    def test_configs_name_what_differs(self):
        stores = {
            4: files.random_matrix((32, 128), bits=4, group_size=64, symmetric=True),
            8: files.random_matrix((32, 128), bits=8, group_size=128),
        }
        matrices = {bits: files_matrix(stored, bits, bits == 4) for bits, stored in stores.items()}
        usual, odd = (kind_of(matrix) for matrix in matrices.values())
        kinds = {f"m.{i}.up": usual for i in range(12)} | {f"m.{i}.q": odd for i in range(3)}
        kinds["m.3.q"] = usual
        config = _gptq_config(kinds, [f"m.{i}.gate" for i in range(12)] + ["lm_head"])
        self.assertEqual((config["bits"], config["group_size"], config["sym"]), (4, 64, True))
        self.assertSameElements(
            config["dynamic"],
            [r"-:^m\.\d+\.gate$", "-:^lm_head$", *(rf"+:^m\.{i}\.q$" for i in range(3))],
        )
        packed = _compressed_tensors_config(kinds, ["lm_head"])
        for written, write in ((config, _gptq_tensors), (packed, _compressed_tensors_tensors)):
            for prefix, bits in (("m.2.q", 8), ("m.3.q", 4)):
                tensors = write("a", matrices[bits])
                named = {name.removeprefix("a."): tensor for name, tensor in tensors.items()}
                again = self.read(written, named, (32, 128), prefix)
                np.testing.assert_array_equal(dequantized(again), stores[bits].weights)
