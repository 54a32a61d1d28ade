"""config.json in both spellings, what is refused, and the way back."""

import dataclasses
import json
import tempfile
from pathlib import Path

import transformers
from absl.testing import absltest, parameterized

from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.hf.config import model_config, read_model_config, to_hf_config
from tests.hf_checkpoints import CHECKPOINTS, write_checkpoint

# The fields, that bear on the model, of two published config.json files.
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}


class HfConfigTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.directory = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))

    def test_qwen3_30b_a3b(self):
        config = model_config(QWEN3_30B_A3B)
        self.assertEqual(
            config,
            ModelConfig(
                family="qwen3_moe",
                vocab_size=151936,
                model_dim=2048,
                num_layers=48,
                num_heads=32,
                num_kv_heads=4,
                head_dim=128,
                num_experts=128,
                experts_per_token=8,
                expert_dim=768,
                mlp_dim=6144,
                moe_layers=tuple(range(48)),
                norm_topk_prob=True,
                norm_eps=1e-6,
                rope_theta=1e6,
                max_positions=40960,
                tied_embeddings=False,
                qk_norm=True,
                attention_bias=False,
                sliding_window=None,
            ),
        )
        self.assertEqual(weight_shapes(config)["moe.gate_up"], (48, 128, 1536, 2048))

    def test_mixtral_8x7b(self):
        config = model_config(MIXTRAL_8X7B)
        self.assertEqual((config.head_dim, config.expert_dim, config.num_experts), (128, 14336, 8))
        self.assertTrue(config.norm_topk_prob)
        self.assertFalse(config.qk_norm)
        self.assertEqual(config.max_positions, 32768)

    @parameterized.parameters(QWEN3_30B_A3B, MIXTRAL_8X7B)
    def test_transformers_5_writes_the_same_model(self, **fields):
        written = transformers.AutoConfig.for_model(**fields).to_dict()
        self.assertIn("rope_parameters", written)
        self.assertEqual(model_config(written), model_config(fields))

    @parameterized.parameters(*CHECKPOINTS)
    def test_way_back(self, name):
        config = read_model_config(write_checkpoint(name, self.directory))
        fields = to_hf_config(config, dtype="bfloat16", eos_token_id=[3, 4])
        self.assertEqual(model_config(json.loads(json.dumps(fields))), config)
        self.assertEqual(fields["eos_token_id"], [3, 4])

    def test_way_back_is_refused_where_it_would_lose_something(self):
        config = dataclasses.replace(model_config(MIXTRAL_8X7B), attention_bias=True)
        with self.assertRaisesRegex(ValueError, "mixtral config.json cannot express"):
            to_hf_config(config, dtype="float32")

    @parameterized.parameters(
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_only_layers": [0, 3]}, (1, 2)),
        ({"mlp_only_layers": None}, (0, 1, 2, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (3,)),
    )
    def test_sparse_layers(self, changed, expected):
        config = model_config({**QWEN3_30B_A3B, "num_hidden_layers": 4, **changed})
        self.assertEqual(config.moe_layers, expected)

    @parameterized.parameters(
        (QWEN3_30B_A3B, {"sliding_window": 4096}, None),
        (QWEN3_30B_A3B, {"sliding_window": 4096, "use_sliding_window": True}, 4096),
        (QWEN3_30B_A3B, {"use_sliding_window": True}, None),  # null is no window
        (MIXTRAL_8X7B, {"sliding_window": 4096}, 4096),
    )
    def test_sliding_window(self, fields, changed, expected):
        self.assertEqual(model_config({**fields, **changed}).sliding_window, expected)

    def test_a_window_that_is_not_given_is_transformers_own(self):
        fields = {**QWEN3_30B_A3B, "use_sliding_window": True}
        del fields["sliding_window"]
        self.assertEqual(
            model_config(fields).sliding_window,
            transformers.Qwen3MoeConfig(use_sliding_window=True).sliding_window,
        )

    @parameterized.parameters("rope_scaling", "rope_parameters")
    def test_rope_theta_wherever_it_is_kept(self, name):
        fields = {**QWEN3_30B_A3B, name: {"rope_type": "default", "rope_theta": 5e6}}
        del fields["rope_theta"]
        self.assertEqual(model_config(fields).rope_theta, 5e6)

    @parameterized.parameters(
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "'llama'.*'qwen3_moe'"),
        ({"model_type": None}, "supported are 'mixtral'"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "rope_scaling of type 'mrope'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "the factor of rope scaling of type 'llama"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_hidden_layers": "48"}, "num_hidden_layers is '48', expected a positive integer"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1, expected a positive finite number"),
        ({"num_experts_per_tok": 129}, "experts_per_token 129 is not in 1..128"),
        ({"rope_parameters": "x"}, "rope_parameters is 'x', expected a JSON object"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\], expected a JSON object"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected a JSON object"),
        ({"quantization_config": "x"}, "quantization_config is 'x', expected a JSON object"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list of layers"),
        ({"mlp_only_layers": ["a"]}, r"mlp_only_layers is \['a'\], expected a list of layers"),
        ({"model_type": []}, r"model_type \[\] \(Qwen3MoeForCausalLM\) is not supported"),
        ({"model_type": "x", "architectures": 5}, r"'x' \(5\) is not supported"),
        ({"model_type": "x", "architectures": [5]}, r"'x' \(5\) is not supported"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, expected a positive finite number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a positive finite number"),
        ({"rope_theta": 10**400}, "rope_theta is 1000.*, expected a positive finite number"),
        ({"num_local_experts": 64}, "num_local_experts says 64 but num_experts says 128"),
        (
            {"rope_parameters": {"rope_theta": 1e4}},
            "rope_parameters.rope_theta says 10000.0 but rope_theta says 1000000.0",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_scaling.rope_theta says 10000.0 but rope_theta says 1000000.0",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters apart for full_attention",
        ),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"sliding_window": "wide", "use_sliding_window": True}, "sliding_window is 'wide'"),
    )
    def test_refused(self, changed, message):
        path = self.directory / "refused"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps({**QWEN3_30B_A3B, **changed}))
        with self.assertRaisesRegex(MoejaxError, message) as caught:
            read_model_config(path)
        self.assertIn("config.json", str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))

    def test_every_reason_is_given(self):
        fields = {**QWEN3_30B_A3B, "hidden_act": "gelu", "partial_rotary_factor": 0.5}
        with self.assertRaisesRegex(MoejaxError, "partial_rotary_factor.*hidden_act"):
            model_config(fields)

    @parameterized.parameters(
        (None, "no config.json in"),
        ("{", "cannot read .*config.json"),
        ("[]", "expected a JSON object"),
    )
    def test_broken_file(self, text, message):
        path = self.directory / f"broken_{text}"
        path.mkdir()
        if text is not None:
            (path / "config.json").write_text(text)
        with self.assertRaisesRegex(MoejaxError, message):
            read_model_config(path)

    def test_missing_directory(self):
        with self.assertRaisesRegex(MoejaxError, "no such directory: .*nowhere"):
            read_model_config(self.directory / "nowhere")


if __name__ == "__main__":
    absltest.main()
