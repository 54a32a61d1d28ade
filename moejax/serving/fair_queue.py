"""Queue of waiting rows: clients take turns, and so do each one's requests."""

import collections
from collections.abc import Callable, Sequence
from typing import TypeVar

from moejax.serving.rows import Row

_K = TypeVar("_K")
_V = TypeVar("_V")


class FairQueue:
    """Queue in which no client waits for all rows of another.

    `take` goes from client to client and, within a client, from request to request, one row each;
    the rows of a request keep their order. Not safe across threads.
    """

    def __init__(self) -> None:
        # Whose turn is next stands first; a key that is put back goes to the end.
        self._clients: dict[str, dict[int, collections.deque[Row]]] = {}
        self._num_requests = 0
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def has(self, client: str) -> bool:
        """Whether rows of a client wait."""
        return client in self._clients

    def add(self, rows: Sequence[Row]) -> None:
        """Adds the rows of one request, at least one, all of one client."""
        requests = self._clients.setdefault(rows[0].client, {})
        requests[self._num_requests] = collections.deque(rows)
        self._num_requests += 1
        self._num_rows += len(rows)

    def take(self, count: int) -> list[Row]:
        """Removes the next rows, at most `count`."""
        taken: list[Row] = []
        while self._clients and len(taken) < count:
            client, requests = _pop_first(self._clients)
            request, rows = _pop_first(requests)
            taken.append(rows.popleft())
            if rows:
                requests[request] = rows
            if requests:
                self._clients[client] = requests
        self._num_rows -= len(taken)
        return taken

    def drop(self, is_over: Callable[[Row], bool]) -> None:
        """Removes the rows that are over; turns stay as they are."""
        for client, requests in list(self._clients.items()):
            for request, rows in list(requests.items()):
                kept = collections.deque(row for row in rows if not is_over(row))
                self._num_rows -= len(rows) - len(kept)
                requests[request] = kept
                if not kept:
                    del requests[request]
            if not requests:
                del self._clients[client]


def _pop_first(of: dict[_K, _V]) -> tuple[_K, _V]:
    key = next(iter(of))
    return key, of.pop(key)
