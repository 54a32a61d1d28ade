"""Turns of prompts that run chunk by chunk."""

from collections.abc import Iterable, Mapping
from typing import Generic, Protocol, TypeVar

MOST_PASSED = 4  # chunks of short prompts before one of what they passed


class _Prompt(Protocol):
    """A prompt of a client."""

    client: str

    @property
    def num_left(self) -> int:
        """Tokens that are to be run."""
        ...


P = TypeVar("P", bound=_Prompt)
K = TypeVar("K")


class PromptTurns(Generic[P]):
    """Prompts of several clients, of which one chunk after the other runs.

    The client with the fewest tokens left in all is next, with its shortest prompt: a short prompt
    waits for one chunk of a long one at most, and a client gains nothing by many prompts. After
    `MOST_PASSED` such chunks comes one of the client, and of its prompts the one, that was passed
    most often; so of n that keep waiting each has a chunk in n * (`MOST_PASSED` + 1).
    """

    def __init__(self) -> None:
        self._passed: dict[P, int] = {}  # by arrival; within its client's turns
        self._clients_passed: dict[str, int] = {}
        self._num_short = 0  # chunks since one of what was passed

    def __bool__(self) -> bool:
        return bool(self._passed)

    def add(self, prompt: P) -> None:
        """Adds a prompt, which has not been passed."""
        self._passed[prompt] = 0
        self._clients_passed.setdefault(prompt.client, 0)

    def remove(self, prompt: P) -> None:
        """Removes a prompt whose tokens have run, or that has ended."""
        del self._passed[prompt]
        if not any(other.client == prompt.client for other in self._passed):
            del self._clients_passed[prompt.client]

    def next(self) -> P:
        """The prompt whose turn it is; `count` has to follow if its chunk runs."""
        left: dict[str, int] = {}
        for prompt in self._passed:
            left[prompt.client] = left.get(prompt.client, 0) + prompt.num_left
        client = self._first(left, self._clients_passed)
        own = {prompt: prompt.num_left for prompt in self._of(client)}
        return self._first(own, self._passed)

    def count(self, prompt: P) -> None:
        """Counts a chunk of a prompt as a turn that passed the others."""
        self._num_short = 0 if self._num_short >= MOST_PASSED else self._num_short + 1
        for client in self._clients_passed:
            self._clients_passed[client] += 1
        self._clients_passed[prompt.client] = 0
        for own in self._of(prompt.client):
            self._passed[own] += 1
        self._passed[prompt] = 0

    def _of(self, client: str) -> Iterable[P]:
        return [prompt for prompt in self._passed if prompt.client == client]

    def _first(self, left: Mapping[K, int], passed: Mapping[K, int]) -> K:
        """Chooses what has least left, or if it is its turn what was passed most often."""
        often = max(left, key=lambda key: passed[key])
        if self._num_short >= MOST_PASSED and passed[often] >= MOST_PASSED:
            return often
        return min(left, key=lambda key: left[key])
