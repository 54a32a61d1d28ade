"""Run configurations: frozen dataclasses; each default is written here alone.

A main reads an `ml_collections` config (a file under `configs/`, flags, or neither) and turns it at
once into one of these with `from_config_dict`; below the mains nothing sees a ConfigDict.
"""

import dataclasses
from typing import Any

from moejax.config.options import RunConfig, option
from moejax.config.options import to_config_dict as to_config_dict
from moejax.config.policy import PolicyConfig
from moejax.errors import MoejaxError
from moejax.experts.budget import Limits, check_gib, check_phase
from moejax.inference.generation import NUM_SEEDS, GenerationSettings
from moejax.models.shapes import SHAPES
from moejax.text.chat_template import ChatSettings
from moejax.text.corpus import JOINS
from moejax.text.windows import PRESETS, Windowing

SHAPE_BITS = (2, 3, 4, 8, 16)
# Bits that `moejax.quantize` takes where none are given.
CODE_BITS = 3
FACTOR_BITS = 3
RANK_DIVISOR = 4
_EFFORTS = ("low", "medium", "high")
THINKING = {"auto": None, "on": True, "off": False, **{effort: effort for effort in _EFFORTS}}
_TASKS_BY_LM_EVAL = (
    "python -m moejax.lm_eval --model moejax --model_args pretrained=CHECKPOINT --tasks NAME "
    "--data FOLDER (moejax.evaluate measures perplexity alone)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig(RunConfig):
    """Options `memory`: the model's memory limits, and where its experts may be stored."""

    device_gib: float = option(
        Limits.device_gib,
        "accelerator memory in GiB, for weights, caches and workspace; 0: no limit",
    )
    host_gib: float = option(
        Limits.host_gib, "host memory in GiB for experts; the rest is read from disk; 0: no limit"
    )
    disk_path: str = option(
        Limits.disk_path, "a copy of the checkpoint that experts are read from; '': itself"
    )
    slots: int = option(
        Limits.slots, "cache slots per layer on the accelerator; -1: as many as fit", least=-1
    )
    transient: int = option(
        Limits.transient,
        "slots through which other experts stream; 0: enough to keep the link busy",
        least=0,
    )
    prefetch: int = option(
        Limits.prefetch, "experts of the next layer to prefetch; 0: none", least=0
    )
    prefetch_in: str = option(
        Limits.prefetch_in, "steps that prefetch: both, prefill (of prompts) or decode"
    )
    bulk: int = option(
        Limits.bulk,
        "most experts in flight to the accelerator between steps; 0: none, or for a policy that "
        "transfers experts 128 MiB of them, 8 to 128, at most one for twelve slots",
        least=0,
    )
    host_threads: int = option(
        Limits.host_threads,
        "threads of the host that multiply some of the missed experts of decode steps of one "
        "sequence while the link fetches the others; 0: none, -1: all cores but one",
        least=-1,
    )

    def limits(self) -> Limits:
        """Converts to the limits of `moejax.experts.budget`."""
        return Limits(**dataclasses.asdict(self))

    def check(self) -> None:
        """Checks fields; `make_budget` checks them with the model (`RunConfig.check`)."""
        super().check()
        check_gib(self.device_gib, self.host_gib, "")
        check_phase(self.prefetch_in, "")


def sampling(name: str, meaning: str, default: Any = None, more: str = "") -> Any:
    """Declares a setting of answers; not given, it is the checkpoint's or `default`."""
    own = getattr(GenerationSettings, name)
    default = own if default is None else default
    said = f"{meaning}; None: the checkpoint's, or {default:g}{more}"
    return option(None, said, kind=type(own))


# Fields of several commands.
CHECKPOINT = option(
    "demo", "'demo', a directory, or a Hugging Face name (org/name)", needed="a name or a directory"
)
READ_BITS = option(0, "width in which a checkpoint of bit planes is read; 0: the widest", least=0)
VERIFY = option(
    False, "first compare the files of checkpoints with their SHA-256, or checksums, where known"
)
PLATFORM = option("auto", "auto (an accelerator if there is one), cpu or gpu")
MESH = option(
    "", "number of devices that run the model together, each with its share of every expert: 2, or "
    "2,4 for 8; 2,heads splits attention by heads, too, 2,whole does not, 2 chooses; 2,experts "
    "hands experts out whole; '': one",
)  # fmt: skip
PROCESSES = option(
    "", "this process among several that run the same command on one mesh: HOST:PORT,NUMBER,INDEX, "
    "with the address of the first; auto: as the cluster's launcher says; '': it is alone",
    of=("mesh",),
)  # fmt: skip
DTYPE = option(
    "auto", "auto (float32 on CPU, the file's on an accelerator), float32, bfloat16 or float16"
)
COMPILATION_CACHE = option(
    "auto", "directory of compiled programs: auto (the user's cache), a path, '' (off)"
)
ADD_SPECIAL_TOKENS = option(
    GenerationSettings.add_special_tokens, "let the tokenizer add its special tokens (such as bos)"
)
JOIN = option(
    "none", "none (a file as it stands), or wikitext (its lines joined as papers join the rows)",
    choices=JOINS,
)  # fmt: skip
MEMORY = option(MemoryConfig(), "memory limits")
POLICY = option(PolicyConfig(), "policy of experts")
TIER_ERRORS = option(
    "", "a profile with tiers (moejax.profile_experts) by which a run with a policy tells each "
    "layer's error (of moejax.generate with --stats); '': the checkpoint's, if it has one",
    of=("policy.name",),
)  # fmt: skip
BITS = option(
    4, "bits of a shape's experts and dense MLPs: 2, 3, 4, 8 or 16 (plain)", choices=SHAPE_BITS,
    of=("shape",),
)  # fmt: skip
ATTENTION_BITS = option(
    16, "bits of a shape's attention or delta rule", choices=SHAPE_BITS, of=("shape",)
)
SHARED_BITS = option(16, "bits of a shape's shared experts", choices=SHAPE_BITS, of=("shape",))
HEAD_BITS = option(
    16, "bits of a shape's head, if it is not the embedding", choices=SHAPE_BITS, of=("shape",)
)
SHAPE_MXFP4 = option(
    False, "a shape's experts are in MXFP4, whatever bits and group_size say", of=("shape",)
)
SHAPE_PLANES = option(
    "",
    "in place of bits, widths of bit planes of a shape's one copy, such as 2,4, from which its "
    "tiers (int4,int2) are read; '': none", of=("shape",),
)  # fmt: skip
GROUP_SIZE = option(64, "inputs per scale in a packed shape", least=1, of=("shape",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RecordConfig(RunConfig):
    """Options that record a run's routing (`moejax.routing.trace`)."""

    record_trace: str = option(
        "", "a file for a trace of the routing, which moejax.sweep replays; '': none"
    )
    record_foreseen: int = option(
        8, "predicted experts of the next layer in a trace, for prefetch; 0: none", least=0,
        of=("record_trace",),
    )  # fmt: skip
    record_probabilities: bool = option(
        False, "record every router's whole softmax, which some policies need",
        of=("record_trace",),
    )  # fmt: skip
    record_importance: bool = option(
        False, "record the attention that a prompt's tokens receive, which dymoe needs",
        of=("record_trace",),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(_RecordConfig):
    """Configuration of `python -m moejax.generate`: a model, and one request's settings."""

    command = "moejax.generate"

    checkpoint: str = CHECKPOINT
    read_bits: int = READ_BITS
    verify: bool = VERIFY
    platform: str = PLATFORM
    mesh: str = MESH
    processes: str = PROCESSES
    dtype: str = DTYPE
    context: int = option(0, "tokens that the KV cache holds; 0: what the prompts need", least=0)
    memory: MemoryConfig = MEMORY
    policy: PolicyConfig = POLICY
    compilation_cache: str = COMPILATION_CACHE
    trace_dir: str = option(
        "", "a directory for a profiler trace of the answers (TensorBoard, Perfetto); '': none"
    )
    generation_config: bool = option(
        True,
        "settings below that are None come from the checkpoint's generation_config.json, as in "
        "transformers; off: they keep the defaults named there",
    )
    max_new_tokens: int | None = sampling("max_new_tokens", "end after so many tokens")
    temperature: float | None = sampling("temperature", "temperature of sampling; 0 is greedy")
    top_k: int | None = sampling("top_k", "sample among the k likeliest tokens; 0: all")
    top_p: float | None = sampling(
        "top_p", "sample among the likeliest tokens of this total probability"
    )
    min_p: float | None = sampling(
        "min_p", "leave out tokens below this share of the likeliest one"
    )
    repetition_penalty: float | None = sampling(
        "repetition_penalty", "penalty above 1 makes tokens already in the text rarer"
    )
    fidelity_share: float = option(
        0.0,
        "share of answer tokens in which --stats compares a policy with the exact model (KL); "
        "the exact model is loaded beside it under equal limits; 0: none",
        least=0, most=1, of=("policy.name",),
    )  # fmt: skip
    tier_errors: str = TIER_ERRORS
    seed: int = option(
        0,
        "sampling seed; text is not reproducible if a policy transfers experts between steps (see "
        "policy.emulate)",
        least=0, most=NUM_SEEDS - 1,
    )  # fmt: skip
    stop: tuple[str, ...] = option(
        (),
        "string that ends an answer, not included; may be repeated; none: the checkpoint's",
        commas=False,
    )
    add_special_tokens: bool = ADD_SPECIAL_TOKENS
    system_prompt: str = option(
        "", "system message of conversations (--chat, the server) that lack one; '': none"
    )
    thinking: str = option(
        "auto",
        "for chat templates that know it, enable_thinking: on or off, or reasoning_effort: low, "
        "medium or high; auto: the template's default",
        choices=tuple(THINKING),
    )

    def chat_settings(self) -> ChatSettings:
        """Settings that render a conversation's prompts."""
        return ChatSettings(self.system_prompt, THINKING[self.thinking])

    def request(self) -> dict[str, Any]:
        """Request fields for `Engine.generate` and `Engine.stream`, if given."""
        names = {field.name for field in dataclasses.fields(GenerationSettings)}
        given = {name: value for name, value in dataclasses.asdict(self).items() if name in names}
        return {name: value for name, value in given.items() if value not in (None, ())}

    def check(self) -> None:
        """Checks fields but `platform` and `dtype`, which the engine checks (`RunConfig.check`)."""
        super().check()
        if self.processes and self.record_trace:
            raise MoejaxError("record_trace takes one process: leave it or processes out")
        GenerationSettings.of(**self.request())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(GenerateConfig):
    """Configuration of `python -m moejax.plan`: a run, or a shape without files.

    Files under `configs/` for `moejax.generate` can be used; their request fields have no effect.
    """

    command = "moejax.plan"

    platform: str = option("auto", "gpu or cpu; auto: gpu, whatever this machine has")
    shape: str = option(
        "", f"in place of a checkpoint, a shape: {' or '.join(SHAPES)}", choices=SHAPES
    )
    bits: int = BITS
    attention_bits: int = ATTENTION_BITS
    shared_bits: int = SHARED_BITS
    head_bits: int = HEAD_BITS
    group_size: int = GROUP_SIZE
    mxfp4: bool = SHAPE_MXFP4
    planes: str = SHAPE_PLANES
    batch: int = option(1, "sequences per batch", least=1)
    running: bool = option(
        False, "plan for a server of max_batch=batch: rows that come and go, in pages"
    )
    chunk: int = option(0, "prompt tokens per prefill step; 0: the engine's default", least=0)

    def check(self) -> None:
        """Checks the fields, as `RunConfig.check`."""
        super().check()
        if self.mxfp4 and self.planes:
            raise MoejaxError("mxfp4=True is for a shape without planes: leave one of them out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeConfig(RunConfig):
    """Configuration of `python -m moejax.quantize`; the recipe checks its values."""

    command = "moejax.quantize"

    checkpoint: str = CHECKPOINT
    output: str = option("", "a new directory for the quantized checkpoint; must be given")
    format: str = option("moejax", "file format: moejax, gptq or compressed-tensors")
    method: str = option(
        "milo",
        "for attention and MLPs: none, rtn, hqq, least_squares, gptq, autoround, milo, milo+",
    )
    bits: int | None = option(
        None, f"bits of a code: 2, 3, 4 or 8; None: {CODE_BITS}, or those of planes", kind=int
    )
    planes: str = option(
        "",
        "in place of bits, widths of bit planes that one copy is read in (read_bits): 2,4, 2,3, "
        "2,8, 4,8 or 2,4,8; '': none",
    )
    plane_weight: float | None = option(
        None,
        "share of the widest width in the error that codes of bit planes minimise, 0 to 1; None: "
        "measured ones, by the widths",
        kind=float,
    )
    group_size: int = option(64, "inputs per scale; 0: a whole row (per channel)")
    zero_kind: str = option(
        "auto", "zero point: auto (by method and format), float, integer, symmetric"
    )
    scale_dtype: str = option(
        "float16", "dtype of scales and float zero points: float16 or float32"
    )
    rank: str = option(
        "Dense-25% + Kurtosis-6.25%",
        "ranks of compensators: a sum of Uniform-, Dense-, Sparse-, Kurtosis-, Frequency-r or -r%, "
        "optionally 'within 200 MB', or a set of the paper's such as mixtral-s1",
    )
    factor_bits: int | None = option(
        None, f"bits of milo's compensators: 3, 4, 8 or 16 (bfloat16); None: {FACTOR_BITS}",
        kind=int,
    )  # fmt: skip
    rank_divisor: int | None = option(
        None,
        "rank of milo's compensators in the widths of bit planes: a wider one has that of the next "
        f"narrower divided by this, 0: none; None: {RANK_DIVISOR}",
        kind=int,
    )  # fmt: skip
    passes: int = option(20, "most passes of milo", least=1)
    act_order: bool = option(
        False, "gptq visits inputs by falling importance, in groups that are fixed beforehand"
    )
    calibration: str = option(
        "default",
        "text for gptq, autoround and Frequency-r: default (the one that ships), or a UTF-8 file "
        "(.txt, .xz, .gz)",
        needed="'default' or a text file",
    )
    calibration_samples: int = option(
        0, "samples of the calibration text; 0: 128, or as many as it has", least=0
    )
    calibration_length: int = option(
        0, "tokens per sample; 0: 2048 or the model's context", least=0
    )
    rules: str = option(
        "", "'PATTERN: KEY=VALUE ...; ...', such as 'head: method=rtn bits=8; *.o_proj: bits=4'"
    )
    platform: str = PLATFORM
    compilation_cache: str = COMPILATION_CACHE

    def check(self) -> None:
        """Checks fields and refuses those that would have no effect (`RunConfig.check`)."""
        super().check()
        if self.planes and self.bits is not None:
            raise MoejaxError(
                f"bits={self.bits} beside planes={self.planes}: planes are widths in place of "
                "bits; give one of them"
            )
        if self.plane_weight is not None and not self.planes and "planes=" not in self.rules:
            raise MoejaxError(
                f"plane_weight={self.plane_weight:g} weighs widths of bit planes, and no matrix "
                "has them: give planes too, such as planes=2,4, or leave it out"
            )
        has_factors = self.method.startswith("milo") or "method=milo" in self.rules
        has_planes = self.planes or "planes=" in self.rules
        if self.rank_divisor is not None and not (has_factors and has_planes):
            raise MoejaxError(
                f"rank_divisor={self.rank_divisor} is of milo's compensators of bit planes, and no "
                "matrix has them: give planes and method=milo too, or leave it out"
            )
        for name in ("factor_bits", "rank", "passes"):
            given = getattr(self, name)
            if given != getattr(type(self), name) and not has_factors:
                raise MoejaxError(
                    f"{name}={given} is of the compensators of milo and milo+, and no matrix takes "
                    "such a method; leave it out"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(_RecordConfig):
    """Configuration of `python -m moejax.evaluate`; model and text are checked when read."""

    command = "moejax.evaluate"

    checkpoint: str = CHECKPOINT
    read_bits: int = READ_BITS
    verify: bool = VERIFY
    text: str = option(
        "wikitext2", "a UTF-8 file (.txt, .xz, .gz), or wikitext2: the test rows from the Hub",
        needed="a file, or wikitext2",
    )  # fmt: skip
    join: str = JOIN
    preset: str = option("2048/2048", f"window/stride: {' or '.join(PRESETS)}", choices=PRESETS)
    window: int = option(0, "most tokens that a prediction sees; 0: the preset's", least=0)
    stride: int = option(0, "tokens between windows, at most the window; 0: the preset's", least=0)
    max_tokens: int = option(0, "score the first so many tokens; 0: all", least=0)
    seed: int = option(0, "seed of the tokens compared with the exact model")
    batch_size: int = option(
        8, "sequences at once; the result does not depend on it, and under a policy it is 1",
        least=1,
    )  # fmt: skip
    memory: MemoryConfig = MEMORY
    policy: PolicyConfig = POLICY
    fidelity_share: float = option(
        0.05,
        "share of the windows in which a policy is compared with the exact model (KL), which is "
        "loaded beside it under equal limits; 0: none",
        least=0, most=1, of=("policy.name",),
    )  # fmt: skip
    tier_errors: str = TIER_ERRORS
    output: str = option("", "a JSON file for the result; '': none")
    platform: str = PLATFORM
    mesh: str = MESH
    dtype: str = DTYPE
    compilation_cache: str = COMPILATION_CACHE
    add_special_tokens: bool = ADD_SPECIAL_TOKENS

    def moved(self, name: str) -> str:
        """Names lm_eval for the tasks that this command had (`RunConfig.moved`)."""
        gone = ("task", "data", "fewshot", "fewshot_data", "limit", "max_new_tokens", "execute")
        return _TASKS_BY_LM_EVAL if name in gone else ""

    def windowing(self) -> Windowing:
        """Window and stride; the preset's if they are not given."""
        preset = PRESETS[self.preset]
        window = self.window or preset.window
        return Windowing(window, self.stride or min(preset.stride, window))

    def num_rows(self) -> int:
        """Sequences per batch: one under a policy, whose state a batch would share."""
        return 1 if self.policy.name else self.batch_size

    def begins_anew(self) -> str:
        """Reason why a run reuses no windows of an interrupted one; "" if it does."""
        if self.policy.name:
            return "a policy's state goes from window to window, so the run begins anew"
        if self.record_trace:
            return "a trace holds every window of a run, so the run begins anew"
        return ""

    def check(self) -> None:
        """Checks the fields, as `RunConfig.check`."""
        super().check()
        self.windowing().check()
