"""Calls of litellm for `clients.py`; prints a JSON object, each answer beside its name there."""

import asyncio
import importlib.metadata
import json
import sys
from collections.abc import Callable
from typing import Any

MESSAGES = [{"role": "user", "content": "Who was Newton?"}]
WANTED: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "num_retries": 0}


def main(url: str, key: str) -> None:
    """Asks in every way that litellm has for such a server."""
    import litellm  # which the environment of the other scripts lacks

    how = {"api_base": url, "api_key": key, **WANTED}
    found: dict[str, tuple[str, Any]] = {}
    answer = litellm.completion("openai/demo", messages=MESSAGES, **how)
    found["chat, whole"] = ("chat", answer.choices[0].message.content)
    found["chat, its tokens"] = ("chat_tokens", answer.usage.completion_tokens)
    assert answer.timings["predicted_n"] == answer.usage.completion_tokens
    told = litellm.completion(
        "openai/demo", messages=MESSAGES, logprobs=True, top_logprobs=2, **how
    ).choices[0]
    texts = "".join(one["token"] for one in told.logprobs["content"])
    found["chat, tokens of its log-probabilities"] = ("chat", texts)
    options = {"include_usage": True}
    chunks = list(
        litellm.completion(
            "openai/demo", messages=MESSAGES, stream=True, stream_options=options, **how
        )
    )
    texts = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    found["chat, stream"] = ("chat", texts)
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    found["chat, stream, built"] = ("chat", built.choices[0].message.content)
    found["chat, stream, its tokens"] = ("chat_tokens", built.usage.completion_tokens)
    asked = {"model": "text-completion-openai/demo", "prompt": "The history of"}
    text = litellm.text_completion(**asked, **how)
    found["completion, whole"] = ("text", text.choices[0].text)
    stream = litellm.text_completion(**asked, stream=True, **how)
    found["completion, stream"] = ("text", "".join(one.choices[0].text or "" for one in stream))
    hosted = litellm.completion("hosted_vllm/demo", messages=MESSAGES, **how)
    found["chat, as of a vLLM server"] = ("chat", hosted.choices[0].message.content)
    for number, other in enumerate(asyncio.run(at_once(litellm.acompletion, how))):
        found[f"chat, at once {number}"] = ("chat", other)
    for kind, more in (
        (litellm.AuthenticationError, {"api_key": "no"}),
        (litellm.NotFoundError, {"model": "openai/other"}),
        (litellm.BadRequestError, {"max_tokens": -1}),
        (
            litellm.ContextWindowExceededError,
            {"messages": [{"role": "user", "content": "a b " * 9000}]},
        ),
    ):
        given = {"model": "openai/demo", "messages": MESSAGES, **how, **more}
        try:
            litellm.completion(**given)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")
    print(json.dumps({**found, "version": importlib.metadata.version("litellm")}))


async def at_once(ask: Callable[..., Any], how: dict[str, Any]) -> list[str]:
    """Answers of four asynchronous calls."""
    calls = [ask("openai/demo", messages=MESSAGES, **how) for _ in range(4)]
    return [one.choices[0].message.content for one in await asyncio.gather(*calls)]


if __name__ == "__main__":
    main(*sys.argv[1:])
