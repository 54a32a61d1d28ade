"""The shape of a model: one frozen dataclass for every family.

Axis letters, used in every docstring of `moejax.models`, `moejax.cache` and `moejax.engine`:
B batch, T query tokens, S cache length, D model width, H query heads, K key/value heads,
C head width, L layers, M sparse (MoE) layers, N dense (MLP-only) layers, E experts,
A experts per token, F expert width, I dense MLP width, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Static description of a Mixture-of-Experts decoder; hashable, usable as a static argument.

    Invariants (`check` raises ValueError when one is broken):
      * `num_heads` is a multiple of `num_kv_heads`;
      * `1 <= experts_per_token <= num_experts`;
      * `moe_layers` is strictly increasing, each in `[0, num_layers)`; the other layers are dense
        MLPs of width `mlp_width`;
      * `head_dim` is even (rotary halves).
    """

    family: str  # "qwen3_moe" | "mixtral"
    vocab_size: int  # V
    model_dim: int  # D
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # C, not necessarily D / H
    num_experts: int  # E
    experts_per_token: int  # A
    expert_dim: int  # F
    mlp_dim: int  # I, width of the dense layers; unused when every layer is sparse
    moe_layers: tuple[int, ...]  # which layers are sparse, in order
    norm_topk_prob: bool  # divide the top-k weights by their sum
    norm_eps: float
    rope_theta: float
    max_positions: int  # longest context that the model was made for
    tied_embeddings: bool
    qk_norm: bool  # RMSNorm over each query and key head (Qwen3)
    attention_bias: bool  # bias on q, k, v and o projections
    sliding_window: int | None  # tokens seen by a query, itself included; None: all

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "ModelConfig":
        """From the fields that JSON or a ConfigDict kept, in which a tuple may be a list."""
        return cls(**{**fields, "moe_layers": tuple(fields["moe_layers"])})

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ValueError when an invariant does not hold."""
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is not in 1..{self.num_experts}"
            )
        if list(self.moe_layers) != sorted(set(self.moe_layers)) or any(
            not 0 <= layer < self.num_layers for layer in self.moe_layers
        ):
            raise ValueError(
                f"moe_layers {self.moe_layers} is not an increasing list of layers below "
                f"{self.num_layers}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embedding needs pairs")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window {self.sliding_window} is not positive")

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers whose MLP is dense, in order."""
        return tuple(i for i in range(self.num_layers) if i not in set(self.moe_layers))

    @property
    def qkv_dim(self) -> int:
        """Rows of the fused query, key, value projection: (H + 2K) C."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight leaf; layers (and experts) are stacked, matrices [out, in].

    Every matrix keeps the checkpoint's orientation, rows are outputs, so loading is a copy. The
    fused ones are concatenated along the rows: `qkv_proj` is queries, keys, values; `gate_up` is
    gate, then up.
    """
    c = config
    num_moe, num_dense = len(c.moe_layers), len(c.dense_layers)
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (c.vocab_size, c.model_dim),
        "attention.norm": (c.num_layers, c.model_dim),
        "attention.qkv_proj": (c.num_layers, c.qkv_dim, c.model_dim),
        "attention.o_proj": (c.num_layers, c.model_dim, c.num_heads * c.head_dim),
        "mlp_norm": (c.num_layers, c.model_dim),
        "final_norm": (c.model_dim,),
    }
    if c.qk_norm:
        shapes["attention.q_norm"] = (c.num_layers, c.head_dim)
        shapes["attention.k_norm"] = (c.num_layers, c.head_dim)
    if c.attention_bias:
        shapes["attention.qkv_bias"] = (c.num_layers, c.qkv_dim)
        shapes["attention.o_bias"] = (c.num_layers, c.model_dim)
    if num_moe:
        shapes["moe.router"] = (num_moe, c.num_experts, c.model_dim)
        shapes["moe.gate_up"] = (num_moe, c.num_experts, 2 * c.expert_dim, c.model_dim)
        shapes["moe.down"] = (num_moe, c.num_experts, c.model_dim, c.expert_dim)
    if num_dense:
        shapes["mlp.gate_up"] = (num_dense, 2 * c.mlp_dim, c.model_dim)
        shapes["mlp.down"] = (num_dense, c.model_dim, c.mlp_dim)
    if not c.tied_embeddings:
        shapes["head"] = (c.vocab_size, c.model_dim)
    return shapes
