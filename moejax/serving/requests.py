"""Turns bodies of completions, chats, /tokenize and /detokenize into requests to the engine."""

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from moejax.errors import MoejaxError
from moejax.inference.generation import MAX_TEMPERATURE, NUM_SEEDS, GenerationSettings
from moejax.serving.errors import ApiError
from moejax.serving.fields import Fields
from moejax.serving.foreign_fields import (
    CONTEXT_LIMITS,
    IGNORED,
    LOGGED,
    NEUTRAL,
    OF_MESSAGES,
    OTHER_NAMES,
    PENALTY_WINDOWS,
    PROMPT_LIMITS,
)
from moejax.text.chat_template import ROLES, ChatSettings
from moejax.text.tokenizer import Tokenizer, token_ids_of

MOST_LOGPROBS = 20  # likeliest tokens beside each token, of OpenAI's API
MOST_STOPS = 16
MOST_MESSAGES = 2048  # of a chat, and parts of their contents: templates take their time for each
EARLY_FACTOR = 8  # characters of a text for each token that fits, which are looked at first
EARLY_CHARACTERS = 2**16  # shorter texts are read at once
NOT_SUPPORTED = "this server does not support it"


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """Facts of the model that requests are checked against."""

    name: str  # clients call the model by it
    tokenizer: Tokenizer
    vocab_size: int  # V
    defaults: GenerationSettings  # stand for fields that a request leaves out
    # raises MoejaxError where token ids leave no room to answer
    check_prompt: Callable[[list[int]], None]
    longest_prompt: int  # tokens of a prompt that leaves room
    most_answers: int = 2**31  # answers that one request may ask for
    # settings for conversations whose request leaves them out
    chat: ChatSettings = ChatSettings()  # noqa: RUF009, frozen

    def _check_count(self, num_prompts: int, count: int) -> None:
        """Raises an ApiError where there are more answers than may wait; before they cost time."""
        if (answers := num_prompts * count) > self.most_answers:
            field = "n" if count > 1 else "prompt"
            said = f"{field}: {answers} answers are more than the {self.most_answers} of a request"
            raise ApiError(said, param=field)

    def _encode(
        self, prompt: str | list[int], field: str, *, add_special_tokens: bool
    ) -> list[int]:
        """Token ids of a prompt that leaves room to answer."""
        if isinstance(prompt, str):
            self._refuse_early(prompt, field)
        try:
            ids = token_ids_of(
                prompt, self.tokenizer, self.vocab_size, add_special_tokens=add_special_tokens
            )
        except MoejaxError as error:
            raise ApiError(str(error), param=field) from error
        try:
            self.check_prompt(ids)
        except MoejaxError as error:
            raise self._too_long(str(error), field) from error
        return ids

    def _too_long(self, why: str, field: str) -> ApiError:
        """Error whose first words litellm and its like know it by, to take another model."""
        said = f"this model's maximum context length is {self.longest_prompt + 1} tokens: {why}"
        return ApiError(said, param=field, code="context_length_exceeded")

    def _refuse_early(self, prompt: str, field: str) -> None:
        """Refuses a text that is far too long: tokenizers take seconds and gigabytes for megabytes.

        It counts bytes first, where a token has a most of them, then the tokens of the beginning.
        Text after a beginning changes the tokens of its last word, not a quarter of them.
        """
        most, size, longest = self.tokenizer.most_token_bytes, len(prompt.encode()), None
        if most is not None and size > most * self.longest_prompt:
            longest = -(-size // most)
        elif len(prompt) > max(EARLY_CHARACTERS, EARLY_FACTOR * self.longest_prompt):
            begin = prompt[: EARLY_FACTOR * self.longest_prompt]
            count = len(self.tokenizer.encode(begin, add_special_tokens=False))
            longest = count if count > 1.25 * self.longest_prompt else None
        if longest is not None:
            said = f"a prompt of {size} bytes is {longest} tokens at least, and there is room for "
            said += f"{self.longest_prompt}: shorten it"
            raise self._too_long(said, field)


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked request; choice i answers `prompts[i]` with `settings[i]`."""

    is_chat: bool  # whether it is for the chat endpoint
    prompts: list[list[int]]  # token ids of each choice
    num_prompt_tokens: int  # tokens of all prompts, those of several choices counted once
    settings: list[GenerationSettings]  # sampling settings of each choice
    echo: list[str]  # texts that completions begin with; "" for none
    stream: bool  # whether the answer is told as it comes
    include_usage: bool  # whether a stream ends with the counts of tokens
    top_logprobs: int | None  # likeliest tokens beside each token; None: no logprobs at all
    continuous_usage: bool = False  # whether each of its chunks has the counts so far
    ignored: tuple[str, ...] = ()  # fields that the log is to name


@dataclasses.dataclass(frozen=True)
class _Conversation:
    """Messages, and the variables that the chat template gets beside them."""

    messages: list[dict[str, str]]  # roles and contents
    variables: dict[str, Any]  # by their names

    @classmethod
    def read(cls, fields: Fields, model: ModelFacts) -> "_Conversation":
        """Reads `messages` and the fields of the template."""
        messages = _messages(fields)
        variables = model.chat.variables()
        if effort := fields.text("reasoning_effort", ""):
            variables |= {"enable_thinking": False} if effort == "none" else {}
            variables["reasoning_effort"] = effort
        variables |= fields.mapping("chat_template_kwargs")
        for name in ("messages", "self", "add_generation_prompt"):
            if name in variables:
                fields.refuse("chat_template_kwargs", f"{name} is not the caller's to set")
        if (thinking := fields.boolean("enable_thinking", None)) is not None:
            variables["enable_thinking"] = thinking
        return cls(messages, variables)

    def prompt(self, model: ModelFacts) -> str:
        """Renders the prompt, in which the template writes the special tokens."""
        messages = model.chat.messages(self.messages)
        try:
            return model.tokenizer.apply_chat_template(messages, **self.variables)
        except MoejaxError as error:
            raise ApiError(str(error), param="messages") from error


def read_completion(body: Mapping[str, Any], model: ModelFacts) -> Request:
    """A request of /v1/completions.

    Raises:
      ApiError: naming the field that is wrong or not supported.
    """
    fields = Fields(body)
    _check_model(fields, model)
    given = _prompts(fields)
    add_special_tokens = fields.boolean("add_special_tokens", model.defaults.add_special_tokens)
    settings = _settings(fields, model.defaults, ("max_tokens",))
    top_logprobs = fields.integer("logprobs", None, 0, MOST_LOGPROBS)
    echoes = fields.boolean("echo", False)
    if echoes and top_logprobs is not None:
        fields.refuse("echo", "logprobs of prompts are not supported")
    count, how = _shape(fields)
    model._check_count(len(given), count)
    ids = [model._encode(p, "prompt", add_special_tokens=add_special_tokens) for p in given]
    _check_limits(fields, max(map(len, ids)), settings)
    echo = [""] * len(given)
    if echoes:
        echo = [model.tokenizer.decode(p) if isinstance(p, list) else p for p in given]
    return Request(
        False,
        [prompt for prompt in ids for _ in range(count)],
        sum(map(len, ids)),
        settings.by_prompt(len(ids) * count),
        [text for text in echo for _ in range(count)],
        top_logprobs=top_logprobs,
        **how,
    )


def read_chat(body: Mapping[str, Any], model: ModelFacts) -> Request:
    """A request of /v1/chat/completions; raises as `read_completion`."""
    fields = Fields(body)
    _check_model(fields, model)
    conversation = _Conversation.read(fields, model)
    settings = _settings(fields, model.defaults, ("max_completion_tokens", "max_tokens"))
    wants = fields.boolean("logprobs", False)
    top_logprobs = fields.integer("top_logprobs", 0, 0, MOST_LOGPROBS)
    if top_logprobs and not wants:
        fields.refuse("top_logprobs", "needs logprobs=true")
    fields.refuse_but({"echo": (False,), "add_special_tokens": (False,)}, NOT_SUPPORTED)
    count, how = _shape(fields)
    model._check_count(1, count)
    prompt = conversation.prompt(model)
    ids = model._encode(prompt, "messages", add_special_tokens=False)  # the template writes them
    _check_limits(fields, len(ids), settings)
    return Request(
        True, [ids] * count, len(ids), settings.by_prompt(count), [""] * count,
        top_logprobs=top_logprobs if wants else None, **how,
    )  # fmt: skip


def read_tokenize(body: Mapping[str, Any], model: ModelFacts) -> dict[str, Any]:
    """Tokens of `prompt` or `messages` (vLLM), or of `content` (llama.cpp).

    Raises:
      ApiError: naming the field that is wrong, or the text is far longer than the context.
    """
    fields = Fields(body)
    _check_model(fields, model)
    given = [name for name in ("prompt", "messages", "content") if fields.take(name) is not None]
    if len(given) != 1:
        fields.refuse("prompt", "give one of prompt, messages and content")
    [name] = given
    if name == "messages":
        conversation, text, adds = _Conversation.read(fields, model), "", False
    else:
        of_server = model.defaults.add_special_tokens
        adds = (
            fields.boolean("add_special_tokens", of_server)
            if name == "prompt"
            else fields.boolean("add_special", False)
        )
        conversation, text = None, fields.text(name, "")
    neutral = {"return_token_strs": (False,), "with_pieces": (False,), "parse_special": (True,)}
    fields.refuse_but({**neutral, "add_generation_prompt": (True,)}, NOT_SUPPORTED)
    fields.refuse_unknown()
    if conversation is not None:
        text = conversation.prompt(model)
    model._refuse_early(text, name)
    try:
        tokens = model.tokenizer.encode(text, add_special_tokens=adds)
    except MoejaxError as error:
        raise ApiError(str(error), param=name) from error
    return {"count": len(tokens), "max_model_len": model.longest_prompt + 1, "tokens": tokens}


def read_detokenize(body: Mapping[str, Any], model: ModelFacts) -> dict[str, Any]:
    """Text of `tokens`, special ones too, as `prompt` (vLLM) and `content` (llama.cpp)."""
    fields = Fields(body)
    _check_model(fields, model)
    tokens = fields.take("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        fields.wrong_type("tokens", tokens, "a list of token ids")
    for token in tokens:
        if not 0 <= token < model.vocab_size:
            said = f"token id {token} is outside the vocabulary of {model.vocab_size}"
            fields.refuse("tokens", said)
    fields.refuse_unknown()
    try:
        text = model.tokenizer.decode(tokens, skip_special_tokens=False)
    except MoejaxError as error:
        raise ApiError(str(error), param="tokens") from error
    return {"prompt": text, "content": text}


def _check_model(fields: Fields, model: ModelFacts) -> None:
    """Raises an ApiError where a request is for another model."""
    name = fields.text("model", model.name)
    if name != model.name:
        said = f"the model {name[:100]!r} is not served here; {model.name!r} is"
        raise ApiError(said, status=404, param="model", code="model_not_found")


def _prompts(fields: Fields) -> list[str | list[int]]:
    """Reads prompts: a text, a list of texts, token ids, or lists of them."""
    given = fields.take("prompt")
    if given is None:
        fields.refuse("prompt", "must be given")
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if given == []:
        fields.refuse("prompt", "must not be empty")
    if not isinstance(given, list):
        fields.wrong_type("prompt", given, "a string, token ids, or a list of them")
    for one in given:
        if isinstance(one, str):
            fields.checked_text("prompt", one)
        elif not isinstance(one, list) or not {*map(type, one)} <= {int}:
            fields.wrong_type("prompt", one, "a string, token ids, or a list of them")
    return given


def _messages(fields: Fields) -> list[dict[str, str]]:
    given = fields.take("messages")
    if given is None or given == []:
        fields.refuse("messages", "at least one must be given")
    if not isinstance(given, list):
        fields.wrong_type("messages", given, "a list of messages")
    num_parts = sum(len(m["content"]) for m in given if _has_parts(m))
    if max(len(given), num_parts) > MOST_MESSAGES:
        said = f"{len(given)} messages of {num_parts} parts; at most {MOST_MESSAGES} of each"
        fields.refuse("messages", said)
    found = []
    for i, message in enumerate(given):
        if not isinstance(message, dict):
            fields.wrong_type(f"messages[{i}]", message, "an object")
        own = Fields(message, f"messages[{i}].")
        role = own.text("role", "")
        if role not in ROLES:
            own.refuse("role", f"{role[:40]!r} is none of {', '.join(ROLES)}")
        content = own.take("content")
        if isinstance(content, list):
            content = "".join(_part_text(own, part) for part in content)
        elif content is None and role == "assistant":
            content = ""
        found.append({"role": ROLES[role], "content": own.checked_text("content", content)})
        own.refuse_but({"tool_calls": ([],)}, NOT_SUPPORTED)
        own.refuse_unknown(OF_MESSAGES)
    return found


def _has_parts(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("content"), list)


def _part_text(message: Fields, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        message.refuse("content", "only parts of the type text are supported")
    return message.checked_text("content", part.get("text"))


def _settings(
    fields: Fields, defaults: GenerationSettings, length_names: tuple[str, ...]
) -> GenerationSettings:
    """Reads the sampling settings; the first length that is given counts."""
    lengths = [fields.integer(name, None, 1, 2**31 - 1) for name in length_names]
    length = next((n for n in lengths if n is not None), defaults.max_new_tokens)
    stop = fields.take("stop")
    stops = list(defaults.stop) if stop is None else stop if isinstance(stop, list) else [stop]
    if len(stops) > MOST_STOPS:
        fields.refuse("stop", f"at most {MOST_STOPS} texts")
    if not all(fields.checked_text("stop", one) for one in stops):
        fields.refuse("stop", "an empty text")
    top_p = fields.number("top_p", defaults.top_p, 0, 1)
    settings = GenerationSettings(
        max_new_tokens=length,
        temperature=fields.number("temperature", defaults.temperature, 0, MAX_TEMPERATURE),
        top_k=max(0, fields.integer("top_k", defaults.top_k, -1, 2**31 - 1)),  # -1: off
        top_p=max(top_p, 1e-9),  # of 0, the likeliest token is left, as of the smallest number
        min_p=fields.number("min_p", defaults.min_p, 0, 1),
        repetition_penalty=fields.number(
            "repetition_penalty", defaults.repetition_penalty, 1e-3, 1e3
        ),
        seed=_seed(fields, defaults),
        ignore_eos=fields.boolean("ignore_eos", False),
        stop=tuple(stops),
    )
    _check_other_names(fields, settings)
    return settings


def _check_other_names(fields: Fields, settings: GenerationSettings) -> None:
    """Refuses a setting under another server's name that differs from the request's own."""
    own = {
        "max_tokens": settings.max_new_tokens,
        "seed": fields.take("seed"),
        "repetition_penalty": settings.repetition_penalty,
        "stop": list(settings.stop),
    }
    for other, name in OTHER_NAMES.items():
        value = fields.take(other)
        is_no_limit = name == "max_tokens" and value == -1
        if value is not None and value != own[name] and not is_no_limit:
            fields.refuse(other, f"{NOT_SUPPORTED}; {name} is its name here")
    for name in PENALTY_WINDOWS:
        window = fields.integer(name, -1, -1, 2**31 - 1)
        if window != -1 and settings.repetition_penalty != 1:
            fields.refuse(name, f"{NOT_SUPPORTED}; repetition_penalty looks at all tokens")


def _check_limits(fields: Fields, num_prompt: int, settings: GenerationSettings) -> None:
    """Refuses limits of lengths that would cut this prompt or its answer."""
    for names, length in (
        (PROMPT_LIMITS, num_prompt),
        (CONTEXT_LIMITS, num_prompt + settings.max_new_tokens),
    ):
        for name in names:
            most = fields.integer(name, -1, -1, 2**31 - 1)
            if most != -1 and most < length:
                fields.refuse(name, f"{most} is less than the {length} tokens asked for")


def _seed(fields: Fields, defaults: GenerationSettings) -> int:
    """Seed of the request in 32 bits, or the server's; 0 there draws one."""
    default = defaults.seeds(1)[0] or secrets.randbelow(NUM_SEEDS)
    return fields.integer("seed", default, -(2**63), 2**63 - 1) % NUM_SEEDS


def _shape(fields: Fields) -> tuple[int, dict[str, Any]]:
    """Reads the number of choices, and `Request`'s fields about streaming."""
    count = fields.integer("n", 1, 1, 128)
    stream = fields.boolean("stream", False)
    options = fields.mapping("stream_options")
    if options and not stream:
        fields.refuse("stream_options", "needs stream=true")
    own = Fields(options, "stream_options.")
    include_usage = own.boolean("include_usage", False)
    continuous_usage = own.boolean("continuous_usage_stats", False)
    own.refuse_unknown(("include_obfuscation",))
    fields.refuse_but(NEUTRAL, NOT_SUPPORTED)
    # The lengths are checked once the prompt's is known.
    ignored = fields.refuse_unknown((*IGNORED, *LOGGED, *PROMPT_LIMITS, *CONTEXT_LIMITS))
    return count, {
        "stream": stream, "include_usage": include_usage, "continuous_usage": continuous_usage,
        "ignored": tuple(name for name in ignored if name in LOGGED),
    }  # fmt: skip
