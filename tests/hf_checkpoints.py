"""Tiny random Hugging Face checkpoints of each family, written by transformers itself.

    path = write_checkpoint("qwen3_head24", tmp_path)   # tmp_path/qwen3_head24, made once
    model = reference_model(path)                       # transformers, float32, eager attention

The weights are drawn wide (standard deviation 0.3, norms and biases perturbed) so that routing,
logits and their gaps are far from degenerate. No checkpoint names an eos token.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from moejax.checkpoints.reader import CheckpointReader
from moejax.models.hf.config import read_model_config

transformers.utils.logging.disable_progress_bar()

FAMILIES = {
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
    "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
}

_SHARED: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 256,
    "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": 2, "num_key_value_heads": 4, "intermediate_size": 40,
    "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 12,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "head_dim": 16, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "num_experts": 8, "full_attention_interval": 2, "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "intermediate_size": 40, "moe_intermediate_size": 16, "num_experts": 8,
        "norm_topk_prob": True,
    },
    "mixtral": {"intermediate_size": 24, "num_local_experts": 4},
    "olmoe": {
        "intermediate_size": 16, "num_experts": 8, "num_key_value_heads": 4, "pad_token_id": None,
    },
    "deepseek_v2": _DEEPSEEK, "deepseek_v3": _DEEPSEEK | {"n_group": 4, "topk_group": 2},
    "glm4_moe": {
        "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 40, "moe_intermediate_size": 16,
        "n_routed_experts": 8, "n_shared_experts": 2, "attention_bias": True,
    },
    "glm4_moe_lite": {k: v for k, v in _DEEPSEEK.items() if k != "first_k_dense_replace"},
    "qwen3_next": _DELTA | {"intermediate_size": 40, "norm_topk_prob": True}, "qwen3_5_moe": _DELTA,
    "gpt_oss": {
        "hidden_size": 64, "head_dim": 16, "intermediate_size": 32, "num_local_experts": 8,
        "sliding_window": 8, "num_hidden_layers": 4,
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyCheckpoint:
    """A small checkpoint: fields of its config, and the way it is written."""

    family: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.float32  # of the file
    fused: bool = False  # transformers 5's mlp.experts.gate_up_proj instead of published names
    max_shard_size: str = "50GB"
    old_config: bool = False  # config.json as transformers 4 wrote it
    mxfp4: bool = False  # the experts in MXFP4, as gpt-oss is published


def _of(family: str, how: dict[str, Any] | None = None, /, **fields: Any) -> TinyCheckpoint:
    """A checkpoint of a family with some fields, written in another way."""
    return TinyCheckpoint(family=family, fields=fields, **(how or {}))


_qwen3 = functools.partial(_of, "qwen3_moe")
_mixtral = functools.partial(_of, "mixtral")
_next = functools.partial(_of, "qwen3_next")
_v2 = functools.partial(_of, "deepseek_v2")
_v3 = functools.partial(_of, "deepseek_v3")
_olmoe = functools.partial(_of, "olmoe")
_air = functools.partial(_of, "glm4_moe")
_flash = functools.partial(_of, "glm4_moe_lite")
_qwen35 = functools.partial(_of, "qwen3_5_moe")
_oss = functools.partial(_of, "gpt_oss")

CHECKPOINTS: dict[str, TinyCheckpoint] = {
    "qwen3": _qwen3(),
    "qwen3_gqa1_tied": _qwen3(num_key_value_heads=4, tie_word_embeddings=True),
    "qwen3_gqa4_head24": _qwen3(num_key_value_heads=1, head_dim=24),
    "qwen3_top1": _qwen3(num_experts_per_tok=1, norm_topk_prob=False),
    "qwen3_sparse_step2": _qwen3(num_hidden_layers=4, decoder_sparse_step=2),
    "qwen3_mlp_only": _qwen3(mlp_only_layers=[0, 2]),
    "qwen3_unnormalized": _qwen3(norm_topk_prob=False, num_experts_per_tok=3),
    "qwen3_sliding": _qwen3(use_sliding_window=True, sliding_window=5),
    "qwen3_bias": _qwen3(attention_bias=True),
    "qwen3_fused": _qwen3({"fused": True}),
    "qwen3_bf16_sharded": _qwen3({"dtype": torch.bfloat16, "max_shard_size": "20KB"}),
    "qwen3_old_config": _qwen3(
        {"old_config": True},
        head_dim=24,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "mixtral": _mixtral(),
    "mixtral_gqa1_tied_fp16": _mixtral(
        {"dtype": torch.float16}, num_key_value_heads=4, tie_word_embeddings=True
    ),
    "mixtral_gqa4_sliding_fused": _mixtral(
        {"fused": True}, num_key_value_heads=1, sliding_window=5
    ),
    "mixtral_head24_sharded_old_config": _mixtral(
        {"max_shard_size": "20KB", "old_config": True}, head_dim=24
    ),
}

_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 8, "beta_slow": 1,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def _yarn(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {**_YARN, **fields}}


DEEPSEEK_CHECKPOINTS: dict[str, TinyCheckpoint] = {
    "v2_as_lite": _v2(
        {"old_config": True}, q_lora_rank=None, n_group=1, topk_group=1, num_hidden_layers=3,
        **_yarn(mscale=0.707, mscale_all_dim=0.707),
    ),
    "v2_groups": _v2(
        topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=2.5,
        **_yarn(mscale=1.0, mscale_all_dim=0.5),
    ),
    "v2_odd_sizes": _v2(
        hidden_size=36, num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=14, v_head_dim=7,
        first_k_dense_replace=0, n_routed_experts=5, num_experts_per_tok=3,
        n_shared_experts=1, rms_norm_eps=1e-2,
    ),
    "v2_wide_values_tied": _v2(
        {"fused": True}, v_head_dim=24, first_k_dense_replace=2, num_hidden_layers=3,
        tie_word_embeddings=True, q_lora_rank=None,
    ),
    "v2_yarn_alone_bf16": _v2(
        {"dtype": torch.bfloat16}, routed_scaling_factor=0.5, norm_topk_prob=True, **_yarn()
    ),
    "v3": _v3(**_yarn(mscale=1.0, mscale_all_dim=1.0)),
    "v3_halves": _v3(
        {"old_config": True}, rope_interleave=False, norm_topk_prob=False, q_lora_rank=None,
        n_group=1, topk_group=1, routed_scaling_factor=1.0, num_experts_per_tok=3,
    ),
}  # fmt: skip


# Apart, since the place of a name among the others is its seed.
QWEN3_NEXT: dict[str, TinyCheckpoint] = {
    "next": _next(),
    "next_heads1_conv2_tied": _next(
        linear_num_key_heads=2, linear_num_value_heads=2, linear_conv_kernel_dim=2,
        tie_word_embeddings=True, partial_rotary_factor=0.5,
    ),
    "next_heads3_interval3_old_config": _next(
        {"old_config": True},
        num_hidden_layers=4, full_attention_interval=3, linear_num_key_heads=1,
        linear_num_value_heads=3, linear_value_head_dim=24, linear_conv_kernel_dim=3,
    ),
    "next_dense_shared24_fused": _next(
        {"fused": True},
        num_hidden_layers=4, full_attention_interval=4, mlp_only_layers=[1],
        shared_expert_intermediate_size=24, norm_topk_prob=False, linear_key_head_dim=12,
    ),
    "next_step2_gqa4_bias_head24": _next(
        {"max_shard_size": "20KB"},
        num_hidden_layers=4, decoder_sparse_step=2, num_key_value_heads=1, head_dim=24,
        partial_rotary_factor=1.0, attention_bias=True,
        layer_types=["full_attention", "linear_attention"] * 2, linear_num_key_heads=4,
        linear_conv_kernel_dim=5,
    ),
}  # fmt: skip


OLMOE: dict[str, TinyCheckpoint] = {
    "olmoe": _olmoe({"old_config": True}, num_hidden_layers=2),
    "olmoe_gqa2_bias": _olmoe(num_key_value_heads=2, attention_bias=True),
    "olmoe_gqa4_tied_fused": _olmoe(
        {"fused": True}, num_key_value_heads=1, tie_word_embeddings=True
    ),
    "olmoe_normalised_top3_of_5": _olmoe(
        num_experts=5, num_experts_per_tok=3, norm_topk_prob=True
    ),
    "olmoe_odd_sizes_sharded": _olmoe(
        {"max_shard_size": "20KB"}, hidden_size=36, num_attention_heads=3, num_key_value_heads=3,
        intermediate_size=12, rms_norm_eps=1e-2,
    ),
    "olmoe_yarn_bf16": _olmoe({"dtype": torch.bfloat16}, **_yarn()),
    "olmoe_top1": _olmoe(num_experts_per_tok=1, num_hidden_layers=2),
}  # fmt: skip


GLM: dict[str, TinyCheckpoint] = {
    "air": _air({"old_config": True}),
    "air_norms_groups_scaled": _air(
        use_qk_norm=True, n_group=4, topk_group=2, routed_scaling_factor=2.5
    ),
    "air_head24_gqa4_whole_fused": _air(
        {"fused": True}, head_dim=24, num_key_value_heads=1, partial_rotary_factor=1.0
    ),
    "air_tied_no_bias_dense2": _air(
        attention_bias=False, tie_word_embeddings=True, first_k_dense_replace=2,
        num_hidden_layers=4,
    ),
    "air_unnormalised_top3_quarter": _air(
        norm_topk_prob=False, num_experts_per_tok=3, head_dim=16, partial_rotary_factor=0.25,
        n_shared_experts=1, num_key_value_heads=4,
    ),
    "air_all_sparse_odd_sizes_sharded": _air(
        {"max_shard_size": "20KB"}, first_k_dense_replace=0, hidden_size=36, head_dim=12,
        num_attention_heads=3, num_key_value_heads=3, n_routed_experts=5, rms_norm_eps=1e-2,
        use_qk_norm=True,
    ),
    "air_yarn_bf16": _air({"dtype": torch.bfloat16}, head_dim=16, **_yarn()),
    "flash": _flash({"old_config": True}),
    "flash_halves_direct_queries": _flash(rope_interleave=False, q_lora_rank=None),
    "flash_groups_scaled": _flash(n_group=4, topk_group=2, routed_scaling_factor=1.8),
    "flash_dense_between": _flash(
        num_hidden_layers=3, mlp_layer_types=["sparse", "dense", "sparse"]
    ),
    "flash_wide_values_tied_fused": _flash(
        {"fused": True}, v_head_dim=24, tie_word_embeddings=True, n_shared_experts=1
    ),
    "flash_odd_sizes_unnormalised": _flash(
        hidden_size=36, num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=16,
        v_head_dim=8, n_routed_experts=5, num_experts_per_tok=3, norm_topk_prob=False,
        rms_norm_eps=1e-2,
    ),
    "flash_yarn_bf16": _flash(
        {"dtype": torch.bfloat16}, **_yarn(mscale=1.0, mscale_all_dim=0.5)
    ),
}  # fmt: skip


QWEN3_5: dict[str, TinyCheckpoint] = {
    "qwen35": _qwen35(num_hidden_layers=2),
    "qwen35_heads1_conv2_tied": _qwen35(
        linear_num_value_heads=2, linear_conv_kernel_dim=2, tie_word_embeddings=True,
        partial_rotary_factor=0.5,
    ),
    "qwen35_heads3_interval3": _qwen35(
        num_hidden_layers=4, full_attention_interval=3, linear_num_key_heads=1,
        linear_num_value_heads=3, linear_value_head_dim=24, linear_conv_kernel_dim=3,
    ),
    "qwen35_shared24_top3_fused": _qwen35(
        {"fused": True}, num_hidden_layers=4, full_attention_interval=4, num_experts_per_tok=3,
        shared_expert_intermediate_size=24, linear_key_head_dim=12,
    ),
    "qwen35_gqa4_bias_head24_sharded": _qwen35(
        {"max_shard_size": "20KB"}, num_key_value_heads=1, head_dim=24, attention_bias=True,
        partial_rotary_factor=1.0, linear_num_key_heads=4, linear_conv_kernel_dim=5,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
    ),
    "qwen35_top1_bf16": _qwen35({"dtype": torch.bfloat16}, num_experts_per_tok=1),
    "qwen35_mrope_sections_yarn": _qwen35(
        head_dim=32,
        **_yarn(partial_rotary_factor=0.5, mrope_section=[4, 2, 2], mrope_interleaved=True),
    ),
}  # fmt: skip


GPT_OSS: dict[str, TinyCheckpoint] = {
    "oss": _oss(),
    "oss_old_config_sharded": _oss({"old_config": True, "max_shard_size": "20KB"}, **_yarn()),
    "oss_full_first_window1": _oss(
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        num_hidden_layers=3, sliding_window=1, num_key_value_heads=1, head_dim=24,
    ),
    "oss_all_sliding_top1": _oss(
        layer_types=["sliding_attention"] * 4, num_experts_per_tok=1, tie_word_embeddings=True
    ),
    "oss_no_window_no_bias": _oss(
        layer_types=["full_attention"] * 4, attention_bias=False, num_key_value_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "oss_tight_limit_odd": _oss(
        swiglu_limit=0.5, swiglu_alpha=0.75, hidden_size=36, intermediate_size=20,
        num_local_experts=5, num_experts_per_tok=3, num_attention_heads=6, rms_norm_eps=1e-2,
    ),
    "oss_bf16_all_experts": _oss(
        {"dtype": torch.bfloat16}, num_local_experts=4, num_experts_per_tok=4,
        sliding_window=40, num_hidden_layers=5,
    ),
    "oss_mxfp4": _oss({"mxfp4": True}),
    # So wide that weights as large as the others' would make attention take one token alone, and
    # rounding errors a hundred times as large.
    "oss_mxfp4_bf16_wide": _oss(
        {"mxfp4": True, "dtype": torch.bfloat16, "old_config": True}, hidden_size=288,
        intermediate_size=96, num_hidden_layers=2, num_local_experts=4, initializer_range=0.1,
        **_yarn(),
    ),
}  # fmt: skip
GROUPS = (CHECKPOINTS, DEEPSEEK_CHECKPOINTS, QWEN3_NEXT, OLMOE, GLM, QWEN3_5, GPT_OSS)


def write_checkpoint(name: str, parent: Path) -> Path:
    """Writes a checkpoint by its name to `parent / name`, unless it is there; returns the path."""
    directory = parent / name
    if not directory.exists():
        of = next(group for group in GROUPS if name in group)
        write_random_checkpoint(of[name], directory, seed=sorted(of).index(name))
    return directory


def write_random_checkpoint(spec: TinyCheckpoint, directory: Path, seed: int) -> None:
    """Writes the checkpoint of `spec` and `seed` into `directory`."""
    config_class, model_class = FAMILIES[spec.family]
    config = config_class(**{**_SHARED, **_OF_FAMILY[spec.family], **spec.fields})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        _perturb_vectors(model)
    model.to(spec.dtype).save_pretrained(
        directory, max_shard_size=spec.max_shard_size, save_original_format=not spec.fused
    )
    if spec.mxfp4:
        _rewrite_experts_in_mxfp4(directory, seed)
    if spec.old_config:
        _rewrite_config_as_transformers_4(directory / "config.json")


def write_with_vision_tower(directory: Path) -> None:
    """Writes Qwen3.5's decoder as it is published: nested, beside a tower for images."""
    config = transformers.Qwen3_5MoeConfig(
        text_config={**_SHARED, **_DELTA, "eos_token_id": 7},
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
            "out_hidden_size": 32, "num_position_embeddings": 16, "patch_size": 4,
        },
        image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4,
    )  # fmt: skip
    model = transformers.Qwen3_5MoeForConditionalGeneration(config)
    _perturb_vectors(model)
    model.save_pretrained(directory, save_original_format=False)  # experts in one, as published
    (directory / "generation_config.json").unlink()


def reference_model(
    directory: Path, dtype: torch.dtype = torch.float32
) -> transformers.PreTrainedModel:
    """The checkpoint in transformers, weights converted to `dtype`, ready to evaluate."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def _perturb_vectors(model: torch.nn.Module) -> None:
    """Moves norm weights and biases away from the ones and zeros that transformers gives them.

    And slows the decays of delta rules, of which transformers draws most so that a token forgets
    what was before it: all that is read is then one product q . k, by whose size the norm after it
    divides, and where that is near zero two float32 models differ by 1e-4 and more.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("_proj_bias"):
            parameter.add_(0.3 * torch.randn_like(parameter))
        if name.endswith("A_log"):
            parameter.sub_(3.0)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(0.3 * torch.randn_like(buffer))


def _rewrite_experts_in_mxfp4(directory: Path, seed: int) -> None:
    """Random codes and scales in place of the experts' matrices, of deviation 0.3 or so."""
    path, rng = directory / "model.safetensors", np.random.default_rng(seed)
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        groups = (num_experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (*groups, 16), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(123, 126, groups, np.uint8)
    stored = {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}
    save_file(stored, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _rewrite_config_as_transformers_4(path: Path) -> None:
    """The form of the published checkpoints: flat rope fields, `num_experts`, `torch_dtype`."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if (kind := rope.pop("rope_type")) != "default":
        config["rope_scaling"] = {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.51.0"
    if config["model_type"] in ("qwen3_moe", "olmoe"):
        config["num_experts"] = config.pop("num_local_experts", config.get("num_experts"))
        config["rope_scaling"] = None
    if config["model_type"] == "glm4_moe":
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
        config["rope_scaling"] = None
    if config["model_type"] == "qwen3_next":
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
        kinds = config.pop("layer_types")
        config["full_attention_interval"] = kinds.index("full_attention") + 1
        config["rope_scaling"] = None
    path.write_text(json.dumps(config, indent=2))


def load_leaves(path: Path, dtype=jnp.float32, *, progress=False):
    """The leaves of a checkpoint as our reader gives them, on the CPU."""
    reader = CheckpointReader(path, read_model_config(path), dtype=dtype)
    return reader.load(jax.devices("cpu")[0], progress=progress)
