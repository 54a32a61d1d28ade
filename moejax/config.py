"""Run configurations: frozen dataclasses, each the only place where its defaults are written.

A main reads an `ml_collections` config (a file under `configs/`, flags, or neither), turns it at
once into one of these with `from_config_dict`, and nothing below the mains sees a ConfigDict.
"""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, TypeVar

from ml_collections import config_dict

from moejax.errors import MoejaxError
from moejax.generation import GenerationSettings

_T = TypeVar("_T")


def _option(default: _T, meaning: str) -> _T:
    """A dataclass field with the line that `--help` prints for it."""
    return dataclasses.field(default=default, metadata={"help": meaning})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What one main runs; every field has a default, and a meaning that `--help` prints."""

    def check(self) -> None:
        """Raises MoejaxError naming the first field whose value is not allowed, and the range."""


_Config = TypeVar("_Config", bound=RunConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(RunConfig):
    """What `python -m moejax.generate` runs: a model, and one request's `GenerationSettings`."""

    checkpoint: str = _option("demo", "'demo', a directory, or a Hugging Face name (org/name)")
    platform: str = _option("auto", "auto (an accelerator if there is one), cpu or gpu")
    dtype: str = _option(
        "auto",
        "auto (float32 on CPU, the file's on an accelerator), float32, bfloat16 or float16",
    )
    context: int = _option(0, "tokens that the KV cache holds; 0: what the prompts need")
    compilation_cache: str = _option(
        "auto", "where compiled programs are kept: auto (the user's cache), a directory, '' (off)"
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
        if not 0 <= self.seed < 2**32:
            raise MoejaxError(f"seed={self.seed} must be from 0 to 2**32 - 1")
        GenerationSettings.of(**self.request())


def to_config_dict(config: RunConfig) -> config_dict.ConfigDict:
    """The fields of a run configuration as a locked ConfigDict: values change, names do not."""
    return config_dict.ConfigDict(dataclasses.asdict(config)).lock()


def from_config_dict(config_class: type[_Config], values: config_dict.ConfigDict) -> _Config:
    """A checked `config_class` from a ConfigDict; fields that it lacks keep their defaults.

    Raises:
      MoejaxError: a field is unknown (the nearest real one is named), has another type than the
        default, or has a value that is not allowed.
    """
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    typed = {}
    for name, value in values.items():
        check_field_name(name, fields)
        typed[name] = _as_type_of(name, value, fields[name].default)
    config = config_class(**typed)
    config.check()
    return config


def check_field_name(name: str, known: Iterable[str]) -> None:
    """Raises MoejaxError naming the nearest known field, unless `name` is one."""
    known = list(known)
    if name not in known:
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
