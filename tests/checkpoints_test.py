"""Loaded weights against transformers' own state dict; what loading costs in host memory."""

import contextlib
import io
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

from moejax.checkpoints import open_checkpoint, reader, stored_dtype
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.hf.config import read_model_config
from moejax.models.hf.names import _Spelling, find_spelling, placements, published_spelling
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
