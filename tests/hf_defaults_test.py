"""Fields that a config.json leaves out, or has as null, one after the other: as in transformers."""

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import transformers
from absl.testing import parameterized
from huggingface_hub.errors import StrictDataclassError

from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig
from moejax.models.hf import config as hf_config
from moejax.models.hf.config import model_config
from moejax.models.hf.defaults import DEFAULTS, with_defaults
from moejax.text.tokenizer import read_eos_ids
from tests.hf_checkpoints import FAMILIES

_SIZES = {
    "vocab_size": 640, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts_per_tok": 3,
    "max_position_embeddings": 500, "rms_norm_eps": 0.01, "rope_theta": 77.0,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
_QWEN = _SIZES | {
    "moe_intermediate_size": 48, "num_experts": 24, "head_dim": 24, "attention_bias": True,
    "decoder_sparse_step": 2, "mlp_only_layers": [3],
}  # fmt: skip
_DEEPSEEK = _SIZES | {
    "moe_intermediate_size": 48, "first_k_dense_replace": 2, "n_routed_experts": 24,
    "n_shared_experts": 4, "attention_bias": False,
}  # fmt: skip
_DELTA = {
    "moe_intermediate_size": 48, "num_experts": 24, "head_dim": 24, "attention_bias": True,
    "shared_expert_intermediate_size": 56, "partial_rotary_factor": 0.5,
    "full_attention_interval": 2, "layer_types": None, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 10, "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 3, "use_sliding_window": False,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 40, "q_lora_rank": 44, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "routed_scaling_factor": 3.5,
}  # fmt: skip
# Every value differs from the default, where another one is served.
FULL: dict[str, dict[str, Any]] = {
    "mixtral": _SIZES | {"num_local_experts": 24, "head_dim": 24, "sliding_window": 9},
    "olmoe": _SIZES | {
        "num_experts": 24, "norm_topk_prob": True, "attention_bias": True, "head_dim": 24,
    },
    "qwen3_moe": _QWEN
    | {"norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 9},
    "qwen3_next": _QWEN | _DELTA | {"norm_topk_prob": False},
    "qwen3_5_moe": {name: _SIZES[name] for name in _SIZES if name != "intermediate_size"} | _DELTA,
    "deepseek_v2": _DEEPSEEK | _LATENT | {
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "norm_topk_prob": True, "mlp_bias": False,
    },
    "deepseek_v3": _DEEPSEEK | _LATENT | {
        "n_group": 4, "topk_group": 3, "norm_topk_prob": False, "rope_interleave": False,
        "num_attention_heads": 128, "num_key_value_heads": 128,
    },
    "glm4_moe": _DEEPSEEK | {
        "num_key_value_heads": 4, "head_dim": 24, "attention_bias": True, "use_qk_norm": True,
        "partial_rotary_factor": 0.25, "routed_scaling_factor": 3.5, "n_group": 4,
        "topk_group": 3, "norm_topk_prob": False,
    },
    "glm4_moe_lite": _DEEPSEEK | _LATENT | {
        "n_group": 4, "topk_group": 3, "norm_topk_prob": False, "rope_interleave": False,
        "num_attention_heads": 20, "num_key_value_heads": 20, "hidden_size": 100,
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6,
    },
    "gpt_oss": _SIZES | {
        "num_local_experts": 24, "head_dim": 24, "attention_bias": False, "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"] * 4, "swiglu_alpha": 1.5,
        "swiglu_limit": 5.0,
    },
}  # fmt: skip
# Read beside those that have defaults: names of the number of experts, what rope is, and what the
# classes of transformers do not look at.
ALSO_READ = {
    "num_local_experts", "num_experts", "n_routed_experts", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "use_sliding_window", "scoring_func", "mlp_bias", "moe_layer_freq",
    "topk_method", "norm_topk_prob", "rope_interleave", "head_dim", "n_group", "topk_group",
    "clip_qkv",
}  # fmt: skip
# Defaults of the code beside DeepSeek-MoE-16B (configuration_deepseek.py), which transformers has
# no class for.
DEEPSEEK_MOE = {
    "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008,
    "moe_intermediate_size": 1407, "num_hidden_layers": 30, "num_attention_heads": 32,
    "num_key_value_heads": 32, "n_shared_experts": None, "moe_layer_freq": 1,
    "first_k_dense_replace": 0, "norm_topk_prob": False, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_theta": 10000.0, "attention_bias": False, "scoring_func": "softmax",
}  # fmt: skip

Found = ModelConfig | str


def ours(family: str, fields: dict[str, Any]) -> Found:
    """Returns the config that is read, or "refused"."""
    try:
        return model_config({"model_type": family, **json.loads(json.dumps(fields))})
    except (MoejaxError, ValueError):
        return "refused"


def theirs(family: str, fields: dict[str, Any]) -> Found:
    """Returns the config read from one that transformers completed, or "refused"."""
    try:
        whole = FAMILIES[family][0](**json.loads(json.dumps(fields))).to_dict()
    except (StrictDataclassError, TypeError, ValueError):
        return "refused"
    if whole["rope_parameters"]["rope_theta"] is None:  # which no model of theirs can be built of
        return "refused"
    if "partial_rotary_factor" in FULL[family]:  # as the model reads it, not its default again
        whole["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return ours(family, whole)


class DefaultsTest(parameterized.TestCase):
    @parameterized.parameters(*FULL)
    def test_fields_left_out_are_as_transformers_has_them(self, family):
        full, num_changed = FULL[family], 0
        whole = ours(family, full)
        self.assertIsInstance(whole, ModelConfig)
        self.assertEqual(whole, theirs(family, full))
        for name in full:
            without = {other: value for other, value in full.items() if other != name}
            found = ours(family, without)
            self.assertEqual(found, theirs(family, without), name)
            num_changed += found != whole
        self.assertGreater(num_changed, len(full) - 7)  # others serve one value alone
        self.assertEqual(ours(family, {}), theirs(family, {}))

    @parameterized.parameters(*FULL)
    def test_nulls_are_as_transformers_has_them(self, family):
        """Refused alike, but for a flag, which is false, and the number of KV heads.

        transformers 4 took this from the query heads, as 5 still does where it lets a null pass.
        """
        for name, value in FULL[family].items():
            fields = FULL[family] | {name: None}
            if isinstance(value, bool):
                expected = theirs(family, fields | {name: False})
            elif name == "num_key_value_heads" and family not in ("qwen3_next", "qwen3_5_moe"):
                expected = theirs(family, fields | {name: fields["num_attention_heads"]})
            else:
                expected = theirs(family, fields)
            self.assertEqual(ours(family, fields), expected, name)

    @parameterized.parameters(*FULL)
    def test_every_field_that_is_read_is_among_them(self, family):
        read = set()

        class Fields(dict):
            def get(self, name, default=None):
                read.add(name)
                return super().get(name, default)

            def __getitem__(self, name):
                read.add(name)
                return super().__getitem__(name)

        def completed(family, fields):
            return Fields(with_defaults(family, fields))

        with mock.patch.object(hf_config, "with_defaults", completed):
            model_config({"model_type": family, **FULL[family]})
        self.assertLessEqual(read, set(FULL[family]) | ALSO_READ)
        self.assertLessEqual(set(DEFAULTS[family]) - {"eos_token_id"}, set(FULL[family]))

    def test_deepseek_moe_is_as_its_own_code_has_it(self):
        full = _DEEPSEEK | {
            "num_key_value_heads": 4, "moe_layer_freq": 3, "norm_topk_prob": True,
            "scoring_func": "softmax",
        }  # fmt: skip
        self.assertIsInstance(ours("deepseek", full), ModelConfig)
        for name, value in DEEPSEEK_MOE.items():
            without = {other: given for other, given in full.items() if other != name}
            found = ours("deepseek", without)
            self.assertEqual(found, ours("deepseek", full | {name: value}), name)
        for name in ("n_routed_experts", "num_experts_per_tok"):  # None there
            without = {other: given for other, given in full.items() if other != name}
            self.assertEqual(ours("deepseek", without), "refused")

    @parameterized.parameters(*FULL, "deepseek")
    def test_eos_tokens_left_out(self, family):
        expected = 100001 if family == "deepseek" else FAMILIES[family][0]().eos_token_id
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "config.json"
            for fields, ids in (
                ({}, () if expected is None else (expected,)),
                ({"eos_token_id": None}, ()),
                ({"eos_token_id": 3}, (3,)),
            ):
                path.write_text(json.dumps({"model_type": family, **fields}))
                self.assertEqual(read_eos_ids(path.parent, vocab_size=200000), ids)
            path.write_text(json.dumps({"model_type": family}))
            self.assertEqual(read_eos_ids(path.parent, vocab_size=1), ())


transformers.utils.logging.set_verbosity_error()
