"""Text of tokens that come one by one; of OpenAI's harmony format (gpt-oss) the final channel.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

A text without these tokens is its own answer.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoders write it for half a character
FINAL = "final"  # the channel for the user; others are for thoughts and tools
_ASSISTANT = "assistant"  # the role in a header without a channel


class TokenStream:
    """Decodes a growing sequence of tokens to text, never half a character.

    Invariant: what was returned so far, `flush()` included, is `decode()` of what was pushed, as
    long as the tokens spell valid UTF-8.

    A decoder looks at a token's neighbours (the first space of a text is dropped, bytes make up a
    character), so each piece is the difference of two decodings that begin at the same token: the
    first of the piece before.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []  # of the last piece, then those not yet returned
        self._num_returned = 0

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that has become certain, perhaps none."""
        self._ids.append(token_id)
        piece = self._pending()
        if not piece or piece.endswith(_REPLACEMENT):
            return ""
        del self._ids[: self._num_returned]
        self._num_returned = len(self._ids)
        return piece

    def flush(self) -> str:
        """Returns the remaining text: nothing, or an incomplete character's replacement."""
        piece = self._pending()
        self._num_returned = len(self._ids)
        return piece

    def _pending(self) -> str:
        returned = self._decode(self._ids[: self._num_returned])
        return self._decode(self._ids)[len(returned) :]


class Markers(NamedTuple):
    """Ids of the tokens around channels and messages."""

    start: int
    channel: int
    message: int
    end: int


def find_markers(token_id: Callable[[str], int | None]) -> Markers | None:
    """Looks up the markers; None where the tokenizer lacks one."""
    ids = [token_id(f"<|{name}|>") for name in Markers._fields]
    return None if None in ids else Markers(*(i for i in ids if i is not None))


class FinalChannelStream:
    """Decodes a growing answer to the text of its final channel, as `TokenStream` does a text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], markers: Markers):
        self._decode, self._markers = decode, markers
        self._text = TokenStream(decode)
        self._header: list[int] | None = None  # of the message to come; None inside a message
        self._is_shown = True

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that has become certain, perhaps none."""
        marks = self._markers
        if token_id in (marks.start, marks.channel, marks.end):
            rest = self.flush()
            self._text, self._header = TokenStream(self._decode), []
            return rest
        if token_id == marks.message:
            words = self._decode(self._header or []).split()
            self._is_shown = words in ([], [_ASSISTANT]) or words[0] == FINAL
            self._header = None
            return ""
        if self._header is not None:
            self._header.append(token_id)
            return ""
        return self._text.push(token_id) if self._is_shown else ""

    def flush(self) -> str:
        """Returns the remaining text: nothing, or an incomplete character's replacement."""
        return self._text.flush() if self._header is None and self._is_shown else ""
