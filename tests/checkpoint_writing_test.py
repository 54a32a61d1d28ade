"""Written checkpoints can be read, by transformers too; half-written ones cannot."""

import json
import os
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from absl.testing import parameterized

from moejax.checkpoints import (
    load_orbax,
    open_checkpoint,
    orbax_directory,
    save,
    save_hf_checkpoint,
    save_orbax,
)
from moejax.errors import MoejaxError
from moejax.weights.qtensor import from_codes
from tests import slow
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import CHECKPOINTS, reference_model, write_checkpoint


class WritingTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.written = self.directory / "written"

    def _load(self, path, dtype="float32"):
        """Config and leaves of a checkpoint of either kind."""
        checkpoint = open_checkpoint(str(path))
        device = jax.devices()[0]
        return checkpoint.config, checkpoint.load(dtype=dtype, device=device, progress=False)

    def assert_leaves_equal(self, found, expected):
        self.assertSameElements(found, expected)
        for leaf in expected:
            self.assertEqual(found[leaf].dtype, expected[leaf].dtype)
            np.testing.assert_array_equal(found[leaf], expected[leaf], err_msg=leaf)


class HuggingFaceTest(WritingTest):
    @parameterized.parameters(*CHECKPOINTS)
    def test_transformers_and_we_read_it_back(self, name):
        source = write_checkpoint(name, self.directory)
        config, weights = self._load(source)
        save_hf_checkpoint(self.written, config, weights, dtype=jnp.float32)
        config_again, weights_again = self._load(self.written)
        self.assertEqual(config_again, config)
        self.assert_leaves_equal(weights_again, weights)
        tokens = torch.arange(24)[None]
        with torch.no_grad():
            expected = reference_model(source)(tokens).logits
            found = reference_model(self.written)(tokens).logits
        np.testing.assert_array_equal(found, expected)

    @parameterized.parameters(jnp.bfloat16, jnp.float16, jnp.float32)
    def test_shards(self, dtype):
        config, weights = self._load(write_checkpoint("mixtral", self.directory))
        save_hf_checkpoint(self.written, config, weights, dtype=dtype, max_shard_bytes=30_000)
        files = sorted(path.name for path in self.written.glob("*.safetensors"))
        self.assertGreater(len(files), 3)
        self.assertEqual(files[0], f"model-00001-of-{len(files):05}.safetensors")
        for file in files:
            self.assertLess((self.written / file).stat().st_size, 30_000 + 5_000)  # and header
        index = json.loads((self.written / "model.safetensors.index.json").read_text())
        num_values = sum(weight.size for weight in weights.values())
        self.assertEqual(index["metadata"]["total_size"], num_values * jnp.dtype(dtype).itemsize)
        self.assertSameElements(set(index["weight_map"].values()), files)
        self.assert_leaves_equal(
            self._load(self.written, jnp.dtype(dtype).name)[1],
            {leaf: weight.astype(dtype) for leaf, weight in weights.items()},
        )
        reference_model(self.written)

    def test_other_files(self):
        config, weights = self._load(write_checkpoint("qwen3", self.directory))
        ids = {"bos_token_id": 1, "eos_token_id": [2, 3]}
        more = {"tokenizer_config.json": b"{}", "README.md": b"# Card"}
        save_hf_checkpoint(
            self.written, config, weights, dtype=jnp.bfloat16, token_ids=ids, extra_files=more
        )
        self.assertEqual(json.loads((self.written / "generation_config.json").read_text()), ids)
        self.assertEqual((self.written / "README.md").read_bytes(), b"# Card")
        self.assertEqual(open_checkpoint(str(self.written)).eos_ids, (2, 3))

    @parameterized.parameters(0o022, 0o027)
    def test_files_follow_the_umask(self, umask):
        config, weights = self._load(write_checkpoint("qwen3", self.directory))
        self.addCleanup(os.umask, os.umask(umask))
        save_hf_checkpoint(self.written, config, weights, dtype=jnp.float32, max_shard_bytes=60_000)
        modes = {path.stat().st_mode & 0o777 for path in self.written.iterdir()}
        self.assertEqual(modes, {0o666 & ~umask})

    def test_earlier_weights_are_replaced(self):
        for name, max_shard_bytes in (("qwen3", 30_000), ("mixtral", 10**9), ("qwen3", 60_000)):
            config, weights = self._load(write_checkpoint(name, self.directory))
            save_hf_checkpoint(
                self.written, config, weights, dtype=jnp.float32, max_shard_bytes=max_shard_bytes
            )
            self.assert_leaves_equal(self._load(self.written)[1], weights)
            self.assertEmpty(list(self.written.glob("*.partial")))

    def test_half_written_is_no_checkpoint(self):
        config, weights = self._load(write_checkpoint("qwen3", self.directory))

        def save_twice_only(path, tensors):
            if path.name.startswith("model-00003"):
                raise OSError("disk full")
            path.write_bytes(b"")

        for _ in ("into nothing", "over a checkpoint"):
            with (
                mock.patch.object(save, "write_safetensors", save_twice_only),
                self.assertRaisesRegex(OSError, "disk full"),
            ):
                save_hf_checkpoint(
                    self.written, config, weights, dtype=jnp.float32, max_shard_bytes=30_000
                )
            with self.assertRaisesRegex(MoejaxError, "no config.json in"):
                open_checkpoint(str(self.written))
            save_hf_checkpoint(self.written, config, weights, dtype=jnp.float32)
            open_checkpoint(str(self.written))


class OrbaxTest(WritingTest):
    @slow.repeats()
    @parameterized.product(
        name=["qwen3_sparse_step2", "mixtral_gqa1_tied_fp16"], dtype=["float32", "bfloat16"]
    )
    def test_restored_as_it_was(self, name, dtype):
        config, weights = self._load(write_checkpoint(name, self.directory), dtype)
        for _ in ("new", "over the first"):
            save_orbax(self.written, config, weights)
        config_again, restored = load_orbax(self.written)
        self.assertEqual(config_again, config)
        self.assert_leaves_equal(restored, weights)

    def test_opened_by_name_with_tokenizer_and_eos(self):
        source = write_checkpoint("qwen3", self.directory)
        (source / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
        (source / "config.json").write_text(
            json.dumps({**json.loads((source / "config.json").read_text()), "eos_token_id": [5, 6]})
        )
        config, weights = self._load(source)
        save_orbax(self.written, config, weights, tokenizer_from=source)
        checkpoint = open_checkpoint(str(self.written))
        self.assertEqual(checkpoint.config, config)
        self.assertEqual(checkpoint.eos_ids, (5, 6))
        self.assertTrue((self.written / "tokenizer_config.json").exists())
        bf16 = self._load(self.written, "bfloat16")[1]
        self.assert_leaves_equal(
            bf16, {leaf: weight.astype(jnp.bfloat16) for leaf, weight in weights.items()}
        )
        auto = self._load(self.written, "auto")[1]
        self.assertEqual(auto["embed"].dtype, jnp.float32)

    def test_packed_weights_are_refused_before_anything_is_written(self):
        config, weights = self._load(write_checkpoint("qwen3", self.directory))
        codes = np.zeros((*weights["moe.down"].shape,), np.uint8)
        scales = np.ones((*codes.shape[:-1], 1), np.float32)
        weights["moe.down"] = from_codes(
            codes, scales, None, bits=3, group_size=codes.shape[-1], zero_kind="symmetric"
        )
        with self.assertRaisesRegex(MoejaxError, "moe.down is quantized, and Orbax"):
            save_orbax(self.written, config, weights)
        self.assertFalse(self.written.exists())

    def test_chunks_are_bounded(self):
        config, weights = self._load(write_checkpoint("qwen3", self.directory))
        with mock.patch.object(orbax_directory, "_CHUNK_BYTES", 10_000):
            save_orbax(self.written, config, weights)
        self.assert_leaves_equal(load_orbax(self.written)[1], weights)

    def _saved(self):
        config, weights = self._load(write_checkpoint("mixtral", self.directory))
        save_orbax(self.written, config, weights)
        return json.loads((self.written / "moejax.json").read_text())

    def _describe(self, fields):
        (self.written / "moejax.json").write_text(json.dumps(fields))

    def test_unfinished(self):
        config, weights = self._load(write_checkpoint("mixtral", self.directory))
        save_orbax(self.written, config, weights)
        with (
            mock.patch.object(orbax_directory, "_checkpointer", side_effect=OSError),
            self.assertRaises(OSError),
        ):
            save_orbax(self.written, config, weights)
        with self.assertRaisesRegex(MoejaxError, "no moejax.json in"):
            load_orbax(self.written)
        with self.assertRaisesRegex(MoejaxError, "no config.json in"):
            open_checkpoint(str(self.written))

    def test_other_format(self):
        self._describe({**self._saved(), "format": 9})
        with self.assertRaisesRegex(MoejaxError, "has format 9, this version reads 2; save it"):
            load_orbax(self.written)

    @parameterized.parameters({"num_heads": 3}, {"colour": "red"}, {"moe_layers": 3})
    def test_broken_description(self, **changed):
        fields = self._saved()
        self._describe({**fields, "config": {**fields["config"], **changed}})
        with self.assertRaisesRegex(MoejaxError, "moejax.json is broken: "):
            load_orbax(self.written)

    @parameterized.parameters(
        ({"vocab_size": 161}, r"embed \(160, 32\), expected \(161, 32\)"),
        ({"tied_embeddings": True}, r"head \(160, 32\), expected none"),
        ({"qk_norm": True}, r"attention.k_norm missing, expected \(3, 8\)"),
    )
    def test_leaves_that_do_not_fit(self, changed, message):
        fields = self._saved()
        self._describe({**fields, "config": {**fields["config"], **changed}})
        with self.assertRaisesRegex(MoejaxError, f"weights does not fit moejax.json: .*{message}"):
            load_orbax(self.written)

    def test_missing_weights(self):
        self._saved()
        for path in (self.written / "weights").rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with self.assert_one_line("cannot restore ", "weights: "):
            load_orbax(self.written)
