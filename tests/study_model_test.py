"""The study model: cut without a change of function, trained, measured, kept in pieces."""

import json
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from absl.testing import parameterized

from moejax.checkpoints.save import save_hf_checkpoint
from moejax.models.hf.config import read_model_config
from moejax.models.transformer import forward, merge_weights, model_definition
from scripts.demo_training.texts import train_tokenizer
from scripts.studies.study_model import make, pieces
from scripts.studies.study_model.upcycle import (
    as_float32,
    parent_config,
    read_parent,
    replicated,
    replicated_config,
)
from tests.demo_pipeline_test import PROSE, write_source
from tests.hf_checkpoints import reference_model
from tests.script_runs import run_module

VOCABULARY = 300
SHARDS, REPLICAS = 4, 3
TINY = {
    "num_shards": 2,
    "num_replicas": 2,
    "replicas.textbooks": 0,
    "replicas.code": 1,
    "replicas.math": 1,
    "replicas.chinese": 1,
    "router_tokens": 32,
    "dtype": "float32",
    "batch_size": 2,
    "context": 16,
    "total_steps": 4,
    "warmup_steps": 2,
    "log_every": 2,
    "validate_every": 3,
    "validation_tokens": 32,
    "evaluation_tokens": 64,
}


def write_llama(directory: Path, **fields: object) -> transformers.LlamaForCausalLM:
    """Writes a tiny random Llama in bfloat16, with a tokenizer; returns it in float32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
        rms_norm_eps=1e-5, initializer_range=0.3, tie_word_embeddings=True, bos_token_id=1,
        eos_token_id=2, pad_token_id=2,
        **fields,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    train_tokenizer(iter([PROSE * 3]), VOCABULARY).save(str(directory / "tokenizer.json"))
    return reference_model(directory)


class StudyTest(parameterized.TestCase):
    def directory(self) -> Path:
        return Path(self.enterContext(tempfile.TemporaryDirectory()))


class UpcycleTest(StudyTest):
    @parameterized.parameters(1, REPLICAS)
    def test_experts_compute_what_the_dense_model_in_transformers_does(self, num_replicas):
        """In transformers and here, and every shard is taken once."""
        directory = self.directory()
        dense = write_llama(directory / "parent")
        one = parent_config(directory / "parent", SHARDS)
        leaves = read_parent(directory / "parent", one)
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(2, num_replicas, 24))
        leaves, config = replicated(leaves, rows), replicated_config(one, num_replicas)
        save_hf_checkpoint(directory / "sparse", config, leaves, dtype=jnp.bfloat16)
        self.assertEqual(read_model_config(directory / "sparse"), config)

        tokens = rng.integers(0, VOCABULARY, (2, 12))
        with torch.no_grad():
            expected = dense(torch.tensor(tokens)).logits.numpy()
            sparse = reference_model(directory / "sparse")(torch.tensor(tokens)).logits.numpy()
        model = merge_weights(model_definition(config), as_float32(leaves))
        hidden, routing = forward(model, jnp.asarray(tokens, jnp.int32))
        found = np.asarray(model.project_to_vocab(hidden))
        scale = np.abs(expected).max()
        np.testing.assert_allclose(sparse, expected, atol=2e-5 * scale)
        np.testing.assert_allclose(found, expected, atol=2e-5 * scale)
        shards = np.sort(np.asarray(routing.ids) % SHARDS, axis=-1)
        np.testing.assert_array_equal(shards, np.broadcast_to(np.arange(SHARDS), shards.shape))
        if num_replicas > 1:
            self.assertGreater(len(np.unique(np.asarray(routing.ids) // SHARDS)), 1)


class RunTest(StudyTest):
    def run_step(self, command: list[str], *more: str) -> int:
        done = run_module(*command, *more, JAX_PLATFORMS="cpu")
        self.assertIn(done.returncode, (0, 3), done.stderr[-4000:])
        return done.returncode

    @pytest.mark.slow
    def test_steps_of_the_one_command(self):
        """From texts to a model that transformers loads; training stops once and goes on."""
        work = self.directory()
        write_source(work / "data")
        write_llama(work / "parent")
        table = make.commands(
            config="configs/train_study_model.py",
            parent=str(work / "parent"),
            data=work / "data",
            work=work / "run",
        )
        tiny = [f"--config.{name}={value}" for name, value in TINY.items()]
        self.assertEqual(list(table), list(make.STEPS))
        (_, prepare), (_, train) = table["prepare_data"][0], table["train"][0]
        self.run_step(prepare)
        stopped = self.run_step(train, *tiny, "--time_budget_s=1e-3")
        self.assertEqual(stopped, 3)
        self.assertFalse((work / "run/model").exists())
        self.assertEqual(self.run_step(train, *tiny), 0)
        log = [json.loads(line) for line in (work / "run/log.jsonl").read_text().splitlines()]
        last = [row for row in log if row["event"] == "train"][-1]
        self.assertEqual(last["step"], TINY["total_steps"])
        first = next(row for row in log if row["event"] == "valid")
        self.assertLess(max(first["divergence"].values()), 1e-4)
        self.assertGreater(first["replica_cosine"], 0.999)
        self.assertLess(first["other_cosine"], 0.9)
        for step in ("evaluate", "card", "pieces"):
            for result, command in table[step]:
                self.run_step(command, *(tiny if step == "evaluate" else ()))
                self.assertTrue(result.exists(), step)
        card = (work / "run/model/README.md").read_text()
        self.assertIn("4 experts of which 2 run", card)
        pieces.join(work / "run/pieces", work / "joined")
        tokens = torch.arange(20, 30)[None]
        with torch.no_grad():
            trained = reference_model(work / "joined")(tokens).logits.numpy()
            same = reference_model(work / "run/parent_as_experts")(tokens).logits.numpy()
            dense = reference_model(work / "parent")(tokens).logits.numpy()
        np.testing.assert_allclose(same, dense, atol=2e-5 * np.abs(dense).max())
        self.assertGreater(np.abs(trained - dense).max(), 1e-3)
        self.assertTrue(np.isfinite(trained).all())
