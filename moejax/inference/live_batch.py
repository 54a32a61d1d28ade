"""A batch whose rows have settings of their own and end one by one: what a server runs."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moejax.inference.generation import AnswerBuilder, FinishReason, GenerationSettings
from moejax.inference.runner import Runner
from moejax.inference.step_output import NOT_FINITE, StepOutput


class TokenLogprob(NamedTuple):
    """A new token, the logarithm of its probability, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Piece(NamedTuple):
    """One call's addition to a row's answer; `error` says why a row ended without a reason."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # () where none are told
    finish_reason: FinishReason | None
    error: str = ""


class LiveBatch:
    """Some prompts on their way through the model together.

    A row's answer is what its prompt would get alone (see `Engine.generate` on rounding). Rows that
    have ended, by themselves or by `end`, rest: their experts are neither run nor counted.

    Attributes:
      steps_per_call: decode steps of the next call; may change at any time, from 1 to the most.
    """

    def __init__(
        self,
        runner: Runner,
        prompts: list[list[int]],
        settings: Sequence[GenerationSettings],
        builders: list[AnswerBuilder],
        cache_length: int,
        eos_ids: tuple[int, ...],
        *,
        size: int = 0,
        top_logprobs: int = 0,
        steps_per_call: int = 1,
        most_steps: int = 1,
        any_settings: bool = False,
    ):
        """Runs nothing yet.

        Args:
          runner: of the model.
          prompts: token ids, none empty.
          settings: of each prompt, with an integer seed.
          builders: of each answer.
          cache_length: S, longer than every prompt.
          eos_ids: tokens that end a row, unless its settings ignore them.
          size: rows that the programs have; the rest are empty. 0: as many as there are prompts.
          top_logprobs: likeliest tokens told with each new one, and its own logprob; 0: nothing is.
          steps_per_call: see the class.
          most_steps: its limit, for which the programs are compiled. Where they run all of their
            steps, fewer are run one by one.
          any_settings: see `Runner.prefill`.
        """
        rest = max(size, len(prompts)) - len(prompts)
        self._runner = runner
        self._prompts = prompts + [[]] * rest
        self._settings = [*settings, *[GenerationSettings(temperature=0.0)] * rest]
        self._builders = builders
        self._room = [
            min(own.max_new_tokens, cache_length - len(prompt) + 1)
            for prompt, own in zip(prompts, settings, strict=True)
        ]
        self._cache_length = cache_length
        self._eos_ids = eos_ids
        self._top_logprobs = top_logprobs
        self._most_steps = most_steps
        self._any_settings = any_settings
        self.steps_per_call = steps_per_call
        self._ended = np.zeros(len(self._prompts), bool)
        self._to_end = self._ended.copy()

    def end(self, row: int) -> None:
        """Nothing more is wanted of a row; it gets no more pieces."""
        self._ended[row] = True
        self._to_end[row] = True

    def run(self) -> Iterator[list[Piece | None]]:
        """Yields what each row has got, None for rows that have ended, until all have.

        The first token is read before decoding is dispatched; later, a call is dispatched before
        the tokens of the last one are read.
        """
        session = self._runner.prefill(
            self._prompts, self._cache_length, self._settings, self._eos_ids, self._top_logprobs,
            self._any_settings,
        )  # fmt: skip
        num_steps = 1  # whose tokens were asked for

        def dispatch() -> StepOutput | None:
            nonlocal num_steps
            live = [room for room, ended in zip(self._room, self._ended, strict=False) if not ended]
            left = max(live, default=0) - num_steps
            if left <= 0:
                return None
            if self._to_end.any():
                self._runner.end_rows(session, self._to_end)
                self._to_end = np.zeros_like(self._to_end)
            count, most = min(self.steps_per_call, self._most_steps, left), self._most_steps
            if count < most and self._runner.runs_whole_calls:
                count = most = 1
            self._runner.decode(session, count, most)
            num_steps += count
            return session.emitted

        yield self._read(session.emitted, session.since)
        pending = dispatch()
        while pending is not None and not self._ended[: len(self._room)].all():
            following = dispatch()
            yield self._read(pending, session.since)
            pending = following

    def _read(self, emitted: StepOutput, since: int) -> list[Piece | None]:
        with self._runner.reading(since):
            tokens = np.asarray(emitted.tokens).tolist()
            told = emitted.logprobs
            values = [np.asarray(a) for a in (told.chosen, told.top, told.top_ids)] if told else []
        pieces: list[Piece | None] = []
        for row, builder in enumerate(self._builders):
            if self._ended[row]:
                pieces.append(None)
                continue
            text, kept, logprobs, error = "", [], [], ""
            for i, token in enumerate(tokens[row]):
                if token < 0 or builder.finish_reason:
                    is_lost = token == NOT_FINITE and not builder.finish_reason
                    error = self._runner.not_finite() if is_lost else ""
                    break
                text += builder.push(token)
                kept.append(token)
                if values:
                    chosen, top, top_ids = (value[row, i].tolist() for value in values)
                    pairs = tuple(zip(top_ids, top, strict=True))
                    logprobs.append(TokenLogprob(token, chosen, pairs))
            if builder.finish_reason or error:
                self.end(row)
            pieces.append(Piece(text, tuple(kept), tuple(logprobs), builder.finish_reason, error))
        return pieces
