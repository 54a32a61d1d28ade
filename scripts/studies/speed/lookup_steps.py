"""Prompt lookup on a known answer: drafts, verify steps, and the routing of their tokens."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

LONGEST = 3  # tokens of an n-gram that is looked up first


@dataclasses.dataclass(frozen=True)
class Verify:
    """One step of the model: the last known token and a draft, of which the first part is right."""

    last: int  # position of the last known token
    sources: tuple[int, ...]  # positions that the draft's tokens were copied from
    accepted: int  # tokens of the draft that are the answer's

    @property
    def rows(self) -> list[int]:
        """Positions whose routing stands for the step's rows: a wrong token has its source's."""
        right = range(self.last, self.last + self.accepted + 1)
        return [*right, *self.sources[self.accepted :]]


def verify_steps(
    prompt: Sequence[int], answer: Sequence[int], *, k: int, shortest: int
) -> Iterator[Verify]:
    """Decode steps of an answer whose first token the prompt's pass gives.

    A draft is what followed the latest earlier place of the last `LONGEST` tokens in prompt and
    answer, else of fewer down to `shortest`; at most k tokens, none where nothing is found or k is
    0. Then the draft's rows are idle.
    """
    tokens, known = [*prompt, *answer], len(prompt) + 1
    sizes = range(LONGEST, shortest - 1, -1)
    places: dict[tuple[int, ...], int] = {}  # an n-gram's latest continuation
    noted = 0
    while known < len(tokens):
        for end in range(noted + 1, known):  # the last n-gram itself has no continuation yet
            for n in sizes:
                if end >= n:
                    places[tuple(tokens[end - n : end])] = end
        noted = known - 1
        grams = (tuple(tokens[known - n : known]) for n in sizes)
        start = next((places[gram] for gram in grams if gram in places), known)
        sources = tuple(range(start, min(start + k, known)))
        accepted = 0
        while (
            accepted < len(sources)
            and known + accepted < len(tokens) - 1  # the last token comes without a draft
            and tokens[sources[accepted]] == tokens[known + accepted]
        ):
            accepted += 1
        yield Verify(known - 1, sources, accepted)
        known += accepted + 1


def token_rows(pieces: Sequence[str], offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """int[len(pieces)]: the token of another tokenizer that has each piece's last character.

    Args:
      pieces: of one text, in their order.
      offsets: first and last character + 1 of each token of the other tokenizer.
    """
    last = np.maximum(np.cumsum([len(piece) for piece in pieces]) - 1, 0)
    ends = np.array([end for _, end in offsets])
    return np.minimum(np.searchsorted(ends, last, side="right"), len(ends) - 1)
