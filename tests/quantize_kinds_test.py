"""Quantizing models whose layers are not all alike: latents, delta rules, shared experts."""

import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moejax.checkpoints import open_checkpoint
from moejax.checkpoints.sizes import checkpoint_sizes
from moejax.models.config import leaf_dtype, weight_shapes
from moejax.models.leaf_kinds import KIND_OF_LEAF, KINDS, NEVER_PACKED, kind_of, layers_of
from moejax.models.transformer import forward, merge_weights, model_definition
from moejax.quantization.pipeline.forward import LayerRun, _one_layer
from moejax.quantization.pipeline.inventory import take_inventory
from moejax.quantization.pipeline.run import quantize_checkpoint
from moejax.weights.qtensor import QTensor
from tests import model_kinds, numpy_model, slow
from tests.hf_checkpoints import write_with_vision_tower
from tests.packed_weights import values_of
from tests.quantize_case import QuantizeTestCase
from tests.random_checkpoints import write_random_checkpoint, write_tokenizer

PACKED = ("attention", "experts", "shared_experts", "mlp")
# A name of each kind of layer, its class, its leaf and the layer that it is of.
ENTRIES = {
    "shared": {
        "model.layers.1.mlp.shared_experts.up_proj.weight": ("shared_experts", "shared.gate_up", 1),
        "model.layers.2.mlp.shared_experts.down_proj.weight": ("shared_experts", "shared.down", 2),
        "model.layers.0.mlp.gate_proj.weight": ("mlp", "mlp.gate_up", 0),
        "model.layers.2.mlp.experts.3.up_proj.weight": ("experts", "moe.gate_up", 2),
    },
    "latent": {
        "model.layers.2.self_attn.q_a_proj.weight": ("attention", "attention.q_a", 2),
        "model.layers.0.self_attn.q_b_proj.weight": ("attention", "attention.q_b", 0),
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight": ("attention", "attention.kv_a", 1),
        "model.layers.1.self_attn.kv_b_proj.weight": ("kept", "attention.kv_b", 1),
        "model.layers.1.self_attn.kv_a_layernorm.weight": ("norm", "attention.kv_a_norm", 1),
    },
    "delta": {
        "model.layers.3.self_attn.q_proj.weight": ("attention", "attention.qkv_proj", 3),
        "model.layers.3.self_attn.q_norm.weight": ("norm", "attention.q_norm", 3),
        "model.layers.2.linear_attn.in_proj_qkvz.weight": ("attention", "delta.qkvz_proj", 2),
        "model.layers.2.linear_attn.out_proj.weight": ("attention", "delta.o_proj", 2),
        "model.layers.1.linear_attn.in_proj_ba.weight": ("kept", "delta.ba_proj", 1),
        "model.layers.1.linear_attn.conv1d.weight": ("norm", "delta.conv", 1),
        "model.layers.1.linear_attn.A_log": ("norm", "delta.a_log", 1),
        "model.layers.2.input_layernorm.weight": ("norm", "attention.norm", 2),
        "model.layers.3.mlp.shared_expert_gate.weight": ("kept", "shared.gate", 3),
    },
    "sigmoid": {
        "model.layers.1.mlp.gate.weight": ("router", "moe.router", 1),
        "model.layers.2.mlp.gate.e_score_correction_bias": ("norm", "moe.router_bias", 2),
    },
    "lite": {
        "model.layers.1.self_attn.kv_b_proj.weight": ("kept", "attention.kv_b", 1),
        "model.layers.2.mlp.gate.e_score_correction_bias": ("norm", "moe.router_bias", 2),
    },
    "sinks": {
        "model.layers.1.self_attn.sinks": ("norm", "attention.sinks", 1),
        "model.layers.2.mlp.router.bias": ("norm", "moe.logit_bias", 2),
        "model.layers.0.self_attn.o_proj.bias": ("norm", "attention.o_bias", 0),
    },
    "joint": {
        "model.layers.1.self_attn.k_proj.bias": ("norm", "attention.qkv_bias", 1),
        "model.layers.2.self_attn.q_norm.weight": ("norm", "attention.q_norm", 2),
    },
    "by_part": {
        "model.layers.2.linear_attn.in_proj_qkv.weight": ("attention", "delta.qkvz_proj", 2),
        "model.layers.2.linear_attn.in_proj_z.weight": ("attention", "delta.qkvz_proj", 2),
        "model.layers.1.linear_attn.in_proj_a.weight": ("kept", "delta.ba_proj", 1),
        "model.layers.3.mlp.shared_expert.gate_proj.weight": (
            "shared_experts",
            "shared.gate_up",
            3,
        ),
    },
    "biased": {
        "model.layers.0.self_attn.q_proj.bias": ("norm", "attention.qkv_bias", 0),
        "model.layers.1.mlp.gate.e_score_correction_bias": ("norm", "moe.router_bias", 1),
        "model.layers.2.mlp.shared_experts.up_proj.weight": ("shared_experts", "shared.gate_up", 2),
    },
}


class KindsTest(parameterized.TestCase):
    @parameterized.parameters(*model_kinds.KINDS)
    def test_every_leaf_has_a_kind_and_its_layers(self, name):
        config = model_kinds.config_of(name)
        for leaf, shape in weight_shapes(config).items():
            self.assertIn(kind_of(leaf), KINDS)
            # Other leaves than named ones and norms are vectors, or the convolution.
            if leaf not in KIND_OF_LEAF and leaf != "delta.conv":
                self.assertRegex(leaf, r"norm$|bias$|a_log$|sinks$")
            if leaf not in ("embed", "head", "final_norm"):
                self.assertLen(layers_of(config, leaf), shape[0])

    @parameterized.parameters(*model_kinds.KINDS)
    def test_inventory(self, name):
        with tempfile.TemporaryDirectory() as folder:
            source = write_random_checkpoint(pathlib.Path(folder), **model_kinds.KINDS[name])
            inventory = take_inventory(source)
        found = {entry.name: entry for entry in inventory.entries}
        for tensor, (kind, leaf, layer) in ENTRIES[name].items():
            entry = found[tensor]
            self.assertEqual((entry.kind, entry.leaf, entry.layer), (kind, leaf, layer), tensor)
        for shard in inventory.shards[:-1]:
            self.assertTrue(shard.entries)
            for entry in shard.entries:
                self.assertTrue(entry.name.startswith(f"model.layers.{shard.layer}."))
        experts = [entry for entry in inventory.entries if entry.expert is not None]
        self.assertEqual({entry.kind for entry in experts}, {"experts"})


class QuantizeKindsTest(QuantizeTestCase):
    def source_of(self, name, **changes):
        fields = {**model_kinds.KINDS[name], **changes}
        source = write_random_checkpoint(self.directory / "source", **fields)
        write_tokenizer(source, 160)
        return source

    @slow.where(lambda name, method: (name, method) != ("latent", "rtn"))
    @parameterized.parameters(
        ("shared", "rtn"), ("latent", "rtn"), ("delta", "rtn"), ("latent", "gptq"),
        ("delta", "gptq"), ("shared", "milo"), ("delta", "milo"), ("joint", "rtn"),
        ("biased", "rtn"),
        ("by_part", "rtn"), ("sinks", "rtn"), ("lite", "rtn"),
    )  # fmt: skip
    def test_written_and_loaded(self, name, method):
        source = self.source_of(name)
        output = self.directory / method
        outcome = quantize_checkpoint(
            self.job(source=source, output=output, method=method, bits=4, group_size=16)
        )
        of_kind = {}
        for record in outcome.records.values():
            of_kind.setdefault(record["class"], set()).add("bits" in record)
        for kind, is_packed in of_kind.items():
            self.assertEqual(is_packed, {kind in PACKED}, kind)
        self.assertContainsSubset({"experts", "attention"}, of_kind)
        self.assertEqual("shared_experts" in of_kind, name not in ("joint", "sinks"))
        if method == "milo":  # Dense-8: of attention, shared experts and dense MLPs alone
            ranks = {(r["class"], r["rank"]) for r in outcome.records.values() if "rank" in r}
            self.assertEqual({kind for kind, rank in ranks if rank}, set(of_kind) & {*PACKED[2:],
                             "attention"})  # fmt: skip
        checkpoint = open_checkpoint(str(output))
        cpu = jax.devices("cpu")[0]
        loaded = checkpoint.load(dtype="float32", device=cpu, progress=False)
        for leaf, weight in loaded.items():
            self.assertEqual(isinstance(weight, QTensor), kind_of(leaf) in PACKED, leaf)
            if kind_of(leaf) in NEVER_PACKED:
                self.assertEqual(weight.dtype, leaf_dtype(leaf, np.float32))
        sizes = checkpoint_sizes(checkpoint, np.dtype(np.float32))
        for leaf, nbytes in sizes.weights_nbytes.items():
            if leaf in loaded:
                self.assertEqual(nbytes, loaded[leaf].nbytes, leaf)
        original = open_checkpoint(str(source)).load(dtype="float32", device=cpu, progress=False)
        for leaf, weight in loaded.items():
            plain, was = values_of(weight), np.asarray(original[leaf])
            error = np.linalg.norm(plain - was) / np.linalg.norm(was)
            self.assertLess(error, 0.25 if isinstance(weight, QTensor) else 1e-9, leaf)

    @pytest.mark.slow
    def test_decoder_of_a_model_that_sees_images(self):
        source, output = self.directory / "source", self.directory / "output"
        write_with_vision_tower(source)
        write_tokenizer(source, 160)
        quantize_checkpoint(
            self.job(source=source, output=output, method="rtn", bits=4, group_size=16)
        )
        fields = json.loads((output / "config.json").read_text())
        self.assertEqual(fields["model_type"], "qwen3_5_moe_text")
        self.assertEqual(fields["architectures"], ["Qwen3_5MoeForCausalLM"])
        self.assertEqual(fields["eos_token_id"], 7)
        self.assertNotIn("vision_config", fields)
        checkpoints = [open_checkpoint(str(path)) for path in (source, output)]
        self.assertEqual(checkpoints[0].config, checkpoints[1].config)
        cpu = jax.devices("cpu")[0]
        plain, packed = (of.load(dtype="float32", device=cpu, progress=False) for of in checkpoints)
        self.assertEqual(plain.keys(), packed.keys())
        self.assertIsInstance(packed["delta.qkvz_proj"], QTensor)
        np.testing.assert_array_equal(plain["delta.ba_proj"], packed["delta.ba_proj"])


class CalibrationTest(parameterized.TestCase):
    """Against the whole model, and what a projection adds where its matrix changes nothing."""

    def setUp(self):
        super().setUp()
        self.tokens = np.random.default_rng(3).integers(0, 160, (3, 70)).astype(np.int32)

    def weights(self, config):
        rng = np.random.default_rng(1)
        return {
            leaf: (0.1 * rng.standard_normal(shape) + self.middle(leaf, config)).astype(np.float32)
            for leaf, shape in weight_shapes(config).items()
        }

    def middle(self, leaf, config):
        is_centred = config.zero_centred_norm and leaf != "delta.norm"
        return float(leaf.endswith("norm") and not is_centred)

    def of_layer(self, weights, config, layer):
        stacked = {
            n: leaf for n, leaf in weights.items() if n not in ("embed", "head", "final_norm")
        }
        return {
            name: leaf[layers_of(config, name).index(layer)]
            for name, leaf in stacked.items()
            if layer in layers_of(config, name)
        }

    @parameterized.parameters(*model_kinds.KINDS)
    @pytest.mark.slow
    def test_layers_one_by_one_are_the_model(self, name):
        config = model_kinds.config_of(name)
        weights = self.weights(config)
        run = LayerRun(
            config, self.tokens, weights["embed"], dtype=jnp.float32,
            device=jax.devices("cpu")[0], tokens_per_step=140,
        )  # fmt: skip
        captured = []
        for layer in range(config.num_layers):
            of_layer = self.of_layer(weights, config, layer)
            self.assertEqual(set(of_layer), {
                leaf for leaf in weight_shapes(_one_layer(config, layer))
                if leaf not in ("embed", "head", "final_norm")
            })  # fmt: skip
            captured.append(run.capture(of_layer))
            run.advance(of_layer)
        whole = jax.jit(lambda w, t: forward(merge_weights(model_definition(config), w), t))
        hidden, routing = whole(weights, jnp.asarray(self.tokens))
        numpy_model.assert_near(run.hidden, np.asarray(hidden, np.float64), factor=3)
        for number, layer in enumerate(config.moe_layers):
            counts = np.bincount(np.asarray(routing.ids[number]).ravel(), minlength=4)
            np.testing.assert_array_equal(captured[layer].expert_tokens, counts)
            if not config.shared_dim:
                continue
            shared = captured[layer].hessian("shared.gate_up")
            np.testing.assert_array_equal(shared.mean, captured[layer].hessian("moe.router").mean)
            self.assertEqual(captured[layer].hessian("shared.down").mean.shape[0],
                             config.shared_dim)  # fmt: skip

    # D is as wide as what the output projection reads.
    @slow.repeats()
    @parameterized.parameters(
        ("shared", "attention.o_proj"), ("latent", "attention.o_proj"), ("delta", "delta.o_proj"),
        ("gate", "attention.o_proj"),
    )  # fmt: skip
    def test_inputs_of_the_output_projection(self, name, leaf):
        changes = {"delta_net": None} if name == "gate" else {}
        config = model_kinds.config_of("delta" if name == "gate" else name, **changes)
        weights = self.weights(config)
        self.assertEqual(weights[leaf].shape[1], weights[leaf].shape[2])
        weights[leaf][:] = np.eye(config.model_dim, dtype=np.float32)
        of_layer = self.of_layer(weights, config, 0)
        # So that the second half of the layer adds nothing.
        for down in ("moe.down", "mlp.down", "shared.down"):
            if down in of_layer:
                of_layer[down] = np.zeros_like(of_layer[down])
        run = LayerRun(
            config, self.tokens, weights["embed"], dtype=jnp.float32, device=jax.devices("cpu")[0]
        )
        before = np.array(run.hidden, np.float64)
        found = run.capture(of_layer).hessian(leaf)
        run.advance(of_layer)
        added = (np.array(run.hidden, np.float64) - before).reshape(-1, config.model_dim)
        self.assertEqual(found.num_tokens, 210)
        numpy_model.assert_near(found.mean, 2 * added.T @ added / 210, factor=100)

    def test_inputs_of_a_projection_from_a_latent(self):
        config = model_kinds.config_of("latent")
        weights = self.weights(config)
        of_layer = self.of_layer(weights, config, 0)
        run = LayerRun(
            config, self.tokens, weights["embed"], dtype=jnp.float32, device=jax.devices("cpu")[0]
        )
        x = np.array(run.hidden, np.float64).reshape(-1, config.model_dim)
        wide = {leaf: array.astype(np.float64) for leaf, array in of_layer.items()}
        normed = numpy_model.rms_norm(x, wide["attention.norm"], config.norm_eps)
        captured = run.capture(of_layer)
        latents = numpy_model.rms_norm(
            normed @ wide["attention.q_a"].T, wide["attention.q_a_norm"], 1e-6
        )
        for leaf, rows in (
            ("attention.q_a", normed),
            ("attention.kv_a", normed),
            ("attention.q_b", latents),
        ):
            expected = 2 * rows.T @ rows / 210
            numpy_model.assert_near(captured.hessian(leaf).mean, expected, factor=20)
        self.assertNotIn("attention.kv_b", captured._totals)
