"""Run configurations: frozen dataclasses; each default is written here alone.

A main reads an `ml_collections` config (a file under `configs/`, flags, or neither) and turns it at
once into one of these with `from_config_dict`; below the mains nothing sees a ConfigDict.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from moejax.config.options import RunConfig, option
from moejax.config.options import to_config_dict as to_config_dict
from moejax.config.policy import PolicyConfig
from moejax.errors import MoejaxError
from moejax.experts.budget import Limits, check_gib, check_phase
from moejax.inference.generation import GenerationSettings
from moejax.models.shapes import SHAPES
from moejax.text.chat_template import ChatSettings
from moejax.text.corpus import JOINS
from moejax.text.windows import PRESETS, Windowing

SHAPE_BITS = (2, 3, 4, 8, 16)
THINKING = {"auto": None, "on": True, "off": False}


_TASKS_BY_LM_EVAL = (
    "python -m moejax.lm_eval --model moejax --model_args pretrained=CHECKPOINT --tasks NAME "
    "--data FOLDER (moejax.evaluate measures perplexity alone)"
)
VERIFY = "first compare the files of checkpoints with their SHA-256, or checksums, where known"


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
        Limits.slots, "cache slots per layer on the accelerator; -1: as many as fit"
    )
    transient: int = option(
        Limits.transient,
        "slots through which other experts stream; 0: enough to keep the link busy",
    )
    prefetch: int = option(Limits.prefetch, "experts of the next layer to prefetch")
    prefetch_in: str = option(
        Limits.prefetch_in, "steps that prefetch: both, prefill (of prompts) or decode"
    )
    bulk: int = option(
        Limits.bulk,
        "most experts in flight to the accelerator between steps; 0: none, or 8 to 32 by their "
        "bytes for a policy that transfers experts",
    )

    def limits(self) -> Limits:
        """Converts to the limits of `moejax.experts.budget`."""
        return Limits(**dataclasses.asdict(self))

    def check(self) -> None:
        """Checks fields; `make_budget` checks them with the model (`RunConfig.check`)."""
        check_gib(self.device_gib, self.host_gib, "")
        if self.slots < -1:
            raise MoejaxError(f"slots={self.slots} must be -1 (as many as fit) or a number")
        for name in ("transient", "prefetch", "bulk"):
            if getattr(self, name) < 0:
                raise MoejaxError(f"{name}={getattr(self, name)} must be 0 or a number of experts")
        check_phase(self.prefetch_in, "")


def check_share(share: float) -> None:
    """Raises MoejaxError for a `fidelity_share` outside its range."""
    if not 0 <= share <= 1:
        raise MoejaxError(f"fidelity_share={share} must be from 0 to 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordConfig(RunConfig):
    """Options that record a run's routing (`moejax.routing.trace`)."""

    record_trace: str = option(
        "", "a file for a trace of the routing, which moejax.sweep replays; '': none"
    )
    record_foreseen: int = option(
        8, "predicted experts of the next layer in a trace, for prefetch; 0: none"
    )
    record_probabilities: bool = option(
        False, "record every router's whole softmax, which some policies need"
    )
    record_importance: bool = option(
        False, "record the attention that a prompt's tokens receive, which dymoe needs"
    )

    def check(self) -> None:
        """See `RunConfig.check`."""
        if self.record_foreseen < 0:
            said = f"record_foreseen={self.record_foreseen}"
            raise MoejaxError(f"{said} must be 0 (none) or a number of experts")
        for field in () if self.record_trace else dataclasses.fields(RecordConfig):
            if (value := getattr(self, field.name)) != field.default:
                raise MoejaxError(
                    f"{field.name}={value!r} is of a trace, but none is recorded: give "
                    "record_trace=FILE, or leave it out"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(RecordConfig):
    """Configuration of `python -m moejax.generate`: a model, and one request's settings."""

    command = "moejax.generate"

    checkpoint: str = option("demo", "'demo', a directory, or a Hugging Face name (org/name)")
    verify: bool = option(False, VERIFY)
    platform: str = option("auto", "auto (an accelerator if there is one), cpu or gpu")
    dtype: str = option(
        "auto",
        "auto (float32 on CPU, the file's on an accelerator), float32, bfloat16 or float16",
    )
    context: int = option(0, "tokens that the KV cache holds; 0: what the prompts need")
    memory: MemoryConfig = option(  # noqa: RUF009 -- it is frozen
        MemoryConfig(), "memory limits"
    )
    policy: PolicyConfig = option(PolicyConfig(), "policy of experts")  # noqa: RUF009
    compilation_cache: str = option(
        "auto", "directory of compiled programs: auto (the user's cache), a path, '' (off)"
    )
    trace_dir: str = option(
        "", "a directory for a profiler trace of the answers (TensorBoard, Perfetto); '': none"
    )
    generation_config: bool = option(
        True,
        "settings below that are None come from the checkpoint's generation_config.json, as in "
        "transformers; off: they keep the defaults named there",
    )
    max_new_tokens: int | None = option(
        None,
        f"end after so many tokens; None: the checkpoint's, or {GenerationSettings.max_new_tokens}",
        kind=int,
    )
    temperature: float | None = option(
        None,
        "temperature of sampling; 0 is greedy; None: the checkpoint's, or "
        f"{GenerationSettings.temperature:g}",
        kind=float,
    )
    top_k: int | None = option(
        None,
        "sample among the k likeliest tokens; 0: all; None: the checkpoint's, or "
        f"{GenerationSettings.top_k}",
        kind=int,
    )
    top_p: float | None = option(
        None,
        "sample among the likeliest tokens of this total probability; None: the checkpoint's, or "
        f"{GenerationSettings.top_p:g}",
        kind=float,
    )
    min_p: float | None = option(
        None,
        "leave out tokens below this share of the likeliest one; None: the checkpoint's, or "
        f"{GenerationSettings.min_p:g}",
        kind=float,
    )
    repetition_penalty: float | None = option(
        None,
        "penalty above 1 makes tokens already in the text rarer; None: the checkpoint's, or "
        f"{GenerationSettings.repetition_penalty:g}",
        kind=float,
    )
    fidelity_share: float = option(
        0.0,
        "share of answer tokens in which --stats compares a policy with the exact model (KL); "
        "the exact model is loaded beside it under equal limits; 0: none",
    )
    seed: int = option(
        0,
        "sampling seed; text is not reproducible if a policy transfers experts between steps (see "
        "policy.emulate)",
    )
    stop: tuple[str, ...] = option(
        (),
        "string that ends an answer, not included; may be repeated; none: the checkpoint's",
        commas=False,
    )
    add_special_tokens: bool = option(
        GenerationSettings.add_special_tokens,
        "let the tokenizer add its special tokens (such as bos)",
    )
    system_prompt: str = option(
        "", "system message of conversations (--chat, the server) that lack one; '': none"
    )
    thinking: str = option(
        "auto",
        "enable_thinking of chat templates that know it: on or off; auto: the template's default",
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
        if not self.checkpoint:
            raise MoejaxError("checkpoint='' must be a name or a directory")
        if self.context < 0:
            raise MoejaxError(f"context={self.context} must be 0 (as needed) or a number of tokens")
        super().check()
        check_share(self.fidelity_share)
        if self.fidelity_share and not self.policy.name:
            raise MoejaxError(
                f"fidelity_share={self.fidelity_share:g} compares a policy with the exact model: "
                "name policy.name, or leave it out"
            )
        if not 0 <= self.seed < 2**32:
            raise MoejaxError(f"seed={self.seed} must be from 0 to 2**32 - 1")
        if self.thinking not in THINKING:
            raise MoejaxError(f"thinking={self.thinking!r} is none of {', '.join(THINKING)}")
        GenerationSettings.of(**self.request())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(GenerateConfig):
    """Configuration of `python -m moejax.plan`: a run, or a shape without files.

    Files under `configs/` for `moejax.generate` can be used; their request fields have no effect.
    """

    command = "moejax.plan"

    shape: str = option("", f"in place of a checkpoint, a shape: {' or '.join(SHAPES)}")
    bits: int = option(4, "bits of a shape's experts and dense MLPs: 2, 3, 4, 8 or 16 (plain)")
    attention_bits: int = option(16, "bits of a shape's attention or delta rule")
    shared_bits: int = option(16, "bits of a shape's shared experts")
    group_size: int = option(64, "inputs per scale in a packed shape")
    batch: int = option(1, "sequences per batch")
    chunk: int = option(0, "prompt tokens per prefill step; 0: the engine's default")

    def check(self) -> None:
        """See `RunConfig.check`."""
        super().check()
        if self.shape and self.shape not in SHAPES:
            raise MoejaxError(f"shape={self.shape!r} is not there; {_listed(SHAPES)}")
        for name in ("bits", "attention_bits", "shared_bits"):
            if getattr(self, name) not in SHAPE_BITS:
                said = ", ".join(map(str, SHAPE_BITS))
                raise MoejaxError(f"{name}={getattr(self, name)} must be one of {said}")
        if self.group_size < 1:
            raise MoejaxError(f"group_size={self.group_size} must be at least 1")
        if self.batch < 1:
            raise MoejaxError(f"batch={self.batch} must be at least 1")
        if self.chunk < 0:
            raise MoejaxError(f"chunk={self.chunk} must be 0 (the engine's) or a number of tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeConfig(RunConfig):
    """Configuration of `python -m moejax.quantize`; the recipe checks its values."""

    command = "moejax.quantize"

    checkpoint: str = option("demo", "'demo', a directory, or a Hugging Face name (org/name)")
    output: str = option("", "a new directory for the quantized checkpoint; must be given")
    format: str = option("moejax", "file format: moejax, gptq or compressed-tensors")
    method: str = option(
        "milo",
        "for attention and MLPs: none, rtn, hqq, least_squares, gptq, autoround, milo, milo+",
    )
    bits: int = option(3, "bits of a code: 2, 3, 4 or 8")
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
    factor_bits: int = option(3, "bits of milo's compensators: 3, 4, 8 or 16 (bfloat16)")
    passes: int = option(20, "most passes of milo")
    act_order: bool = option(
        False, "gptq visits inputs by falling importance, in groups that are fixed beforehand"
    )
    calibration: str = option(
        "default",
        "text for gptq, autoround and Frequency-r: default (the one that ships), or a file",
    )
    calibration_samples: int = option(
        0, "samples of the calibration text; 0: 128, or as many as it has"
    )
    calibration_length: int = option(0, "tokens per sample; 0: 2048 or the model's context")
    rules: str = option(
        "", "'PATTERN: KEY=VALUE ...; ...', such as 'head: method=rtn bits=8; *.o_proj: bits=4'"
    )
    platform: str = option("auto", "auto (an accelerator if there is one), cpu or gpu")
    compilation_cache: str = option(
        "auto", "directory of compiled programs: auto (the user's cache), a path, '' (off)"
    )

    def check(self) -> None:
        """Checks fields; those of the recipe are checked with the model (`RunConfig.check`)."""
        if not self.checkpoint:
            raise MoejaxError("checkpoint='' must be a name or a directory")
        if not self.calibration:
            raise MoejaxError("calibration='' must be 'default' or a text file")
        if min(self.calibration_samples, self.calibration_length) < 0:
            raise MoejaxError("calibration_samples and calibration_length must be 0 or positive")
        if self.passes < 1:
            raise MoejaxError(f"passes={self.passes} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(RecordConfig):
    """Configuration of `python -m moejax.evaluate`; model and text are checked when read."""

    command = "moejax.evaluate"

    checkpoint: str = option("demo", "'demo', a directory, or a Hugging Face name (org/name)")
    verify: bool = option(False, VERIFY)
    text: str = option(
        "wikitext2", "a UTF-8 file (.txt, .xz, .gz), or wikitext2: the test rows from the Hub"
    )
    join: str = option(
        "none", "none (a file as it stands), or wikitext (its lines joined as papers join the rows)"
    )
    preset: str = option("2048/2048", f"window/stride: {' or '.join(PRESETS)}")
    window: int = option(0, "most tokens that a prediction sees; 0: the preset's")
    stride: int = option(0, "tokens between windows, at most the window; 0: the preset's")
    max_tokens: int = option(0, "score the first so many tokens; 0: all")
    seed: int = option(0, "seed of the tokens compared with the exact model")
    batch_size: int = option(
        8, "sequences at once; the result does not depend on it, and under a policy it is 1"
    )
    memory: MemoryConfig = option(  # noqa: RUF009 -- it is frozen
        MemoryConfig(), "memory limits"
    )
    policy: PolicyConfig = option(PolicyConfig(), "policy of experts")  # noqa: RUF009
    fidelity_share: float = option(
        0.05,
        "share of the windows in which a policy is compared with the exact model (KL), which is "
        "loaded beside it under equal limits; 0: none",
    )
    output: str = option("", "a JSON file for the result; '': none")
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
        """See `RunConfig.check`."""
        if not self.checkpoint:
            raise MoejaxError("checkpoint='' must be a name or a directory")
        if not self.text:
            raise MoejaxError("text='' must be a file, or wikitext2")
        if self.join not in JOINS:
            raise MoejaxError(f"join={self.join!r} is not there; {_listed(JOINS)}")
        if self.preset not in PRESETS:
            raise MoejaxError(f"preset={self.preset!r} is not there; {_listed(PRESETS)}")
        for name in ("window", "stride", "max_tokens"):
            if getattr(self, name) < 0:
                raise MoejaxError(f"{name}={getattr(self, name)} must be 0 or a number of tokens")
        super().check()
        if self.batch_size < 1:
            raise MoejaxError(f"batch_size={self.batch_size} must be at least 1")
        check_share(self.fidelity_share)
        is_given = self.fidelity_share not in (0, EvaluateConfig.fidelity_share)
        if is_given and not self.policy.name:
            raise MoejaxError(
                f"fidelity_share={self.fidelity_share:g} compares a policy with the exact model: "
                "name policy.name, or leave it out"
            )
        self.windowing().check()


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return f"there {'is' if len(names) == 1 else 'are'}: {', '.join(names)}"
