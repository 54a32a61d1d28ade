"""Requests of /tokenize and /detokenize, with the fields of vLLM and of llama.cpp."""

from collections.abc import Mapping
from typing import Any

from moejax.errors import MoejaxError
from moejax.serving.errors import ApiError
from moejax.serving.fields import Fields
from moejax.serving.requests import NOT_SUPPORTED, Conversation, ModelFacts, check_model


def read_tokenize(body: Mapping[str, Any], model: ModelFacts) -> dict[str, Any]:
    """Tokens of `prompt` or `messages` (vLLM), or of `content` (llama.cpp).

    Raises:
      ApiError: naming the field that is wrong, or the text is far longer than the context.
    """
    fields = Fields(body)
    check_model(fields, model)
    given = [name for name in ("prompt", "messages", "content") if fields.take(name) is not None]
    if len(given) != 1:
        fields.refuse("prompt", "give one of prompt, messages and content")
    [name] = given
    if name == "messages":
        conversation, text, adds = Conversation.read(fields, model), "", False
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
    model.refuse_early(text, name)
    try:
        tokens = model.tokenizer.encode(text, add_special_tokens=adds)
    except MoejaxError as error:
        raise ApiError(str(error), param=name) from error
    return {"count": len(tokens), "max_model_len": model.longest_prompt + 1, "tokens": tokens}


def read_detokenize(body: Mapping[str, Any], model: ModelFacts) -> dict[str, Any]:
    """Text of `tokens`, special ones too, as `prompt` (vLLM) and `content` (llama.cpp)."""
    fields = Fields(body)
    check_model(fields, model)
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
