"""Fields of a config.json that all families have, read and written; rotary embedding among them.

`rope_scaling` is of transformers 4, `rope_parameters` of 5, which reads `rope_scaling` alone if it
is present. Here both may be present and must agree.
"""

from collections.abc import Collection, Mapping
from typing import Any, get_args

from moejax.errors import MoejaxError
from moejax.models.config import MOST_EXPERTS, MOST_LAYERS, ModelConfig, RopeKind, RopeScaling
from moejax.models.hf.defaults import DEFAULTS
from moejax.models.hf.fields import ROPES, agreed, flag, integer, number, object_field, rope_field

KINDS = ("default", *get_args(RopeKind))
# Names of the fields of `RopeScaling` in an object, and the kinds that read them.
_FIELDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "factor": ("factor", get_args(RopeKind)),
    "original_positions": ("original_max_position_embeddings", ("yarn", "llama3", "longrope")),
    "beta_fast": ("beta_fast", ("yarn",)),
    "beta_slow": ("beta_slow", ("yarn",)),
    "mscale": ("mscale", get_args(RopeKind)),
    "mscale_all_dim": ("mscale_all_dim", get_args(RopeKind)),
    "attention_factor": ("attention_factor", ("yarn", "longrope")),
    "truncate": ("truncate", ("yarn",)),
    "low_freq_factor": ("low_freq_factor", ("llama3",)),
    "high_freq_factor": ("high_freq_factor", ("llama3",)),
    "short_factors": ("short_factor", ("longrope",)),
    "long_factors": ("long_factor", ("longrope",)),
}
_REQUIRED: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("linear", "dynamic", "yarn", "llama3"): ("factor",),
    ("llama3",): ("low_freq_factor", "high_freq_factor"),
    ("longrope",): ("short_factors", "long_factors"),
}
_SILU = ("silu", "swish")  # names of one function, in transformers too
# Names of one number; a file may have the first beside its family's own.
_NUM_EXPERTS = ("num_local_experts", "num_experts")


def read_shared(family: str, fields: Mapping[str, Any], *num_experts: str) -> dict[str, Any]:
    """Arguments of `ModelConfig` that are read alike, a head's default width among them.

    Args:
      num_experts: further names of the number of experts.
    """
    num_heads, model_dim = (
        integer(fields, name) for name in ("num_attention_heads", "hidden_size")
    )
    experts = integer(fields, *_NUM_EXPERTS, *num_experts, most=MOST_EXPERTS)
    return {
        "family": family,
        "vocab_size": integer(fields, "vocab_size"),
        "model_dim": model_dim,
        "num_layers": integer(fields, "num_hidden_layers", most=MOST_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": integer(fields, "num_key_value_heads", default=num_heads),
        "head_dim": model_dim // num_heads,
        "num_experts": experts,
        "experts_per_token": integer(fields, "num_experts_per_tok", most=experts),
        "norm_eps": number(fields, "rms_norm_eps"),
        "rope_theta": _rope_theta(family, fields),
        "rope_scaling": _rope_scaling(fields),
        "max_positions": integer(fields, "max_position_embeddings"),
        "tied_embeddings": flag(fields, "tie_word_embeddings"),
    }


def write_shared(config: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json, without those that name the family and the experts."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_experts_per_tok": config.experts_per_token,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        **rope_fields(config),
    }


def unsupported(
    fields: Mapping[str, Any], *, ropes: Collection[str] = KINDS, partial: bool = False
) -> list[str]:
    """Every reason why the model's rope cannot run as it does in transformers."""
    reasons = []
    for name in ROPES:
        rope = object_field(fields, name)
        if by_kind := [key for key, value in rope.items() if isinstance(value, dict)]:
            reasons.append(f"{name} apart for {', '.join(by_kind)}")
        elif (kind := _rope_type(rope)) not in ropes:
            reasons.append(f"{name} of type {kind!r} (without it, the model's own context works)")
    rotated = rope_field(fields, "partial_rotary_factor")
    if not partial and rotated not in (None, 1, 1.0):
        reasons.append(f"partial_rotary_factor {rotated}")
    if fields["hidden_act"] not in _SILU:
        known = " and ".join(map(repr, _SILU))
        reasons.append(f"hidden_act {fields['hidden_act']!r}, only {known} are")
    return reasons


def _rope_theta(family: str, fields: Mapping[str, Any]) -> float:
    """Base of rotary frequencies; the family's default if no field names it."""
    default = None if "rope_theta" in fields else DEFAULTS[family]["rope_theta"]
    found = {"rope_theta": rope_field(fields, "rope_theta")}
    return number(found, "rope_theta", default=default)


def rotated_dims(family: str, fields: Mapping[str, Any], head_dim: int) -> int:
    """Rotated dimensions of a head, rounded down; all of them if the share is null."""
    name = "partial_rotary_factor"
    default = 1.0 if name in fields else DEFAULTS[family][name]
    share = number({name: rope_field(fields, name)}, name, default=default)
    if share > 1:
        raise MoejaxError(f"{name} is {share}, more than a whole head")
    return int(head_dim * share)


def _rope_scaling(fields: Mapping[str, Any]) -> RopeScaling | None:
    """Reads the scaling of rotary frequencies; None for none."""
    kinds = {name: _rope_type(of) for name in ROPES if (of := object_field(fields, name))}
    kind = agreed(kinds)
    if kind in (None, "default"):
        return None
    longest = integer(fields, "max_position_embeddings")
    values: dict[str, Any] = {"original_positions": longest}
    for ours, (name, readers) in _FIELDS.items():
        if kind in readers and (value := _value(fields, name)) is not None:
            values[ours] = value
    if kind == "longrope":
        values.setdefault("factor", longest / values["original_positions"])
    required = [name for kinds, names in _REQUIRED.items() if kind in kinds for name in names]
    if missing := [_FIELDS[ours][0] for ours in required if ours not in values]:
        raise MoejaxError(f"the {missing[0]} of rope scaling of type {kind!r} is missing")
    return RopeScaling(kind=kind, **values)


def _value(fields: Mapping[str, Any], name: str) -> Any:
    """Reads a field of rope scaling as `RopeScaling` stores it; None if it is missing."""
    value = rope_field(fields, name)
    # Zeros are as if they were left out; one of `attention_factor` would be taken.
    if value is None or (type(value) in (int, float) and not value and name != "attention_factor"):
        return None
    given = {name: value}
    if name == "truncate":
        return flag(given, name)
    if name == "original_max_position_embeddings":
        return integer(given, name)
    if name not in ("short_factor", "long_factor"):
        return number(given, name)
    if not isinstance(value, list):
        raise MoejaxError(f"{name} is {value!r}, expected a list of numbers")
    return tuple(number({name: of}, name) for of in value)


def _rope_type(rope: Mapping[str, Any]) -> Any:
    """Reads the kind in `rope_scaling` or `rope_parameters`."""
    return rope.get("rope_type", rope.get("type", "default"))


def rope_fields(config: ModelConfig, **more: Any) -> dict[str, Any]:
    """Fields of a config.json in both spellings; `more` goes inside the objects."""
    theta = {"rope_theta": config.rope_theta}
    if config.rope_scaling is None:
        return {**theta, "rope_parameters": {"rope_type": "default", **theta, **more}}
    kind = config.rope_scaling.kind
    scaling: dict[str, Any] = {"type": kind, "rope_type": kind}
    for ours, (name, readers) in _FIELDS.items():
        value = getattr(config.rope_scaling, ours)
        if kind in readers and value is not None:
            scaling[name] = list(value) if isinstance(value, tuple) else value
    return {
        **theta,
        "rope_scaling": {**scaling, **more},
        "rope_parameters": {**theta, **scaling, **more},
    }
