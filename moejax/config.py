"""Run configurations: frozen dataclasses, each the only place where its defaults are written.

A main reads an `ml_collections` config (a file under `configs/`, flags, or neither), turns it at
once into one of these with `from_config_dict`, and nothing below the mains sees a ConfigDict.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from ml_collections import config_dict

from moejax.errors import MoejaxError
from moejax.evaluation.perplexity import PRESETS, Windowing
from moejax.evaluation.texts import JOINS
from moejax.generation import GenerationSettings
from moejax.memory.budget import Limits
from moejax.models.shapes import SHAPES

_T = TypeVar("_T")

EVALUATION_TASKS = ("perplexity",)
SHAPE_BITS = (2, 3, 4, 8, 16)


def _option(default: _T, meaning: str) -> _T:
    """A dataclass field with the line that `--help` prints for it."""
    return dataclasses.field(default=default, metadata={"help": meaning})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What one main runs; every field has a default, and a meaning that `--help` prints.

    A field whose default is a RunConfig is a group of fields, named `group.field` on the command
    line and in errors; groups hold no groups.
    """

    def check(self) -> None:
        """Raises MoejaxError naming the first field whose value is not allowed, and the range."""


_Config = TypeVar("_Config", bound=RunConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig(RunConfig):
    """The group `memory`: what a model may take, and where its experts may lie."""

    device_gib: float = _option(
        Limits.device_gib, "GiB on the accelerator, for weights, caches and work; 0: no limit"
    )
    host_gib: float = _option(
        Limits.host_gib, "GiB of host memory for experts; 0: no limit; the rest is read from disk"
    )
    disk_path: str = _option(
        Limits.disk_path, "a copy of the checkpoint that experts are read from; '': itself"
    )
    slots: int = _option(
        Limits.slots, "experts of a layer that the accelerator caches; -1: as many as fit"
    )
    transient: int = _option(
        Limits.transient, "slots through which the others stream; 0: what keeps the link busy"
    )
    prefetch: int = _option(Limits.prefetch, "experts of the next layer that are fetched ahead")
    bulk: int = _option(
        Limits.bulk, "experts that may be on their way to the accelerator between steps; 0: none"
    )

    def limits(self) -> Limits:
        """As `moejax.memory.budget` takes them."""
        return Limits(**dataclasses.asdict(self))

    def check(self) -> None:
        """See `RunConfig.check`; `make_budget` checks them with the model at hand."""
        for name in ("device_gib", "host_gib"):
            gib = getattr(self, name)
            if not 0 <= gib < math.inf:
                raise MoejaxError(f"{name}={gib} must be 0 (no limit) or a number of GiB")
        if self.slots < -1:
            raise MoejaxError(f"slots={self.slots} must be -1 (as many as fit) or a number")
        for name in ("transient", "prefetch", "bulk"):
            if getattr(self, name) < 0:
                raise MoejaxError(f"{name}={getattr(self, name)} must be 0 or a number of experts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordConfig(RunConfig):
    """What a run records of its routing (`moejax.traces`)."""

    record_trace: str = _option(
        "", "a file for a trace of the routing, which moejax.sweep replays; '': none"
    )
    record_foreseen: int = _option(
        8, "experts of the next layer that a trace foresees, for look-ahead; 0: none"
    )
    record_probabilities: bool = _option(
        False, "whether a trace holds every router's whole softmax, which some policies need"
    )

    def check(self) -> None:
        """See `RunConfig.check`."""
        if self.record_foreseen < 0:
            said = f"record_foreseen={self.record_foreseen}"
            raise MoejaxError(f"{said} must be 0 (none) or a number of experts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(RecordConfig):
    """What `python -m moejax.generate` runs: a model, and one request's `GenerationSettings`."""

    checkpoint: str = _option("demo", "'demo', a directory, or a Hugging Face name (org/name)")
    platform: str = _option("auto", "auto (an accelerator if there is one), cpu or gpu")
    dtype: str = _option(
        "auto",
        "auto (float32 on CPU, the file's on an accelerator), float32, bfloat16 or float16",
    )
    context: int = _option(0, "tokens that the KV cache holds; 0: what the prompts need")
    memory: MemoryConfig = _option(  # noqa: RUF009 -- it is frozen
        MemoryConfig(), "limits, under which experts may move"
    )
    compilation_cache: str = _option(
        "auto", "where compiled programs are kept: auto (the user's cache), a directory, '' (off)"
    )
    trace_dir: str = _option(
        "", "a directory for a profiler trace of the answers (TensorBoard, Perfetto); '': none"
    )
    max_new_tokens: int = _option(GenerationSettings.max_new_tokens, "end after so many tokens")
    temperature: float = _option(
        GenerationSettings.temperature, "0 is greedy; else logits are divided by it and sampled"
    )
    top_k: int = _option(GenerationSettings.top_k, "sample among the k likeliest tokens; 0: all")
    top_p: float = _option(
        GenerationSettings.top_p, "sample among the likeliest tokens of this total probability"
    )
    min_p: float = _option(
        GenerationSettings.min_p, "leave out tokens below this share of the likeliest one"
    )
    repetition_penalty: float = _option(
        GenerationSettings.repetition_penalty, "above 1, tokens already in the text get rarer"
    )
    seed: int = _option(0, "of the sampling; the same seed gives the same text")
    stop: tuple[str, ...] = _option(
        GenerationSettings.stop, "end before this string; may be repeated"
    )
    add_special_tokens: bool = _option(
        GenerationSettings.add_special_tokens, "let the tokenizer add its own (such as bos)"
    )

    def request(self) -> dict[str, Any]:
        """The fields that `Engine.generate` and `Engine.stream` take."""
        names = {field.name for field in dataclasses.fields(GenerationSettings)}
        return {name: value for name, value in dataclasses.asdict(self).items() if name in names}

    def check(self) -> None:
        """See `RunConfig.check`; the engine checks `platform` and `dtype`, which are its own."""
        if not self.checkpoint:
            raise MoejaxError("checkpoint='' must be a name or a directory")
        if self.context < 0:
            raise MoejaxError(f"context={self.context} must be 0 (as needed) or a number of tokens")
        super().check()
        if not 0 <= self.seed < 2**32:
            raise MoejaxError(f"seed={self.seed} must be from 0 to 2**32 - 1")
        GenerationSettings.of(**self.request())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(GenerateConfig):
    """What `python -m moejax.plan` looks at: a run of `moejax.generate`, or a shape without files.

    The files under `configs/` for `moejax.generate` serve; of their fields, those of the request
    change nothing here.
    """

    shape: str = _option("", f"in place of a checkpoint, a shape: {' or '.join(SHAPES)}")
    bits: int = _option(4, "of a shape's experts: 2, 3, 4, 8 or 16 (plain)")
    attention_bits: int = _option(16, "the same of its attention; all else is plain")
    group_size: int = _option(64, "inputs that share a scale, where a shape is packed")
    batch: int = _option(1, "sequences at once")
    chunk: int = _option(0, "tokens of a prompt that a prefill step takes; 0: as the engine does")

    def check(self) -> None:
        """See `RunConfig.check`."""
        super().check()
        if self.shape and self.shape not in SHAPES:
            raise MoejaxError(f"shape={self.shape!r} is not there; {_listed(SHAPES)}")
        for name in ("bits", "attention_bits"):
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
    """What `python -m moejax.quantize` runs; the recipe's values are checked where it is read."""

    checkpoint: str = _option("demo", "'demo', a directory, or a Hugging Face name (org/name)")
    output: str = _option("", "a new directory for the quantized checkpoint; must be given")
    format: str = _option("moejax", "moejax, gptq or compressed-tensors: who can read the result")
    method: str = _option(
        "milo",
        "none, rtn, hqq, least_squares, gptq, autoround, milo or milo+: of attention and MLPs",
    )
    bits: int = _option(3, "2, 3, 4 or 8")
    group_size: int = _option(64, "inputs that share a scale; 0: all of a row (per channel)")
    zero_kind: str = _option(
        "auto", "auto (what method and format take), float, integer, symmetric"
    )
    scale_dtype: str = _option("float16", "float16 or float32, of scales and float zero points")
    rank: str = _option(
        "Dense-25% + Kurtosis-6.25%",
        "of compensators: a sum of Uniform-, Dense-, Sparse-, Kurtosis-, Frequency-r or -r%, "
        "perhaps 'within 200 MB', or a set of the paper's such as mixtral-s1",
    )
    factor_bits: int = _option(3, "of milo's compensators: 3, 4, 8 or 16 (bfloat16)")
    passes: int = _option(20, "milo stops after so many passes at the latest")
    act_order: bool = _option(
        False, "gptq visits inputs by falling importance, in groups that are fixed beforehand"
    )
    calibration: str = _option(
        "default", "what gptq, autoround and Frequency-r look at: the text that ships, or a file"
    )
    calibration_samples: int = _option(0, "samples of that text; 0: 128, or what there is")
    calibration_length: int = _option(0, "tokens of a sample; 0: 2048 or the model's context")
    rules: str = _option(
        "", "'PATTERN: KEY=VALUE ...; ...', such as 'head: method=rtn bits=8; *.o_proj: bits=4'"
    )
    platform: str = _option("auto", "auto (an accelerator if there is one), cpu or gpu")
    compilation_cache: str = _option(
        "auto", "where compiled programs are kept: auto (the user's cache), a directory, '' (off)"
    )

    def check(self) -> None:
        """See `RunConfig.check`; the recipe's fields are checked with the model at hand."""
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
    """What `python -m moejax.evaluate` runs; model and text are checked where they are read."""

    task: str = _option("perplexity", "what is measured: perplexity")
    checkpoint: str = _option("demo", "'demo', a directory, or a Hugging Face name (org/name)")
    text: str = _option(
        "wikitext2", "a UTF-8 file (.txt, .xz, .gz), or wikitext2: the test rows from the Hub"
    )
    join: str = _option(
        "none", "none (a file as it stands), or wikitext (its lines joined as papers join the rows)"
    )
    preset: str = _option("2048/2048", f"window/stride: {' or '.join(PRESETS)}")
    window: int = _option(0, "tokens that a prediction sees at most; 0: the preset's")
    stride: int = _option(0, "tokens that windows advance by; 0: the preset's, at most the window")
    max_tokens: int = _option(0, "score no more than the first so many tokens; 0: all")
    batch_size: int = _option(8, "windows at once; the result does not depend on it")
    output: str = _option("", "a JSON file for the result; '': none")
    platform: str = _option("auto", "auto (an accelerator if there is one), cpu or gpu")
    dtype: str = _option(
        "auto",
        "auto (float32 on CPU, the file's on an accelerator), float32, bfloat16 or float16",
    )
    compilation_cache: str = _option(
        "auto", "where compiled programs are kept: auto (the user's cache), a directory, '' (off)"
    )
    add_special_tokens: bool = _option(
        GenerationSettings.add_special_tokens, "let the tokenizer add its own (such as bos)"
    )

    def windowing(self) -> Windowing:
        """Window and stride: the preset's where they are not given."""
        preset = PRESETS[self.preset]
        window = self.window or preset.window
        return Windowing(window, self.stride or min(preset.stride, window))

    def check(self) -> None:
        """See `RunConfig.check`."""
        if self.task not in EVALUATION_TASKS:
            raise MoejaxError(f"task={self.task!r} is not there; {_listed(EVALUATION_TASKS)}")
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
        self.windowing().check()


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return f"there {'is' if len(names) == 1 else 'are'}: {', '.join(names)}"


def to_config_dict(config: RunConfig) -> config_dict.ConfigDict:
    """The fields of a run configuration as a locked ConfigDict: values change, names do not."""
    return config_dict.ConfigDict(dataclasses.asdict(config)).lock()


def from_config_dict(config_class: type[_Config], values: config_dict.ConfigDict) -> _Config:
    """A checked `config_class` from a ConfigDict; fields that it lacks keep their defaults.

    Raises:
      MoejaxError: a field is unknown (the nearest real one is named), has another type than the
        default, or has a value that is not allowed.
    """
    default = config_class()
    defaults = {option.name: option.default for option in options(default)}
    typed: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in _flat(values):
        check_field_name(name, default)
        group, _, field = name.rpartition(".")
        into = groups.setdefault(group, {}) if group else typed
        into[field] = _as_type_of(name, value, defaults[name])
    for group, fields in groups.items():
        part = type(getattr(default, group))(**fields)
        try:
            part.check()
        except MoejaxError as error:
            raise MoejaxError(f"{group}.{error}") from error
        typed[group] = part
    config = config_class(**typed)
    config.check()
    return config


def _flat(values: config_dict.ConfigDict) -> Iterator[tuple[str, Any]]:
    """Every value and its name; what a group holds is named `group.field`."""
    for name, value in values.items():
        if isinstance(value, config_dict.ConfigDict):
            yield from ((f"{name}.{field}", part) for field, part in _flat(value))
        else:
            yield name, value


@dataclasses.dataclass(frozen=True)
class Option:
    """A field of a run configuration as the command line names it."""

    name: str  # "seed", "memory.device_gib"
    default: Any
    meaning: str


def options(config: RunConfig) -> list[Option]:
    """The fields, with the values of `config` for defaults; in place of a group its own fields."""
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, RunConfig):
            parts = options(value)
            found += [dataclasses.replace(p, name=f"{field.name}.{p.name}") for p in parts]
        else:
            found.append(Option(field.name, value, field.metadata["help"]))
    return found


def check_field_name(name: str, config: RunConfig) -> None:
    """Raises MoejaxError naming the nearest field of `config`, unless `name` is one."""
    known = [option.name for option in options(config)]
    if name in known:
        return
    if group := [option for option in known if option.startswith(f"{name}.")]:
        raise MoejaxError(f"{name} has no value of its own; it is a group: {', '.join(group)}")
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    raise MoejaxError(f"there is no config field {name!r}; did you mean {nearest!r}?")


def _as_type_of(name: str, value: Any, default: Any) -> Any:
    """`value` in the type of `default`: an int serves as a float, a list of str as a tuple."""
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, tuple):
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        quoted = f"--config.{name}=\"'5'\""
        raise MoejaxError(f"{name}={value!r} must be strings; quote a number: {quoted}")
    if type(value) is not type(default):
        raise MoejaxError(f"{name}={value!r} must be of type {type(default).__name__}")
    return value
