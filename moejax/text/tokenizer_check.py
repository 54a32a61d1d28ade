"""Refuses tokenizer.json files that would end the process, hang it, or fill the memory.

The tokenizers library trusts its files: some make it panic (a few of these end the process), others
expand one character to millions. Here the file's parts are checked before the library reads them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moejax.errors import MoejaxError
from moejax.text.token_bytes import flat

# Every type of the library's parts (0.23), but for `Precompiled`, a binary table that it trusts.
_TYPES = {
    "normalizer": (
        "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Prepend",
        "Replace", "Sequence", "Strip", "StripAccents",
    ),
    "pre_tokenizer": (
        "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace",
        "Punctuation", "Sequence", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
    ),
    "post_processor": (
        "BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing",
    ),
    "decoder": (
        "BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace",
        "Sequence", "Strip", "WordPiece",
    ),
}  # fmt: skip
_MOST_PARTS = 16
_MOST_GROWTH = 64  # characters of one, by all replacements one after the other
_MOST_PREPENDED = 16  # characters
_MOST_PIECES = 64  # of a template, and ids of one of them
_MOST_TOKEN = 4096  # characters of a token
_MOST_ADDED = 100_000  # tokens

Part = Mapping[str, Any]


def check_tokenizer(fields: Part) -> None:
    """Checks the fields of a tokenizer.json; a MoejaxError names the part that is not usable."""
    try:
        parts = {name: list(flat(fields.get(name))) for name in _TYPES}
        for name, found in parts.items():
            _check_parts(name, found)
        added = fields.get("added_tokens") or []
        _check_texts("an added token", [token["content"] for token in added])
        if len(added) > _MOST_ADDED:
            raise MoejaxError(f"it has {len(added):,} added tokens, at most {_MOST_ADDED:,} may be")
        # Bytes are characters that are all in the vocabulary: nothing is unknown.
        before = (*parts["normalizer"], *parts["pre_tokenizer"])
        _check_model(fields["model"], any(part["type"] == "ByteLevel" for part in before))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise MoejaxError(f"it is not understood ({type(error).__name__}: {error})") from error


def _check_parts(name: str, parts: Sequence[Part]) -> None:
    for part in parts:
        if part["type"] not in _TYPES[name]:
            raise MoejaxError(f"its {name} has the type {part['type']!r}, which is not supported")
    if len(parts) > _MOST_PARTS:
        raise MoejaxError(f"its {name} has {len(parts)} parts, at most {_MOST_PARTS} may be")
    # A second ByteLevel turns bytes as characters into bytes again, more each time.
    if sum(part["type"] == "ByteLevel" for part in parts) > 1:
        raise MoejaxError(f"its {name} has ByteLevel twice")
    growth = math.prod(_growth(part) for part in parts)
    if growth > _MOST_GROWTH:
        raise MoejaxError(
            f"its {name} makes {growth:,} characters of one, at most {_MOST_GROWTH} may be"
        )
    for part in parts:
        if part["type"] == "Prepend" and len(part["prepend"]) > _MOST_PREPENDED:
            raise MoejaxError(f"its {name} puts {len(part['prepend'])} characters before each text")
        if part["type"] == "FixedLength" and not part["length"] > 0:
            raise MoejaxError(f"its {name} makes pieces of length {part['length']!r}")
        if name == "decoder" and part["type"] == "Strip" and part["stop"] != 0:
            raise MoejaxError("its decoder strips the end of tokens, which is not supported")
        if part["type"] == "TemplateProcessing":
            _check_template(part)


def _growth(part: Part) -> int:
    """Most characters that a `Replace` makes of one; 1 for other types, which make few."""
    if part["type"] != "Replace":
        return 1
    content, pattern = part["content"], part["pattern"]
    if "String" not in pattern:
        return len(content) + 1  # an expression may stand for nothing, between characters
    if not pattern["String"]:
        return len(content) + 1
    return max(1, -(-len(content) // len(pattern["String"])))


def _check_template(part: Part) -> None:
    """Checks that a template has its text once, and only known special tokens."""
    pieces, special = part["single"], part["special_tokens"]
    sequences = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
    if sequences not in (["A"], []) or len(pieces) > _MOST_PIECES:
        raise MoejaxError(
            f"its post_processor has a template of {len(pieces)} pieces with the texts "
            f"{sequences[:3]}, expected one text A and at most {_MOST_PIECES} pieces"
        )
    for piece in pieces:
        if "Sequence" in piece:
            continue
        token = piece["SpecialToken"]["id"]
        if token not in special:
            raise MoejaxError(f"its post_processor puts {token!r}, which is none of its tokens")
        if not 0 < len(special[token]["ids"]) <= _MOST_PIECES:
            raise MoejaxError(f"its post_processor has {token!r} with as many ids as no token has")


def _check_model(model: Part, by_bytes: bool) -> None:
    vocab = model["vocab"]
    texts = list(vocab) if isinstance(vocab, dict) else [entry[0] for entry in vocab]
    _check_texts("a token", texts)
    if "merges" in model and (prefix := model.get("continuing_subword_prefix")):
        raise MoejaxError(
            f"its model has continuing_subword_prefix {prefix!r}, which is not supported"
        )
    unknown = model.get("unk_token")
    if unknown and unknown not in vocab and not by_bytes:
        raise MoejaxError(f"its unknown token {unknown!r} is not in its vocabulary")


def _check_texts(what: str, texts: Sequence[str]) -> None:
    if (most := max(map(len, texts), default=0)) > _MOST_TOKEN:
        raise MoejaxError(f"it has {what} of {most:,} characters, at most {_MOST_TOKEN:,} may be")
