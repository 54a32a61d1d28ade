"""A row: one answer on its way from a request to the batch and back."""

import dataclasses
import time
from collections.abc import Callable

from moejax.inference.batch import TokenLogprob
from moejax.inference.generation import FinishReason, GenerationSettings
from moejax.serving.errors import ApiError


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a row's answer, all of it, or its error.

    `finish_reason` or `error` is set on a row's last part.
    """

    row: int  # of the request's rows
    text: str = ""
    num_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: ApiError | None = None


@dataclasses.dataclass(eq=False)
class Row:
    """One prompt that wants one answer.

    Attributes:
      index: among the request's rows.
      prompt: token ids.
      settings: sampling settings, with an integer seed.
      wants_logprobs: whether parts tell them.
      stream: whether parts are told as they come; else one at the end.
      deliver: takes parts, in the batcher's thread.
      client: owner of the row, in whose turn it runs.
      cancelled: set from any thread when nobody reads the answer any more.
      arrived: seconds of `time.monotonic`.
    """

    index: int
    prompt: list[int]
    settings: GenerationSettings
    wants_logprobs: bool
    stream: bool
    deliver: Callable[[Part], None]
    client: str = ""
    cancelled: bool = False
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    first_token_at: float | None = None
    num_tokens: int = 0
    told: list[Part] = dataclasses.field(default_factory=list)  # what waits for the end

    def tell(self, part: Part) -> None:
        """Delivers a part, or keeps it for the end."""
        self.num_tokens += part.num_tokens
        if self.stream or part.error:
            self.deliver(part)
            return
        self.told.append(part)
        if part.finish_reason:
            self.deliver(
                Part(
                    self.index,
                    "".join(one.text for one in self.told),
                    self.num_tokens,
                    tuple(told for one in self.told for told in one.logprobs),
                    part.finish_reason,
                )
            )

    def fail(self, error: ApiError) -> None:
        """Ends the row with an error."""
        self.tell(Part(self.index, error=error))
