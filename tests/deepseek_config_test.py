"""config.json of DeepSeek's families in both spellings and back, what is refused, YaRN, chats."""

import dataclasses
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from absl.testing import absltest, parameterized
from tokenizers import models
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from moejax.errors import MoejaxError
from moejax.models.config import RouterRule, weight_shapes
from moejax.models.hf.config import model_config, read_model_config, to_hf_config
from moejax.models.rope import scaled_frequencies
from moejax.models.shapes import DEEPSEEK_MOE_16B, DEEPSEEK_V2_LITE
from moejax.text.tokenizer import Tokenizer
from tests.deepseek_moe_torch import DeepseekMoe, Shape
from tests.hf_checkpoints import DEEPSEEK_CHECKPOINTS, write_checkpoint

# The fields, that bear on the model, of three published config.json files.
MOE_16B: dict[str, Any] = {
    "architectures": ["DeepseekForCausalLM"], "attention_bias": False, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944,
    "max_position_embeddings": 4096, "model_type": "deepseek", "moe_intermediate_size": 1408,
    "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 28,
    "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000,
    "scoring_func": "softmax", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 102400,
}  # fmt: skip
V2_LITE: dict[str, Any] = {
    **MOE_16B, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "n_group": 1, "num_hidden_layers": 27,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
}  # fmt: skip
V3: dict[str, Any] = {
    **V2_LITE, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4,
    "topk_method": "noaux_tc", "vocab_size": 129280,
    "rope_scaling": V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip

# Published tokenizer_config.json of DeepSeek-V2-Lite-Chat.
CHAT_TEMPLATE = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
    "{% endif %}{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'User: ' + message['content'] + '\n\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}"
    "{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ 'Assistant:' }}{% endif %}"
)
BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


class ConfigTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.directory = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))

    def test_published(self):
        self.assertEqual(model_config(V2_LITE), DEEPSEEK_V2_LITE)
        self.assertEqual(model_config(MOE_16B), DEEPSEEK_MOE_16B)
        v3 = model_config(V3)
        rule = RouterRule(
            scoring="sigmoid", scale=2.5, num_groups=8, top_groups=4, group_score="top2",
            has_bias=True,
        )  # fmt: skip
        self.assertEqual((v3.router, v3.norm_topk_prob, v3.shared_dim), (rule, True, 2048))
        self.assertEqual(v3.latent, dataclasses.replace(DEEPSEEK_V2_LITE.latent, query_rank=1536))
        self.assertEqual((v3.head_dim, v3.moe_layers), (192, tuple(range(3, 61))))

    def test_sizes(self):
        """Sizes equal the papers': 16.4 and 15.7 thousand million weights."""
        sizes = [
            sum(math.prod(shape) for shape in weight_shapes(config).values()) / 1e9
            for config in (DEEPSEEK_MOE_16B, DEEPSEEK_V2_LITE)
        ]
        np.testing.assert_allclose(sizes, (16.4, 15.7), atol=0.05)
        self.assertEqual(DEEPSEEK_V2_LITE.cached_values, 27 * (512 + 64))

    @parameterized.parameters(V2_LITE, V3)
    def test_transformers_5_writes_the_same_model(self, **fields):
        written = transformers.AutoConfig.for_model(**json.loads(json.dumps(fields))).to_dict()
        self.assertNotIn("rope_scaling", written)
        self.assertEqual(model_config(written), model_config(fields))

    @parameterized.parameters(V2_LITE, V3)
    def test_transformers_builds_the_same_model_of_what_is_written(self, **fields):
        expected = transformers.AutoConfig.for_model(**json.loads(json.dumps(fields)))
        written = to_hf_config(model_config(fields), dtype="bfloat16")
        found = transformers.AutoConfig.for_model(**json.loads(json.dumps(written)))
        names = set(fields) - {"rope_scaling", "rope_theta", "torch_dtype", "first_k_dense_replace"}
        for name in sorted(names):
            self.assertEqual(getattr(found, name), getattr(expected, name), name)
        for name, value in expected.rope_parameters.items():
            self.assertEqual(found.rope_parameters[name], value, name)

    @parameterized.parameters(*DEEPSEEK_CHECKPOINTS)
    def test_way_back(self, name):
        config = read_model_config(write_checkpoint(name, self.directory))
        fields = json.loads(json.dumps(to_hf_config(config, dtype="float32", eos_token_id=7)))
        self.assertEqual(model_config(fields), config)
        self.assertEqual(fields["eos_token_id"], 7)
        self.assertEqual(
            model_config(transformers.AutoConfig.for_model(**fields).to_dict()), config
        )

    @parameterized.parameters(
        {}, {"moe_layer_freq": 2}, {"first_k_dense_replace": 5, "moe_layer_freq": 3},
        {"n_shared_experts": None}, {"first_k_dense_replace": 0, "norm_topk_prob": True},
    )  # fmt: skip
    def test_way_back_of_deepseek_moe(self, **changed):
        config = model_config(MOE_16B | changed)
        fields = json.loads(json.dumps(to_hf_config(config, dtype="float32")))
        self.assertEqual(model_config(fields), config)

    def test_every_second_layer(self):
        path = self.directory / "second"
        DeepseekMoe(Shape(num_hidden_layers=5, moe_layer_freq=2), seed=0).write(path)
        self.assertEqual(read_model_config(path).moe_layers, (2, 4))

    @parameterized.parameters(
        ({"moe_layers": (1, 2, 5)}, "moe_layers"),
        ({"shared_dim": 1000}, "shared_dim"),
        ({"attention_bias": True}, "bias"),
        ({"sliding_window": 9}, "window"),
        ({"interleaved_rope": False}, "rope"),
        ({"router": RouterRule(scoring="sigmoid")}, "router"),
    )
    def test_way_back_is_refused_where_it_would_lose_something(self, changed, _):
        config = dataclasses.replace(DEEPSEEK_V2_LITE, **changed)
        with self.assertRaisesRegex(ValueError, "a deepseek_v2 config.json cannot express"):
            to_hf_config(config, dtype="float32")

    @parameterized.parameters(
        (V2_LITE, {"attention_bias": True}, "attention_bias true"),
        (V2_LITE, {"mlp_bias": True}, "mlp_bias true"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid', only 'softmax' is"),
        (V2_LITE, {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (V2_LITE, {"num_key_value_heads": 4}, "num_key_value_heads 4 of 16 heads"),
        (V2_LITE, {"n_shared_experts": None}, "n_shared_experts None"),
        (V2_LITE, {"rope_scaling": {"type": "mrope", "factor": 2}}, "rope_scaling of type 'mrop"),
        (V2_LITE, {"rope_scaling": {"type": "yarn"}}, "the factor of rope scaling"),
        (
            V2_LITE, {"rope_parameters": {"rope_type": "yarn", "factor": 4}},
            "rope_scaling.factor says 40 but rope_parameters.factor says 4;",
        ),
        (
            V2_LITE, {"rope_parameters": {"rope_type": "default"}},
            "rope_scaling says 'yarn' but rope_parameters says 'default'",
        ),
        (V2_LITE, {"topk_method": "group_limited_greedy", "n_group": 7}, "1 of 7 groups do not"),
        (V2_LITE, {"topk_method": "group_limited_greedy", "n_group": None}, "n_group is missing"),
        (V2_LITE, {"q_lora_rank": 0}, "q_lora_rank is 0, expected a positive integer"),
        (V2_LITE, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (V2_LITE, {"n_routed_experts": None}, "n_routed_experts is missing"),
        (V3, {"scoring_func": "softmax"}, "scoring_func 'softmax', only 'sigmoid' is"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy'"),
        (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        (MOE_16B, {"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling of type 'yarn'"),
        (MOE_16B, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid', only 'softmax' is"),
        (MOE_16B, {"hidden_size": 2050}, "hidden_size 2050 is no multiple of 16 heads"),
    )  # fmt: skip
    def test_refused(self, fields, changed, message):
        with self.assertRaisesRegex((MoejaxError, ValueError), message) as caught:
            model_config(fields | changed)
        self.assertNotIn("\n", str(caught.exception))

    @parameterized.product(
        fields=(V2_LITE, V3, MOE_16B, MOE_16B | {"num_experts_per_tok": 1}),
        name=("norm_topk_prob", "rope_interleave"),
        value=("xxxxx", float("nan"), 1, [True]),
    )
    def test_flags_of_a_wrong_type(self, fields, name, value):
        """Read where they change nothing, too."""
        with self.assertRaisesRegex(MoejaxError, f"{name} is .*, expected true or false"):
            model_config(fields | {name: value})

    def test_what_is_left_out_is_as_transformers_has_it(self):
        left_out = (
            "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
            "first_k_dense_replace", "n_shared_experts", "routed_scaling_factor", "topk_method",
            "max_position_embeddings", "norm_topk_prob", "num_key_value_heads", "rms_norm_eps",
        )  # fmt: skip
        for published in (V2_LITE, V3):
            more = ("n_group", "topk_group") if published is V3 else ()
            fields = {n: v for n, v in published.items() if n not in (*left_out, *more)}
            if published is V3:
                fields["num_experts_per_tok"] = 4  # of which 8 groups hold enough
            else:
                fields["num_attention_heads"] = 32
            fields = json.loads(json.dumps(fields | {"num_key_value_heads": None}))
            whole = transformers.AutoConfig.for_model(**fields).to_dict()
            self.assertEqual(model_config(fields), model_config(whole))


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
        found = scaled_frequencies(config.rotary_dim, config.rope_theta, scaling)
        np.testing.assert_array_max_ulp(found, rotary.inv_freq.numpy(), maxulp=0)
        np.testing.assert_allclose(scaling.rotation_scale, rotary.attention_scaling, rtol=1e-12)
        np.testing.assert_allclose(config.score_scale, attention.scaling, rtol=1e-12)


class ChatTest(parameterized.TestCase):
    @parameterized.product(
        system=(False, True), num_turns=(1, 3), add_generation_prompt=(False, True)
    )
    def test_published_template(self, system, num_turns, add_generation_prompt):
        turns = [
            {"role": "user", "content": "Hello & <welcome>, 你好"},
            {"role": "assistant", "content": " Hi. "},
            {"role": "user", "content": "Again?\n"},
        ]
        system_turn = [{"role": "system", "content": "Be brief."}]
        messages = (system_turn if system else []) + turns[:num_turns]
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            vocab = {letter: i for i, letter in enumerate(sorted({BEGIN, END, "a", "b"}))}
            backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
            backend.save(str(directory / "tokenizer.json"))
            special = {"bos_token": BEGIN, "eos_token": END, "chat_template": CHAT_TEMPLATE}
            fields = {**special, "tokenizer_class": "PreTrainedTokenizerFast"}
            (directory / "tokenizer_config.json").write_text(json.dumps(fields))
            ours = Tokenizer.from_directory(directory)
            theirs = transformers.AutoTokenizer.from_pretrained(directory)
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        self.assertTrue(expected.startswith(BEGIN))
        found = ours.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
        self.assertEqual(found, expected)


if __name__ == "__main__":
    absltest.main()
