"""Configuration of `python -m moejax.benchmark`."""

import dataclasses
import operator
import re

from moejax.config.commands import (
    ATTENTION_BITS,
    BITS,
    CHECKPOINT,
    COMPILATION_CACHE,
    GROUP_SIZE,
    HEAD_BITS,
    MEMORY,
    MESH,
    PLATFORM,
    POLICY,
    READ_BITS,
    SHAPE_MXFP4,
    SHAPE_PLANES,
    SHARED_BITS,
    MemoryConfig,
)
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

    checkpoint: str = CHECKPOINT
    read_bits: int = READ_BITS
    shape: str = option(
        "", f"in place of a checkpoint, random weights of a shape: {', '.join(CONFIGS)}",
        choices=CONFIGS,
    )  # fmt: skip
    layers: int = option(0, "fewer layers than the shape's; 0: all", least=0)
    bits: int = BITS
    attention_bits: int = ATTENTION_BITS
    shared_bits: int = SHARED_BITS
    head_bits: int = HEAD_BITS
    group_size: int = GROUP_SIZE
    mxfp4: bool = SHAPE_MXFP4
    planes: str = SHAPE_PLANES
    dense_rank: int = option(
        0, "rank of INT3 compensators of a shape's packed attention and MLPs; 0: none", least=0,
        of=("shape",),
    )  # fmt: skip
    expert_rank: int = option(
        0, "rank of INT3 compensators of a shape's experts, which stay on the device; 0: none",
        least=0, of=("shape",),
    )  # fmt: skip
    trace: str = option(
        "", "with a shape: a trace whose routing its decode steps replay", of=("shape",)
    )
    skew: str = option(
        "", "routing of a shape without a trace: zipf:S (popularity of rank r is r^-S) or uniform; "
        "'': zipf:0.85 for Qwen3-30B-A3B, uniform for others, whose skew is not published",
        of=("shape",),
    )  # fmt: skip
    shift_every: int = option(
        0, "decode steps after which a quarter of a layer's experts exchange their popularity, in "
        "made-up routing; 0: it stays", least=0, of=("shape",),
    )  # fmt: skip
    recall: float = option(
        0.85, "share of needed experts that prefetch predicts, for made-up routing",
        least=0, most=1, of=("shape",),
    )  # fmt: skip
    prompts: str = option(
        "", "a file of prompts: text, JSON Lines, or ShareGPT's JSON; '': prompts of a length"
    )
    split: str = option(
        "lines", "how a text file is split: lines, or paragraphs (at empty lines)", choices=SPLITS,
        of=("prompts",),
    )  # fmt: skip
    prompt_tokens: int = option(
        0,
        f"tokens per prompt, the most in a file; 0: {PROMPT_TOKENS}, or a file's prompts unchanged",
        least=0,
    )
    new_tokens: int = option(128, "tokens of each answer", least=1)
    num_prompts: int = option(0, "requests; 0: all of a file, else a batch", least=0)
    ignore_eos: bool = option(True, "continue after a token that ends the answer")
    batches: tuple[int, ...] = option((1,), "batch sizes to measure")
    budgets: tuple[float, ...] = option(
        (0.0,), "memory budgets to measure, GiB on the accelerator; 0: memory.device_gib"
    )
    runs: int = option(
        3, "runs of all requests, after an uncounted one; medians are reported", least=1
    )
    steps_per_call: int = option(
        0, "decode steps per compiled call; 0: the engine's default", least=0
    )
    count_experts: bool = option(
        True, "compile one more program to count a whole model's distinct experts; else uniform "
        "routing is assumed",
    )  # fmt: skip
    fidelity_share: float = option(
        0.0, "share of some prompts' tokens in which a checkpoint's policy is compared with the "
        "exact model (KL), which is loaded last, under the largest budget; 0: none",
        least=0, most=1, of=("policy.name",),
    )  # fmt: skip
    context: int = option(0, "tokens that the KV cache holds; 0: what the requests need", least=0)
    memory: MemoryConfig = MEMORY
    policy: PolicyConfig = POLICY
    seed: int = option(0, "seed of random prompts and routing", least=0)
    output: str = option(
        "", "files for the result, with commas between: x.json (all), x.csv and x.jsonl (rows; the "
        "latter are appended)",
    )  # fmt: skip
    platform: str = PLATFORM
    mesh: str = MESH
    dtype: str = option(
        "auto",
        "of a checkpoint: auto (float32 on CPU, the file's on an accelerator), float32, bfloat16 "
        "or float16; a shape is bfloat16",
    )
    compilation_cache: str = COMPILATION_CACHE

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
        super().check()
        if not self.batches or not all(1 <= batch <= MAX_BATCH for batch in self.batches):
            raise MoejaxError(f"batches={self.batches} must be numbers from 1 to {MAX_BATCH}")
        if not self.budgets or not all(0 <= gib < 1e6 for gib in self.budgets):
            raise MoejaxError(f"budgets={self.budgets} must be 0 (no limit) or numbers of GiB")
        if self.planes and (self.mxfp4 or not self.policy.name):
            raise MoejaxError(
                f"planes={self.planes} is read by a policy's tiers of a shape in INT codes: name "
                "policy.name and policy.tiers, or leave it out"
            )
        for name in self.outputs():
            if not name.endswith(FORMATS):
                raise MoejaxError(f"output={name} must end with one of {', '.join(FORMATS)}")
        self._check_ranks()
        self._check_routing()

    def _check_ranks(self) -> None:
        if self.mxfp4 and self.expert_rank:
            raise MoejaxError(
                f"expert_rank={self.expert_rank} beside mxfp4=True: experts in MXFP4 have no "
                "compensators; leave one of them out"
            )
        mlp_bits = 16 if self.mxfp4 else self.bits
        packed = {
            "dense_rank": min(self.attention_bits, self.shared_bits, mlp_bits) < 16,
            "expert_rank": self.bits < 16,
        }
        for name, is_packed in packed.items():
            if getattr(self, name) and not is_packed:
                raise MoejaxError(
                    f"{name}={getattr(self, name)} is of compensators of packed matrices: give "
                    "fewer bits, or leave it out"
                )

    def _check_routing(self) -> None:
        if not re.fullmatch(r"|uniform|zipf:\d+(\.\d*)?", self.skew):
            raise MoejaxError(f"skew={self.skew!r} must be uniform or zipf:S, such as zipf:1.1")
        for name in ("skew", "shift_every"):
            if self.trace and getattr(self, name):
                raise MoejaxError(f"trace and {name} both say the routing: leave one of them out")
        if not self.shape:
            return
        if self.layers > CONFIGS[self.shape].num_layers:
            most = CONFIGS[self.shape].num_layers
            raise MoejaxError(f"layers={self.layers} is more than the {most} of {self.shape}")
        for name in ("prompts", "read_bits", "memory.disk_path", "fidelity_share"):
            if operator.attrgetter(name)(self):
                raise MoejaxError(f"{name} is of a checkpoint: leave it or shape out")
        if wrong := [b for b in self.batches if self.num_prompts % b]:
            raise MoejaxError(
                f"num_prompts={self.num_prompts} is no multiple of batch {wrong[0]}, and routing "
                "is replayed for whole batches"
            )
