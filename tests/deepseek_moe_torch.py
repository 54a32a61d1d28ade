"""DeepSeek-MoE-16B in torch from its equations, with checkpoints of its published form.

DeepSeekMoE (arXiv:2401.06066), equations 9 to 11, between attention as in Llama: RMSNorm before
each, rotary embedding of halves. transformers has no class for it. Every expert runs on every
token, a shared one for itself, and attention is a plain softmax over a whole sequence.
"""

import dataclasses
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Fields of a config.json of model_type "deepseek", by their names there."""

    vocab_size: int = 160
    hidden_size: int = 32
    intermediate_size: int = 40
    moe_intermediate_size: int = 16
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    n_routed_experts: int = 8
    n_shared_experts: int | None = 2
    num_experts_per_tok: int = 2
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 256

    def is_sparse(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


class DeepseekMoe:
    """A model of random weights, under the names of the published checkpoints."""

    def __init__(self, shape: Shape, seed: int):
        self.shape = shape
        self.weights: Weights = {}
        self._generator = torch.Generator().manual_seed(seed)
        s = shape
        head = s.hidden_size // s.num_attention_heads
        self._draw("model.embed_tokens.weight", s.vocab_size, s.hidden_size)
        for layer in range(s.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            for x in "qkv":
                heads = s.num_attention_heads if x == "q" else s.num_key_value_heads
                self._draw(f"{prefix}.self_attn.{x}_proj.weight", heads * head, s.hidden_size)
            attended = s.num_attention_heads * head
            self._draw(f"{prefix}.self_attn.o_proj.weight", s.hidden_size, attended)
            self._draw(f"{prefix}.input_layernorm.weight", s.hidden_size)
            self._draw(f"{prefix}.post_attention_layernorm.weight", s.hidden_size)
            if not s.is_sparse(layer):
                self._draw_mlp(f"{prefix}.mlp", s.intermediate_size)
                continue
            self._draw(f"{prefix}.mlp.gate.weight", s.n_routed_experts, s.hidden_size)
            for expert in range(s.n_routed_experts):
                self._draw_mlp(f"{prefix}.mlp.experts.{expert}", s.moe_intermediate_size)
            if s.n_shared_experts:
                width = s.n_shared_experts * s.moe_intermediate_size
                self._draw_mlp(f"{prefix}.mlp.shared_experts", width)
        self._draw("model.norm.weight", s.hidden_size)
        if not s.tie_word_embeddings:
            self._draw("lm_head.weight", s.vocab_size, s.hidden_size)

    def _draw(self, name: str, *size: int) -> None:
        drawn = 0.3 * torch.randn(size, generator=self._generator)
        self.weights[name] = drawn + (len(size) == 1)

    def _draw_mlp(self, prefix: str, width: int) -> None:
        for x in ("gate", "up"):
            self._draw(f"{prefix}.{x}_proj.weight", width, self.shape.hidden_size)
        self._draw(f"{prefix}.down_proj.weight", self.shape.hidden_size, width)

    def write(self, directory: Path) -> None:
        """Writes config.json and the tensors as the published checkpoint has them."""
        directory.mkdir()
        fields = {
            **dataclasses.asdict(self.shape), "architectures": ["DeepseekForCausalLM"],
            "model_type": "deepseek", "hidden_act": "silu", "scoring_func": "softmax",
            "rope_scaling": None, "attention_bias": False, "torch_dtype": "float32",
        }  # fmt: skip
        (directory / "config.json").write_text(json.dumps(fields))
        save_file(self.weights, directory / "model.safetensors", metadata={"format": "pt"})

    def logits(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, V] of one sequence, and how near a router was to another choice, [T]."""
        self._gaps = torch.full((len(tokens),), torch.inf)
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.shape.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            x = x + self._attention(self._norm(x, f"{prefix}.input_layernorm"), prefix)
            u = self._norm(x, f"{prefix}.post_attention_layernorm")
            x = x + (
                self._moe(u, f"{prefix}.mlp")
                if self.shape.is_sparse(layer)
                else self._mlp(u, f"{prefix}.mlp", slice(None))
            )
        tied = self.shape.tie_word_embeddings
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return self._norm(x, "model.norm") @ self.weights[head].T, self._gaps

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + self.shape.rms_norm_eps)
        return x * scale * self.weights[f"{name}.weight"]

    def _mlp(self, u: torch.Tensor, prefix: str, part: slice) -> torch.Tensor:
        """SwiGLU by a part of the rows of gate and up."""
        gate, up, down = (self.weights[f"{prefix}.{x}_proj.weight"] for x in ("gate", "up", "down"))
        hidden = torch.nn.functional.silu(u @ gate[part].T) * (u @ up[part].T)
        return hidden @ down[:, part].T

    def _moe(self, u: torch.Tensor, prefix: str) -> torch.Tensor:
        """Equation 9, without the stream that it adds to."""
        s, width = self.shape, self.shape.moe_intermediate_size
        scores = (u @ self.weights[f"{prefix}.gate.weight"].T).softmax(-1)  # equation 11
        falling = scores.sort(-1, descending=True).values
        last = falling[:, s.num_experts_per_tok - 1]
        self._gaps = torch.minimum(self._gaps, last - falling[:, s.num_experts_per_tok])
        gates = torch.where(scores >= last[:, None], scores, 0.0)  # equation 10
        if s.norm_topk_prob and s.num_experts_per_tok > 1:  # as published
            gates = gates / gates.sum(-1, keepdim=True)
        out = torch.zeros_like(u)
        for i in range(s.n_shared_experts or 0):
            out += self._mlp(u, f"{prefix}.shared_experts", slice(i * width, (i + 1) * width))
        for i in range(s.n_routed_experts):
            out += gates[:, i, None] * self._mlp(u, f"{prefix}.experts.{i}", slice(None))
        return out

    def _attention(self, u: torch.Tensor, prefix: str) -> torch.Tensor:
        s, length = self.shape, len(u)
        q, k, v = (
            (u @ self.weights[f"{prefix}.self_attn.{x}_proj.weight"].T)
            .reshape(length, -1, s.hidden_size // s.num_attention_heads)
            .transpose(0, 1)
            for x in "qkv"
        )
        times = s.num_attention_heads // s.num_key_value_heads
        q, k, v = (
            self._turn(q),
            self._turn(k).repeat_interleave(times, 0),
            v.repeat_interleave(times, 0),
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        attended = (shares @ v).transpose(0, 1).reshape(length, -1)
        return attended @ self.weights[f"{prefix}.self_attn.o_proj.weight"].T

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embedding: number i and number i + C / 2 of a head are a point that is turned."""
        half = x.shape[-1] // 2
        pace = self.shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * pace
        turned = torch.complex(*x.double().split(half, -1)) * torch.exp(1j * angle)
        return torch.cat([turned.real, turned.imag], -1).float()
