"""Text of tokens that come one by one."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoders write it for half a character


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
