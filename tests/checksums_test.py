"""Checksums of tensors: what they see and who writes them; loading and `verify` compare them."""

import hashlib
import itertools
import json
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from moejax import generate
from moejax.checkpoints import open_checkpoint
from moejax.checkpoints.experts import open_experts
from moejax.checkpoints.safetensors_reader import read_header
from moejax.checkpoints.safetensors_writer import write_safetensors
from moejax.checkpoints.verify import verify_checkpoint
from moejax.errors import MoejaxError
from moejax.files.checksums import CHECKSUMS, checksum, checksum_fields
from tests import commands
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import write_checkpoint
from tests.quantized_stores import QWEN, Gptq, Own
from tests.random_checkpoints import empty_row, write_tokenizer

WEIGHTS = "model.safetensors"


def by_hand(content: bytes) -> int:
    """Computes the checksum with Python's integers."""
    padded = content + bytes(-len(content) % (8 * 509))
    sums = [0] * 509
    for at in range(0, len(padded), 8):
        sums[at // 8 % 509] += int.from_bytes(padded[at : at + 8], "little")
    words = b"".join((total % 2**64).to_bytes(8, "little") for total in sums)
    return zlib.crc32(words, len(content))


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


class ChecksumTest(parameterized.TestCase):
    @parameterized.parameters(0, 1, 8, 4071, 4072, 4073, 20_000)
    def test_as_defined(self, size):
        content = random_bytes(size)
        self.assertEqual(checksum([content]), by_hand(content.tobytes()))

    def test_pieces(self):
        content = random_bytes(30_001)
        cuts = [0, 1, 1, 4072, 4073, 9000, 29_000, 30_001]
        pieces = [content[a:b] for a, b in itertools.pairwise(cuts)]
        self.assertEqual(checksum(pieces), checksum([content]))
        self.assertNotEqual(checksum([content[:-1]]), checksum([content]))

    def test_arrays_of_other_types(self):
        array = random_bytes(4096).view(np.uint16).reshape(32, 64)
        for dtype in (np.float16, jnp.bfloat16, np.int16):
            self.assertEqual(checksum([array.view(dtype)]), checksum([array]))

    def test_damage_is_seen(self):
        content = random_bytes(3 * 4096 + 5)
        whole = checksum([content])
        for bit in np.random.default_rng(1).integers(0, 8 * content.size, 500):
            damaged = content.copy()
            damaged[bit // 8] ^= 1 << (bit % 8)
            self.assertNotEqual(checksum([damaged]), whole, bit)
        swapped = content.copy()
        swapped[:4096], swapped[4096:8192] = content[4096:8192], content[:4096]
        zeroed = content.copy()
        zeroed[4096:8192] = 0
        for damaged in (swapped, zeroed, content[::-1].copy(), np.append(content, np.uint8(0))):
            self.assertNotEqual(checksum([damaged]), whole)


def flip(path: Path, bit: int = -6) -> None:
    """Flips a bit of a file's tensors, by its number or from the end."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start + bit // 8 % (len(content) - start)] ^= 1 << (bit % 8)
    path.write_bytes(content)


class FilesTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.device = jax.devices("cpu")[0]

    def _write_own(self) -> None:
        """A packed checkpoint, its weights written as moejax.quantize writes them."""
        store = Own(QWEN)
        store.write(self.directory)
        written = write_safetensors(self.directory / WEIGHTS, store.tensors)
        path = self.directory / "quantization.json"
        manifest = json.loads(path.read_text())
        manifest["files"] = {WEIGHTS: written._asdict()}
        path.write_text(json.dumps(manifest))

    def _load(self):
        checkpoint = open_checkpoint(str(self.directory))
        return checkpoint.load(dtype="float32", device=self.device, progress=False)

    @parameterized.parameters(*range(10))
    def test_a_flipped_bit_of_a_packed_checkpoint(self, seed):
        self._write_own()
        path = self.directory / WEIGHTS
        flip(path, int(np.random.default_rng(seed).integers(2**40)))
        with self.assert_one_line(str(path), "is not what was written ", "copy it again"):
            self._load()
        checkpoint = open_checkpoint(str(self.directory))
        with (
            self.assertRaisesRegex(MoejaxError, "is not what was written"),
            open_experts(checkpoint, dtype="float32", device=self.device) as reader,
        ):
            checkpoint.load(
                dtype="float32", device=self.device, progress=False, experts=False
            )  # the flip is in one of the two
            for layer, expert in np.ndindex(reader.num_layers, reader.num_experts):
                reader.read(layer, expert, empty_row(reader))

    def test_old_checkpoints_load(self):
        self._write_own()
        found = self._load()
        path = self.directory / WEIGHTS
        save_file(load_file(path), path, {"format": "pt"})
        manifest = self.directory / "quantization.json"
        fields = json.loads(manifest.read_text())
        fields["files"] = {}
        manifest.write_text(json.dumps(fields))
        self.assertIsNone(next(iter(read_header(path).values())).checksum)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(self._load()), strict=True):
            np.testing.assert_array_equal(one, other)

    def test_other_readers_read_what_is_written(self):
        arrays = {"a": random_bytes(100), "b": np.ones((2, 3), np.float32), "c": np.ones(0, "f4")}
        path = self.directory / "x.safetensors"
        write_safetensors(path, arrays)
        for name, array in load_file(path).items():
            np.testing.assert_array_equal(array, arrays[name])
        with safe_open(path, framework="numpy") as file:
            said = json.loads(file.metadata()[CHECKSUMS])
        expected = {name: f"{by_hand(a.tobytes()):08x}" for name, a in arrays.items()}
        self.assertEqual(said, expected)

    def test_what_is_copied_is_compared(self):
        array = np.random.default_rng(0).standard_normal((300, 70)).astype(np.float32)
        path = self.directory / "x.safetensors"
        write_safetensors(path, {"a": array})
        copy = self.directory / "y.safetensors"
        write_safetensors(copy, {"b": read_header(path)["a"]})
        self.assertEqual(read_header(copy)["b"].checksum, checksum([array]))
        flip(path, 77)
        copy.unlink()
        with self.assertRaisesRegex(MoejaxError, "x.safetensors: a is not what was written"):
            write_safetensors(copy, {"b": read_header(path)["a"]})
        self.assertEqual([found.name for found in self.directory.iterdir()], [path.name])

    @parameterized.parameters(
        ({"a": 0, "b": 0, "c": 0}, "c has a checksum and no data"),
        ({"a": 0}, "b has no checksum"),
        ({"a": 0, "B": 0}, "B has a checksum and no data"),
    )
    def test_checksums_of_other_tensors(self, said, reason):
        path = self.directory / "x.safetensors"
        save_file({"a": random_bytes(8), "b": random_bytes(8)}, path, checksum_fields(said))
        with self.assertRaisesRegex(MoejaxError, f"x.safetensors is not .*{reason}"):
            read_header(path)

    @parameterized.parameters("not JSON", "[]", '{"a": "xyz"}', '{"a": 1}', "[" * 100_000)
    def test_checksums_that_are_not_understood(self, said):
        path = self.directory / "x.safetensors"
        save_file({"a": random_bytes(8)}, path, {CHECKSUMS: said})
        with self.assertRaisesRegex(MoejaxError, "moejax_checksums .* not understood"):
            read_header(path)


class VerifyTest(FolderTestCase):
    def test_nothing_to_compare_with_is_said(self):
        path = write_checkpoint("qwen3", self.directory)
        self.assertRegex(
            verify_checkpoint(str(path)), f"^not verified: nothing says what the files of {path}"
        )

    @pytest.mark.slow
    def test_a_run_says_so(self):
        path = write_checkpoint("qwen3", self.directory)
        write_tokenizer(path, 160)
        given = {"checkpoint": path, "max_new_tokens": 1}
        _, said = commands.succeed(generate.COMMAND, "--prompt=a", "--verify", **given)
        self.assertRegex(said, f"(?m)^not verified: nothing says what the files of {path} should")
        _, said = commands.succeed(generate.COMMAND, "--prompt=a", **given)
        self.assertNotIn("verified", said)

    def test_demo(self):
        said = verify_checkpoint("demo")
        self.assertEqual(said, "verified demo: 737 tensors by the checksums in their files")

    def test_tensors_without_checksums_are_counted(self):
        path = write_checkpoint("qwen3_bf16_sharded", self.directory)
        first = sorted(path.glob("*.safetensors"))[0]
        tensors = load_file(first)
        write_safetensors(first, tensors)
        said = verify_checkpoint(str(path))
        self.assertRegex(said, f": {len(tensors)} tensors by .*; not verified: [0-9]+ tensors")
        flip(first)
        with self.assertRaisesRegex(MoejaxError, f"{first.name}: .* is not what was written"):
            verify_checkpoint(str(path))

    def test_other_formats_beside_a_manifest(self):
        Gptq(QWEN).write(self.directory)
        file = self.directory / WEIGHTS
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        (self.directory / "quantization.json").write_text(
            f'{{"files": {{"{WEIGHTS}": {{"size": {file.stat().st_size}, "sha256": "{sha256}"}}}}}}'
        )
        self.assertRegex(verify_checkpoint(str(self.directory)), "1 files by SHA-256 of quant")
        flip(file)
        with self.assertRaisesRegex(MoejaxError, f"{file} is not what was written"):
            verify_checkpoint(str(self.directory))

    def test_cache_of_the_hub(self):
        path = write_checkpoint("qwen3", self.directory)
        file, blobs = path / WEIGHTS, self.directory / "blobs"
        save_file(load_file(file), file)
        blobs.mkdir()
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        file.symlink_to(blob)
        self.assertRegex(verify_checkpoint(str(path)), "1 files by the SHA-256 that the hub's")
        flip(blob)
        with self.assertRaisesRegex(MoejaxError, "is not what the hub holds .*download it again"):
            verify_checkpoint(str(path))
