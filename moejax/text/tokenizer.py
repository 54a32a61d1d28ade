"""Text to token ids and back by a checkpoint's tokenizer.json, whole or token by token."""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from moejax.errors import MoejaxError
from moejax.files.small import check_depth, parse_json, read_file
from moejax.models.hf.config import read_json, text_fields
from moejax.models.hf.defaults import default_eos_id
from moejax.models.hf.fields import flag
from moejax.text.chat_template import ChatRenderer, find_chat_template
from moejax.text.token_bytes import most_token_bytes
from moejax.text.tokenizer_check import check_tokenizer

Prompt = str | Sequence[int]

# Everything that `Tokenizer` reads, but for the eos tokens.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# Classes of transformers 4 that read two fields of tokenizer_config.json, and the fields' defaults.
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast", "DeepseekTokenizerFast")
_LLAMA_ADDS = {"add_bos_token": True, "add_eos_token": False}
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoders write it for half a character
# Channels for the user and for thoughts; others are for tools.
_FINAL, _ANALYSIS = "final", "analysis"
_ASSISTANT = "assistant"  # the role in a header without a channel


class _TokenStream:
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


class _Markers(NamedTuple):
    """Ids of the tokens around channels, messages and thoughts; -1 for none."""

    start: int
    channel: int
    message: int
    end: int
    think: int
    answer: int


class _ChannelStream:
    """Decodes a growing answer to its text, as `_TokenStream` does, and keeps thoughts apart.

    OpenAI's harmony format (gpt-oss):
    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    Of other models thoughts are between <think> and </think>. Without these tokens all is text.

    Attributes:
      thoughts: what the answer has of them so far.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], markers: _Markers, begins_thinking: bool
    ):
        self._decode, self._markers = decode, markers
        self._stream = _TokenStream(decode)
        self._header: list[int] | None = None  # of the message to come; None inside a message
        self._channel = _ANALYSIS if begins_thinking else _FINAL
        self.thoughts = ""

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that has become certain, perhaps none."""
        marks = self._markers
        if token_id in (marks.start, marks.channel, marks.end, marks.think, marks.answer):
            rest = self.flush()
            self._stream = _TokenStream(self._decode)
            if token_id in (marks.think, marks.answer):
                self._channel = _ANALYSIS if token_id == marks.think else _FINAL
            else:
                self._header = []
            return rest
        if token_id == marks.message:
            words = self._decode(self._header or []).split()
            if words in ([], [_ASSISTANT]):
                words = [_FINAL]
            is_for_tool = words[0] != _FINAL and any(word.startswith("to=") for word in words)
            self._channel = "" if is_for_tool else words[0]
            self._header = None
            return ""
        if self._header is not None:
            self._header.append(token_id)
            return ""
        return self._text_of(self._stream.push(token_id))

    def flush(self) -> str:
        """Returns the remaining text: nothing, or an incomplete character's replacement."""
        return self._text_of(self._stream.flush()) if self._header is None else ""

    def _text_of(self, piece: str) -> str:
        """The piece, if it is text; thoughts are kept, and other channels are for tools."""
        if self._channel == _ANALYSIS:
            self.thoughts += piece
        return piece if self._channel == _FINAL else ""


class Tokenizer:
    """Tokenizer of a checkpoint directory.

    Special tokens around a text are those of tokenizer.json's post-processor and, as in
    transformers 4, those that tokenizer_config.json asks for by `add_bos_token` (true where it is
    left out) and `add_eos_token` (false) if its `tokenizer_class` is LlamaTokenizer(Fast) or
    DeepSeek's subclass of it; DeepSeek's files have a post-processor that adds nothing. For other
    classes, such as Qwen2Tokenizer, the two fields mean nothing. A token that the post-processor
    adds is neither added twice nor, where its field is false, taken away, as transformers 4 would.
    transformers 5 reads neither field beside a tokenizer.json: it gives DeepSeek's prompts no bos.
    """

    def __init__(self, directory: Path, encoder: tokenizers.Tokenizer):
        encoder.no_truncation()  # a file may carry the settings of somebody's training run
        encoder.no_padding()
        self._encoder, self._failure = encoder, f"the tokenizer of {directory} failed"
        # text of "bos_token", "eos_token" and the like, for chat templates
        self.special_tokens = _special_tokens(directory)
        own = self._encode("", add_special_tokens=True).ids  # of the post-processor alone
        bos, eos = (self._asked_for(directory, name) for name in ("bos_token", "eos_token"))
        self._before = [i for i in bos if i not in own]
        self._after = [i for i in eos if i not in own]
        with _plain_errors(self._failure):
            self._num_behind = _num_behind(encoder)
        self.chat_template = find_chat_template(directory)  # Jinja source, or None
        self._renderer = ChatRenderer()

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer | None":
        """Loads a checkpoint's tokenizer; None without a tokenizer.json."""
        path = directory / "tokenizer.json"
        if not path.exists() and not path.is_symlink():
            return None
        try:
            content = read_file(path)
        except OSError as error:
            raise MoejaxError(f"cannot read {path}: {error}; download it again") from error
        try:
            fields = parse_json(content)
            check_depth(fields)
            check_tokenizer(fields)
        except (ValueError, MoejaxError) as error:
            raise MoejaxError(f"cannot read {path}: {error}; download it again") from error
        with _plain_errors(f"cannot read {path}"):
            encoder = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
            if (token := _vanishing_token(encoder)) is not None:
                raise MoejaxError(
                    f"{path}: its normalizer makes nothing of the added token {token!r}, which "
                    "would be found everywhere; download it again"
                )
        return cls(directory, encoder)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, goes_on: bool = False
    ) -> list[int]:
        """Encodes `text`, with the special tokens around it; see the class.

        Args:
          goes_on: more text follows, so special tokens are put before it and none behind it,
            neither by the post-processor nor by `add_eos_token`.
        """
        ids = self._encode(text, add_special_tokens=add_special_tokens).ids
        if not add_special_tokens:
            return ids
        if goes_on:
            return [*self._before, *ids[: len(ids) - self._num_behind]]
        return [*self._before, *ids, *self._after]

    @functools.cached_property
    def most_token_bytes(self) -> int | None:
        """Most bytes of text that a token can stand for; None if unlimited."""
        return most_token_bytes(self._encoder.to_str())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes token ids to text; ids without a token are left out."""
        with _plain_errors(self._failure):
            return self._encoder.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text, such as "<s>"; None if there is no such token."""
        return self._encoder.token_to_id(token)

    def stream(self, chat_prompt: Sequence[int] | None = None) -> _ChannelStream:
        """Starts a decoder that takes one token at a time; of harmony's, to the final channel.

        Args:
          chat_prompt: token ids that the answer goes on from, if what is between <think> and
            </think> is no part of its text; templates begin the thoughts in the prompt.
        """
        marks = [self.token_id(f"<|{name}|>") for name in ("start", "channel", "message", "end")]
        thinks = [self.token_id(name) for name in ("<think>", "</think>")]
        if None in marks:
            marks = [-1] * 4
        if chat_prompt is None or None in thinks:
            thinks, chat_prompt = [-1] * 2, ()
        markers = _Markers(*(-1 if i is None else i for i in (*marks, *thinks)))
        # Behind <think> a line may end, or </think>: GLM-4.5's template closes thoughts that it
        # leaves out.
        last = [i for i in chat_prompt[-2:] if i in (markers.think, markers.answer)]
        return _ChannelStream(self.decode, markers, last[-1:] == [markers.think])

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool = True,  # end with the words that begin an answer
        **variables: Any,  # further variables of the template, `enable_thinking` for instance
    ) -> str:
        """Renders a conversation's prompt; encode it with `add_special_tokens=False`.

        Raises:
          MoejaxError: the checkpoint has no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise MoejaxError(
                "this checkpoint has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); prompt it with plain text"
            )
        given = {**self.special_tokens, "add_generation_prompt": add_generation_prompt}
        return self._renderer.render(self.chat_template, messages, {**given, **variables})

    def _encode(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        with _plain_errors(self._failure):
            # `encode` holds Python's lock, seconds for megabytes; this lets other threads run.
            [found] = self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return found

    def _asked_for(self, directory: Path, name: str) -> list[int]:
        """Id of a special token that tokenizer_config.json puts around a text, or none."""
        path = directory / "tokenizer_config.json"
        fields = _LLAMA_ADDS | _read_if_there(path)
        if fields.get("tokenizer_class") not in _LLAMA_CLASSES:
            return []
        try:
            is_asked = flag(fields, f"add_{name}")
        except MoejaxError as error:
            raise MoejaxError(f"{path}: {error}") from error
        token = self.special_tokens.get(name)
        if not is_asked or token is None:
            return []
        if (token_id := self.token_id(token)) is None:
            raise MoejaxError(
                f"{path}: {name} {token!r} is to be put around texts (add_{name}), and "
                "tokenizer.json has no such token; download both again"
            )
        return [token_id]


def token_ids_of(
    prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int, *, add_special_tokens: bool
) -> list[int]:
    """Encodes a prompt, a text or token ids; without a tokenizer texts are refused.

    Raises:
      MoejaxError: the prompt has no tokens, or is not a prompt.
    """
    if not isinstance(prompt, str):
        try:
            ids = [*map(operator.index, prompt)]
        except TypeError as error:
            raise MoejaxError(f"a prompt is text or a list of token ids ({error})") from error
    elif tokenizer is None:
        raise MoejaxError("this checkpoint has no tokenizer.json: give token ids, or add the file")
    else:
        ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    if not ids:
        raise MoejaxError("an empty prompt: give at least one token")
    check_tokens(np.asarray(ids), vocab_size)
    return ids


def check_tokens(ids: np.ndarray, vocab_size: int) -> None:
    """Raises MoejaxError for token ids outside 0..V - 1."""
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise MoejaxError(f"token id {wrong.flat[0]} is outside the vocabulary of {vocab_size}")


def read_eos_ids(directory: Path, *, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end an answer: by generation_config.json, config.json, or name.

    If config.json omits them, they are its family's own, as in transformers.

    Raises:
      MoejaxError: one of the files is broken, or names an unknown token.
    """
    for name in ("generation_config.json", "config.json"):
        fields = text_fields(_read_if_there(directory / name))
        ids = fields.get("eos_token_id", default_eos_id(fields, vocab_size))
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
                raise MoejaxError(
                    f"{directory / name}: eos_token_id {ids} must be token ids below {vocab_size}, "
                    "the size of the vocabulary"
                )
            return tuple(ids)
    eos = _special_tokens(directory).get("eos_token")
    added = _read_if_there(directory / "tokenizer.json").get("added_tokens") or []
    try:
        return tuple(token["id"] for token in added if token["content"] == eos)
    except (TypeError, KeyError) as error:
        raise MoejaxError(
            f"{directory / 'tokenizer.json'}: added_tokens must be objects with id and content"
        ) from error


@contextlib.contextmanager
def _plain_errors(said: str) -> Iterator[None]:
    """Turns exceptions and panics of the Rust side into errors of one line."""
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or type(error).__name__ == "PanicException":
            reason = " ".join(str(error).split())
            raise MoejaxError(f"{said}: {reason}; download tokenizer.json again") from error
        raise


def _vanishing_token(encoder: tokenizers.Tokenizer) -> str | None:
    """Added token whose normalized text is empty, with which encoding hangs; or None."""
    normalizer = encoder.normalizer
    for token in encoder.get_added_tokens_decoder().values() if normalizer else ():
        if token.normalized and not normalizer.normalize_str(token.content):
            return token.content
    return None


def _num_behind(encoder: tokenizers.Tokenizer) -> int:
    """Number of tokens that the post-processor appends to every text."""
    for token in encoder.get_added_tokens_decoder().values():  # any text that has a token
        is_added = encoder.encode(token.content).special_tokens_mask
        if 0 in is_added:
            return is_added[::-1].index(0)
    return 0


def _special_tokens(directory: Path) -> dict[str, str]:
    """Reads the `*_token` fields of tokenizer_config.json, texts or objects."""
    tokens = {}
    for name, value in _read_if_there(directory / "tokenizer_config.json").items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() or path.is_symlink() else {}
