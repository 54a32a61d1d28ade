"""A fixed set of programs that serves every request, compiled before the first one.

Compiling takes seconds to minutes, in which the server answers nobody, so no request may need a
program of its own: rows, prompts and caches are padded to a few sizes, and sampling has two forms.
"""

import dataclasses
import time
from collections.abc import Sequence

from moejax.engine import STEPS_PER_CALL, Engine
from moejax.errors import print_stderr
from moejax.inference.batch import RowBatch
from moejax.inference.chunking import FixedSizes
from moejax.inference.generation import GenerationSettings
from moejax.serving.requests import MOST_LOGPROBS

# By platform: a GPU pads at little cost, and compiles for longer.
ROWS_FACTOR = {"cpu": 4, "gpu": 16}  # from one size of a batch to the next
CHUNKS = {"cpu": (64, 256), "gpu": (64, 1024)}
KV_LENGTHS = {"cpu": (), "gpu": (1024,)}  # beside S; a CPU's programs choose among several


@dataclasses.dataclass(frozen=True)
class ServerPrograms:
    """The programs of one server."""

    rows: tuple[int, ...]  # sizes of batches, rising
    sizes: FixedSizes  # sizes of prompts and caches

    @classmethod
    def of(cls, engine: Engine, max_batch: int) -> "ServerPrograms":
        """Fixes the sizes of an engine's calls, its context among them."""
        platform = engine.device.platform
        rows = [1]
        while rows[-1] * ROWS_FACTOR[platform] < max_batch:
            rows.append(rows[-1] * ROWS_FACTOR[platform])
        sizes = engine.fix_sizes(max_batch, CHUNKS[platform], KV_LENGTHS[platform])
        return cls(tuple(sorted({*rows, max_batch})), sizes)

    def begin(
        self,
        engine: Engine,
        prompts: list[list[int]],
        settings: Sequence[GenerationSettings],
        wants_logprobs: bool,
    ) -> RowBatch:
        """A batch that has not run yet.

        Greedy rows run without sampling, a sort of the whole vocabulary, where all are greedy; one
        other form samples, penalizes and tells log-probabilities.
        """
        is_plain = not wants_logprobs and all(map(_is_plain, settings))
        return engine.batch(
            prompts,
            settings,
            size=next(size for size in self.rows if size >= len(prompts)),
            top_logprobs=0 if is_plain else MOST_LOGPROBS,
            steps_per_call=STEPS_PER_CALL,
            any_settings=not is_plain,
        )

    def compile(self, engine: Engine) -> None:
        """Compiles all programs by running batches; reports progress on stderr."""
        started = time.monotonic()
        settings = GenerationSettings(ignore_eos=True, max_new_tokens=STEPS_PER_CALL + 3)
        for number, size in enumerate(self.rows):
            which = f"({number + 1} of {len(self.rows)})"
            print_stderr(f"compiling for {size} row{'s' * (size > 1)} {which}")
            smaller = self.rows[number - 1] if number else 0
            for length in self.sizes.probes():
                for wants_logprobs in (False, True):
                    prompts = [[0] * length] + [[0]] * smaller
                    live = self.begin(engine, prompts, [settings] * len(prompts), wants_logprobs)
                    _run(live, len(prompts))
        print_stderr(f"compiled {engine.num_traces} programs in {time.monotonic() - started:.0f} s")


def _run(live: RowBatch, num_rows: int) -> None:
    """A call of one step, then whole ones; rows but the first end early."""
    live.steps_per_call = 1
    for number, _ in enumerate(live.steps()):
        if number == 1:
            live.steps_per_call = STEPS_PER_CALL
            for row in range(1, num_rows):
                live.finish_row(row)


def _is_plain(settings: GenerationSettings) -> bool:
    return settings.temperature == 0 and settings.repetition_penalty == 1
