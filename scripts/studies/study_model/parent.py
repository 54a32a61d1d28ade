"""Turns a GGUF file of SmolLM2 into the Hugging Face directory that the study starts from.

    python -m scripts.studies.study_model.parent --gguf_file=FILE.gguf --output=DIR  # hub

Where the hub can be reached, download the directory instead; README.md has both commands. Needs the
`gguf` package, which dequantizes. The directory holds config.json, model.safetensors in bfloat16
and the tokenizer's files.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tokenizers
from absl import app, flags
from tokenizers import decoders, models, pre_tokenizers

from moejax.checkpoints.safetensors_writer import write_safetensors
from moejax.errors import MoejaxError
from moejax.files.whole import write_json, write_whole

_GGUF = flags.DEFINE_string("gguf_file", None, "the GGUF file of a Llama model", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "directory to write", required=True)

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_CONTROL = 3  # the type of tokens such as <|im_end|> in GGUF


def published_name(name: str) -> str:
    """Hugging Face's name of a Llama tensor in GGUF; MoejaxError if there is none."""
    if name in _ENDS:
        return _ENDS[name]
    kind, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    part = part.removesuffix(".weight")
    if kind != "blk" or part not in _NAMES:
        raise MoejaxError(f"tensor {name!r} is none of a Llama model with tied embeddings")
    return f"model.layers.{layer}.{_NAMES[part]}.weight"


def halves_of_heads(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes GGUF's order of query and key rows [H C, D].

    GGUF puts the two rows that rotary embedding turns together side by side, Hugging Face half a
    head apart.
    """
    rows, width = matrix.shape
    pairs = matrix.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def config_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the GGUF file's fields; MoejaxError for another architecture than Llama."""
    if fields["general.architecture"] != "llama":
        raise MoejaxError(
            f"the file holds a {fields['general.architecture']} model; the study starts from llama"
        )
    heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # Stored in float32: 9.999999747378752e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def tokenizer_files(fields: Mapping[str, Any]) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json: byte-level BPE, each digit a token."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens(special)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }


def convert(gguf_file: Path, output: Path) -> None:
    """Writes the directory; config.json, without which it counts as none, comes last."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise MoejaxError("the gguf package is not installed: pip install gguf") from error
    try:
        reader = gguf.GGUFReader(gguf_file)
    except (OSError, ValueError) as error:
        raise MoejaxError(f"cannot read {gguf_file} as GGUF: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = config_fields(fields)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        for part, num_heads in heads.items():
            if tensor.name.endswith(f".{part}.weight"):
                values = halves_of_heads(values, num_heads)
        weights[published_name(tensor.name)] = np.ascontiguousarray(values, jnp.bfloat16)
    output.mkdir(parents=True, exist_ok=True)
    write_safetensors(output / "model.safetensors", weights)
    for name, text in tokenizer_files(fields).items():
        write_whole(output / name, text)
    write_json(output / "config.json", config)


def main(argv: list[str]) -> None:
    """Converts by the flags."""
    del argv
    convert(Path(_GGUF.value), Path(_OUTPUT.value))


if __name__ == "__main__":
    app.run(main)
