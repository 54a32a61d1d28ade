"""Fields that clients of other servers send: which values ask for nothing, and which are ignored.

OpenAI's own clients, and those of llama.cpp, vLLM, Ollama, SillyTavern, Open WebUI.
"""

from typing import Any

# Values that ask for nothing, which clients send on their own, and the fields that may have them.
_NEUTRAL: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (0,),
        "frequency_penalty presence_penalty no_repeat_ngram_size penalty_alpha min_tokens "
        "min_length top_a nsigma epsilon_cutoff eta_cutoff xtc_probability dry_multiplier "
        "dynatemp_range smoothing_factor skew mirostat mirostat_mode max_tokens_second "
        "t_max_predict_ms n_probs",
    ),
    (
        (1,),
        "repeat_penalty encoder_repetition_penalty guidance_scale best_of num_beams "
        "length_penalty tfs tfs_z typical typical_p typ_p",
    ),
    (
        ("",),
        "negative_prompt suffix custom_token_bans guided_regex guided_grammar grammar "
        "grammar_string",
    ),
    (
        ([],),
        "stop_token_ids bad_words banned_strings allowed_token_ids samplers "
        "logits_processors documents guided_choice lora tools functions",
    ),
    (
        (False,),
        "ban_eos_token include_stop_str_in_output use_beam_search early_stopping "
        "dynamic_temperature return_tokens return_token_ids store "
        "return_tokens_as_token_ids continue_final_message",
    ),
    ((True,), "add_bos_token do_sample add_generation_prompt"),
    ((), "prompt_logprobs guided_json audio prediction web_search_options"),
    (({},), "structured_outputs json_schema"),
    (("none", "auto"), "tool_choice function_call"),
    (({}, []), "logit_bias"),
    ((-1, 0), "top_n_sigma"),
    ((0, 1), "min_keep"),
    ((True, False), "parallel_tool_calls"),
    (({"type": "text"},), "response_format"),
    ((["text"],), "modalities"),
    (("auto", "default"), "service_tier"),
    ((True,), "cache_prompt"),
    (("",), "cache_salt"),
)
NEUTRAL = {name: values for values, names in _NEUTRAL for name in names.split()}
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
    "prompt_cache_retention", "keep_alive", "id_slot",
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
