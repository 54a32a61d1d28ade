"""Answers as JSON objects of OpenAI's API, whole or in chunks."""

import dataclasses
import math
import time
from typing import Any

from moejax.inference.batch import TokenLogprob
from moejax.serving.requests import Request
from moejax.serving.rows import AnswerPart
from moejax.text.tokenizer import Tokenizer

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
_LEAST = -9999.0  # JSON has no infinity; OpenAI's API writes this


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds of a request by the server's clock."""

    prompt_s: float  # from its arrival to its first token, waiting included
    decode_s: float  # from then to its last token
    num_cached: int = 0  # tokens of its prompts that the cache held, and that were not run

    def of(self, num_prompt: int, num_new: int) -> dict[str, float]:
        """The object `timings`, with llama.cpp's names; the first token is the prompt's."""
        num_run = num_prompt - self.num_cached
        return {
            "cache_n": self.num_cached,
            **_pace("prompt", num_run, self.prompt_s, num_run),
            **_pace("predicted", num_new, self.decode_s, max(0, num_new - 1)),
        }


def _pace(name: str, count: int, seconds: float, num_timed: int) -> dict[str, float]:
    """Tokens, milliseconds and rates; the rates are of the tokens within the seconds."""
    return {
        f"{name}_n": count,
        f"{name}_ms": round(1e3 * seconds, 3),
        f"{name}_per_token_ms": round(1e3 * seconds / max(1, num_timed), 3),
        f"{name}_per_second": round(num_timed / seconds, 3) if seconds > 0 else 0.0,
    }


class TokenTexts:
    """Texts of single tokens, each decoded once."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._found: dict[int, str] = {}

    def of(self, token: int) -> str:
        """Text of a token inside a text: decoders drop a leading space."""
        if (text := self._found.get(token)) is None:
            once = self._tokenizer.decode([token], skip_special_tokens=False)
            twice = self._tokenizer.decode([token, token], skip_special_tokens=False)
            text = self._found[token] = twice[len(once) :]
        return text


class AnswerWriter:
    """Writes the answer of one request."""

    def __init__(
        self,
        request: Request,
        request_id: str,
        model_name: str,
        texts: TokenTexts,
        eos_ids: tuple[int, ...],
    ):
        """Writes nothing yet."""
        self._request = request
        self._texts = texts
        self._eos_ids = eos_ids
        self._num_new = 0
        self._offsets = [len(text) for text in request.echo]
        self._held: dict[int, list[TokenLogprob]] = {}  # of tokens whose text is still held back
        self._begun: set[int] = set()
        kind = "chat.completion" if request.is_chat else "text_completion"
        prefix = "chatcmpl" if request.is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model_name,
        }

    def _usage(self) -> dict[str, int]:
        """Tokens so far; those that end an answer are counted."""
        prompt = self._request.num_prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_new,
            "total_tokens": prompt + self._num_new,
        }

    def _ended(self, timings: Timings) -> dict[str, Any]:
        """The counts of tokens, and beside them, as llama.cpp has it, how long they took."""
        times = timings.of(self._request.num_prompt_tokens, self._num_new)
        usage = {**self._usage(), "prompt_tokens_details": {"cached_tokens": timings.num_cached}}
        return {"usage": usage, "timings": times}

    def log_line(self, timings: Timings) -> str:
        """Tokens and their times, for the log."""
        num_prompt, num_new = self._request.num_prompt_tokens, self._num_new
        rate = timings.of(num_prompt, num_new)["predicted_per_second"]
        said = f"{num_prompt} + {num_new} tokens, the first after {timings.prompt_s:.3f} s"
        return f"{said}, {rate:.1f} tokens/s"

    def whole(self, parts: list[AnswerPart], timings: Timings) -> dict[str, Any]:
        """The answer of a request that does not stream: one part a row, in order."""
        choices = []
        for part in parts:
            self._num_new += part.num_tokens
            choice: dict[str, Any] = {"index": part.row}
            if self._request.is_chat:
                message = {"role": "assistant", "content": part.text, "refusal": None}
                choice["message"] = message | _thoughts(part)
            else:
                choice["text"] = self._request.echo[part.row] + part.text
            choice["logprobs"] = self._logprobs(part.row, part.logprobs)
            choice["finish_reason"] = FINISH_REASONS[part.finish_reason or "length"]
            choices.append(choice)
        return {**self._head, "choices": choices, **self._ended(timings)}

    def chunks(self, part: AnswerPart) -> list[dict[str, Any]]:
        """Returns a part's stream chunks; none while its text is held back."""
        self._num_new += part.num_tokens
        held = self._held.setdefault(part.row, [])
        held += part.logprobs
        first = part.row not in self._begun
        thoughts = _thoughts(part) if self._request.is_chat else {}
        has_news = part.text or part.finish_reason or thoughts
        if not has_news and not (first and self._request.is_chat):
            return []
        self._begun.add(part.row)
        chunks = []
        if self._request.is_chat and first:
            chunks.append(self._chunk(part.row, {"role": "assistant", "content": ""}))
        text = part.text
        if not self._request.is_chat and first:
            text = self._request.echo[part.row] + text
        if text or held or thoughts:
            delta: Any = text
            if self._request.is_chat:
                delta = thoughts | ({"content": text} if text or not thoughts else {})
            chunks.append(self._chunk(part.row, delta, tuple(held)))
            self._held[part.row] = []
        if part.finish_reason:
            reason = FINISH_REASONS[part.finish_reason]
            chunks.append(self._chunk(part.row, {} if self._request.is_chat else "", (), reason))
        return chunks

    def last_chunk(self, timings: Timings) -> dict[str, Any] | None:
        """The counts of tokens and their times, where the request asks for them."""
        if not self._request.include_usage:
            return None
        return {**self._chunk_head(), "choices": [], **self._ended(timings)}

    def _chunk_head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._request.is_chat else "text_completion"
        return {**self._head, "object": kind}

    def _chunk(
        self,
        row: int,
        said: Any,
        logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": row,
            "delta" if self._request.is_chat else "text": said,
            "logprobs": self._logprobs(row, logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }
        chunk = {**self._chunk_head(), "choices": [choice]}
        if self._request.continuous_usage:
            return {**chunk, "usage": self._usage()}
        return {**chunk, "usage": None} if self._request.include_usage else chunk

    def _logprobs(self, row: int, told: tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
        """Log-probabilities of all tokens but the one that ends the answer."""
        count = self._request.top_logprobs
        if count is None:
            return None
        told = tuple(one for one in told if one.token not in self._eos_ids)
        if self._request.is_chat:
            content = [
                {
                    **self._token(one.token, one.logprob),
                    "top_logprobs": [self._token(*pair) for pair in one.top[:count]],
                }
                for one in told
            ]
            return {"content": content, "refusal": None}
        tokens = [self._texts.of(one.token) for one in told]
        offsets = []
        for text in tokens:
            offsets.append(self._offsets[row])
            self._offsets[row] += len(text)
        tops = [
            {self._texts.of(token): _finite(logprob) for token, logprob in one.top[:count]}
            for one in told
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(one.logprob) for one in told],
            "top_logprobs": tops if count else None,
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._texts.of(token)
        known = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": known}


def _thoughts(part: AnswerPart) -> dict[str, str]:
    """The field for thoughts, as DeepSeek's API, llama.cpp and vLLM name it; or none."""
    return {"reasoning_content": part.thoughts} if part.thoughts else {}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST) if math.isfinite(logprob) else _LEAST
