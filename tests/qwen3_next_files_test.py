"""Qwen3-Next's files: config.json in both spellings, tensors that are left out, chat template."""

import json
import tempfile
from pathlib import Path

import numpy as np
import safetensors.numpy
import transformers
from absl.testing import absltest, parameterized

from moejax import Engine
from moejax.errors import MoejaxError
from moejax.models.config import weight_shapes
from moejax.models.hf.config import model_config, read_model_config, to_hf_config
from moejax.models.shapes import QWEN3_NEXT_80B_A3B
from moejax.text.chat_template import ChatRenderer
from tests.hf_checkpoints import QWEN3_NEXT, write_checkpoint

# The published config.json of Qwen3-Next-80B-A3B-Instruct, in the fields that bear on the model.
PUBLISHED = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# In the manner of the Instruct model's: ChatML, with tools and calls.
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions.\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 6 x 7? <ä&>"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "times", "arguments": {"a": 6, "b": 7}}}],
    },
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "42."},
    {"role": "user", "content": "And 6 x 8?"},
]
TOOLS = [{"type": "function", "function": {"name": "times", "description": "a × b"}}]


class FilesTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.directory = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))

    def test_published(self):
        self.assertEqual(model_config(PUBLISHED), QWEN3_NEXT_80B_A3B)
        written = transformers.AutoConfig.for_model(**PUBLISHED).to_dict()
        self.assertIn("layer_types", written)
        self.assertEqual(model_config(written), QWEN3_NEXT_80B_A3B)
        shapes = weight_shapes(QWEN3_NEXT_80B_A3B)
        self.assertEqual(shapes["delta.qkvz_proj"], (36, 12288, 2048))
        self.assertEqual(shapes["attention.qkv_proj"], (12, 9216, 2048))
        total = sum(int(np.prod(shape)) for shape in shapes.values())
        self.assertEqual(round(total / 1e9, 1), 79.7)

    @parameterized.parameters("80B", *QWEN3_NEXT)
    def test_way_back(self, name):
        config = QWEN3_NEXT_80B_A3B
        if name != "80B":
            config = read_model_config(write_checkpoint(name, self.directory))
        fields = json.loads(json.dumps(to_hf_config(config, dtype="bfloat16")))
        self.assertEqual(model_config(fields), config)
        read_by_transformers = transformers.AutoConfig.for_model(**fields).to_dict()
        self.assertEqual(model_config(read_by_transformers), config)

    @parameterized.parameters(
        ({"layer_types": ["linear_attention"] * 3}, "layer_types is .*, expected a list of 48"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types with 'sliding_attention'"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0, expected a positive"),
        ({"linear_num_key_heads": 5}, "32 value heads are no multiple of 5 key heads"),
        ({"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim is missing"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"head_dim": 100}, "25 rotated dimensions of a head of 100"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "mrope", "factor": 4.0}}, "rope_scaling of type 'mrope'"),
        ({"num_experts": 0}, "num_experts is 0"),
    )
    def test_refused(self, changed, message):
        with self.assertRaisesRegex((MoejaxError, ValueError), message) as caught:
            model_config({**PUBLISHED, **changed})
        self.assertNotIn("\n", str(caught.exception))

    def test_all_layers_may_attend(self):
        config = model_config({**PUBLISHED, "full_attention_interval": 1})
        self.assertIsNone(config.delta_net)
        self.assertEqual(model_config(to_hf_config(config, dtype="float32")), config)

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

    @parameterized.product(tools=[None, TOOLS], add_generation_prompt=[True, False])
    def test_chat_template(self, tools, add_generation_prompt):
        variables = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        reference = transformers.utils.chat_template_utils.render_jinja_template(
            [CONVERSATION], chat_template=CHATML, **variables
        )[0][0]
        self.assertEqual(ChatRenderer().render(CHATML, CONVERSATION, variables), reference)
        self.assertIn("<|im_start|>user\nAnd 6 x 8?<|im_end|>\n", reference)


if __name__ == "__main__":
    absltest.main()
