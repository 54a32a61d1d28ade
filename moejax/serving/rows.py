"""Rows, answers on their way from a request to the batch and back, and their queue."""

import dataclasses
import time
from collections.abc import Callable

from moejax.inference.batch import TokenLogprob
from moejax.inference.generation import FinishReason, GenerationSettings
from moejax.serving.errors import ApiError


@dataclasses.dataclass(frozen=True)
class AnswerPart:
    """A piece of a row's answer, all of it, or its error.

    `finish_reason` or `error` is set on a row's last part.
    """

    row: int  # of the request's rows
    text: str = ""
    num_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: ApiError | None = None
    thoughts: str = ""


@dataclasses.dataclass(eq=False)
class Row:
    """One prompt that wants one answer."""

    index: int  # among the request's rows
    prompt: list[int]  # token ids
    settings: GenerationSettings  # sampling settings, with an integer seed
    wants_logprobs: bool  # whether parts tell them
    stream: bool  # whether parts are told as they come; else one at the end
    deliver: Callable[[AnswerPart], None]  # takes parts, in the batcher's thread
    client: str = ""  # owner of the row, in whose turn it runs
    is_chat: bool = False  # whether thoughts are told apart
    cancelled: bool = False  # set from any thread when nobody reads the answer any more
    # seconds of `time.monotonic`
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    started: float = 0.0  # when it left the queue
    first_token_at: float | None = None
    num_tokens: int = 0
    num_shared: int = 0  # first tokens of its prompt that were not run again
    told: list[AnswerPart] = dataclasses.field(default_factory=list)  # what waits for the end

    def tell(self, part: AnswerPart) -> None:
        """Delivers a part, or keeps it for the end."""
        self.num_tokens += part.num_tokens
        if self.stream or part.error:
            self.deliver(part)
            return
        self.told.append(part)
        if part.finish_reason:
            self.deliver(
                AnswerPart(
                    self.index,
                    "".join(one.text for one in self.told),
                    self.num_tokens,
                    tuple(told for one in self.told for told in one.logprobs),
                    part.finish_reason,
                    thoughts="".join(one.thoughts for one in self.told),
                )
            )

    def fail(self, error: ApiError) -> None:
        """Ends the row with an error."""
        self.tell(AnswerPart(self.index, error=error))
