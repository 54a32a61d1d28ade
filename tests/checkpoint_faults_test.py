"""Broken checkpoints: one line that names the thing and the mend."""

import json
import shutil
from unittest import mock

import huggingface_hub
import jax.numpy as jnp
import torch
from absl.testing import parameterized
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from moejax.checkpoints import open_checkpoint, resolve_checkpoint, stored_dtype
from moejax.demo import DEMO_DIRECTORY
from moejax.errors import MoejaxError
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import load_leaves, write_checkpoint

NORM = "model.norm.weight"  # not alone in its file


def edit_tensors(path, edit):
    """Rewrites the one weight file of a checkpoint."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def edit_config(path, **changed):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changed}))


class FaultTest(FolderTestCase):
    def assert_refused(self, path, *messages):
        """Loading says all of the messages in one line."""
        with self.assert_one_line(*messages):
            load_leaves(path)

    @parameterized.parameters(
        ("pytorch_model.bin", "pytorch_model.bin is a pickle, which can run any code"),
        ("qmodel.pt", "qmodel.pt is a pickle, which can run any code"),
        ("model.gguf", "weights of other formats must be"),
    )
    def test_no_weights(self, name, said):
        path = write_checkpoint("qwen3", self.directory)
        (path / "model.safetensors").rename(path / name)
        self.assert_refused(path, "no model.safetensors", str(path), said, "to safetensors")

    def test_missing_shard(self):
        path = write_checkpoint("qwen3_bf16_sharded", self.directory)
        (path / "model-00002-of-00008.safetensors").unlink()
        self.assert_refused(path, "1 of 8 weight files", "model-00002-of-00008", "the download")

    def test_index_without_map(self):
        path = write_checkpoint("qwen3_bf16_sharded", self.directory)
        (path / "model.safetensors.index.json").write_text("{}")
        self.assert_refused(path, "model.safetensors.index.json has no weight_map")

    @parameterized.parameters(0, 5, 100, -1, -50_000)
    def test_truncated(self, num_bytes):
        path = write_checkpoint("qwen3", self.directory)
        file = path / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:num_bytes])
        size = len(content[:num_bytes])
        self.assert_refused(path, f"{file} is truncated: {size:,} bytes, its header asks for")
        if num_bytes < 0:
            self.assert_refused(path, f"{len(content):,}; download or copy it again")

    @parameterized.parameters(
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"\x02\0\0\0\0\0\0\0[]", "is not a safetensors file"),
        (b"\x08\0\0\0\0\0\0\0not JSON", "is not a safetensors file"),
        (b'\x08\0\0\0\0\0\0\0{"a": 1}', "is not a safetensors file"),
    )
    def test_not_safetensors(self, content, message):
        path = write_checkpoint("qwen3", self.directory)
        (path / "model.safetensors").write_bytes(content)
        self.assert_refused(path, message, "model.safetensors")

    def _headed(self, header):
        """A checkpoint whose weight file has this header and 20 bytes of data."""
        path = write_checkpoint("qwen3", self.directory)
        text = header if isinstance(header, str) else json.dumps(header)
        length = len(text).to_bytes(8, "little")
        (path / "model.safetensors").write_bytes(length + text.encode() + bytes(20))
        return path

    @parameterized.parameters(
        ([-8, 8], [4], "expected integers from 0"),
        ([4, 12.0], [2], "expected integers from 0"),
        ([4, 20], [4.0], "shape [4.0], expected integers from 0"),
        ([4, 20], [True, 4], "shape [True, 4], expected"),
        ([4, 20], 4, "shape 4, expected"),
        ([4], [4], "expected two"),
        ([16, 8], [2], "a is at 16..8"),
        ([8, 20], [3], "a is at 8..20, expected it to begin at 4"),
        ([2, 20], [4], "a is at 2..20, expected it to begin at 4"),
        ([4, 16], [3], "4 bytes follow the last tensor"),
        ([4, 20], [3], "16 bytes, its shape needs 12"),
    )
    def test_layout(self, offsets, shape, message):
        first = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        path = self._headed({"a": {**first, "shape": shape, "data_offsets": offsets}, "": first})
        self.assert_refused(path, "model.safetensors is not a safetensors file", message)

    def test_nested_header(self):
        self.assert_refused(self._headed('{"a":' + "[" * 100_000), "nested more than 64 deep")

    def test_tensor_in_two_shards(self):
        path = write_checkpoint("qwen3_bf16_sharded", self.directory)
        first, second = sorted(path.glob("model-*.safetensors"))[:2]
        shutil.copy(first, second)
        self.assert_refused(path, f"is in {first} and in {second.name} as well")

    @parameterized.parameters(
        (NORM, "model-00001-of-00008.safetensors", "in model-00001-of-00008.safetensors, but mod"),
        (NORM, None, "in no file, but model-"),
        (NORM, "../x.safetensors", "expected a file name"),
        (NORM, 3, "weight_map has 3 for "),
        ("none", "model-00001-of-00008.safetensors", "none in model-00001-of-00008.safetensors, "
         "but no file holds it"),
    )  # fmt: skip
    def test_index_that_disagrees(self, name, file, message):
        path = write_checkpoint("qwen3_bf16_sharded", self.directory)
        index = path / "model.safetensors.index.json"
        fields = json.loads(index.read_text())
        mapped = fields["weight_map"]
        mapped[name] = file
        if file is None:
            del mapped[name]
        index.write_text(json.dumps(fields))
        self.assert_refused(path, str(index), name, message)

    def test_directory_for_a_file(self):
        path = write_checkpoint("qwen3", self.directory)
        file = path / "model.safetensors"
        file.unlink()
        file.mkdir()
        self.assert_refused(path, f"{file} is a directory, expected a safetensors file")

    @parameterized.parameters(
        ("qwen3", "model.safetensors"),
        ("qwen3", "config.json"),
        ("qwen3_bf16_sharded", "model-00001-of-00008.safetensors"),
        ("qwen3_bf16_sharded", "model.safetensors.index.json"),
    )
    def test_link_that_leads_nowhere(self, name, file):
        path = write_checkpoint(name, self.directory)
        (path / file).unlink()
        (path / file).symlink_to("../blobs/none")
        self.assert_refused(path, f"{path / file} is a link to ../blobs/none, which is not there")

    def test_unsupported_dtype(self):
        path = write_checkpoint("qwen3", self.directory)
        edit_tensors(
            path, lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})
        )
        self.assert_refused(path, "model.norm.weight is stored as I8", "F32, F16, BF16")
        with self.assertRaisesRegex(MoejaxError, "stored as I8"):
            stored_dtype(path)

    def test_no_tensors(self):
        path = write_checkpoint("qwen3", self.directory)
        save_file({}, path / "model.safetensors")
        self.assert_refused(path, "missing tensors (")
        with self.assertRaisesRegex(MoejaxError, "hold no tensors"):
            stored_dtype(path)

    @parameterized.parameters(
        ("qwen3", "model.norm.weight", None, "missing tensors (1): model.norm.weight [32];"),
        ("qwen3", "model.extra", (2, 3), "unexpected tensors (1): model.extra [2, 3];"),
        ("qwen3_gqa1_tied", "lm_head.weight", (2, 3), "unexpected tensors (1): lm_head.weight [2"),
        (
            "mixtral_gqa4_sliding_fused", "model.layers.1.mlp.experts.down_proj", (4, 24, 32),
            "wrongly shaped tensors (1): model.layers.1.mlp.experts.down_proj is [4, 24, 32] in "
            "the file, [4, 32, 24] by config.json",
        ),
    )  # fmt: skip
    def test_tensors_that_do_not_fit(self, checkpoint, name, shape, said):
        path = write_checkpoint(checkpoint, self.directory)

        def edit(tensors):
            tensors.pop(name, None)
            tensors |= {} if shape is None else {name: torch.ones(shape)}

        edit_tensors(path, edit)
        self.assert_refused(path, str(path), said)

    def test_many_missing_tensors_are_counted(self):
        path = write_checkpoint("mixtral", self.directory)
        edit_config(path, num_hidden_layers=5)
        self.assert_refused(
            path,
            "missing tensors (38): model.layers.3.input_layernorm.weight [32], "
            "model.layers.3.self_attn.q_proj.weight [32, 32], ",
            ", ...; download it again or mend config.json",
        )

    def test_float16_overflow(self):
        path = write_checkpoint("qwen3_bf16_sharded", self.directory)
        file = path / "model-00001-of-00008.safetensors"
        tensors = load_file(file)
        name = min(tensors)
        tensors[name].view(-1)[0] = 1e6
        save_file(tensors, file)
        with self.assertRaisesRegex(MoejaxError, f"{name} does not fit float16.*bfloat16"):
            load_leaves(path, jnp.float16)


class ResolveTest(FolderTestCase):
    def test_demo(self):
        self.assertEqual(resolve_checkpoint("demo"), DEMO_DIRECTORY)

    def test_directory(self):
        self.assertEqual(resolve_checkpoint(str(self.directory)), self.directory)

    @parameterized.parameters("/no/such/place", "./a", "../a/b", "one", "a/b/c", "~/none")
    def test_no_such_directory(self, name):
        with self.assertRaisesRegex(MoejaxError, "no such directory: .*give a checkpoint's"):
            resolve_checkpoint(name)

    @parameterized.parameters("a--b/c", "foo/bar..baz", "foo/-bar", "foo/" + "a" * 100)
    def test_no_name_of_the_hub(self, name):
        with self.assert_one_line(f"no directory {name} here", "names: "):
            resolve_checkpoint(name)

    def test_nobodys_home(self):
        with self.assertRaisesRegex(MoejaxError, "no such directory: ~nobody-here/x"):
            resolve_checkpoint("~nobody-here/x")

    def test_link_that_leads_nowhere(self):
        path = self.directory / "link"
        path.symlink_to("nowhere")
        with self.assertRaisesRegex(MoejaxError, "link is a link to nowhere, which is not there"):
            resolve_checkpoint(str(path))

    def test_file(self):
        path = self.directory / "model.safetensors"
        path.write_bytes(b"")
        with self.assertRaisesRegex(MoejaxError, "is a file; give the checkpoint's directory"):
            resolve_checkpoint(str(path))

    def _cache(self, *files):
        """A hub cache that holds these files of the repository org/tiny."""
        source = write_checkpoint("qwen3_bf16_sharded", self.directory)
        repository = self.directory / "cache" / "models--org--tiny"
        snapshot = repository / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
        for file in files or [path.name for path in source.iterdir()]:
            shutil.copy(source / file, snapshot)
        return self.directory / "cache", snapshot

    def test_cached_name_needs_no_network(self):
        cache, snapshot = self._cache()
        found = resolve_checkpoint("org/tiny", cache_dir=cache)
        self.assertEqual(found, snapshot)
        open_checkpoint(str(found))

    @parameterized.parameters(
        ["config.json"],
        ["config.json", "model.safetensors.index.json", "model-00001-of-00008.safetensors"],
    )
    def test_incomplete_cache_is_downloaded(self, *files):
        cache, snapshot = self._cache(*files)
        asked = []

        def snapshot_download(name, *, cache_dir, local_files_only=False, allow_patterns=None):
            asked.append((name, cache_dir, local_files_only))
            return str(snapshot)

        with mock.patch.object(huggingface_hub, "snapshot_download", snapshot_download):
            resolve_checkpoint("org/tiny", cache_dir=cache)
        self.assertEqual(asked, [("org/tiny", cache, True), ("org/tiny", cache, False)])

    def test_name_that_the_hub_does_not_give(self):
        # The tests run with HF_HUB_OFFLINE=1.
        with self.assert_one_line("hub does not give it: ", "org/none"):
            resolve_checkpoint("org/none", cache_dir=self.directory)

    def test_error_without_words(self):
        with (
            mock.patch.object(
                huggingface_hub, "snapshot_download", side_effect=LocalEntryNotFoundError("")
            ),
            self.assertRaisesRegex(MoejaxError, "LocalEntryNotFoundError"),
        ):
            resolve_checkpoint("org/none", cache_dir=self.directory)
