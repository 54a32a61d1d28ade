"""Fields that clients of other servers send: which values ask for nothing, and which are ignored.

OpenAI's own clients, and those of llama.cpp, vLLM, Ollama, SillyTavern, Open WebUI.
"""

from typing import Any

# Values that ask for nothing are allowed: clients send such values on their own.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repeat_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "negative_prompt": ("",),
    "logit_bias": ({}, []),
    "best_of": (1,),
    "num_beams": (1,),
    "suffix": ("",),
    "min_tokens": (0,),
    "min_length": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "banned_strings": ([],),
    "custom_token_bans": ("",),
    "ban_eos_token": (False,),
    "allowed_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "top_a": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "typical": (1,),
    "typical_p": (1,),
    "typ_p": (1,),
    "top_n_sigma": (-1, 0),
    "nsigma": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynamic_temperature": (False,),
    "dynatemp_range": (0,),
    "smoothing_factor": (0,),
    "skew": (0,),
    "min_keep": (0, 1),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "samplers": ([],),
    "logits_processors": ([],),
    "add_bos_token": (True,),
    "do_sample": (True,),
    "max_tokens_second": (0,),
    "t_max_predict_ms": (0,),
    "n_probs": (0,),
    "prompt_logprobs": (),
    "return_tokens": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "documents": ([],),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "json_schema": ({},),
    "grammar": ("",),
    "grammar_string": ("",),
    "lora": ([],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
# Settings of a method that only its own field in `NEUTRAL` switches on, so none has an effect.
OF_METHODS_THAT_ARE_OFF = (
    "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
    "dynatemp_low", "dynatemp_high", "dynatemp_exponent", "smoothing_curve", "xtc_threshold",
    "mirostat_tau", "mirostat_eta", "n_keep", "n_discard",
)  # fmt: skip
IGNORED = (
    "user", "metadata", "safety_identifier", "prompt_cache_key", *OF_METHODS_THAT_ARE_OFF,
)  # fmt: skip
# Without a meaning here: a line in the log says so.
LOGGED = (
    "skip_special_tokens", "spaces_between_special_tokens", "reasoning_effort", "verbosity",
    "include_reasoning", "separate_reasoning", "reasoning_format", "priority", "request_id",
    "cache_prompt", "cache_salt", "prompt_cache_retention", "keep_alive", "id_slot",
    "timings_per_token", "return_progress",
)  # fmt: skip
# Other servers' names of fields that this one has; each must have the same value.
OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "sampler_seed": "seed",
    "rep_pen": "repetition_penalty",
    "stopping_strings": "stop",
}
# Tokens of a prompt at most, of which other servers cut off the beginning; -1 is the model's own.
PROMPT_LIMITS = ("truncate_prompt_tokens", "truncation_length")
# Tokens of a prompt and its answer at most.
CONTEXT_LIMITS = ("num_ctx", "n_ctx")
# Tokens that a repetition penalty looks back; -1 is all, as here.
PENALTY_WINDOWS = ("repeat_last_n", "rep_pen_range", "repetition_penalty_range")
# In messages of a conversation: answers that a client sends back carry them.
OF_MESSAGES = (
    "name", "refusal", "annotations", "reasoning_content", "reasoning", "reasoning_details",
    "thinking",
)  # fmt: skip
