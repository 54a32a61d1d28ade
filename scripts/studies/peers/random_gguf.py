"""GGUF files of random weights in a real shape, for llama.cpp.

Matrices are Q4_K with a head in Q6_K, or Q4_0 where a row is no multiple of 256; gpt-oss has
experts in MXFP4 and the rest in Q8_0, as its published files. Codes are random bytes, a block of
them again and again; scales keep activations finite. Tokens are bytes and made-up words, so that a
server can answer.
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

ARCHITECTURES = {
    "qwen3_moe": "qwen3moe", "mixtral": "llama", "qwen3_next": "qwen3next",
    "qwen3_5_moe": "qwen35moe", "glm4_moe_lite": "deepseek2", "gpt_oss": "gpt-oss",
}  # fmt: skip
# Where a block's scales stand, and their values: d, or d and dmin, or MXFP4's exponent.
SCALES: dict[str, tuple[slice, np.ndarray]] = {
    "Q4_0": (slice(0, 2), np.array([0.004], np.float16)),
    "Q4_K": (slice(0, 4), np.array([1e-4, 7e-4], np.float16)),
    "Q6_K": (slice(208, 210), np.array([2e-5], np.float16)),
    "Q8_0": (slice(0, 2), np.array([0.0003], np.float16)),
    "MXFP4": (slice(0, 1), np.array([120], np.uint8)),
}
POST_NORM = ("qwen3_next", "qwen3_5_moe", "gpt_oss")  # families with another name of that norm
DRAWN = 2**26  # bytes of a kind's random codes
MROPE_SECTIONS = (11, 11, 10, 0)  # of Qwen3.5, whose texts turn all of them alike
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
    yield _matrix(config, "token_embd.weight", (vocab, dim))
    yield _vector("output_norm.weight", dim)
    yield _matrix(config, "output.weight", (vocab, dim))
    for layer in range(config.num_layers):
        prefix = f"blk.{layer}."
        delta = config.delta_net
        if delta is not None and layer in delta.layers:
            parts = _delta_rule(config)
        elif config.latent is not None:
            parts = _latent_attention(config)
        else:
            parts = _attention(config)
        norm = "post_attention_norm" if config.family in POST_NORM else "ffn_norm"
        ffn = _experts(config) if layer in config.moe_layers else _mlp(config)
        norms = (_vector("attn_norm.weight", dim), _vector(f"{norm}.weight", dim))
        for name, shape, kind in (*norms, *parts, *ffn):
            yield Tensor(prefix + name, shape, kind)


def _matrix(c: ModelConfig, name: str, shape: tuple[int, ...]) -> Tensor:
    if c.family == "gpt_oss":
        return Tensor(name, shape, "MXFP4" if "_exps" in name else "Q8_0")
    if shape[-1] % 256:
        return Tensor(name, shape, "Q4_0")
    return Tensor(name, shape, "Q6_K" if name == "output.weight" else "Q4_K")


def _vector(name: str, *shape: int) -> Tensor:
    return Tensor(name, shape, "F32")


def _attention(c: ModelConfig) -> Iterator[Tensor]:
    queries = c.num_heads * c.head_dim
    keys = c.num_kv_heads * c.head_dim
    yield _matrix(c, "attn_q.weight", (queries * (2 if c.attention_gate else 1), c.model_dim))
    yield _matrix(c, "attn_k.weight", (keys, c.model_dim))
    yield _matrix(c, "attn_v.weight", (keys, c.model_dim))
    yield _matrix(c, "attn_output.weight", (c.model_dim, queries))
    if c.qk_norm:
        yield _vector("attn_q_norm.weight", c.head_dim)
        yield _vector("attn_k_norm.weight", c.head_dim)
    if c.attention_bias:
        rows = {"q": queries, "k": keys, "v": keys, "output": c.model_dim}
        for part, count in rows.items():
            yield _vector(f"attn_{part}.bias", count)
    if c.attention_sinks:
        yield _vector("attn_sinks.weight", c.num_heads)


def _latent_attention(c: ModelConfig) -> Iterator[Tensor]:
    latent = c.latent
    assert latent is not None and latent.query_rank is not None
    rank, queries = latent.kv_rank, latent.query_rank
    yield _matrix(c, "attn_q_a.weight", (queries, c.model_dim))
    yield _vector("attn_q_a_norm.weight", queries)
    yield _matrix(c, "attn_q_b.weight", (c.num_heads * c.head_dim, queries))
    yield _matrix(c, "attn_kv_a_mqa.weight", (rank + latent.rope_dim, c.model_dim))
    yield _vector("attn_kv_a_norm.weight", rank)
    yield _matrix(c, "attn_k_b.weight", (c.num_heads, rank, latent.nope_dim))
    yield _matrix(c, "attn_v_b.weight", (c.num_heads, latent.value_dim, rank))
    yield _matrix(c, "attn_output.weight", (c.model_dim, c.num_heads * latent.value_dim))


def _delta_rule(c: ModelConfig) -> Iterator[Tensor]:
    delta = c.delta_net
    assert delta is not None
    heads = delta.num_value_heads
    yield _matrix(c, "attn_qkv.weight", (delta.conv_dim, c.model_dim))
    yield _matrix(c, "attn_gate.weight", (delta.value_width, c.model_dim))
    yield _vector("ssm_conv1d.weight", delta.conv_dim, delta.conv_width)
    yield _vector("ssm_dt.bias", heads)
    yield _vector("ssm_a", heads)
    if delta.rows_by_head:
        yield _matrix(c, "ssm_ba.weight", (2 * heads, c.model_dim))
    else:
        for part in ("beta", "alpha"):
            yield _matrix(c, f"ssm_{part}.weight", (heads, c.model_dim))
    yield _vector("ssm_norm.weight", delta.value_dim)
    yield _matrix(c, "ssm_out.weight", (c.model_dim, delta.value_width))


def _mlp(c: ModelConfig, width: int = 0, of: str = "") -> Iterator[Tensor]:
    """Gate, up and down of a width; 0: of a dense layer."""
    width = width or c.mlp_dim
    for part in ("gate", "up"):
        yield _matrix(c, f"ffn_{part}{of}.weight", (width, c.model_dim))
    yield _matrix(c, f"ffn_down{of}.weight", (c.model_dim, width))


def _experts(c: ModelConfig) -> Iterator[Tensor]:
    yield _vector("ffn_gate_inp.weight", c.num_experts, c.model_dim)
    if c.router.has_bias:
        yield _vector("exp_probs_b.bias", c.num_experts)
    if c.router.has_logit_bias:
        yield _vector("ffn_gate_inp.bias", c.num_experts)
    for name, shape, kind in _mlp(c, c.expert_dim, "_exps"):
        yield Tensor(name, (c.num_experts, *shape), kind)
        if c.expert_bias:
            yield _vector(name.replace("weight", "bias"), c.num_experts, shape[0])
    if c.shared_dim:
        if c.shared_gate:
            yield _vector("ffn_gate_inp_shexp.weight", c.model_dim)
        yield from _mlp(c, c.shared_dim, "_shexp")


def _write_fields(writer: Any, c: ModelConfig, gguf: Any) -> None:
    writer.add_name(f"random {c.family}")
    writer.add_block_count(c.num_layers)
    writer.add_context_length(c.max_positions)
    writer.add_embedding_length(c.model_dim)
    writer.add_feed_forward_length(c.mlp_dim)
    writer.add_head_count(c.num_heads)
    writer.add_rope_dimension_count(c.rotary_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.experts_per_token)
    if c.family != "mixtral":
        writer.add_expert_feed_forward_length(c.expert_dim)
    if c.shared_gate:
        writer.add_expert_shared_feed_forward_length(c.shared_dim)
    _write_attention(writer, c, gguf)
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


def _write_attention(writer: Any, c: ModelConfig, gguf: Any) -> None:
    latent = c.latent
    writer.add_head_count_kv(c.num_kv_heads if latent is None else 1)
    if latent is None:
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
    else:  # one head of keys, the latent, as the product over it sees it
        writer.add_key_length(latent.kv_rank + latent.rope_dim)
        writer.add_value_length(latent.kv_rank)
        writer.add_key_length_mla(c.head_dim)
        writer.add_value_length_mla(latent.value_dim)
        writer.add_kv_lora_rank(latent.kv_rank)
        writer.add_q_lora_rank(latent.query_rank)
        writer.add_leading_dense_block_count(c.num_layers - len(c.moe_layers))
        writer.add_expert_shared_count(c.shared_dim // c.expert_dim)
        writer.add_expert_weights_scale(c.router.scale)
        writer.add_expert_weights_norm(c.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if c.family == "qwen3_5_moe":
        writer.add_rope_dimension_sections(MROPE_SECTIONS)
    if c.sliding_window is not None:
        writer.add_sliding_window(c.sliding_window)
    if (scaling := c.rope_scaling) is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.kind))
        writer.add_rope_scaling_factor(scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(scaling.original_positions)


def made_up_words(count: int) -> list[str]:
    """Tokens of a byte-level vocabulary: the bytes' stand-ins of GPT-2, then words."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(BYTES) if byte not in plain]
    stand_ins = [chr(byte) for byte in plain] + [chr(BYTES + i) for i in range(len(rest))]
    return (stand_ins + [f"word{i}" for i in range(count - BYTES)])[:count]


def _float32(tensor: Tensor, rng: np.random.Generator) -> np.ndarray:
    name, shape, _ = tensor
    if name.endswith("ssm_a"):
        return np.full(shape, -1.0, np.float32)
    if "norm" in name:
        return np.ones(shape, np.float32)
    return rng.standard_normal(shape, np.float32) * 0.05


def _codes(kind: str, rng: np.random.Generator, gguf: Any) -> np.ndarray:
    """Whole blocks of a kind, uint8[about DRAWN]."""
    _, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    codes = rng.integers(0, 256, (DRAWN // nbytes, nbytes), np.uint8)
    where, scales = SCALES[kind]
    codes[:, where] = scales.view(np.uint8)
    return codes.reshape(-1)


def write(config: ModelConfig, path: Path, gguf: Any, seed: int = 0) -> None:
    """Writes the file, tensor by tensor."""
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.family])
    found = list(tensors(config))
    _write_fields(writer, config, gguf)
    sizes = [nbytes_of(tensor, gguf) for tensor in found]
    for (name, shape, kind), nbytes in zip(found, sizes, strict=True):
        if kind == "F32":
            writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes)
            continue
        stored = (*shape[:-1], nbytes // math.prod(shape[:-1]))
        writer.add_tensor_info(
            name, stored, np.dtype(np.uint8), nbytes, raw_dtype=gguf.GGMLQuantizationType[kind]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    drawn = {kind: _codes(kind, rng, gguf) for kind in {one.kind for one in found} - {"F32"}}
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    for tensor, nbytes in zip(found, sizes, strict=True):
        start = file.tell()
        if tensor.kind == "F32":
            _float32(tensor, rng).tofile(file)
        else:
            codes = drawn[tensor.kind]
            for first in range(0, nbytes, codes.size):
                codes[: nbytes - first].tofile(file)
        writer.write_padding(file, file.tell() - start)
    writer.close()


def nbytes_of(tensor: Tensor, gguf: Any) -> int:
    """Bytes of a tensor in the file."""
    count = math.prod(tensor.shape)
    if tensor.kind == "F32":
        return 4 * count
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.kind]]
    assert tensor.shape[-1] % block == 0, tensor
    return int(count // block * nbytes)


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
