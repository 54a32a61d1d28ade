"""Parts of a model that only some families have, each a frozen dataclass inside `ModelConfig`."""

import dataclasses
import math
from typing import Literal

RopeKind = Literal["linear", "dynamic", "yarn", "llama3", "longrope"]
Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention:
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
class DeltaNet:
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

    @property
    def is_plain(self) -> bool:
        """Whether the rule is a softmax, then the best of all experts."""
        return self.scoring == "softmax" and self.num_groups == 1 and not self.has_bias


PLAIN_ROUTER = RouterRule()
