"""Weights loaded as transformers' own state dict, and written so that it reads them."""

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from absl.testing import parameterized
from safetensors.torch import load_file, save_file

from moejax.checkpoints import (
    load_orbax,
    open_checkpoint,
    orbax_directory,
    reader,
    save,
    save_hf_checkpoint,
    save_orbax,
    stored_dtype,
)
from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.hf.config import read_model_config
from moejax.models.hf.names import _Spelling, find_spelling, placements, published_spelling
from moejax.weights.qtensor import from_codes
from tests import slow
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import CHECKPOINTS, load_leaves, reference_model, write_checkpoint


def reference_leaves(model: transformers.PreTrainedModel, config: ModelConfig) -> dict:
    """The leaves, stacked from the tensors that transformers holds in memory."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    def stack(name, layers):
        return np.stack([state[f"model.layers.{i}.{name}"] for i in layers])

    def rows(names, layers):
        return np.concatenate([stack(name, layers) for name in names], axis=1)

    every = range(config.num_layers)
    qkv = [f"self_attn.{x}_proj" for x in "qkv"]
    leaves = {
        "embed": state["model.embed_tokens.weight"],
        "attention.norm": stack("input_layernorm.weight", every),
        "attention.qkv_proj": rows([f"{x}.weight" for x in qkv], every),
        "attention.o_proj": stack("self_attn.o_proj.weight", every),
        "mlp_norm": stack("post_attention_layernorm.weight", every),
        "final_norm": state["model.norm.weight"],
        "moe.router": stack("mlp.gate.weight", config.moe_layers),
        "moe.gate_up": stack("mlp.experts.gate_up_proj", config.moe_layers),
        "moe.down": stack("mlp.experts.down_proj", config.moe_layers),
    }
    if config.family == "qwen3_moe":
        leaves["attention.q_norm"] = stack("self_attn.q_norm.weight", every)
        leaves["attention.k_norm"] = stack("self_attn.k_norm.weight", every)
    if config.attention_bias:
        leaves["attention.qkv_bias"] = rows([f"{x}.bias" for x in qkv], every)
        leaves["attention.o_bias"] = stack("self_attn.o_proj.bias", every)
    if config.dense_layers:
        gate_up = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
        leaves["mlp.gate_up"] = rows(gate_up, config.dense_layers)
        leaves["mlp.down"] = stack("mlp.down_proj.weight", config.dense_layers)
    if not model.config.tie_word_embeddings:
        leaves["head"] = state["lm_head.weight"]
    return leaves


class LoadTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.directory = cls.class_folder()

    def _assert_loads(self, path, dtype=jnp.float32):
        config, weights = read_model_config(path), load_leaves(path, dtype)
        expected = reference_leaves(reference_model(path), config)
        self.assertEqual({k: v.shape for k, v in weights.items()}, weight_shapes(config))
        self.assertSameElements(weights, expected)
        for leaf, weight in weights.items():
            self.assertEqual(weight.dtype, dtype)
            np.testing.assert_array_equal(weight, expected[leaf].astype(dtype), err_msg=leaf)

    @parameterized.parameters(*CHECKPOINTS)
    def test_values(self, name):
        self._assert_loads(write_checkpoint(name, self.directory))

    @parameterized.product(
        name=["qwen3", "qwen3_bf16_sharded", "mixtral_gqa1_tied_fp16", "qwen3_fused"],
        dtype=[jnp.bfloat16, jnp.float16],
    )
    def test_values_in_other_dtypes(self, name, dtype):
        self._assert_loads(write_checkpoint(name, self.directory), dtype)

    @slow.repeats()
    @parameterized.parameters("qwen3_sparse_step2", "qwen3_fused", "mixtral_gqa1_tied_fp16")
    def test_values_staged_by_layer(self, name):
        path = write_checkpoint(name, self.directory)
        with mock.patch.object(reader, "_is_host", return_value=False):
            self._assert_loads(path)

    @pytest.mark.gpu
    def test_values_on_the_gpu(self):
        self._assert_loads(write_checkpoint("qwen3_sparse_step2", self.directory))

    @parameterized.parameters(
        ("qwen3_bf16_sharded", jnp.bfloat16),
        ("mixtral_gqa1_tied_fp16", jnp.float16),
        ("mixtral", jnp.float32),
    )
    def test_stored_dtype(self, name, dtype):
        path = write_checkpoint(name, self.directory)
        self.assertEqual(stored_dtype(path), dtype)
        checkpoint = open_checkpoint(str(path))
        weights = checkpoint.load(dtype="auto", device=jax.devices("cpu")[0], progress=False)
        self.assertEqual(weights["embed"].dtype, jnp.float32)

    @parameterized.parameters(True, False)
    def test_tied_checkpoint_that_holds_its_head(self, is_same):
        path = self._with_tensors(
            "qwen3_gqa1_tied",
            lambda t: {
                "lm_head.weight": t["model.embed_tokens.weight"].clone() + (0 if is_same else 1)
            },
        )
        if is_same:
            self._assert_loads(path)
        else:
            with self.assertRaisesRegex(reader.MoejaxError, "lm_head.weight differs from"):
                self._assert_loads(path)

    def test_rotary_buffers_are_ignored(self):
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        path = self._with_tensors("mixtral", lambda _: {name: torch.ones(4)})
        self.assertLen(load_leaves(path), 10)

    def test_mixtral_with_the_module_renamed(self):
        path = self._with_tensors("mixtral", lambda _: {})
        tensors = load_file(path / "model.safetensors")
        renamed = {k.replace("block_sparse_moe", "mlp"): v for k, v in tensors.items()}
        save_file(renamed, path / "model.safetensors")
        weights = load_leaves(path)
        expected = tensors["model.layers.1.block_sparse_moe.experts.2.w2.weight"]
        np.testing.assert_array_equal(weights["moe.down"][1, 2], expected)

    def test_progress_bar(self):
        path = write_checkpoint("qwen3", self.directory)
        for progress in (True, False):
            with contextlib.redirect_stderr(io.StringIO()) as stderr:
                load_leaves(path, jnp.bfloat16, progress=progress)
            self.assertEqual("100%" in stderr.getvalue(), progress)

    def _with_tensors(self, name, more):
        """A copy of a checkpoint with more tensors in its file."""
        path = write_checkpoint(name, Path(self.enterContext(tempfile.TemporaryDirectory())))
        tensors = load_file(path / "model.safetensors")
        save_file({**tensors, **more(tensors)}, path / "model.safetensors")
        return path


class NamesTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.directory = cls.class_folder()

    @parameterized.product(name=list(CHECKPOINTS), fused=[True, False])
    def test_placements_fill_every_leaf_once(self, name, fused):
        config = read_model_config(write_checkpoint(name, self.directory))
        count = {leaf: np.zeros(shape, int) for leaf, shape in weight_shapes(config).items()}
        for placement in placements(config, _Spelling("mlp", fused)):
            rows = placement.rows(count[placement.leaf][placement.index])
            self.assertEqual(rows.shape, placement.shape)
            rows += 1
        for leaf, times in count.items():
            np.testing.assert_array_equal(times, 1, err_msg=leaf)

    def test_spelling_of_nothing_is_the_published_one(self):
        self.assertEqual(find_spelling("mixtral", []), published_spelling("mixtral"))

    @parameterized.parameters("model", "model.language_model")
    def test_spelling_is_that_of_the_decoder_alone(self, root):
        apart = f"{root}.layers.0.mlp.experts.0.gate_proj.weight"
        fused = ".layers.0.mlp.experts.gate_up_proj"
        found = find_spelling("qwen3_5_moe", [apart, f"mtp{fused}"])
        self.assertEqual((found.root, found.fused), (root, False))
        found = find_spelling("qwen3_5_moe", [f"{root}{fused}", f"mtp{fused}"])
        self.assertEqual((found.root, found.fused), (root, True))


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
