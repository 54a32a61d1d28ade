"""config.json of every family in both spellings and back, what is refused, YaRN."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import transformers
from absl.testing import parameterized
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from moejax import Engine
from moejax.checkpoints.sizes import shape_sizes
from moejax.errors import MoejaxError
from moejax.models.config import RouterRule, weight_shapes
from moejax.models.hf.config import model_config, read_model_config, text_fields, to_hf_config
from moejax.models.rope import _scaled_frequencies
from moejax.models.shapes import SHAPES
from tests.deepseek_moe_torch import DeepseekMoe, Shape
from tests.folder_case import FolderTestCase
from tests.hf_checkpoints import GROUPS, write_checkpoint

# Fields that bear on the model, of published config.json files. Qwen3.6's text is nested in one.
_FIELDS = json.loads(Path(__file__).with_name("published_configs.json").read_text())
QWEN3, MIXTRAL, NEXT, MOE_16B, V2_LITE, V3, OLMOE_1B_7B, GLM_AIR, GLM_FLASH, QWEN35, OSS_20B = (
    _FIELDS.values()
)


def qwen35(**text: Any) -> dict[str, Any]:
    """The published fields of another size of Qwen3.5."""
    same = {"moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024}
    same |= {"linear_num_value_heads": 64, "num_attention_heads": 32}
    return QWEN35 | {"text_config": QWEN35["text_config"] | same | text}


PUBLISHED = {
    "Qwen3-30B-A3B": QWEN3,
    "Qwen3-235B-A22B": QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_attention_heads": 64, "num_hidden_layers": 94,
    },
    "Mixtral-8x7B": MIXTRAL,
    "Qwen3-Next-80B-A3B": NEXT,
    "DeepSeek-MoE-16B": MOE_16B,
    "DeepSeek-V2-Lite": V2_LITE,
    "Qwen3.6-35B-A3B": QWEN35,
    "Qwen3.5-122B-A10B": qwen35(hidden_size=3072, num_hidden_layers=48),
    "Qwen3.5-397B-A17B": qwen35(
        hidden_size=4096, num_hidden_layers=60, num_experts=512, num_experts_per_tok=10
    ),
    "OLMoE-1B-7B": OLMOE_1B_7B,
    "GLM-4.5-Air": GLM_AIR,
    "GLM-4.7": GLM_AIR | {
        "first_k_dense_replace": 3, "hidden_size": 5120, "intermediate_size": 12288,
        "max_position_embeddings": 202752, "moe_intermediate_size": 1536,
        "n_routed_experts": 160, "num_hidden_layers": 92, "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    },
    "GLM-4.7-Flash": GLM_FLASH,
    "gpt-oss-20b": OSS_20B,
    "gpt-oss-120b": OSS_20B | {
        "layer_types": OSS_20B["layer_types"][:2] * 18, "num_hidden_layers": 36,
        "num_local_experts": 128,
    },
}  # fmt: skip


def as_json(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields after they were written and read; transformers changes what it is given."""
    return json.loads(json.dumps(fields))


def by_transformers(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as transformers 5 writes them."""
    return transformers.AutoConfig.for_model(**as_json(fields)).to_dict()


class PublishedTest(parameterized.TestCase):
    @parameterized.parameters(*PUBLISHED)
    def test_fields_are_those_of_the_shape(self, name):
        fields, expected = PUBLISHED[name], SHAPES[name]
        self.assertEqual(model_config(fields), expected)
        self.assertEqual(model_config(as_json(to_hf_config(expected, dtype="float32"))), expected)

    # Billions of weights: of papers and model cards, and of Qwen3.5 what the fields add up to.
    @parameterized.parameters(
        ("Qwen3-30B-A3B", 30.53), ("Mixtral-8x7B", 46.70), ("Qwen3-Next-80B-A3B", 79.67),
        ("DeepSeek-MoE-16B", 16.38), ("DeepSeek-V2-Lite", 15.71), ("OLMoE-1B-7B", 6.92),
        ("GLM-4.5-Air", 106.85), ("GLM-4.7-Flash", 29.94), ("Qwen3.6-35B-A3B", 34.66),
        ("Qwen3.5-122B-A10B", 122.11), ("Qwen3.5-397B-A17B", 396.35), ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.83), ("GLM-4.7", 352.80), ("Qwen3-235B-A22B", 235.09),
    )  # fmt: skip
    def test_planned_sizes_are_those_published(self, name, billions):
        config = SHAPES[name]
        sizes = shape_sizes(config, np.dtype(np.float16), expert_kind=None)
        num_experts = len(config.moe_layers) * config.num_experts
        planned = sum(sizes.weights_nbytes.values()) + num_experts * sizes.expert_nbytes
        self.assertAlmostEqual(planned / 2e9, billions, delta=0.006)

    def test_every_shape_has_its_published_size_and_fields(self):
        self.assertEqual({*PUBLISHED}, {*SHAPES})

    def test_shapes_of_leaves(self):
        of_qwen, of_next = map(
            weight_shapes, (SHAPES["Qwen3-30B-A3B"], SHAPES["Qwen3-Next-80B-A3B"])
        )
        self.assertEqual(of_qwen["moe.gate_up"], (48, 128, 1536, 2048))
        self.assertEqual(of_next["delta.qkvz_proj"], (36, 12288, 2048))
        self.assertEqual(of_next["attention.qkv_proj"], (12, 9216, 2048))
        self.assertEqual(SHAPES["DeepSeek-V2-Lite"].cached_values, 27 * (512 + 64))

    def test_deepseek_v3(self):
        v3 = model_config(V3)
        rule = RouterRule(
            scoring="sigmoid", scale=2.5, num_groups=8, top_groups=4, group_score="top2",
            has_bias=True,
        )  # fmt: skip
        self.assertEqual((v3.router, v3.norm_topk_prob, v3.shared_dim), (rule, True, 2048))
        latent = dataclasses.replace(SHAPES["DeepSeek-V2-Lite"].latent, query_rank=1536)
        self.assertEqual(v3.latent, latent)
        self.assertEqual((v3.head_dim, v3.moe_layers), (192, tuple(range(3, 61))))

    @parameterized.parameters(
        QWEN3, MIXTRAL, NEXT, V2_LITE, V3, OLMOE_1B_7B, GLM_AIR, GLM_FLASH, QWEN35["text_config"],
        OSS_20B,
    )  # fmt: skip
    def test_transformers_5_writes_the_same_model(self, **fields):
        written = by_transformers(fields)
        self.assertIn("rope_parameters", written)
        self.assertNotIn("rope_scaling", written)
        self.assertEqual(model_config(written), model_config(fields))

    @parameterized.parameters(V2_LITE, V3)
    def test_transformers_builds_the_same_model_of_what_is_written(self, **fields):
        expected = transformers.AutoConfig.for_model(**as_json(fields))
        written = to_hf_config(model_config(fields), dtype="bfloat16")
        found = transformers.AutoConfig.for_model(**as_json(written))
        names = set(fields) - {"rope_scaling", "rope_theta", "torch_dtype", "first_k_dense_replace"}
        for name in sorted(names):
            self.assertEqual(getattr(found, name), getattr(expected, name), name)
        for name, value in expected.rope_parameters.items():
            self.assertEqual(found.rope_parameters[name], value, name)


class WayBackTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.checkpoints = cls.class_folder()

    @parameterized.parameters(*(name for group in GROUPS for name in group))
    def test_of_checkpoints(self, name):
        config = read_model_config(write_checkpoint(name, self.checkpoints))
        fields = as_json(to_hf_config(config, dtype="bfloat16", eos_token_id=[3, 4]))
        self.assertEqual(model_config(fields), config)
        self.assertEqual(fields["eos_token_id"], [3, 4])
        self.assertEqual(model_config(by_transformers(fields)), config)

    @parameterized.parameters(
        (MOE_16B, {"moe_layer_freq": 2}),
        (MOE_16B, {"first_k_dense_replace": 5, "moe_layer_freq": 3}),
        (MOE_16B, {"n_shared_experts": None}),
        (MOE_16B, {"first_k_dense_replace": 0, "norm_topk_prob": True}),
        (NEXT, {"full_attention_interval": 1}),  # no delta rule
    )
    def test_of_other_fields(self, fields, changed):
        config = model_config(fields | changed)
        self.assertEqual(model_config(as_json(to_hf_config(config, dtype="float32"))), config)
        self.assertIsNone(config.delta_net)

    @parameterized.parameters(
        (SHAPES["Mixtral-8x7B"], {"attention_bias": True}),
        (SHAPES["DeepSeek-V2-Lite"], {"moe_layers": (1, 2, 5)}),
        (SHAPES["DeepSeek-V2-Lite"], {"shared_dim": 1000}),
        (SHAPES["DeepSeek-V2-Lite"], {"attention_bias": True}),
        (SHAPES["DeepSeek-V2-Lite"], {"sliding_window": 9}),
        (SHAPES["DeepSeek-V2-Lite"], {"interleaved_rope": False}),
        (SHAPES["DeepSeek-V2-Lite"], {"router": RouterRule(scoring="sigmoid")}),
    )
    def test_is_refused_where_it_would_lose_something(self, config, changed):
        said = f"a?n? ?{config.family} config.json cannot express"
        with self.assertRaisesRegex(ValueError, said):
            to_hf_config(dataclasses.replace(config, **changed), dtype="float32")


class FieldsTest(FolderTestCase):
    @parameterized.parameters(
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_only_layers": [0, 3]}, (1, 2)),
        ({"mlp_only_layers": None}, (0, 1, 2, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (3,)),
    )
    def test_sparse_layers(self, changed, expected):
        config = model_config({**QWEN3, "num_hidden_layers": 4, **changed})
        self.assertEqual(config.moe_layers, expected)

    @parameterized.parameters(
        (QWEN3, {"sliding_window": 4096}, None),
        (QWEN3, {"sliding_window": 4096, "use_sliding_window": True}, 4096),
        (QWEN3, {"use_sliding_window": True}, None),  # null is no window
        (MIXTRAL, {"sliding_window": 4096}, 4096),
    )
    def test_sliding_window(self, fields, changed, expected):
        self.assertEqual(model_config({**fields, **changed}).sliding_window, expected)

    @parameterized.parameters("rope_scaling", "rope_parameters")
    def test_rope_theta_wherever_it_is_kept(self, name):
        fields = {**QWEN3, name: {"rope_type": "default", "rope_theta": 5e6}}
        del fields["rope_theta"]
        self.assertEqual(model_config(fields).rope_theta, 5e6)

    @parameterized.parameters(GLM_AIR, MOE_16B)
    def test_rope_interleave_is_of_latent_attention_alone(self, **fields):
        found = model_config(fields | {"rope_interleave": True})
        self.assertEqual(found, model_config(fields))
        self.assertFalse(found.interleaved_rope)

    @parameterized.parameters(QWEN3, MOE_16B, OSS_20B)
    def test_swish_is_silu(self, **fields):
        self.assertIs(transformers.activations.ACT2CLS["swish"], torch.nn.SiLU)
        found = model_config(fields | {"hidden_act": "swish"})
        self.assertEqual(found, model_config(fields | {"hidden_act": "silu"}))

    def test_nested_text_without_a_model_type(self):
        expected = model_config(QWEN35)
        text = QWEN35["text_config"]
        unnamed = {name: value for name, value in text.items() if name != "model_type"}
        for nested in (unnamed, unnamed | {"model_type": None}):
            fields = QWEN35 | {"text_config": nested}
            self.assertEqual(model_config(fields), expected)
            self.assertEqual(text_fields(fields)["model_type"], "qwen3_5_moe_text")

    def test_nested_text_that_is_null_has_the_defaults_of_transformers(self):
        fields = QWEN35 | {"text_config": None}
        made = transformers.AutoConfig.for_model(**as_json(fields)).text_config.to_dict()
        self.assertEqual(model_config(fields), model_config(as_json(made)))

    def test_every_second_layer(self):
        path = self.directory / "second"
        DeepseekMoe(Shape(num_hidden_layers=5, moe_layer_freq=2), seed=0).write(path)
        self.assertEqual(read_model_config(path).moe_layers, (2, 4))

    def test_the_head_for_further_tokens_is_left_out_and_named(self):
        path = write_checkpoint("next", self.directory)
        more = self.directory / "with_mtp"
        more.mkdir()
        for file in path.iterdir():
            (more / file.name).write_bytes(file.read_bytes())
        tensors = safetensors.numpy.load_file(more / "model.safetensors")
        extra = {f"mtp.layers.0.{n}.weight": np.zeros((2, 2), np.float32) for n in "abc"}
        safetensors.numpy.save_file(tensors | extra, more / "model.safetensors")
        how = {"dtype": "float32", "platform": "cpu", "progress": False}
        with self.assertLogs("absl", "WARNING") as logs:
            found = Engine.from_pretrained(more, **how)
        told = [line for line in logs.output if "mtp." in line]
        self.assertLen(told, 1)
        self.assertIn("left out 3 tensors", told[0])
        expected = Engine.from_pretrained(path, **how).weights
        self.assertEqual(found.weights.keys(), expected.keys())
        for name, leaf in found.weights.items():
            np.testing.assert_array_equal(leaf, expected[name])


class RefusalTest(FolderTestCase):
    @parameterized.parameters(
        (
            QWEN3,
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            "'llama'.*'qwen3_moe'",
        ),
        (QWEN3, {"model_type": None}, "supported are 'mixtral'"),
        (QWEN3, {"rope_scaling": {"type": "mrope", "factor": 2.0}}, "rope_scaling of type 'mrope'"),
        (QWEN3, {"rope_parameters": {"rope_type": "llama3"}}, "the factor of rope scaling of type"),
        (QWEN3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act 'gelu', only 'silu' and 'swish' are"),
        (QWEN3, {"hidden_size": None}, "hidden_size is null, in the file or by default"),
        (
            QWEN3,
            {"num_hidden_layers": math.nan},
            "num_hidden_layers is nan, expected a positive inte",
        ),
        (QWEN3, {"num_hidden_layers": "48"}, "num_hidden_layers is '48', expected a positive inte"),
        (QWEN3, {"rms_norm_eps": -1}, "rms_norm_eps is -1, expected a positive finite number"),
        (QWEN3, {"num_experts_per_tok": 129}, ": num_experts_per_tok is 129, expected at most 128"),
        (MIXTRAL, {"num_experts_per_tok": 9}, ": num_experts_per_tok is 9, expected at most 8"),
        (V3, {"num_experts_per_tok": 257}, ": num_experts_per_tok is 257, expected at most 256"),
        (OSS_20B, {"num_experts_per_tok": 33}, ": num_experts_per_tok is 33, expected at most 32"),
        (QWEN3, {"rope_parameters": "x"}, "rope_parameters is 'x', expected a JSON object"),
        (QWEN3, {"mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list of layers"),
        (QWEN3, {"model_type": []}, r"model_type \[\] \(Qwen3MoeForCausalLM\) is not supported"),
        (QWEN3, {"model_type": "x", "architectures": 5}, r"'x' \(5\) is not supported"),
        (QWEN3, {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, expected a positive finite"),
        (QWEN3, {"rope_theta": 10**400}, "rope_theta is 1000.*, expected a positive finite number"),
        (QWEN3, {"num_local_experts": 64}, "num_local_experts says 64 but num_experts says 128"),
        (QWEN3, {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta says 10000."),
        (
            QWEN3,
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters apart for full_attention",
        ),
        (QWEN3, {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or fal"),
        (QWEN3, {"sliding_window": "wide", "use_sliding_window": True}, "sliding_window is 'wide'"),
        (NEXT, {"layer_types": ["linear_attention"] * 3}, "layer_types is .*, expected a list of"),
        (NEXT, {"layer_types": ["sliding_attention"] * 48}, "layer_types with 'sliding_attention'"),
        (NEXT, {"full_attention_interval": 0}, "full_attention_interval is 0, expected a positive"),
        (NEXT, {"linear_num_key_heads": 5}, "32 value heads are no multiple of 5 key heads"),
        (NEXT, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        (NEXT, {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        (NEXT, {"head_dim": 100}, "25 rotated dimensions of a head of 100"),
        (NEXT, {"use_sliding_window": True}, "use_sliding_window"),
        (OLMOE_1B_7B, {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        (QWEN35, {"text_config": [1]}, r"text_config is \[1\], expected a JSON object"),
        (QWEN35, {"text_config": {"model_type": "x"}}, "model_type 'x'"),
        (
            QWEN35,
            {"text_config": QWEN35["text_config"] | {"tie_word_embeddings": True}},
            "text_config.tie_word_embeddings says True;",
        ),
        (V2_LITE, {"attention_bias": True}, "attention_bias true"),
        (V2_LITE, {"mlp_bias": True}, "mlp_bias true"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid', only 'softmax' is"),
        (V2_LITE, {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (V2_LITE, {"num_key_value_heads": 4}, "num_key_value_heads 4 of 16 heads"),
        (V2_LITE, {"n_shared_experts": None}, "n_shared_experts None"),
        (V2_LITE, {"rope_scaling": {"type": "yarn"}}, "the factor of rope scaling"),
        (
            V2_LITE,
            {"rope_parameters": {"rope_type": "yarn", "factor": 4}},
            "rope_scaling.factor says 40 but rope_parameters.factor says 4;",
        ),
        (V2_LITE, {"topk_method": "group_limited_greedy", "n_group": 7}, "1 of 7 groups do not"),
        (V2_LITE, {"topk_method": "group_limited_greedy", "n_group": None}, "n_group is null"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy'"),
        (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        (GLM_FLASH, {"attention_bias": True}, "attention_bias true"),
        (GLM_FLASH, {"mlp_layer_types": ["dense"]}, "mlp_layer_types is .*, expected 47 times"),
        (GLM_FLASH, {"first_k_dense_replace": 3}, "first_k_dense_replace 3 but mlp_layer_types"),
        (GLM_FLASH, {"first_k_dense_replace": "1"}, "first_k_dense_replace is '1', expected a pos"),
        (GLM_FLASH, {"first_k_dense_replace": True}, "first_k_dense_replace is True, expected a"),
        (OSS_20B, {"sliding_window": None}, "sliding_window is null, .*positive integer; write"),
        (OSS_20B, {"swiglu_limit": None}, "swiglu_limit is null, .*finite number; write"),
        (MOE_16B, {"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling of type 'yarn'"),
        (MOE_16B, {"hidden_size": 2050}, "hidden_size 2050 is no multiple of 16 heads"),
    )
    def test_fields(self, fields, changed, message):
        (self.directory / "config.json").write_text(json.dumps(fields | changed))
        with self.assertRaisesRegex(MoejaxError, message) as caught:
            read_model_config(self.directory)
        self.assertIn("config.json", str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))

    def test_every_reason_is_given(self):
        fields = {**QWEN3, "hidden_act": "gelu", "partial_rotary_factor": 0.5}
        with self.assertRaisesRegex(MoejaxError, "partial_rotary_factor.*hidden_act"):
            model_config(fields)

    @parameterized.parameters(
        (None, "no config.json in"),
        ("{", "cannot read .*config.json"),
        ("[]", "expected a JSON object"),
    )
    def test_broken_file(self, text, message):
        if text is not None:
            (self.directory / "config.json").write_text(text)
        with self.assertRaisesRegex(MoejaxError, message):
            read_model_config(self.directory)

    def test_missing_directory(self):
        with self.assertRaisesRegex(MoejaxError, "no such directory: .*nowhere"):
            read_model_config(self.directory / "nowhere")

    @parameterized.product(
        fields=(V2_LITE, V3, MOE_16B, MOE_16B | {"num_experts_per_tok": 1}),
        name=("norm_topk_prob", "rope_interleave"),
        value=("xxxxx", float("nan"), 1, [True]),
    )
    def test_flags_of_a_wrong_type(self, fields, name, value):
        """Read where they change nothing, too."""
        with self.assertRaisesRegex(MoejaxError, f"{name} is .*, expected true or false"):
            model_config(fields | {name: value})


class YarnTest(parameterized.TestCase):
    @parameterized.parameters(
        (V2_LITE, {}), (V3, {}),
        (V2_LITE, {"mscale": 1.0, "mscale_all_dim": 0.5, "factor": 3.7, "beta_fast": 17}),
        (V2_LITE, {"mscale": 0.8, "mscale_all_dim": 0}),
        (V2_LITE, {"mscale": 0, "mscale_all_dim": 0.8}),
        (V2_LITE, {"attention_factor": 1.25}),
        (V2_LITE, {"factor": 1.0}),
        (V2_LITE, {"original_max_position_embeddings": 163840 * 10**4, "beta_slow": 0.001}),
    )  # fmt: skip
    def test_frequencies_and_scales_are_those_of_transformers(self, fields, changed):
        rope = {**fields["rope_scaling"], **changed}
        fields = fields | {"rope_scaling": rope}
        config = model_config(fields)
        theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(fields)))
        v2 = fields["model_type"] == "deepseek_v2"
        module = modeling_deepseek_v2 if v2 else modeling_deepseek_v3
        name = "DeepseekV2" if v2 else "DeepseekV3"
        rotary = getattr(module, f"{name}RotaryEmbedding")(theirs)
        with torch.device("meta"):
            attention = getattr(module, f"{name}Attention")(theirs, 0)
        scaling = config.rope_scaling
        found = _scaled_frequencies(config.rotary_dim, config.rope_theta, scaling)
        np.testing.assert_array_max_ulp(found, rotary.inv_freq.numpy(), maxulp=0)
        np.testing.assert_allclose(scaling.rotation_scale, rotary.attention_scaling, rtol=1e-12)
        np.testing.assert_allclose(config.score_scale, attention.scaling, rtol=1e-12)
