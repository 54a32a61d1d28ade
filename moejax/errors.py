"""Errors that a user can cause and mend; the mains print their text as one line."""

import re
import sys

_MOST_CHARACTERS = 4000
# Control characters but tab and newline, and those that turn the direction of text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Escapes a text for terminals and logs: ESC is written \x1b; bounded in length."""
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]} ... ({len(text):,} characters) ... {text[-half:]}"
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def print_stderr(*lines: str) -> None:
    """Prints lines to stderr, where users look for what is no result."""
    for line in lines:
        print(line, file=sys.stderr)


class MoejaxError(Exception):
    """A mistake in the input; one line names the thing and the mend."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))
