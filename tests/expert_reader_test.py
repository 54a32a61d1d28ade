"""Experts one at a time: what a whole load gives, bit for bit; faults of files."""

import concurrent.futures
import dataclasses
import gc
import os
from unittest import mock

import jax
import numpy as np
from absl import logging
from absl.testing import parameterized

from moejax.checkpoints import open_checkpoint, save_orbax
from moejax.checkpoints import reader as readers
from moejax.checkpoints.experts import open_experts
from moejax.checkpoints.formats.interfaces import Tensors
from moejax.checkpoints.safetensors_reader import read_header
from moejax.errors import MoejaxError
from moejax.files.checksums import checksum
from moejax.weights.qtensor import QTensor
from tests.folder_case import FolderTestCase
from tests.quantized_stores import (
    MIXTRAL,
    QWEN,
    WIDE,
    Awq,
    CompressedTensors,
    Fp8,
    Gptq,
    Hqq,
    Mixed,
    MixedBits,
    Own,
    Plain,
)
from tests.random_checkpoints import empty_row

EXPERTS = ("moe.gate_up", "moe.down")
WEIGHTS = "model.safetensors"
# (name, how the store is made, whether reading it computes by JAX).
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
    ("plain", lambda: Plain(QWEN), False),
    ("plain_mixtral", lambda: Plain(MIXTRAL), False),
    ("plain_fused", lambda: Plain(QWEN, fused=True), False),
)


class ReaderTestCase(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.device = jax.devices("cpu")[0]

    def open(self, store=None, dtype="auto", **kwargs):
        """The checkpoint of a store and its reader."""
        if store is not None:
            store.write(self.directory)
        checkpoint = open_checkpoint(str(self.directory))
        reader = open_experts(checkpoint, dtype=dtype, device=self.device, **kwargs)
        self.addCleanup(reader.close)
        return checkpoint, reader

    def load(self, checkpoint, dtype="auto", **kwargs):
        return checkpoint.load(dtype=dtype, device=self.device, progress=False, **kwargs)

    def edit(self, change):
        """Changes the file under the open reader."""
        path = self.directory / WEIGHTS
        content = bytearray(path.read_bytes())
        with path.open("r+b") as file:
            change(content)
            file.write(content)
            file.truncate(len(content))


def every_expert(reader):
    return list(np.ndindex(reader.num_layers, reader.num_experts))


def without_compensators(weight):
    return dataclasses.replace(weight, compensators=()) if isinstance(weight, QTensor) else weight


def expert_rows(weights):
    """The arrays [M, E, ...] of both leaves in the order of a row."""
    leaves = [without_compensators(weights[leaf]) for leaf in EXPERTS]
    return [np.asarray(array) for array in jax.tree.leaves(leaves)]


class ValuesTest(ReaderTestCase):
    def assert_rows(self, reader, expected):
        self.assertLen(expected, len(reader.row))
        for array, part in zip(expected, reader.row, strict=True):
            self.assertEqual(array.shape, (reader.num_layers, reader.num_experts, *part.shape))
            self.assertEqual(array.dtype, part.dtype)
        row = empty_row(reader)
        self.assertEqual(reader.row_nbytes, sum(array.nbytes for array in row))
        for index in reversed(every_expert(reader)):
            for array in row:
                array.view(np.uint8)[...] = 0xA5
            reader.read(*index, row)
            for found, array in zip(row, expected, strict=True):
                np.testing.assert_array_equal(found, array[index])

    @parameterized.named_parameters(*STORES)
    def test_rows_are_what_is_loaded_whole(self, make, uses_jax):
        checkpoint, reader = self.open(make())
        whole = self.load(checkpoint)
        self.assertEqual(reader.uses_jax, uses_jax)
        templates, terms = (reader.gate_up, reader.down), reader.load_compensators(self.device)
        for template, found, leaf in zip(templates, terms, EXPERTS, strict=True):
            expected = without_compensators(whole[leaf])
            if isinstance(expected, QTensor):
                template.check()
            self.assertEqual(template.shape, expected.shape)
            self.assertEqual(
                jax.tree.map(lambda x: (x.shape, x.dtype), template),
                jax.tree.map(lambda x: (x.shape, x.dtype), expected),
            )
            expected = getattr(whole[leaf], "compensators", ())
            self.assertEqual(jax.tree.structure(found), jax.tree.structure(expected))
            jax.tree.map(np.testing.assert_array_equal, found, expected)
            for array in jax.tree.leaves(found):
                self.assertIsInstance(array, jax.Array)
        self.assert_rows(reader, expert_rows(whole))

    def test_compensators_are_there_and_read_alone(self):
        _, reader = self.open(Own(QWEN))
        read = []

        def recorded(tensors, name):
            read.append(name)
            return original(tensors, name)

        original = Tensors.read
        with mock.patch.object(Tensors, "read", recorded):
            gate_up, down = reader.load_compensators(self.device)
        self.assertNotEmpty(gate_up + down)
        self.assertNotEmpty(read)
        for name in read:
            self.assertRegex(name, r"\.experts\..*\.[uv](\.words|\.scales)?$")

    @parameterized.named_parameters(*(s[:2] for s in STORES if s[0] in ("own", "gptq", "plain")))
    def test_loading_without_experts(self, make):
        checkpoint, _ = self.open(make())
        whole, read = self.load(checkpoint), []
        original = readers.read_tensor

        def recorded(tensor, destination):
            read.append(tensor.name)
            original(tensor, destination)

        with mock.patch.object(readers, "read_tensor", recorded):
            found = self.load(checkpoint, experts=False)
        self.assertNotEmpty(read)
        self.assertEmpty([name for name in read if ".experts." in name])
        self.assertEqual(set(found), set(whole) - {*EXPERTS})
        for leaf, weight in found.items():
            jax.tree.map(np.testing.assert_array_equal, weight, whole[leaf])

    def test_threads(self):
        checkpoint, reader = self.open(Own(QWEN))
        expected = expert_rows(self.load(checkpoint))

        def work(index):
            row = empty_row(reader)
            reader.read(*index, row)
            return all(
                np.array_equal(x, y[index], equal_nan=True)
                for x, y in zip(row, expected, strict=True)
            )

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            self.assertTrue(all(threads.map(work, 50 * every_expert(reader))))

    @parameterized.product(dtype=["float32", "float16", "bfloat16"], fused=[False, True])
    def test_plain_rows_are_what_was_stored(self, dtype, fused):
        store = Plain(QWEN, fused=fused)
        _, reader = self.open(store, dtype)
        leaves = store.leaves()
        expected = [leaves[leaf].astype(dtype) for leaf in EXPERTS]
        self.assert_rows(reader, expected)


class RefusalTest(ReaderTestCase):
    def assert_refused(self, store, *messages, **kwargs):
        with self.assert_one_line(*messages):
            self.open(store, **kwargs)

    @parameterized.parameters(
        (lambda: Fp8(WIDE), "moe.gate_up is FP8, of which there are no slots"),
        (lambda: Fp8(WIDE, fused=True), "moe.gate_up is FP8, of which there are no slots"),
        (lambda: Gptq(QWEN, act_order=True), "moe.gate_up is permuted by GPTQ's act-order"),
        (lambda: Plain(dataclasses.replace(QWEN, moe_layers=())), "model has no sparse layer"),
    )
    def test_stores(self, make, said):
        self.assert_refused(make(), said)

    def test_orbax(self):
        Plain(QWEN).write(self.directory)
        weights = self.load(open_checkpoint(str(self.directory)))
        self.directory = self.directory / "orbax"
        save_orbax(self.directory, QWEN, weights)
        self.assert_refused(None, f"{self.directory} is an Orbax directory, which is loaded whole")
        with self.assertRaisesRegex(MoejaxError, "is loaded whole"):
            self.load(open_checkpoint(str(self.directory)), experts=False)

    def test_too_large_for_float16(self):
        class Large(Plain):
            def matrix(self, prefix, shape):
                tensors, weights = super().matrix(prefix, shape)
                next(iter(tensors.values()))[...] *= 1e6
                return tensors, weights

        _, reader = self.open(Large(QWEN), "float16")
        with self.assertRaisesRegex(MoejaxError, "does not fit float16"):
            reader.read(0, 0, empty_row(reader))


class FaultTest(ReaderTestCase):
    def test_bytes_that_change_between_reads(self):
        _, reader = self.open(Own(QWEN, ranks=(0,)))
        row = empty_row(reader)
        reader.read(1, 2, row)
        crc = checksum(row)
        reader.read(1, 2, row)
        path = self.directory / WEIGHTS
        own = [tensor for name, tensor in read_header(path).items() if "2.mlp.experts.2." in name]
        self.assertLen(own, 9)  # words, scales and zeros of three matrices
        for tensor in own:
            last = tensor.offset + tensor.num_bytes - 1
            self.edit(lambda content, at=last: content.__setitem__(at, content[at] ^ 0x80))
            with self.assertRaisesRegex(MoejaxError, "expert 2 of sparse layer 1 is not what was"):
                reader.read(1, 2, row)
            reader.read(1, 2, row, check=False)
            self.assertNotEqual(checksum(row), crc)
            self.edit(lambda content, at=last: content.__setitem__(at, content[at] ^ 0x80))
            reader.read(1, 2, row)

    @parameterized.named_parameters(*(s[:2] for s in STORES if s[0] in ("own", "awq", "plain")))
    def test_a_file_that_shrinks(self, make):
        _, reader = self.open(make())
        self.edit(lambda content: content.__delitem__(slice(len(content) // 8, None)))
        with self.assertRaisesRegex(MoejaxError, r"ended inside model\.layers\..*; it was changed"):
            for index in every_expert(reader):
                reader.read(*index, empty_row(reader))

    def test_an_error_of_the_disk(self):
        _, reader = self.open(Own(QWEN))
        with (
            mock.patch.object(os, "preadv", side_effect=OSError(5, "Input/output error")),
            self.assertRaisesRegex(MoejaxError, "layer 0 cannot be read .*: Input/output error"),
        ):
            reader.read(0, 1, empty_row(reader))

    @parameterized.parameters(True, False)
    def test_short_reads_and_none_of_several(self, has_preadv):
        checkpoint, reader = self.open(Own(QWEN))
        expected, original, row = expert_rows(self.load(checkpoint)), os.preadv, empty_row(reader)
        with mock.patch.object(os, "preadv", lambda f, v, at: original(f, [v[0][:100]], at)):
            if not has_preadv:
                del os.preadv
            reader.read(1, 1, row)
        for found, array in zip(row, expected, strict=True):
            np.testing.assert_array_equal(found, array[1, 1])

    def test_files_are_closed(self):
        opened = []
        original = os.open

        def recorded(path, *args, **kwargs):
            found = original(path, *args, **kwargs)
            if str(path).endswith(WEIGHTS):
                opened.append(found)
            return found

        with mock.patch.object(os, "open", recorded):
            checkpoint, reader = self.open(Own(QWEN))
            reader.close()
            with self.assertRaisesRegex(ValueError, "are closed"):
                reader.read(0, 0, empty_row(reader))
            kept = open_experts(checkpoint, dtype="auto", device=self.device)
            self.assertLen(opened, 2)
            os.fstat(opened[1])
            del kept
            gc.collect()
        for descriptor in opened:
            with self.assertRaises(OSError):
                os.fstat(descriptor)

    def test_dequantized_is_said(self):
        with self.assertLogs(logging.get_absl_logger(), "WARNING") as logs:
            self.open(MixedBits(QWEN))
        self.assertIn(
            "moe.gate_up is dequantized to float32 while it is read", "".join(logs.output)
        )
