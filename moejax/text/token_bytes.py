"""Most bytes that a token can stand for, a lower bound on a text's tokens."""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

_INNER = ("normalizers", "pretokenizers", "processors", "decoders")  # the parts of a `Sequence`
_NFC_SHRINKS = 3  # U+1FEF has three bytes in UTF-8 and is a grave accent, of one


def most_token_bytes(serialized: str) -> int | None:
    """Most bytes of text that a token of a tokenizer's JSON can stand for; None if unlimited.

    BPE over bytes, or with all bytes as fallback, has a limit if its normalizers and splits keep
    all of a text.
    """
    parts = json.loads(serialized)
    normalizers, splits = (list(flat(parts[name])) for name in ("normalizer", "pre_tokenizer"))
    shrinks = 1
    for one in normalizers:
        if (times := _shrinks(one)) is None:
            return None
        shrinks *= times
    model, added = parts["model"], parts["added_tokens"]
    if model["type"] != "BPE" or any(token["lstrip"] or token["rstrip"] for token in added):
        return None  # a stripping token takes any number of spaces
    if not all(map(_keeps_all, splits)):
        return None
    vocab = model["vocab"]
    if any(one["type"] == "ByteLevel" for one in (*normalizers, *splits)):
        if sum(len(token) == 1 for token in vocab) < 256:
            return None  # bytes that are no token are left out
        longest = max(map(len, vocab))  # a byte is a character
    elif model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        longest = max(len(token.encode()) for token in vocab)
    else:
        return None
    return shrinks * max(longest, *(len(token["content"].encode()) for token in added), 1)


def flat(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yields the part that a tokenizer's field holds, or the parts of a `Sequence`, which nest."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for inner in itertools.chain(*(part.get(name, ()) for name in _INNER)):
        yield from flat(inner)


def _shrinks(normalizer: Mapping[str, Any]) -> int | None:
    """Largest factor by which a normalizer can shorten a text; None if unlimited."""
    kind = normalizer["type"]
    if kind == "NFC":
        return _NFC_SHRINKS
    if kind == "Replace" and "String" in normalizer["pattern"]:
        is_shorter = len(normalizer["content"].encode()) < len(
            normalizer["pattern"]["String"].encode()
        )
        return None if is_shorter else 1
    return 1 if kind in ("ByteLevel", "Prepend") else None


def _keeps_all(split: Mapping[str, Any]) -> bool:
    """Whether a split keeps all of a text."""
    if split["type"] in ("Split", "Punctuation"):
        return split["behavior"] != "Removed"
    return split["type"] in ("ByteLevel", "Digits", "Metaspace")
