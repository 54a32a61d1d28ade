"""Sampling defaults of a checkpoint: generation_config.json, as transformers reads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import logging

from moejax.errors import MoejaxError
from moejax.inference.generation import GenerationSettings
from moejax.models.hf.config import read_json
from moejax.models.hf.fields import flag

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
    """Names the checkpoint's defaults that an answer takes, for people; "" for none.

    Args:
      defaults: from `read_generation_defaults`.
      given: the caller's fields, which take precedence; None counts as omitted.
    """
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
