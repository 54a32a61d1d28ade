"""Configuration of `python -m moejax.profile_experts`."""

import dataclasses
from typing import TYPE_CHECKING, get_args

import numpy as np

from moejax.config.commands import (
    ADD_SPECIAL_TOKENS,
    CHECKPOINT,
    COMPILATION_CACHE,
    DTYPE,
    JOIN,
    PLATFORM,
    READ_BITS,
)
from moejax.config.options import RunConfig, option
from moejax.config.policy import PolicyConfig
from moejax.errors import MoejaxError
from moejax.policies.buddy_lists import Source, alpha_schedule

if TYPE_CHECKING:  # it imports JAX, which --help and mistakes need not wait for
    from moejax.experts.tiering import Tiering


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig(RunConfig):
    """A model, a text, and options of buddy lists; model and text are checked when read."""

    command = "moejax.profile_experts"

    checkpoint: str = CHECKPOINT
    read_bits: int = READ_BITS
    text: str = option(
        "default", "default (the calibration text that ships), or a UTF-8 file (.txt, .xz, .gz)",
        needed="'default' or a file",
    )  # fmt: skip
    join: str = JOIN
    window: int = option(
        0, "tokens that see each other; 0: 2048, or the model's context if less", least=0
    )
    max_tokens: int = option(0, "profile the first so many tokens; 0: all", least=0)
    batch_size: int = option(8, "windows per batch", least=1)
    source: str = option(
        "coactivations",
        f"source of lists: {', '.join(get_args(Source))} (by probability; by output similarity)",
        choices=get_args(Source),
    )
    outputs: bool = option(False, "also compare outputs, which runs each expert on each token")
    alpha: float = option(0.95, "a list covers this share of its expert's co-activations (CFT)")
    alpha_last: float = option(
        0.0, "alpha of the last sparse layer, with equal steps between; 0: alpha", least=0, most=1
    )
    max_buddies: int = option(16, "most buddies per list", least=1)
    smoothing: float = option(1.0, "added to every pair's count (Laplace)", least=0)
    warmup: int = option(0, "first tokens of each window, with less weight; 0: none", least=0)
    warmup_weight: float = option(0.0, "weight of warmup tokens; 0: none", least=0, most=1)
    percentile: float = option(
        10.0, "share of the tokens (%) that the TAE gate holds back in each layer; 0: none",
        least=0, most=100,
    )  # fmt: skip
    temperature: float = option(1.0, "temperature of TAE's softmax")
    tiers: tuple[str, ...] = option(
        (), "tiers of which each expert's output error is measured, as policy.tiers of the other "
        "commands; (): none",
    )  # fmt: skip
    quantizer: str = option(
        PolicyConfig.quantizer, "quantizer of tiers that are made at load", needed="a quantizer"
    )
    group_size: int = option(
        PolicyConfig.group_size, "inputs per scale in tiers that are made at load", least=1
    )
    output: str = option("", "a file for the profile; '': buddies.safetensors in the checkpoint")
    platform: str = PLATFORM
    dtype: str = DTYPE
    compilation_cache: str = COMPILATION_CACHE
    add_special_tokens: bool = ADD_SPECIAL_TOKENS

    def alphas(self, num_layers: int) -> float | np.ndarray:
        """CFT of every sparse layer, float64[M], or one for all."""
        if not self.alpha_last:
            return self.alpha
        return alpha_schedule(self.alpha, self.alpha_last, num_layers)

    def tiering(self) -> "Tiering | None":
        """Builds the tiers that are measured; None for none."""
        if not self.tiers:
            return None
        from moejax.experts.tiering import Tiering

        return Tiering(tiers=self.tiers, quantizer=self.quantizer, group_size=self.group_size)

    def check(self) -> None:
        """Checks the fields, as `RunConfig.check`."""
        super().check()
        if not 0 < self.alpha <= 1:
            raise MoejaxError(f"alpha={self.alpha} must be above 0, at most 1")
        if not 0 < self.temperature < np.inf:
            raise MoejaxError(f"temperature={self.temperature} must be above 0")
