"""GGUF files of random weights in a real shape, for llama.cpp.

Matrices are Q4_K with a head in Q6_K, or Q4_0 where a row is no multiple of 256. Codes are random
bytes; scales keep activations finite. Tokens are bytes and made-up words, so that a server can
answer.
"""

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moejax.errors import MoejaxError
from moejax.models.config import ModelConfig

ARCHITECTURES = {"qwen3_moe": "qwen3moe", "mixtral": "llama", "qwen3_next": "qwen3next"}
# Bytes of a block, and where its float16 scales stand, with their values: d, or d and dmin.
SCALES = {
    "Q4_0": (slice(0, 2), (0.004,)),
    "Q4_K": (slice(0, 4), (1e-4, 7e-4)),
    "Q6_K": (slice(208, 210), (2e-5,)),
}
WRITTEN_AT_ONCE = 2**28  # bytes
BYTES = 256


class Tensor(NamedTuple):
    """Name, shape in numpy's order (rows, columns), and type: a block format or F32."""

    name: str
    shape: tuple[int, ...]
    kind: str


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Tensors of a model under llama.cpp's names.

    Raises:
      MoejaxError: llama.cpp's names of this family are not known here.
    """
    if config.family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise MoejaxError(f"no GGUF names for the family {config.family}; known: {known}")
    dim, vocab = config.model_dim, config.vocab_size
    yield _matrix("token_embd.weight", (vocab, dim))
    yield Tensor("output_norm.weight", (dim,), "F32")
    yield _matrix("output.weight", (vocab, dim), head=True)
    for layer in range(config.num_layers):
        prefix = f"blk.{layer}."
        delta = config.delta_net
        if delta is not None and layer in delta.layers:
            parts = _delta_rule(config)
        else:
            parts = _attention(config)
        for name, shape, kind in (*parts, *_experts(config)):
            yield Tensor(prefix + name, shape, kind)


def _matrix(name: str, shape: tuple[int, ...], *, head: bool = False) -> Tensor:
    if shape[-1] % 256:
        return Tensor(name, shape, "Q4_0")
    return Tensor(name, shape, "Q6_K" if head else "Q4_K")


def _attention(c: ModelConfig) -> Iterator[Tensor]:
    queries = c.num_heads * c.head_dim
    keys = c.num_kv_heads * c.head_dim
    yield Tensor("attn_norm.weight", (c.model_dim,), "F32")
    yield _matrix("attn_q.weight", (queries * (2 if c.attention_gate else 1), c.model_dim))
    yield _matrix("attn_k.weight", (keys, c.model_dim))
    yield _matrix("attn_v.weight", (keys, c.model_dim))
    yield _matrix("attn_output.weight", (c.model_dim, queries))
    if c.qk_norm:
        yield Tensor("attn_q_norm.weight", (c.head_dim,), "F32")
        yield Tensor("attn_k_norm.weight", (c.head_dim,), "F32")


def _delta_rule(c: ModelConfig) -> Iterator[Tensor]:
    delta = c.delta_net
    assert delta is not None
    keys, values = delta.num_key_heads * delta.key_dim, delta.num_value_heads * delta.value_dim
    yield Tensor("attn_norm.weight", (c.model_dim,), "F32")
    yield _matrix("attn_qkv.weight", (2 * keys + values, c.model_dim))
    yield _matrix("attn_gate.weight", (values, c.model_dim))
    yield Tensor("ssm_conv1d.weight", (2 * keys + values, delta.conv_width), "F32")
    yield Tensor("ssm_dt.bias", (delta.num_value_heads,), "F32")
    yield Tensor("ssm_a", (delta.num_value_heads,), "F32")
    yield _matrix("ssm_ba.weight", (2 * delta.num_value_heads, c.model_dim))
    yield Tensor("ssm_norm.weight", (delta.value_dim,), "F32")
    yield _matrix("ssm_out.weight", (c.model_dim, values))


def _experts(c: ModelConfig) -> Iterator[Tensor]:
    norm = "post_attention_norm" if c.family == "qwen3_next" else "ffn_norm"
    yield Tensor(f"{norm}.weight", (c.model_dim,), "F32")
    yield Tensor("ffn_gate_inp.weight", (c.num_experts, c.model_dim), "F32")
    for part in ("gate", "up"):
        yield _matrix(f"ffn_{part}_exps.weight", (c.num_experts, c.expert_dim, c.model_dim))
    yield _matrix("ffn_down_exps.weight", (c.num_experts, c.model_dim, c.expert_dim))
    if c.shared_dim:
        yield Tensor("ffn_gate_inp_shexp.weight", (c.model_dim,), "F32")
        for part in ("gate", "up"):
            yield _matrix(f"ffn_{part}_shexp.weight", (c.shared_dim, c.model_dim))
        yield _matrix("ffn_down_shexp.weight", (c.model_dim, c.shared_dim))


def _write_fields(writer: Any, c: ModelConfig, gguf: Any) -> None:
    writer.add_name(f"random {c.family}")
    writer.add_block_count(c.num_layers)
    writer.add_context_length(c.max_positions)
    writer.add_embedding_length(c.model_dim)
    writer.add_feed_forward_length(c.mlp_dim)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.rope_dim or c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.experts_per_token)
    if c.family != "mixtral":
        writer.add_expert_feed_forward_length(c.expert_dim)
    if c.shared_dim:
        writer.add_expert_shared_feed_forward_length(c.shared_dim)
    if (delta := c.delta_net) is not None:
        writer.add_ssm_conv_kernel(delta.conv_width)
        writer.add_ssm_inner_size(delta.num_value_heads * delta.value_dim)
        writer.add_ssm_state_size(delta.key_dim)
        writer.add_ssm_time_step_rank(delta.num_value_heads)
        writer.add_ssm_group_count(delta.num_key_heads)
    writer.add_vocab_size(c.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    words = made_up_words(c.vocab_size)
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges([f"{words[0]} {words[1]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def made_up_words(count: int) -> list[str]:
    """Tokens of a byte-level vocabulary: the bytes' stand-ins of GPT-2, then words."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(BYTES) if byte not in plain]
    stand_ins = [chr(byte) for byte in plain] + [chr(BYTES + i) for i in range(len(rest))]
    return (stand_ins + [f"word{i}" for i in range(count - BYTES)])[:count]


def _values(tensor: Tensor, rng: np.random.Generator, gguf: Any) -> Iterator[np.ndarray]:
    """The tensor's bytes, some at a time."""
    name, shape, kind = tensor
    size = math.prod(shape)
    if kind == "F32":
        if name.endswith("ssm_a"):
            yield np.full(shape, -1.0, np.float32)
        elif "norm" in name:
            yield np.ones(shape, np.float32)
        else:
            yield rng.standard_normal(shape, np.float32) * 0.05
        return
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    where, scales = SCALES[kind]
    count = size // block
    step = WRITTEN_AT_ONCE // nbytes
    for first in range(0, count, step):
        codes = rng.integers(0, 256, (min(step, count - first), nbytes), np.uint8)
        codes[:, where] = np.asarray(scales, np.float16).view(np.uint8)
        yield codes.reshape(-1)


def write(config: ModelConfig, path: Path, gguf: Any, seed: int = 0) -> None:
    """Writes the file, tensor by tensor."""
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.family])
    found = list(tensors(config))
    _write_fields(writer, config, gguf)
    for name, shape, kind in found:
        if kind == "F32":
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * math.prod(shape))
            continue
        code = gguf.GGMLQuantizationType[kind]
        block, nbytes = gguf.GGML_QUANT_SIZES[code]
        stored = (*shape[:-1], shape[-1] // block * nbytes)
        writer.add_tensor_info(
            name, stored, np.dtype(np.uint8), math.prod(shape) // block * nbytes, raw_dtype=code
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    for tensor in found:
        start = file.tell()
        for part in _values(tensor, rng, gguf):
            part.tofile(file)
        writer.write_padding(file, file.tell() - start)
    writer.close()


def load_gguf(folder: str) -> Any:
    """Imports the gguf package.

    Raises:
      MoejaxError: it is not there.
    """
    if folder:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        said = "pip install gguf, or give --gguf=LLAMA_CPP/gguf-py"
        raise MoejaxError(f"the gguf package cannot be imported ({error}): {said}") from error
