"""Settings of a generation, a checkpoint's defaults for them, and the result."""

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from absl import logging

from moejax.errors import MoejaxError
from moejax.models.hf.config import read_json
from moejax.models.hf.fields import flag
from moejax.text.tokenizer import Tokenizer

FinishReason = Literal["eos", "stop", "length"]

MAX_TEMPERATURE = 1e6  # uniform to float32 long before
NUM_SEEDS = 2**32
_INTEGER: tuple[type, ...] = (int, np.integer)
_NUMBER: tuple[type, ...] = (*_INTEGER, float, np.floating)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Settings of sampling and of an answer's end; their defaults are here alone."""

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | Sequence[int] = 0  # prompt i draws from seed + i, or from the i-th of a sequence
    stop: tuple[str, ...] = ()  # strings that end the text, and are not part of it
    ignore_eos: bool = False
    add_special_tokens: bool = True  # of text prompts, as the tokenizer's template says

    @classmethod
    def of(cls, **fields: Any) -> "GenerationSettings":
        """Makes checked settings by name; an error names the nearest right one."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
                raise MoejaxError(f"unknown generation setting {name}{hint}")
        stop = fields.get("stop", ())
        if isinstance(stop, str) or not isinstance(stop, Sequence):
            stop = (stop,)
        fields["stop"] = tuple(stop)
        settings = cls(**fields)
        settings.check()
        return settings

    def check(self) -> None:
        """Raises MoejaxError naming the field, its value and what is allowed."""
        for name in ("max_new_tokens", "top_k"):
            if not isinstance(getattr(self, name), _INTEGER):
                raise MoejaxError(f"{name}={getattr(self, name)!r} must be an integer")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if not isinstance(getattr(self, name), _NUMBER):
                raise MoejaxError(f"{name}={getattr(self, name)!r} must be a number")
        seeds: Any = [self.seed] if isinstance(self.seed, _INTEGER) else self.seed
        allowed: dict[str, tuple[bool, str]] = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (
                0 <= self.temperature <= MAX_TEMPERATURE,
                f"0 (greedy) or a positive number up to {MAX_TEMPERATURE:g}",
            ),
            "top_k": (0 <= self.top_k < 2**31, "0 (off) or a count below 2**31"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            "min_p": (0 <= self.min_p <= 1, "from 0 (off) to 1"),
            "repetition_penalty": (
                math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
                "a positive number; 1 is off",
            ),
            "seed": (
                isinstance(seeds, Sequence) and all(map(_is_seed, seeds)),
                f"an integer from 0 to {NUM_SEEDS - 1}, or a list of them, one a prompt",
            ),
            "stop": (
                all(isinstance(stop, str) and stop for stop in self.stop),
                "strings that are not empty",
            ),
        }
        for name, (valid, expected) in allowed.items():
            if not valid:
                raise MoejaxError(f"{name}={getattr(self, name)!r} must be {expected}")

    def seeds(self, num_prompts: int) -> list[int]:
        """The seed of each prompt."""
        if isinstance(self.seed, int | np.integer):
            return [(int(self.seed) + i) % NUM_SEEDS for i in range(num_prompts)]
        if len(self.seed) != num_prompts:
            raise MoejaxError(f"{len(self.seed)} seeds for {num_prompts} prompts: give one each")
        return list(self.seed)

    def by_prompt(self, num_prompts: int) -> list["GenerationSettings"]:
        """Settings of each prompt, with a seed of its own."""
        return [dataclasses.replace(self, seed=seed) for seed in self.seeds(num_prompts)]


def _is_seed(value: Any) -> bool:
    return isinstance(value, int | np.integer) and bool(0 <= value < NUM_SEEDS)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Wall time of a call, compiling excluded."""

    ttft_s: float  # until the first token was on the host
    decode_s: float  # from then to the last token
    num_decoded: int  # tokens a sequence after the first, of the longest one
    compile_s: float

    @property
    def tpot_s(self) -> float:
        """Seconds per decode step; nan without one."""
        return self.decode_s / self.num_decoded if self.num_decoded else math.nan


@dataclasses.dataclass(frozen=True)
class Generation:
    """One prompt's answer."""

    text: str | None  # None without a tokenizer
    tokens: list[int]  # the new ones; a closing end-of-sequence token is among them
    finish_reason: FinishReason
    num_prompt_tokens: int
    timing: Timing  # of the whole batch
    thoughts: str = ""  # of gpt-oss, before the text; other models' are part of it


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One step of a stream; `text` may lag behind `token` by a few characters."""

    text: str
    token: int
    finish_reason: FinishReason | None  # set on the last
    timing: Timing


class AnswerBuilder:
    """Builds one answer from tokens; decides which text may be shown, and the end.

    Text is held back while it could be the beginning of a stop string or half a character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stop: tuple[str, ...],
        eos_ids: tuple[int, ...],
        max_tokens: int,
        chat_prompt: Sequence[int] | None = None,  # see `Tokenizer.stream`
    ):
        if stop and tokenizer is None:
            raise MoejaxError("stop strings need a tokenizer, and this checkpoint has none")
        self._stream = tokenizer.stream(chat_prompt) if tokenizer else None
        self._stop = stop
        self._eos_ids = eos_ids
        self._max_tokens = max_tokens
        self._held = ""
        self.text = ""
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None

    @property
    def thoughts(self) -> str:
        """Thoughts so far, which are no part of the text and have no stop strings."""
        return self._stream.thoughts if self._stream else ""

    def push(self, token: int) -> str:
        """Adds a token; returns the text that it releases. Not to be called once finished."""
        self.tokens.append(token)
        if self._stream is not None and token not in self._eos_ids:
            self._held += self._stream.push(token)
        if token in self._eos_ids:
            self.finish_reason = "eos"
        elif len(self.tokens) >= self._max_tokens:
            self.finish_reason = "length"
        if self.finish_reason and self._stream is not None:
            self._held += self._stream.flush()
        hits = [self._held.find(stop) for stop in self._stop if stop in self._held]
        if hits:
            self.finish_reason = "stop"
            released, self._held = self._held[: min(hits)], ""
        else:
            keep = 0 if self.finish_reason else _possible_stop_length(self._held, self._stop)
            released = self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]
        self.text += released
        return released


def _possible_stop_length(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


FILE = "generation_config.json"
_TOP_K = 50  # of transformers, where a file asks for sampling and names none
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_ALSO_READ = ("repetition_penalty", "max_new_tokens")
# Values that ask for nothing, and the fields that may have them: others of theirs would change
# answers and are not supported. The 20 is the default of transformers; the prompt counts in it.
_NEUTRAL: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (1,),
        "num_beams num_beam_groups num_return_sequences typical_p "
        "encoder_repetition_penalty guidance_scale",
    ),
    (
        (0,),
        "diversity_penalty penalty_alpha epsilon_cutoff eta_cutoff no_repeat_ngram_size "
        "encoder_no_repeat_ngram_size min_length min_new_tokens",
    ),
    (
        (),
        "dola_layers top_h exponential_decay_length_penalty forced_bos_token_id "
        "forced_eos_token_id watermarking_config max_time",
    ),
    (([],), "bad_words_ids force_words_ids constraints suppress_tokens begin_suppress_tokens"),
    (([], {}), "sequence_bias"),
    ((20,), "max_length"),
)


def read_generation_defaults(directory: Path) -> dict[str, Any]:
    """Fields of `GenerationSettings` that a checkpoint's file decides; warns of those left out.

    Without `do_sample` answers are greedy, whatever the temperature. A file that names nothing of
    sampling decides nothing of it.

    Raises:
      MoejaxError: the file is broken, or a value is not allowed.
    """
    path = directory / FILE
    if not path.exists() and not path.is_symlink():
        return {}
    fields = {name: value for name, value in read_json(path).items() if value is not None}
    found = {name: fields[name] for name in (*_SAMPLING, *_ALSO_READ) if name in fields}
    try:
        if flag(fields, "do_sample"):
            found = {"temperature": 1.0, "top_k": _TOP_K} | found
        elif "do_sample" in fields or any(name in fields for name in _SAMPLING):
            found["temperature"] = 0.0
        if "stop_strings" in fields:
            found["stop"] = fields["stop_strings"]
        GenerationSettings.of(**found)
    except MoejaxError as error:
        raise MoejaxError(f"{path}: {error}") from error
    left_out = [
        f"{name}={fields[name]!r}"
        for neutral, names in _NEUTRAL
        for name in names.split()
        if name in fields and fields[name] not in neutral
        if not (name == "max_length" and "max_new_tokens" in fields)  # which counts before it
    ]
    if left_out:
        logging.warning("%s: not supported, left out: %s", path, ", ".join(left_out))
    return found


def describe_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Names the checkpoint's defaults that an answer takes beside `given` ones; "" for none."""
    used = {name: value for name, value in defaults.items() if given.get(name) is None}
    settings = GenerationSettings.of(**with_defaults(defaults, given))
    if settings.temperature == 0:  # greedy: nothing is drawn
        used = {n: v for n, v in used.items() if n == "temperature" or n not in _SAMPLING}
    if not used:
        return ""
    return f"by {FILE}: " + ", ".join(f"{name} {value}" for name, value in used.items())


def with_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Completes the fields that a caller gave; None counts as omitted."""
    return {**defaults, **{name: value for name, value in given.items() if value is not None}}
