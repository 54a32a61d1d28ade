"""Configuration of `python -m moejax.profile_experts`."""

import dataclasses
from typing import get_args

import numpy as np

from moejax.config.options import RunConfig, option
from moejax.errors import MoejaxError
from moejax.inference.generation import GenerationSettings
from moejax.policies.buddy_lists import Source, alpha_schedule
from moejax.text.corpus import JOINS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig(RunConfig):
    """A model, a text, and options of buddy lists; model and text are checked when read."""

    command = "moejax.profile_experts"

    checkpoint: str = option("demo", "'demo', a directory, or a Hugging Face name (org/name)")
    text: str = option(
        "default", "default (the calibration text that ships), or a UTF-8 file (.txt, .xz, .gz)"
    )
    join: str = option(
        "none", "none (a file as it stands), or wikitext (its lines joined as papers join the rows)"
    )
    window: int = option(0, "tokens that see each other; 0: 2048, or the model's context if less")
    max_tokens: int = option(0, "profile the first so many tokens; 0: all")
    batch_size: int = option(8, "windows per batch")
    source: str = option(
        "coactivations",
        f"source of lists: {', '.join(get_args(Source))} (by probability; by output similarity)",
    )
    outputs: bool = option(False, "also compare outputs, which runs each expert on each token")
    alpha: float = option(0.95, "a list covers this share of its expert's co-activations (CFT)")
    alpha_last: float = option(
        0.0, "alpha of the last sparse layer, with equal steps between; 0: alpha"
    )
    max_buddies: int = option(16, "most buddies per list")
    smoothing: float = option(1.0, "added to every pair's count (Laplace)")
    warmup: int = option(0, "first tokens of each window, with less weight")
    warmup_weight: float = option(0.0, "weight of warmup tokens; 0: none")
    percentile: float = option(
        10.0, "share of the tokens (%) that the TAE gate holds back in each layer; 0: none"
    )
    temperature: float = option(1.0, "temperature of TAE's softmax")
    output: str = option("", "a file for the profile; '': buddies.safetensors in the checkpoint")
    platform: str = option("auto", "auto (an accelerator if there is one), cpu or gpu")
    dtype: str = option(
        "auto",
        "auto (float32 on CPU, the file's on an accelerator), float32, bfloat16 or float16",
    )
    compilation_cache: str = option(
        "auto", "directory of compiled programs: auto (the user's cache), a path, '' (off)"
    )
    add_special_tokens: bool = option(
        GenerationSettings.add_special_tokens,
        "let the tokenizer add its special tokens (such as bos)",
    )

    def alphas(self, num_layers: int) -> float | np.ndarray:
        """CFT of every sparse layer, float64[M], or one for all."""
        if not self.alpha_last:
            return self.alpha
        return alpha_schedule(self.alpha, self.alpha_last, num_layers)

    def check(self) -> None:
        """See `RunConfig.check`."""
        if not self.checkpoint:
            raise MoejaxError("checkpoint='' must be a name or a directory")
        if not self.text:
            raise MoejaxError("text='' must be 'default' or a file")
        for name, allowed in (("join", JOINS), ("source", get_args(Source))):
            if getattr(self, name) not in allowed:
                said = ", ".join(allowed)
                raise MoejaxError(f"{name}={getattr(self, name)!r} must be one of {said}")
        ranges = (
            ("window", self.window >= 0, "0 or a number of tokens"),
            ("max_tokens", self.max_tokens >= 0, "0 or a number of tokens"),
            ("warmup", self.warmup >= 0, "0 or a number of tokens"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("max_buddies", self.max_buddies >= 1, "at least 1"),
            ("alpha", 0 < self.alpha <= 1, "above 0, at most 1"),
            ("alpha_last", 0 <= self.alpha_last <= 1, "0 (as alpha) or at most 1"),
            ("smoothing", 0 <= self.smoothing < np.inf, "0 or more"),
            ("warmup_weight", 0 <= self.warmup_weight <= 1, "from 0 to 1"),
            ("percentile", 0 <= self.percentile <= 100, "from 0 to 100"),
            ("temperature", 0 < self.temperature < np.inf, "above 0"),
        )
        for name, holds, said in ranges:
            if not holds:
                raise MoejaxError(f"{name}={getattr(self, name)} must be {said}")
