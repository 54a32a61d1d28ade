"""The baseline of accelerate: its INT4 products, what its hooks move, and that the script runs."""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest
from absl.testing import absltest, parameterized

pytest.importorskip("accelerate", reason="the baseline of accelerate needs it")

import torch

from moejax.files.result_rows import read_rows
from scripts.studies.dymoe.accelerate_models import (
    TINY,
    empty_model,
    fill,
    int4_error,
    offload,
    place_of,
)
from tests.script_runs import run_module

CPU = torch.device("cpu")
SHAPES = {"qwen3": TINY, "mixtral": dataclasses.replace(TINY, family="mixtral", qk_norm=False)}
RESIDENT = 2  # of TINY's six layers
WHOLE = {"model": 0, "lm_head": 0}
SOME = {"model": 0, "lm_head": "cpu"} | {
    f"model.layers.{i}": "cpu" for i in range(RESIDENT, TINY.num_layers)
}


def _models(config):
    """Makes one model three times: resident, offloaded but for two layers, host copy."""
    whole = empty_model(config, torch.float32, "cpu")
    assert not fill(whole, WHOLE, CPU)
    moved = empty_model(config, torch.float32, "cpu")
    host = fill(moved, SOME, CPU)
    places = {name: place_of(name, SOME) for name in ("model.embed_tokens", "model.norm")}
    places |= {"model.rotary_emb": 0, "lm_head": "cpu"}
    places |= {f"model.layers.{i}": place_of(f"model.layers.{i}", SOME) for i in range(6)}
    return whole, offload(moved, places, host, CPU), host


def _logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits


class Int4Test(parameterized.TestCase):
    @parameterized.parameters(1, 7)
    def test_products_are_those_of_the_decoded_weights(self, num_rows):
        # Sums of 1024 float32 terms in another order; bfloat16 rounds weights and products.
        self.assertLess(int4_error(CPU, torch.float32, num_rows), 1024**0.5 * 2**-23)
        self.assertLess(int4_error(CPU, torch.bfloat16, num_rows), 2**-8)


class OffloadTest(parameterized.TestCase):
    @parameterized.parameters(*SHAPES)
    def test_it_changes_no_logit_and_moves_what_a_token_hits(self, shape):
        config = SHAPES[shape]
        whole, moved, host = _models(config)
        for name, value in moved.named_parameters():
            self.assertEqual(value.device.type == "meta", name in host, name)
        for tokens in (list(range(20)), [5]):
            want, got = _logits(whole, tokens), _logits(moved, tokens)
            self.assertGreater(float(want.std()), 0.1)
            np.testing.assert_array_equal(got.numpy(), want.numpy())
        bytes_of = {name: value.nbytes for name, value in host.items()}
        experts = sum(size for name, size in bytes_of.items() if ".experts." in name)
        dense = sum(size for name, size in bytes_of.items() if ".layers." in name) - experts
        host.layer_bytes = host.other_bytes = 0
        _logits(moved, [7])
        hit = config.experts_per_token / config.num_experts
        self.assertEqual(host.layer_bytes, dense + experts * hit)
        self.assertEqual(host.other_bytes, bytes_of["lm_head.weight"])


class ScriptTest(absltest.TestCase):
    @pytest.mark.slow
    def test_it_runs_on_a_cpu(self):
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "rows.jsonl"
            done = run_module(
                "scripts.studies.dymoe.bench_accelerate", "--model=tiny", "--device=cpu",
                "--prompt=16", "--tokens=2", "--repeats=1", f"--out={out}",
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            first, later = read_rows(out)  # a CPU pins nothing
        self.assertIn("TTFT", first.what)
        self.assertIn("TPOT", later.what)
        for row in (first, later):
            self.assertGreater(row.baseline["megabytes"], 0)
            self.assertIn("accelerate", row.versions)
