"""`verify`: compares files with whatever says what they should hold, or says that nothing does."""

import hashlib
from pathlib import Path

from safetensors.numpy import load_file, save_file

from moejax.checkpoints.safetensors_writer import write_safetensors
from moejax.checkpoints.verify import verify_checkpoint
from moejax.errors import MoejaxError
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import write_checkpoint
from tests.quantized_stores import QWEN, Gptq

WEIGHTS = "model.safetensors"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


class VerifyTest(FolderTestCase):
    def test_nothing_to_compare_with_is_said(self):
        path = write_checkpoint("qwen3", self.directory)
        self.assertRegex(
            verify_checkpoint(str(path)), f"^not verified: nothing says what the files of {path}"
        )

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
