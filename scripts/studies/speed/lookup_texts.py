"""Prompts of six tasks on real text, and the answers that a small language model gives greedily."""

import dataclasses
import json
import lzma
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CHARACTERS = 900  # of a passage, about 220 tokens
LOOP = 12  # tokens that an answer says again: it is cut there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """One prompt: a text to go on with, or words to a chat model."""

    task: str
    text: str
    is_chat: bool
    reference: str = ""  # what a perfect model says, where the data have it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """A prompt and its answer as tokens; `source` says whose the answer is."""

    task: str
    source: str  # "model", "reference"
    prompt: list[int]
    tokens: list[int]


def prompts(folder: Path, count: int) -> dict[str, list[Asked]]:
    """So many prompts of each task, spread over the texts of a folder of data."""
    passages, titles = _passages(folder / "eval" / "wikitext2.test.raw.xz", count)
    code = _spread(_code(_rows(folder / "valid" / "code.jsonl.xz")), count)
    books = _spread(_paragraphs(_rows(folder / "valid" / "textbooks.jsonl.xz")), count)
    sums = _spread(_rows(folder / "eval" / "gsm8k.test.jsonl.xz"), count)
    draw = random.Random(0)
    found: dict[str, list[Asked]] = {
        "continue": [
            _continued("continue", text) for text in passages
        ],
        "summarize": [
            _chat("summarize", "Summarize the passage in three sentences and quote the sentence "
                  f"that says most.\n\n{text[:CHARACTERS]}")
            for text in passages
        ],
        "correct": [
            _chat("correct", "Correct the spelling mistakes. Answer with the corrected text "
                  "only.\n\n" + misspelled(text, draw), text)
            for text in books
        ],
        "code": [
            _continued("code", text) for text in code
        ],
        "question": [
            _chat("question", f"{text[:CHARACTERS]}\n\nQuestion: what does the passage say about "
                  f"{title}? Answer in full sentences from the passage.")
            for text, title in zip(passages, titles, strict=True)
        ],
        "sum": [_chat("sum", row["question"], row["answer"]) for row in sums],
    }  # fmt: skip
    return found


def _continued(task: str, text: str) -> Asked:
    beginning, rest = text[:CHARACTERS], text[CHARACTERS:]
    return Asked(task=task, text=beginning, is_chat=False, reference=rest)


def _chat(task: str, text: str, reference: str = "") -> Asked:
    return Asked(task=task, text=text, is_chat=True, reference=reference)


def _rows(path: Path) -> list[dict[str, Any]]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    if len(items) < count:
        raise ValueError(f"{len(items)} texts are fewer than {count}")
    return [items[i * len(items) // count] for i in range(count)]


def _passages(path: Path, count: int) -> tuple[list[str], list[str]]:
    """Beginnings of articles twice as long as a passage, and their titles."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        parts = re.split(r"^ = ([^=\n]+) = $", file.read(), flags=re.MULTILINE)
    articles = [
        (re.sub(r" (?=[,.;:)])|(?<=\() ", "", re.sub(r" @(.)@ ", r"\1", body)).strip(), title)
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
        if len(body) > 3 * CHARACTERS
    ]
    chosen = _spread(articles, count)
    return [body[: 2 * CHARACTERS] for body, _ in chosen], [title for _, title in chosen]


def _code(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Python from the beginning of a class or a function on, twice as long as a passage."""
    texts = []
    for row in rows:
        starts = [m.start() for m in re.finditer(r"^(?:def|class) ", row["text"], re.MULTILINE)]
        texts += [row["text"][at : at + 2 * CHARACTERS] for at in starts[::8]]
    return [text for text in texts if len(text) == 2 * CHARACTERS]


def _paragraphs(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Paragraphs of 400 to 650 characters, whose correction fits an answer."""
    return [
        part.strip()
        for row in rows
        for part in row["text"].split("\n")
        if 400 <= len(part) <= 650 and part.isascii()
    ]


def misspelled(text: str, draw: random.Random) -> str:
    """A tenth of the words of five letters or more with two letters exchanged."""

    def word(match: re.Match[str]) -> str:
        letters = match.group()
        if draw.random() >= 0.1:
            return letters
        at = draw.randrange(1, len(letters) - 2)
        return letters[:at] + letters[at + 1] + letters[at] + letters[at + 2 :]

    return re.sub(r"[A-Za-z]{5,}", word, text)


def answered(parent: Path, asked: Sequence[Asked], new_tokens: int) -> list[Answer]:
    """Greedy answers of a Hugging Face model in one padded batch, and the references as tokens."""
    import torch
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(parent, padding_side="left")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(parent, dtype=torch.float32)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": one.text}], tokenize=False, add_generation_prompt=True
        )
        if one.is_chat
        else one.text
        for one in asked
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        made = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False)
    start, found = batch["input_ids"].shape[1], []
    for row, mask, one in zip(made.tolist(), batch["attention_mask"].tolist(), asked, strict=True):
        prompt, tokens = row[start - sum(mask) : start], row[start:]
        if tokenizer.eos_token_id in tokens:
            tokens = tokens[: tokens.index(tokenizer.eos_token_id) + 1]
        found.append(Answer(task=one.task, source="model", prompt=prompt, tokens=tokens))
        if one.reference:
            said = tokenizer(one.reference, add_special_tokens=False)["input_ids"][:new_tokens]
            found.append(Answer(task=one.task, source="reference", prompt=prompt, tokens=said))
    return found


def pieces(parent: Path) -> Callable[[Sequence[int]], list[str]]:
    """A function from tokens to the text of each."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(parent)
    return lambda tokens: [tokenizer.decode([token]) for token in tokens]


def without_loop(tokens: Sequence[int]) -> list[int]:
    """An answer up to where it says `LOOP` tokens again that it has said: small models loop."""
    seen: set[tuple[int, ...]] = set()
    for end in range(LOOP, len(tokens) + 1):
        gram = tuple(tokens[end - LOOP : end])
        if gram in seen:
            return list(tokens[: end - LOOP])
        seen.add(gram)
    return list(tokens)
