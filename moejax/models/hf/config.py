"""config.json of a Hugging Face checkpoint to `ModelConfig`, and back.

Two spellings are read: that of the published checkpoints (transformers 4: `num_experts`,
`rope_theta`, `torch_dtype`) and that of transformers 5 (`num_local_experts`, `rope_parameters`,
`dtype`). A setting that the models here would compute differently from transformers is refused by
name.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moejax.errors import MoejaxError
from moejax.files.small import check_depth, parse_json, read_file
from moejax.models.config import ModelConfig
from moejax.models.hf import deepseek as hf_deepseek
from moejax.models.hf import gpt_oss as hf_gpt_oss
from moejax.models.hf import qwen3_next as hf_qwen3_next
from moejax.models.hf.defaults import with_defaults
from moejax.models.hf.fields import agreed, flag, integer, object_field, sparse_layers
from moejax.models.hf.shared import read_shared, unsupported, write_shared

ARCHITECTURES = {
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    **hf_deepseek.ARCHITECTURES,
    "gpt_oss": "GptOssForCausalLM",
}
# `model_type` of a decoder alone, where the family's own is that of a model that sees images too.
_TEXT_TYPES = {"qwen3_5_moe": "qwen3_5_moe_text"}
# Families with a module of their own; the others are read and written here.
_READERS = dict.fromkeys(hf_deepseek.ARCHITECTURES, hf_deepseek.model_config)
_READERS |= dict.fromkeys(("qwen3_next", "qwen3_5_moe"), hf_qwen3_next.model_config)
_READERS["gpt_oss"] = hf_gpt_oss.model_config


def read_model_config(directory: Path) -> ModelConfig:
    """Reads the shape of the model in `directory`.

    Raises:
      MoejaxError: config.json is missing, is not JSON, lacks a field, is of another architecture,
        or asks for something that is not supported.
    """
    path = directory / "config.json"
    fields = read_json(path)
    try:
        return model_config(fields)
    except (MoejaxError, ValueError) as error:
        raise MoejaxError(f"{path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; MoejaxError if the file or its directory is missing, or holds none."""
    if not path.parent.is_dir():
        raise MoejaxError(f"no such directory: {path.parent}")
    try:
        fields = parse_json(read_file(path))
        check_depth(fields)
    except FileNotFoundError as error:
        raise MoejaxError(
            f"no {path.name} in {path.parent}; a Hugging Face checkpoint directory has one"
        ) from error
    except (OSError, ValueError) as error:
        raise MoejaxError(f"cannot read {path}: {error}") from error
    if not isinstance(fields, dict):
        raise MoejaxError(f"{path} holds a {type(fields).__name__}, expected a JSON object")
    return fields


def model_config(fields: Mapping[str, Any]) -> ModelConfig:
    """Builds a `ModelConfig` from a config.json in either spelling; MoejaxError names no file."""
    fields = text_fields(fields)
    family = _family(fields)
    object_field(fields, "quantization_config")  # the weights' reader knows which ones it can read
    fields = with_defaults(family, fields)
    if read := _READERS.get(family):
        return read(family, fields)
    reasons = unsupported(fields)
    if family == "olmoe" and fields.get("clip_qkv") is not None:
        reasons.append(f"clip_qkv {fields['clip_qkv']}")
    if reasons:
        raise MoejaxError("not supported: " + "; ".join(reasons))
    shared, mlp_dim = read_shared(family, fields), integer(fields, "intermediate_size")
    num_layers = shared["num_layers"]
    is_qwen3, is_mixtral = family == "qwen3_moe", family == "mixtral"
    windowed = family != "olmoe" and fields["sliding_window"] is not None
    windowed &= not is_qwen3 or flag(fields, "use_sliding_window")
    return ModelConfig(
        **shared | {"head_dim": integer(fields, "head_dim", default=shared["head_dim"])},
        expert_dim=integer(fields, "moe_intermediate_size") if is_qwen3 else mlp_dim,
        mlp_dim=mlp_dim,
        moe_layers=sparse_layers(fields, num_layers) if is_qwen3 else tuple(range(num_layers)),
        norm_topk_prob=is_mixtral or flag(fields, "norm_topk_prob"),
        qk_norm=not is_mixtral,
        joint_qk_norm=family == "olmoe",
        attention_bias=not is_mixtral and flag(fields, "attention_bias"),
        sliding_window=integer(fields, "sliding_window") if windowed else None,
    )


def text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of a decoder's own config.json, where they are nested in `text_config`.

    Without a `model_type` of its own, or null, it is the family's decoder, of defaults where null.
    `tie_word_embeddings`, the dtype and the weights' `quantization_config` may stand outside.
    """
    family = fields.get("model_type")
    if family not in tuple(_TEXT_TYPES) or "text_config" not in fields:
        return fields
    text, tied = object_field(fields, "text_config"), "tie_word_embeddings"
    places = {tied: fields.get(tied), f"text_config.{tied}": text.get(tied)}
    names = ("dtype", "torch_dtype", "quantization_config")
    outside = {name: fields[name] for name in names if name in fields}
    head = {
        "architectures": [ARCHITECTURES[str(family)]],
        "model_type": text.get("model_type") or _TEXT_TYPES[str(family)],
        tied: bool(agreed(places)),
    }
    return {**outside, **text, **head}


def to_hf_config(config: ModelConfig, *, dtype: str, **token_ids: Any) -> dict[str, Any]:
    """Writes config.json fields in both spellings, for transformers 4 and 5.

    Raises:
      ValueError: the family cannot express the config (a Mixtral with biases, for instance).
    """
    c = config
    model_type = _TEXT_TYPES.get(c.family, c.family)
    fields = {
        "architectures": [ARCHITECTURES[c.family]], "model_type": model_type, **write_shared(c),
        "dtype": dtype, "torch_dtype": dtype, **token_ids,
    }  # fmt: skip
    if c.family in hf_deepseek.ARCHITECTURES:
        return _checked(fields | hf_deepseek.fields_of(c), c)
    fields |= {
        "head_dim": c.head_dim,
        "num_local_experts": c.num_experts,
        "sliding_window": c.sliding_window,
    }
    if c.family in ("qwen3_next", "qwen3_5_moe"):
        fields |= hf_qwen3_next.fields_of(c)
    elif c.family == "gpt_oss":
        fields |= hf_gpt_oss.fields_of(c)
    elif c.family == "qwen3_moe":
        fields |= {
            "num_experts": c.num_experts,
            "intermediate_size": c.mlp_dim,
            "moe_intermediate_size": c.expert_dim,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(c.dense_layers),
            "norm_topk_prob": c.norm_topk_prob,
            "attention_bias": c.attention_bias,
            "use_sliding_window": c.sliding_window is not None,
        }
    else:
        fields["intermediate_size"] = c.expert_dim
    if c.family == "olmoe":
        fields |= {"norm_topk_prob": c.norm_topk_prob, "attention_bias": c.attention_bias}
    # Some families have no dense layers, so the width of one does not come back.
    mlp_dim = c.mlp_dim if c.dense_layers else fields.get("intermediate_size", c.expert_dim)
    return _checked(fields, dataclasses.replace(c, mlp_dim=mlp_dim))


def _checked(fields: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Returns the fields if they read back as `config`."""
    try:
        found = model_config(fields)
    except MoejaxError:
        found = None
    if found != config:
        raise ValueError(f"a {config.family} config.json cannot express {config}")
    return fields


def _family(fields: Mapping[str, Any]) -> str:
    model_type = fields.get("model_type")
    for family in ARCHITECTURES:
        if model_type in (family, _TEXT_TYPES.get(family, family)):
            return family
    architectures = fields.get("architectures") or "no architecture"
    if isinstance(architectures, list):
        architectures = ", ".join(map(str, architectures))
    raise MoejaxError(
        f"model_type {model_type!r} ({architectures}) is not supported; supported are "
        + " and ".join(f"{family!r} ({name})" for family, name in ARCHITECTURES.items())
    )
