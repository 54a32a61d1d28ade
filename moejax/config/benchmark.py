"""Configuration of `python -m moejax.benchmark`."""

import dataclasses
import re

from moejax.config.commands import SHAPE_BITS, MemoryConfig, check_share
from moejax.config.options import RunConfig, option
from moejax.config.policy import PolicyConfig
from moejax.errors import MoejaxError
from moejax.models.shapes import CONFIGS

PROMPT_TOKENS = 512  # where neither a file nor a length says it
SPLITS = ("lines", "paragraphs")
FORMATS = (".json", ".csv", ".jsonl")
MAX_BATCH = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(RunConfig):
    """A model, its requests, and the batches and budgets to measure."""

    command = "moejax.benchmark"

    checkpoint: str = option("demo", "'demo', a directory, or a Hugging Face name (org/name)")
    shape: str = option(
        "", f"in place of a checkpoint, random weights of a shape: {', '.join(CONFIGS)}"
    )
    layers: int = option(0, "fewer layers than the shape's; 0: all")
    bits: int = option(4, "bits of a shape's experts and dense MLPs: 2, 3, 4, 8 or 16 (plain)")
    attention_bits: int = option(16, "bits of a shape's attention or delta rule")
    shared_bits: int = option(16, "bits of a shape's shared experts")
    group_size: int = option(64, "inputs per scale in a packed shape")
    trace: str = option("", "with a shape: a trace whose routing its decode steps replay")
    skew: str = option(
        "", "routing of a shape without a trace: zipf:S (popularity of rank r is r^-S) or uniform; "
        "'': zipf:0.85 for Qwen3-30B-A3B, uniform for others, whose skew is not published",
    )  # fmt: skip
    recall: float = option(
        0.85, "share of needed experts that prefetch predicts, for made-up routing"
    )
    prompts: str = option(
        "", "a file of prompts: text, JSON Lines, or ShareGPT's JSON; '': prompts of a length"
    )
    split: str = option("lines", "how a text file is split: lines, or paragraphs (at empty lines)")
    prompt_tokens: int = option(
        0,
        f"tokens per prompt, the most in a file; 0: {PROMPT_TOKENS}, or a file's prompts unchanged",
    )
    new_tokens: int = option(128, "tokens of each answer")
    num_prompts: int = option(0, "requests; 0: all of a file, else a batch")
    ignore_eos: bool = option(True, "continue after a token that ends the answer")
    batches: tuple[int, ...] = option((1,), "batch sizes to measure")
    budgets: tuple[float, ...] = option(
        (0.0,), "memory budgets to measure, GiB on the accelerator; 0: memory.device_gib"
    )
    runs: int = option(3, "runs of all requests, after an uncounted one; medians are reported")
    steps_per_call: int = option(0, "decode steps per compiled call; 0: the engine's default")
    count_experts: bool = option(
        True, "compile one more program to count a whole model's distinct experts; else uniform "
        "routing is assumed",
    )  # fmt: skip
    fidelity_share: float = option(
        0.0, "share of some prompts' tokens in which a checkpoint's policy is compared with the "
        "exact model (KL), which is loaded last, under the largest budget; 0: none",
    )  # fmt: skip
    context: int = option(0, "tokens that the KV cache holds; 0: what the requests need")
    memory: MemoryConfig = option(  # noqa: RUF009 -- it is frozen
        MemoryConfig(), "memory limits"
    )
    policy: PolicyConfig = option(PolicyConfig(), "policy of experts")  # noqa: RUF009
    seed: int = option(0, "seed of random prompts and routing")
    output: str = option(
        "", "files for the result, with commas between: x.json (all), x.csv and x.jsonl (rows; the "
        "latter are appended)",
    )  # fmt: skip
    platform: str = option("auto", "auto (an accelerator if there is one), cpu or gpu")
    dtype: str = option(
        "auto",
        "of a checkpoint: auto (float32 on CPU, the file's on an accelerator), float32, bfloat16 "
        "or float16; a shape is bfloat16",
    )
    compilation_cache: str = option(
        "auto", "directory of compiled programs: auto (the user's cache), a path, '' (off)"
    )

    def points(self) -> list[tuple[int, float]]:
        """Pairs (batch, GiB) to measure, budgets first; 0 is no limit."""
        gibs = dict.fromkeys(gib or self.memory.device_gib for gib in self.budgets)
        return [(batch, gib) for gib in gibs for batch in dict.fromkeys(self.batches)]

    def outputs(self) -> list[str]:
        """Files that the benchmark writes."""
        return [name for name in self.output.split(",") if name]

    def exponent(self) -> float | None:
        """Exponent S of the skew; None: the shape's own."""
        if not self.skew:
            return None
        return 0.0 if self.skew == "uniform" else float(self.skew.removeprefix("zipf:"))

    def check(self) -> None:
        """Checks fields; what needs the model is checked when it is there (`RunConfig.check`)."""
        if not self.checkpoint:
            raise MoejaxError("checkpoint='' must be a name or a directory")
        if self.shape and self.shape not in CONFIGS:
            raise MoejaxError(f"shape={self.shape!r} is not there; there are: {', '.join(CONFIGS)}")
        for name in ("bits", "attention_bits", "shared_bits"):
            if getattr(self, name) not in SHAPE_BITS:
                said = ", ".join(map(str, SHAPE_BITS))
                raise MoejaxError(f"{name}={getattr(self, name)} must be one of {said}")
        for name in ("group_size", "new_tokens", "runs"):
            if getattr(self, name) < 1:
                raise MoejaxError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("layers", "prompt_tokens", "num_prompts", "steps_per_call", "context", "seed"):
            if getattr(self, name) < 0:
                raise MoejaxError(f"{name}={getattr(self, name)} must be 0 or a positive number")
        if not self.batches or not all(1 <= batch <= MAX_BATCH for batch in self.batches):
            raise MoejaxError(f"batches={self.batches} must be numbers from 1 to {MAX_BATCH}")
        if not self.budgets or not all(0 <= gib < 1e6 for gib in self.budgets):
            raise MoejaxError(f"budgets={self.budgets} must be 0 (no limit) or numbers of GiB")
        check_share(self.fidelity_share)
        if self.fidelity_share and (self.shape or not self.policy.name):
            raise MoejaxError(
                f"fidelity_share={self.fidelity_share:g} compares a policy with the exact model of "
                "a checkpoint: name policy.name and a checkpoint, or leave it out"
            )
        if not 0 <= self.recall <= 1:
            raise MoejaxError(f"recall={self.recall} must be from 0 to 1")
        if self.split not in SPLITS:
            raise MoejaxError(f"split={self.split!r} must be one of {', '.join(SPLITS)}")
        for name in self.outputs():
            if not name.endswith(FORMATS):
                raise MoejaxError(f"output={name} must end with one of {', '.join(FORMATS)}")
        self._check_routing()

    def _check_routing(self) -> None:
        if not re.fullmatch(r"|uniform|zipf:\d+(\.\d*)?", self.skew):
            raise MoejaxError(f"skew={self.skew!r} must be uniform or zipf:S, such as zipf:1.1")
        for name in ("trace", "skew"):
            if getattr(self, name) and not self.shape:
                raise MoejaxError(
                    f"{name} is for random weights: name a shape, or leave it out (a checkpoint's "
                    "routing is its own)"
                )
        if self.trace and self.skew:
            raise MoejaxError("trace and skew both say the routing: leave one of them out")
        if not self.shape:
            return
        if self.layers > CONFIGS[self.shape].num_layers:
            most = CONFIGS[self.shape].num_layers
            raise MoejaxError(f"layers={self.layers} is more than the {most} of {self.shape}")
        if self.prompts:
            raise MoejaxError("a shape has no tokenizer for prompts: give prompt_tokens")
        if self.memory.disk_path:
            raise MoejaxError("a shape has no files: leave memory.disk_path out")
        if wrong := [b for b in self.batches if self.num_prompts % b]:
            raise MoejaxError(
                f"num_prompts={self.num_prompts} is no multiple of batch {wrong[0]}, and routing "
                "is replayed for whole batches"
            )
