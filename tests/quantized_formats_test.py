"""Every quantized format, matrix by matrix: what is read equals what independent writers stored.

Our format there and back; GPTQ v2 and compressed-tensors as they are written.
"""

import dataclasses
import json
import re
import warnings

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import parameterized

from moejax.checkpoints.formats.interfaces import Tensors
from moejax.checkpoints.formats.manifest import MANIFEST_FILE, quantization_config
from moejax.checkpoints.formats.native import matrix_tensors, whole_compensator
from moejax.checkpoints.formats.registry import open_format
from moejax.checkpoints.safetensors_reader import stored_tensors
from moejax.errors import MoejaxError
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

_CT = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def scheme(bits, group_size, symmetric, **more):
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group_size,
        "strategy": "group" if group_size else "channel", **more,
    }  # fmt: skip
    return {"targets": ["Linear"], "weights": weights}


def gptq(bits, group_size=32, **more):
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **more}


class GptqTest(FormatTestCase):
    SHAPE = (64, 160)

    @parameterized.product(
        bits=[2, 3, 4, 8], is_v1=[True, False], symmetric=[True, False], act_order=[True, False]
    )
    def test_values(self, bits, is_v1, symmetric, act_order):
        stored = files.random_matrix(
            self.SHAPE,
            bits=bits,
            group_size=64,  # 160 inputs: the last group is shorter
            symmetric=symmetric,
            act_order=act_order,
        )
        if not symmetric:
            self.assertEqual(stored.zeros.min(), 0)
        version = "gptq" if is_v1 else "gptq_v2"
        config = gptq(bits, 64, sym=symmetric, desc_act=act_order, checkpoint_format=version)
        matrix = self.assert_reads(config, files.gptq(stored, bits, is_v1=is_v1), stored)
        self.assertEqual(matrix.zero_kind, "symmetric" if symmetric else "integer")
        self.assertEqual(matrix.permutation is not None, act_order)

    @parameterized.parameters((4, "gptq", False), (4, "gptq_v2", True), (8, None, False))
    def test_symmetric_zeros_go_by_value(self, bits, label, is_v1):
        # The label says the other version than the constant that is stored.
        stored = files.random_matrix(self.SHAPE, bits=bits, group_size=160, symmetric=True)
        config = gptq(bits, -1) | ({"checkpoint_format": label} if label else {})
        tensors = files.gptq(stored, bits, is_v1=is_v1, has_groups=False)
        matrix = self.assert_reads(config, tensors, stored)
        self.assertEqual(matrix.zero_kind, "symmetric")

    @parameterized.product(bits=[2, 3, 4, 8], runs=[[0], [0, 0, 1], [1, 0, 0]])
    def test_borrows_of_v1_that_cross_fields(self, bits, runs):
        stored = files.random_matrix(self.SHAPE, bits=bits, group_size=32)
        stored.zeros[:] = np.resize(runs, stored.zeros.T.shape).T
        self.assert_reads(gptq(bits, sym=False), files.gptq(stored, bits, is_v1=True), stored)

    @parameterized.parameters(
        ("gptqmodel:5.8.0", False, False),
        (["gptqmodel:6.0.3", "x:1"], True, True),
        (None, True, False),
    )
    def test_three_bits_of_older_gptqmodel(self, quantizer, symmetric, act_order):
        stored = files.random_matrix(
            self.SHAPE, bits=3, group_size=32, symmetric=symmetric, act_order=act_order
        )
        tensors = files.gptq(stored, 3, is_v1=False)
        words = tensors["qzeros"].view(np.uint32)
        for word, taken in enumerate((0x24924924, 0x92492492, 0x49249249)):
            words[:, word::3] -= np.uint32(taken)
        config = gptq(3, sym=symmetric) | ({"meta": {"quantizer": quantizer}} if quantizer else {})
        matrix = self.assert_reads(config, tensors, stored)
        self.assertEqual(matrix.zero_kind, "symmetric" if symmetric else "integer")

    def test_scales_in_bfloat16_are_kept(self):
        stored = files.random_matrix(
            self.SHAPE, bits=4, group_size=32, symmetric=True, dtype=ml_dtypes.bfloat16
        )
        self.assert_reads(gptq(4), files.gptq(stored, 4, is_v1=True), stored)

    def test_dynamic_settings(self):
        stored = files.random_matrix(self.SHAPE, bits=8, group_size=32)
        rules = {"-:.*gate$": {}, r"+:a\.b$": {"bits": 8, "group_size": 32}}
        config = gptq(4, 128, sym=False, checkpoint_format="gptq_v2", dynamic=rules)
        self.assert_reads(config, files.gptq(stored, 8, is_v1=False), stored)

    @parameterized.parameters(
        ({"bits": 5}, "bits is 5, expected 2 or 3 or 4 or 8"),
        ({"group_size": 0}, "group_size is 0, expected a positive integer or -1"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"dynamic": {"+:(": {}}}, "pattern '\\('"),
        ({"sym": "yes"}, "sym is 'yes', expected true or false"),
        ({"quant_method": "exl2"}, "'exl2'; supported are moejax, gptq, awq, compressed-tensors"),
        ({"quant_method": None}, "quant_method None; supported are"),
    )
    def test_configs_that_are_not_understood(self, changed, message):
        path = re.escape(str(self.directory / "config.json"))
        with self.assertRaisesRegex(MoejaxError, f"{path}.*{message}"):
            open_format(self.directory, gptq(4) | changed)

    def test_mislabelled_bits_show_both_shapes(self):
        stored = files.random_matrix(self.SHAPE, bits=8, group_size=32)
        said = r"a.b.qweight is \[40, 64\] in the file, \[20, 64\] by config.json"
        with self.assertRaisesRegex(MoejaxError, said):
            self.read(gptq(4), files.gptq(stored, 8, is_v1=True), self.SHAPE)

    def test_uneven_groups(self):
        stored = files.random_matrix(self.SHAPE, bits=4, group_size=32)
        tensors = files.gptq(stored, 4, is_v1=True)
        tensors["g_idx"] = np.where(stored.groups == 1, 0, stored.groups).astype(np.int32)
        with self.assertRaisesRegex(MoejaxError, "a.b.g_idx has groups that are not of 32 inputs"):
            self.read(gptq(4), tensors, self.SHAPE)


class AwqTest(FormatTestCase):
    @parameterized.parameters(32, -1)
    def test_values(self, group_size):
        size = group_size if group_size > 0 else 96
        stored = files.random_matrix((48, 96), bits=4, group_size=size)
        config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm"}
        self.assert_reads(config, files.awq(stored), stored)

    @parameterized.parameters(({"version": "gemv"}, "'gemv'"), ({"bits": 8}, "awq has 4"))
    def test_refused(self, changed, message):
        config = {"quant_method": "awq", "bits": 4, "group_size": 32, **changed}
        with self.assertRaisesRegex(MoejaxError, message):
            open_format(self.directory, config)


class AutoRoundTest(FormatTestCase):
    @parameterized.parameters(
        ("auto-round", "auto_round:auto_gptq", 3, True, True),
        ("auto-round", "auto_round:auto_gptq", 4, True, False),
        ("auto-round", "auto_round", 2, False, False),
        ("intel/auto-round", "auto_round:exllamav2", 4, False, False),
        ("auto-round", "auto_round:auto_awq", 4, False, False),
    )
    def test_values(self, method, packing, bits, is_v1, symmetric):
        stored = files.random_matrix((32, 64), bits=bits, group_size=32, symmetric=symmetric)
        own = {"bits": bits, "group_size": 32, "sym": symmetric}
        config = {
            "quant_method": method, "packing_format": packing, "bits": 4, "group_size": 128,
            "sym": True, "data_type": "int", "extra_config": {"a.b": own},
        }  # fmt: skip
        if "awq" in packing:
            tensors = files.awq(stored)
            config["group_size"] = 32
        else:
            tensors = files.gptq(stored, bits, is_v1=is_v1, has_groups=False)
        self.assert_reads(config, tensors, stored)

    @parameterized.parameters(
        ({"data_type": "mx_fp"}, "'mx_fp'"), ({"packing_format": "auto_x"}, "'auto_x'")
    )
    def test_refused(self, changed, message):
        config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, **changed}
        with self.assertRaisesRegex(MoejaxError, message):
            open_format(self.directory, config)


class CompressedTensorsTest(FormatTestCase):
    @parameterized.product(bits=[2, 3, 4, 8], symmetric=[True, False], group_size=[32, None])
    def test_values(self, bits, symmetric, group_size):
        stored = files.random_matrix(
            (13, 160), bits=bits, group_size=group_size or 160, symmetric=symmetric,
            dtype=np.float16 if symmetric else ml_dtypes.bfloat16,
        )  # fmt: skip
        config = {**_CT, "config_groups": {"group_0": scheme(bits, group_size, symmetric)}}
        tensors = files.compressed_tensors(stored, bits, symmetric=symmetric)
        matrix = self.assert_reads(config, tensors, stored)
        self.assertEqual(matrix.zero_kind, "symmetric" if symmetric else "integer")

    @parameterized.parameters(7, 33, 100)
    def test_odd_sizes(self, num_inputs):
        stored = files.random_matrix((5, num_inputs), bits=3, group_size=num_inputs)
        config = {**_CT, "config_groups": {"group_0": scheme(3, None, False)}}
        tensors = files.compressed_tensors(stored, 3, symmetric=False)
        self.assert_reads(config, tensors, stored)

    def test_act_order_of_older_versions(self):
        stored = files.random_matrix((8, 128), bits=4, group_size=32, act_order=True)
        group = scheme(4, 32, False, actorder="group")
        tensors = files.compressed_tensors(stored, 4, symmetric=False, act_order=True)
        matrix = self.assert_reads({**_CT, "config_groups": {"x": group}}, tensors, stored)
        self.assertIsNotNone(matrix.permutation)

    def test_ten_codes_a_word_of_older_versions(self):
        stored = files.random_matrix((40, 320), bits=3, group_size=64)

        def tens(codes):
            padded = np.pad(codes, [(0, 0), (0, -codes.shape[1] % 10)]).astype(np.uint32)
            words = padded.reshape(codes.shape[0], -1, 10) << (3 * np.arange(10, dtype=np.uint32))
            return words.sum(axis=-1, dtype=np.uint32).view(np.int32)

        tensors = files.compressed_tensors(stored, 3, symmetric=False)
        tensors["weight_packed"] = tens(stored.codes)
        config = {**_CT, "config_groups": {"x": scheme(3, 64, False)}}
        self.assert_reads(config, tensors, stored)

    def test_a_group_that_names_a_module_goes_before_its_class(self):
        stored = files.random_matrix((8, 64), bits=8, group_size=64, symmetric=True)
        named = scheme(8, None, True) | {"targets": ["re:.*b$"]}
        config = {**_CT, "config_groups": {"x": scheme(4, 32, True), "y": named}}
        tensors = files.compressed_tensors(stored, 8, symmetric=True)
        self.assert_reads(config, tensors, stored)

    @parameterized.parameters(
        ({"format": "nvfp4-pack-quantized"}, {}, "'nvfp4-pack-quantized'"),
        ({}, {"strategy": "block"}, "by 'block'"),
        ({}, {"type": "float"}, "type 'float'"),
        ({}, {"num_bits": 6}, "num_bits is 6"),
        ({"config_groups": {}}, {}, "no config_groups"),
    )
    def test_refused(self, changed, weights, message):
        config = {**_CT, "config_groups": {"x": scheme(4, 32, True, **weights)}, **changed}
        with self.assertRaisesRegex(MoejaxError, message):
            open_format(self.directory, config)

    def test_stored_shape_that_disagrees(self):
        stored = files.random_matrix((8, 64), bits=4, group_size=64, symmetric=True)
        tensors = files.compressed_tensors(stored, 4, symmetric=True)
        tensors["weight_shape"] = np.array([8, 60])
        config = {**_CT, "config_groups": {"x": scheme(4, None, True)}}
        with self.assertRaisesRegex(MoejaxError, r"weight_shape says \[8, 60\], config.json \[8"):
            self.read(config, tensors, (8, 64))


class Fp8Test(FormatTestCase):
    @parameterized.parameters(
        ((256, 384), np.float32), ((130, 100), np.float32), ((128, 256), ml_dtypes.bfloat16)
    )
    def test_values(self, shape, dtype):
        tensors, weights = files.fp8(shape, 0, dtype)
        config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
        matrix = self.read(config, tensors, shape)
        np.testing.assert_array_equal(dequantized(matrix), weights)
        self.assertEqual(matrix.values.dtype, jnp.float8_e4m3fn)

    def test_fused_experts(self):
        shape = (3, 200, 130)
        tensors, weights = files.fp8(shape, 0)
        named = {"a.b": tensors["weight"], "a.b_scale_inv": tensors["weight_scale_inv"]}
        files.write(self.directory / "model.safetensors", named)
        stored = Tensors(stored_tensors(self.directory))
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        found = open_format(self.directory, config).find("a.b", shape, stored)
        np.testing.assert_array_equal(dequantized(found.read()), weights)

    @parameterized.parameters(
        ({"weight_block_size": [64, 128]}, r"\[64, 128\]; of fp8, blocks of \[128, 128\]"),
        ({"weight_block_size": None}, "weight_block_size is None"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
    )
    def test_refused(self, changed, message):
        config = {"quant_method": "fp8", "weight_block_size": [128, 128], **changed}
        with self.assertRaisesRegex(MoejaxError, message):
            open_format(self.directory, config)

    def test_values_without_scales(self):
        tensors, _ = files.fp8((128, 128), 0)
        del tensors["weight_scale_inv"]
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        with self.assertRaisesRegex(MoejaxError, r"missing tensors \(1\): a.b.weight_scale_inv"):
            self.read(config, tensors, (128, 128))


class HqqTest(FormatTestCase):
    CONFIG = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {}}}  # noqa: RUF012

    def quantized(self, shape, dtype="float32", **params):
        """Quantizes by the hqq library: tensors as its modules store them, and weights."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit says that it is deprecated
            import torch
            from hqq.core.quantize import Quantizer
            from hqq.core.utils import encode_safetensor_type
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        codes, meta = Quantizer.quantize(weights, device="cpu", **params)
        for name in ("scale", "zero"):
            meta[name] = meta[name].to(getattr(torch, dtype))
        expected = Quantizer.dequantize(codes, {**meta, "compute_dtype": torch.float32})
        encoded = {name: encode_safetensor_type(value) for name, value in meta.items()}
        stored = {"W_q": codes, **{k: v for k, v in encoded.items() if v is not None}}
        return {name: value.numpy() for name, value in stored.items()}, expected.numpy()

    @parameterized.parameters(
        *((bits, group_size) for bits in (8, 4, 3, 2) for group_size in (16, 64)),
        (6, 64),
        (4, None),  # per channel, which the library itself cannot unpack at 3 bits
    )
    def test_values(self, bits, group_size):
        shape = (24, 128)
        tensors, expected = self.quantized(shape, nbits=bits, group_size=group_size, axis=1)
        matrix = self.read(self.CONFIG, tensors, shape)
        np.testing.assert_array_equal(dequantized(matrix), expected)
        self.assertEqual(matrix.zero_kind, "float")

    def test_half_precision(self):
        tensors, expected = self.quantized((16, 64), "float16", nbits=4, group_size=64, axis=1)
        matrix = self.read(self.CONFIG, tensors, (16, 64))
        self.assertEqual(matrix.scales.dtype, np.float16)
        np.testing.assert_allclose(dequantized(matrix), expected, rtol=1e-3, atol=1e-4)
        wide = matrix.scales.astype(np.float32), matrix.zeros.astype(np.float32)
        codes = np.asarray(matrix.codes()).astype(np.float32)
        np.testing.assert_array_equal(dequantized(matrix), (codes - wide[1]) * wide[0])

    @parameterized.parameters(
        ({"axis": 0}, "axis 0, groups of different outputs"),
        ({"axis": 1, "view_as_float": True}, "view_as_float"),
        ({"axis": 1, "nbits": 1}, "packing '1bit_u8'; 8bit_u8, 4bit_u8"),
        ({"axis": 1, "group_size": 128}, "groups of 128 codes, which are no part of its 64"),
    )
    def test_refused(self, changed, message):
        params = {"nbits": 4, "group_size": 64, **changed}
        tensors, _ = self.quantized((16, 64), **params)
        with self.assertRaisesRegex(MoejaxError, message):
            self.read(self.CONFIG, tensors, (16, 64))


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
    def assert_written(self, write, config_of, shape, expected_of, **how):
        """Tensors are those that the format's own text makes, and its reader reads them back."""
        stored = files.random_matrix(shape, **how)
        matrix = files_matrix(stored, how["bits"], how["symmetric"])
        tensors = {k.removeprefix("a.b."): v for k, v in write("a.b", matrix).items()}
        expected = expected_of(stored)
        self.assertSameElements(tensors, expected)
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, expected[name], err_msg=name)
            self.assertEqual(tensor.dtype, expected[name].dtype)
        self.assert_reads(config_of({"a.b": kind_of(matrix)}, []), tensors, stored)

    @parameterized.product(bits=[2, 3, 4, 8], symmetric=[True, False], group_size=[32, 96])
    def test_gptq(self, **how):
        self.assert_written(
            _gptq_tensors, _gptq_config, (32, 96),
            lambda stored: files.gptq(stored, how["bits"], is_v1=False), **how,
        )  # fmt: skip

    @parameterized.product(bits=[2, 3, 4, 8], symmetric=[True, False], group_size=[25, 100])
    def test_compressed_tensors(self, bits, symmetric, group_size):
        self.assert_written(
            _compressed_tensors_tensors, _compressed_tensors_config, (13, 100),
            lambda stored: files.compressed_tensors(stored, bits, symmetric=symmetric),
            bits=bits, symmetric=symmetric, group_size=group_size,
        )  # fmt: skip

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
                self.assert_reads(written, named, stores[bits], prefix)
