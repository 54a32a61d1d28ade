"""The shape of a model: one frozen dataclass for every family.

Axis letters, used in every docstring of `moejax.models` and `moejax.engine`:
B batch, T query tokens, S cache length, D model width, H query heads, K key/value heads,
C head width, L layers, M sparse (MoE) layers, N dense (MLP-only) layers, E experts,
A experts per token, F expert width, I dense MLP width, V vocabulary. Where not all layers are
alike: U layers with attention, G layers with a delta rule; U + G = L.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from pallas_kernels.gating import SWIGLU, Gating

RopeKind = Literal["linear", "dynamic", "yarn", "llama3", "longrope"]
Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]
PAGE = 128  # slots; a multiple of the blocks in which kernels read them


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Keys and values of all heads are linear in one latent of a token, which the cache stores beside
    one rotated key that all heads share. A query or key head is `nope_dim` numbers that are not
    rotated, then `rope_dim` that are.
    """

    kv_rank: int  # R, width of the latent
    query_rank: int | None  # width of the queries' own latent; None: projected at once
    nope_dim: int
    rope_dim: int  # P, even
    value_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Gated delta rule layers in place of attention (Yang et al., arXiv:2412.06464).

    Each value head keeps a matrix [key_dim, value_dim]; `num_value_heads` is a multiple of
    `num_key_heads`, and consecutive value heads share a query and key head.
    """

    layers: tuple[int, ...]  # which of all layers, in order
    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int  # of a head
    conv_width: int  # W, taps of the causal convolution before it
    # Rows of the projections: those of a key head lie together (Qwen3-Next), or those of all heads,
    # queries first, then keys, values, gates; b, then a (Qwen3.5).
    rows_by_head: bool = True

    @property
    def key_width(self) -> int:
        """Width of all key heads together."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of all value heads together."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rope scaling for contexts longer than the trained one, in transformers' kinds.

    * "linear" divides all frequencies by the factor (Chen et al., arXiv:2306.15595);
    * "dynamic" raises the base as a sequence grows beyond the original positions (NTK-aware);
    * "yarn" divides those of slow pairs (Peng et al., arXiv:2309.00071) and scales scores of
      attention (section 3.4), part of it in cosines and sines (`rotation_scale`), part of it in
      the scores of latent attention (`score_scale`);
    * "llama3" divides those of slow pairs along another ramp;
    * "longrope" divides each by a number of its own (Ding et al., arXiv:2402.13753), by another
      one in sequences that are longer than the original positions.
    """

    kind: RopeKind
    factor: float  # how many times longer
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None  # in place of what `rotation_scale` would be
    truncate: bool = True  # whether YaRN's ramp begins and ends with a pair
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies change as a sequence grows."""
        return self.kind in ("dynamic", "longrope")

    @property
    def rotation_scale(self) -> float:
        """Factor on cosines and sines."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            if self.factor <= 1:
                return 1.0
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_positions))
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    @property
    def score_scale(self) -> float:
        """Factor on scores of latent attention, beside 1 / sqrt(C)."""
        return self._scale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _scale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterRule:
    """Rule that turns a router's logits into chosen experts and weights.

    Scores are a softmax or sigmoids. Experts in consecutive groups: only those of the `top_groups`
    best groups can be chosen, where a group's score is that of its best expert ("max", DeepSeek-V2)
    or of its best two together ("top2", DeepSeek-V3). A bias decides who is chosen and takes no
    part in the weights.
    """

    scoring: Scoring = "softmax"
    scale: float = 1.0  # of the weights, after they are normalised
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    has_bias: bool = False
    has_logit_bias: bool = False  # one that is added to the logits, and so to weights too (gpt-oss)

    @property
    def is_plain(self) -> bool:
        """Whether the rule is a softmax, then the best of all experts."""
        return self.scoring == "softmax" and self.num_groups == 1 and not self.has_bias


PLAIN_ROUTER = RouterRule()


# Far beyond every model: whoever asks for more has a broken config.json, and memory is made by it.
MOST_LAYERS = 10_000
MOST_EXPERTS = 2**16  # of a layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Static description of a Mixture-of-Experts decoder; hashable, usable as a static argument.

    Invariants (`check` raises ValueError when one is broken):
      * at most `MOST_LAYERS` layers, and `MOST_EXPERTS` experts in each;
      * `num_heads` is a multiple of `num_kv_heads`;
      * `1 <= experts_per_token <= num_experts`;
      * `moe_layers` is strictly increasing, each in `[0, num_layers)`; the other layers are dense
        MLPs of width `mlp_dim`;
      * `rotary_dim` is even (rotary pairs) and at most `head_dim`;
      * `window_layers` are like `moe_layers`, at least one, and need a `sliding_window`;
      * latent attention has no sinks and one window for all layers;
      * with `latent`, `num_kv_heads` is `num_heads` and `head_dim` is that of queries and keys;
      * the layers of `delta_net` are like `moe_layers`, and at least one;
      * `router.num_groups` divides `num_experts`, and the best groups hold enough experts.
    """

    family: str  # a key of `hf_config.ARCHITECTURES`
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
    max_positions: int  # of its config.json; `context_limit` says what scaled rope makes of it
    tied_embeddings: bool = False
    qk_norm: bool = False  # RMSNorm over each query and key head (Qwen3)
    attention_bias: bool = False  # bias on q, k, v and o projections
    sliding_window: int | None = None  # tokens seen by a query, itself included; None: all
    window_layers: tuple[int, ...] | None = None  # that have the window; None: all layers
    attention_sinks: bool = False  # a logit a head that joins its softmax and attends to nothing
    rope_dim: int | None = None  # of a head, that are rotated; None: all, or `latent.rope_dim`
    interleaved_rope: bool = False  # pairs are neighbours, not halves
    rope_scaling: RopeScaling | None = None
    output_bias: bool = True  # False: `attention_bias` spares the o projection (GLM-4.5)
    joint_qk_norm: bool = False  # `qk_norm` is over all heads together (OLMoE)
    attention_gate: bool = False  # a head's output times the sigmoid of a projection of its own
    zero_centred_norm: bool = False  # norms multiply by 1 + weight
    latent: LatentConfig | None = None  # in place of `qkv_proj`
    delta_net: DeltaConfig | None = None  # layers without attention
    shared_dim: int = 0  # width of the expert that every token sees; 0: there is none
    shared_gate: bool = False  # which is multiplied by a sigmoid of its own
    router: RouterRule = PLAIN_ROUTER
    gating: Gating = SWIGLU  # of gate and up, in MLPs and experts
    expert_bias: bool = False  # biases on the experts' gate, up and down projections

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "ModelConfig":
        """Builds a config from JSON or a ConfigDict, in which a tuple may be a list."""
        given = {**fields, "moe_layers": tuple(fields["moe_layers"])}
        if given.get("window_layers") is not None:
            given["window_layers"] = tuple(given["window_layers"])
        for name, kind in _PARTS.items():
            if given.get(name) is not None and not isinstance(given[name], kind):
                part = dict(given[name])
                lists = {n: tuple(of) for n, of in part.items() if isinstance(of, list | tuple)}
                given[name] = kind(**part | lists)
        return cls(**given)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ValueError when an invariant does not hold."""
        if self.num_layers > MOST_LAYERS or self.num_experts > MOST_EXPERTS:
            raise ValueError(
                f"{self.num_layers} layers of {self.num_experts} experts, expected at most "
                f"{MOST_LAYERS} and {MOST_EXPERTS}"
            )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is not in 1..{self.num_experts}"
            )
        if not self._are_layers(self.moe_layers):
            raise ValueError(
                f"moe_layers {self.moe_layers} is not an increasing list of layers below "
                f"{self.num_layers}"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"{self.rotary_dim} rotated dimensions of a head of {self.head_dim}: rotary "
                "embedding needs pairs"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window {self.sliding_window} is not positive")
        if self.window_layers is not None and (
            self.sliding_window is None
            or not self.window_layers
            or not self._are_layers(self.window_layers)
        ):
            raise ValueError(
                f"window_layers {self.window_layers} with sliding_window {self.sliding_window} is "
                f"not an increasing list of layers below {self.num_layers} that have a window"
            )
        if self.latent is not None and (self.attention_sinks or self.window_layers is not None):
            raise ValueError("latent attention has no sinks and one window for all layers")
        self._check_parts()

    def _are_layers(self, layers: tuple[int, ...]) -> bool:
        """Whether `layers` increase and are all of the model."""
        return [*layers] == sorted({*layers} & {*range(self.num_layers)})

    def _check_parts(self) -> None:
        latent, delta, router = self.latent, self.delta_net, self.router
        self._check_rope_scaling()
        if latent is not None and (
            self.num_kv_heads != self.num_heads
            or self.head_dim != latent.nope_dim + latent.rope_dim
        ):
            raise ValueError(
                f"latent attention has heads of {latent.nope_dim} + {latent.rope_dim} and as many "
                f"keys as queries, not head_dim {self.head_dim} and num_kv_heads "
                f"{self.num_kv_heads} of {self.num_heads}"
            )
        if delta is not None:
            if not delta.layers or not self._are_layers(delta.layers):
                raise ValueError(
                    f"delta_net.layers {delta.layers} is not an increasing list of layers below "
                    f"{self.num_layers}"
                )
            if delta.num_value_heads % delta.num_key_heads:
                raise ValueError(
                    f"{delta.num_value_heads} value heads are no multiple of "
                    f"{delta.num_key_heads} key heads"
                )
        size, rest = divmod(self.num_experts, router.num_groups)
        if rest or not 1 <= router.top_groups <= router.num_groups:
            raise ValueError(
                f"{router.top_groups} of {router.num_groups} groups do not divide "
                f"{self.num_experts} experts"
            )
        if router.top_groups * size < self.experts_per_token:
            raise ValueError(
                f"{router.top_groups} groups of {size} experts hold fewer than the "
                f"{self.experts_per_token} that a token takes"
            )

    def _check_rope_scaling(self) -> None:
        scaling, num_pairs = self.rope_scaling, self.rotary_dim // 2
        if scaling is None:
            return
        if scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta {self.rope_theta} with YaRN, which takes its logarithm")
        if scaling.kind == "dynamic" and num_pairs < 2:
            raise ValueError("dynamic rope scaling of a single pair, whose frequency is 1")
        for name in ("short_factors", "long_factors"):
            factors = getattr(scaling, name)
            if scaling.kind == "longrope" and len(factors) != num_pairs:
                raise ValueError(f"{len(factors)} {name} of longrope for {num_pairs} pairs")
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if scaling.kind == "llama3" and (low is None or high is None or low == high):
            raise ValueError(f"low_freq_factor {low} and high_freq_factor {high} are no ramp")

    @functools.cached_property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers whose MLP is dense, in order."""
        sparse = set(self.moe_layers)
        return tuple(i for i in range(self.num_layers) if i not in sparse)

    @functools.cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that attend, in order."""
        others = set(self.delta_net.layers) if self.delta_net else set()
        return tuple(i for i in range(self.num_layers) if i not in others)

    def window_of(self, layer: int) -> int | None:
        """Tokens that a query of a layer sees, itself included; None: all."""
        if self.window_layers is not None and layer not in self.window_layers:
            return None
        return self.sliding_window

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        if self.latent is not None:
            return self.latent.rope_dim
        return self.head_dim if self.rope_dim is None else self.rope_dim

    @property
    def score_scale(self) -> float:
        """Factor on attention scores."""
        more = self.rope_scaling.score_scale if self.rope_scaling and self.latent else 1.0
        return self.head_dim**-0.5 * more

    @property
    def context_limit(self) -> int:
        """Longest context the model may run with: the trained one times a rope's factor.

        For "llama3" and "longrope", `max_positions` is the scaled length already.
        """
        scaling = self.rope_scaling
        if scaling is None or scaling.kind in ("llama3", "longrope"):
            return self.max_positions
        return max(self.max_positions, int(scaling.factor * scaling.original_positions))

    @property
    def qkv_dim(self) -> int:
        """Rows of the fused query, key, value projection: (H + 2K) C, with gates (2H + 2K) C."""
        queries = (2 if self.attention_gate else 1) * self.num_heads
        return (queries + 2 * self.num_kv_heads) * self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a head's output."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def cached_heads(self) -> int:
        """K of the cache: one where heads share a latent."""
        return 1 if self.latent else self.num_kv_heads

    @property
    def cached_dims(self) -> tuple[int, int]:
        """Widths of a cached key and value; in latent attention, of rotated key and latent."""
        if self.latent:
            return self.latent.rope_dim, self.latent.kv_rank
        return self.head_dim, self.head_dim

    @property
    def watched_heads(self) -> tuple[tuple[int, int], ...]:
        """Possible (K, C) of the keys that an attention observer is given.

        In latent attention a query is compared with all heads' keys or, absorbed to the width of
        the latents, with the one cached row.
        """
        heads = (self.num_kv_heads, self.head_dim)
        return (heads, (1, sum(self.cached_dims))) if self.latent else (heads,)

    @property
    def cached_values(self) -> int:
        """Numbers per position in the cache, over all layers."""
        return len(self.attention_layers) * self.cached_heads * sum(self.cached_dims)

    @property
    def state_values(self) -> tuple[int, int]:
        """Numbers per sequence beside the cache, over all layers: float32, and plain ones."""
        if self.delta_net is None:
            return 0, 0
        d = self.delta_net
        matrices = d.num_value_heads * d.key_dim * d.value_dim
        return len(d.layers) * matrices, len(d.layers) * (d.conv_width - 1) * d.conv_dim


_PARTS: Mapping[str, Any] = {
    "rope_scaling": RopeScaling, "latent": LatentConfig, "delta_net": DeltaConfig,
    "router": RouterRule, "gating": Gating,
}  # fmt: skip

# Leaves that stay float32 whatever the activations are: of biases that decide who is chosen, and of
# decays, which are taken to a power.
FLOAT32_LEAVES = ("moe.router_bias", "delta.a_log", "delta.dt_bias")


class Pages(NamedTuple):
    """Pages of a cache, beside the first, which stays zero."""

    number: int
    size: int = PAGE  # slots of a page

    def of(self, length: int) -> int:
        """Pages that so many slots take."""
        return -(-length // self.size)


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight leaf; layers (and experts) are stacked, matrices [out, in].

    Every matrix keeps the checkpoint's orientation, rows are outputs, so loading is a copy. The
    fused ones are concatenated along the rows: `qkv_proj` is queries (of a head with a gate the
    gate after it), keys, values; `gate_up` is gate, then up.
    """
    c = config
    num_moe, num_dense = len(c.moe_layers), len(c.dense_layers)
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (c.vocab_size, c.model_dim),
        "attention.norm": (c.num_layers, c.model_dim),  # of every layer, whatever it mixes by
        **(_latent_shapes(c) if c.latent else _projection_shapes(c)),
        "mlp_norm": (c.num_layers, c.model_dim),
        "final_norm": (c.model_dim,),
        **_head_shapes(c),
    }
    if c.delta_net:
        shapes |= _delta_shapes(c, c.delta_net)
    if num_moe:
        shapes["moe.router"] = (num_moe, c.num_experts, c.model_dim)
        if c.router.has_bias:
            shapes["moe.router_bias"] = (num_moe, c.num_experts)
        if c.router.has_logit_bias:
            shapes["moe.logit_bias"] = (num_moe, c.num_experts)
        shapes["moe.gate_up"] = (num_moe, c.num_experts, 2 * c.expert_dim, c.model_dim)
        shapes["moe.down"] = (num_moe, c.num_experts, c.model_dim, c.expert_dim)
        if c.expert_bias:
            shapes["moe.gate_up_bias"] = (num_moe, c.num_experts, 2 * c.expert_dim)
            shapes["moe.down_bias"] = (num_moe, c.num_experts, c.model_dim)
    if num_moe and c.shared_dim:
        shapes["shared.gate_up"] = (num_moe, 2 * c.shared_dim, c.model_dim)
        shapes["shared.down"] = (num_moe, c.model_dim, c.shared_dim)
        if c.shared_gate:
            shapes["shared.gate"] = (num_moe, 1, c.model_dim)
    if num_dense:
        shapes["mlp.gate_up"] = (num_dense, 2 * c.mlp_dim, c.model_dim)
        shapes["mlp.down"] = (num_dense, c.model_dim, c.mlp_dim)
    if not c.tied_embeddings:
        shapes["head"] = (c.vocab_size, c.model_dim)
    return shapes


def _projection_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    num = len(c.attention_layers)
    if not num:
        return {}
    return {
        "attention.qkv_proj": (num, c.qkv_dim, c.model_dim),
        "attention.o_proj": (num, c.model_dim, c.num_heads * c.head_dim),
    }


def _head_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of head norms and biases."""
    num = len(c.attention_layers)
    shapes: dict[str, tuple[int, ...]] = {}
    if not num or c.latent:
        return shapes
    if c.qk_norm:
        heads = (c.num_heads, c.num_kv_heads) if c.joint_qk_norm else (1, 1)
        for name, of in zip(("attention.q_norm", "attention.k_norm"), heads, strict=True):
            shapes[name] = (num, of * c.head_dim)
    if c.attention_bias:
        shapes["attention.qkv_bias"] = (num, c.qkv_dim)
        if c.output_bias:
            shapes["attention.o_bias"] = (num, c.model_dim)
    if c.attention_sinks:
        shapes["attention.sinks"] = (num, c.num_heads)
    return shapes


def _latent_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of latent attention: `kv_a` gives latent and rotated key, `kv_b` keys and values."""
    assert c.latent is not None
    of, num, queries = c.latent, len(c.attention_layers), c.num_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    if of.query_rank is None:
        shapes["attention.q_proj"] = (num, queries, c.model_dim)
    else:
        shapes["attention.q_a"] = (num, of.query_rank, c.model_dim)
        shapes["attention.q_a_norm"] = (num, of.query_rank)
        shapes["attention.q_b"] = (num, queries, of.query_rank)
    expanded = c.num_heads * (of.nope_dim + of.value_dim)
    return shapes | {
        "attention.kv_a": (num, of.kv_rank + of.rope_dim, c.model_dim),
        "attention.kv_a_norm": (num, of.kv_rank),
        "attention.kv_b": (num, expanded, of.kv_rank),
        "attention.o_proj": (num, c.model_dim, c.num_heads * of.value_dim),
    }


def _delta_shapes(c: ModelConfig, of: DeltaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of delta rule leaves, whose rows lie as checkpoints store them."""
    num = len(of.layers)
    return {
        "delta.qkvz_proj": (num, of.conv_dim + of.value_width, c.model_dim),
        "delta.ba_proj": (num, 2 * of.num_value_heads, c.model_dim),
        "delta.conv": (num, of.conv_dim, 1, of.conv_width),
        "delta.dt_bias": (num, of.num_value_heads),
        "delta.a_log": (num, of.num_value_heads),
        "delta.norm": (num, of.value_dim),
        "delta.o_proj": (num, c.model_dim, of.value_width),
    }


def leaf_dtype(leaf: str, dtype: Any) -> np.dtype:
    """Dtype of a plain leaf in a model whose activations are `dtype`."""
    return np.dtype(np.float32 if leaf in FLOAT32_LEAVES else dtype)
