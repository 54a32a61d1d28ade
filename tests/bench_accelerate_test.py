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
    Form,
    HostWeights,
    Int4Linear,
    empty_model,
    fill,
    int4_error,
    offload,
)
from scripts.studies.dymoe.accelerate_plan import Plan, layer_places, make_plan
from tests.script_runs import run_module

CPU = torch.device("cpu")
FORMS = {"fused": Form(16, fused=True), "modules": Form(16), "int4": Form(4)}
SHAPES = {
    "qwen3": TINY,
    "mixtral": dataclasses.replace(TINY, family="mixtral", qk_norm=False),
}
RESIDENT = 2  # of TINY's six layers


def _models(config, form):
    """Makes one model three times: resident, offloaded but for two layers, host copy."""
    whole = empty_model(config, form, torch.float32, "cpu")
    assert not fill(whole, {"model": 0, "lm_head": 0}, CPU)
    places = layer_places({"model": 0, "lm_head": "cpu"}, config.num_layers, RESIDENT)
    moved = empty_model(config, form, torch.float32, "cpu")
    host = fill(moved, places, CPU)
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

    def test_shapes_that_the_kernels_do_not_have_are_refused(self):
        with self.assertRaisesRegex(ValueError, "multiple of 128"):
            Int4Linear(192, 64, torch.float32, "cpu")


class OffloadTest(parameterized.TestCase):
    @parameterized.product(shape=list(SHAPES), form=list(FORMS))
    def test_it_changes_no_logit(self, shape, form):
        whole, moved, host = _models(SHAPES[shape], FORMS[form])
        self.assertNotEmpty(host)
        for name, value in moved.named_parameters():
            self.assertEqual(value.device.type == "meta", name in host, name)
        for tokens in (list(range(20)), [5]):
            want, got = _logits(whole, tokens), _logits(moved, tokens)
            self.assertGreater(float(want.std()), 0.1)
            np.testing.assert_array_equal(got.numpy(), want.numpy())

    @parameterized.product(shape=list(SHAPES), form=list(FORMS))
    def test_a_token_moves_what_it_hits_and_fused_experts_whole(self, shape, form):
        config = SHAPES[shape]
        _, moved, host = _models(config, FORMS[form])
        bytes_of = {name: value.nbytes for name, value in host.items()}
        experts = sum(size for name, size in bytes_of.items() if ".experts." in name)
        dense = sum(size for name, size in bytes_of.items() if ".layers." in name) - experts
        _logits(moved, [7])
        hit = 1 if form == "fused" else config.experts_per_token / config.num_experts
        self.assertEqual(host.layer_bytes, dense + experts * hit)
        self.assertEqual(host.other_bytes, bytes_of["lm_head.weight"])

    @parameterized.parameters(*SHAPES)
    @pytest.mark.slow
    def test_modules_compute_what_the_experts_of_transformers_do(self, shape):
        fused = empty_model(SHAPES[shape], FORMS["fused"], torch.float32, "cpu")
        fill(fused, {"model": 0, "lm_head": 0}, CPU)
        state = {}
        for name, value in fused.named_parameters():
            if ".experts." not in name:
                state[name] = value
                continue
            prefix, part = name.rsplit(".", 1)
            for i, matrix in enumerate(value):
                state[f"{prefix}.{i}.{part.removesuffix('_proj')}.weight"] = matrix
        modules = empty_model(SHAPES[shape], FORMS["modules"], torch.float32, "cpu")
        fill(modules, {"model": 0, "lm_head": 0}, CPU)
        modules.load_state_dict(state)
        for tokens in (list(range(20)), [5]):
            np.testing.assert_allclose(
                _logits(modules, tokens).numpy(), _logits(fused, tokens).numpy(), atol=1e-4
            )


class PlanTest(absltest.TestCase):
    def test_accelerate_leaves_room_for_the_largest_layer(self):
        model = empty_model(TINY, Form(4), torch.bfloat16, "cpu")
        sizes = [sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers]
        dense = model.model.embed_tokens.weight.nbytes
        for wanted in range(1, 5):
            cap = dense + (wanted + 1) * sizes[0] + 1024  # and the buffers of rotary embeddings
            plan = make_plan(TINY, Form(4), "cpu", cap, share=1.0, depth=6)
            self.assertEqual((plan.all_resident, plan.resident), (wanted, wanted))
            self.assertEqual(plan.cap_bytes, cap)
            fewer = make_plan(TINY, Form(4), "cpu", cap, share=1.0, depth=3)
            self.assertEqual((fewer.all_resident, fewer.config.num_layers), (wanted, 3))
            self.assertEqual(fewer.resident, max(1, round(wanted / 2)))
            # The free bytes equal those at the real depth.
            self.assertEqual(cap - fewer.cap_bytes, (wanted - fewer.resident) * sizes[0])

    def test_a_model_that_fits_stays(self):
        plan = make_plan(TINY, Form(4), "cpu", 2**40, share=0.9, depth=6)
        self.assertEqual((plan.all_resident, set(plan.places.values())), (6, {0}))
        self.assertEqual(plan.of_all(1.0, 6.0, 0.0), 7.0)

    def test_a_figure_of_all_layers_counts_each_kind(self):
        plan = Plan(dataclasses.replace(TINY, num_layers=4, moe_layers=(0,)), 32, 10, 1, {}, 0)
        # One resident layer of 2 and three others of 5 each; the real depth has 10 and 22.
        self.assertEqual(plan.of_all(3.0, 2.0, 15.0), 3.0 + 10 * 2.0 + 22 * 5.0)

    def test_what_is_read_is_counted(self):
        host = HostWeights()
        host["model.layers.0.a"], host["lm_head.weight"] = torch.zeros(3), torch.zeros(2)
        _ = host["model.layers.0.a"], host["model.layers.0.a"], host["lm_head.weight"]
        self.assertEqual((host.layer_bytes, host.other_bytes), (24, 8))


class ScriptTest(absltest.TestCase):
    @pytest.mark.slow
    def test_it_runs_on_a_cpu(self):
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "rows.jsonl"
            done = run_module(
                "scripts.studies.dymoe.bench_accelerate", "--model=tiny", "--device=cpu",
                "--prompt=16", "--tokens=2", "--repeats=1", "--depth=4", f"--out={out}",
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            rows = read_rows(out)
        self.assertLen(rows, 6)  # three forms, TTFT and TPOT; a CPU pins nothing
        for row in rows:
            self.assertIn("scaled from 4 of 6 layers", row.what)
            self.assertGreater(row.figure, row.baseline["measured_ms"])
            self.assertIn("accelerate", row.versions)
        fused, modules, int4 = (row for row in rows if "TPOT" in row.what)
        self.assertLess(modules.baseline["megabytes"], fused.baseline["megabytes"])
        self.assertLess(int4.baseline["megabytes"], modules.baseline["megabytes"])
