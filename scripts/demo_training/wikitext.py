"""WikiText-2's training text made like its raw test text: rare words stand where `<unk>` was.

The training file replaces every word seen fewer than three times by `<unk>` (2.6 % of the words),
while the raw held-out text spells such words out (5.5 % of its words do not occur in the training
file). A model trained on the masked file learns that an article never holds a new word. So each
`<unk>` is filled with a rare word of the other training text, and some seldom names are replaced
through a whole article, which teaches copying names that were never seen before.
"""

import collections
import dataclasses
import re

import numpy as np

_TITLE = re.compile(r"^ = [^=].* = $")
_WORD = re.compile(r"[A-Za-z][a-z]+(?:-[a-z]+)?")
_UNKNOWN = "<unk>"


def split_articles(text: str) -> list[list[str]]:
    """Splits the tokenised file into articles, each its lines from the blank above the title on."""
    articles: list[list[str]] = []
    lines = text.split("\n")
    for i, line in enumerate(lines):
        blank_around = (
            i > 0 and not lines[i - 1].strip() and not "".join(lines[i + 1 : i + 2]).strip()
        )
        if _TITLE.match(line) and blank_around:
            articles.append([articles[-1].pop() if articles else lines[i - 1]])
        if articles and (line or i + 1 < len(lines)):
            articles[-1].append(line)
    return articles


def file_form(lines: list[str]) -> str:
    """The text as the raw file holds it: every line, blank ones a single space, newline-ended."""
    return "".join(line + "\n" for line in lines)


def joined_form(lines: list[str]) -> str:
    r"""The text as papers score it: `"\n\n".join(rows)`, blank rows empty, others newline-ended."""
    return "\n\n".join("" if not line.strip() else line + "\n" for line in lines)


@dataclasses.dataclass(frozen=True)
class RareWords:
    """Words of other text that the WikiText vocabulary does not hold, with sampling weights."""

    names: tuple[str, ...]  # capitalised, and never seen in lower case
    name_probs: np.ndarray  # float64[len(names)], sums to 1
    terms: tuple[str, ...]  # lower case
    term_probs: np.ndarray  # float64[len(terms)], sums to 1

    def draw_names(self, rng: np.random.Generator, count: int) -> list[str]:
        """Independent draws of capitalised words."""
        return [self.names[i] for i in rng.choice(len(self.names), count, p=self.name_probs)]

    def draw_terms(self, rng: np.random.Generator, count: int) -> list[str]:
        """Independent draws of lower-case words."""
        return [self.terms[i] for i in rng.choice(len(self.terms), count, p=self.term_probs)]


def find_rare_words(known: collections.Counter[str], texts: list[str]) -> RareWords:
    """Collects words of `texts` absent from `known`; weights are the square roots of counts."""
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        counts.update(_WORD.findall(text))
    unknown = {w: n for w, n in counts.items() if w not in known and len(w) > 2}
    names = {
        w: n
        for w, n in unknown.items()
        if w[0].isupper() and w.lower() not in counts and w.lower() not in known
    }
    terms = {w: n for w, n in unknown.items() if w[0].islower()}

    def probs(table: dict[str, int]) -> np.ndarray:
        roots = np.sqrt(np.array(list(table.values()), np.float64))
        return roots / roots.sum()

    return RareWords(tuple(names), probs(names), tuple(terms), probs(terms))


def spell_out(
    lines: list[str], rare: RareWords, known: collections.Counter[str], rng: np.random.Generator
) -> list[str]:
    """Fills `<unk>` in one article and renames some of its seldom names.

    A filled word is a name more often beside a capitalised word. A capitalised word seen fewer than
    30 times in the training file is replaced through the article one time in five.
    """
    words = {w for line in lines for w in line.split(" ")}
    seldom = sorted(w for w in words if w[:1].isupper() and w.isalpha() and known[w] < 30)
    chosen = [w for w in seldom if rng.random() < 0.2]
    renamed = dict(zip(chosen, rare.draw_names(rng, len(chosen)), strict=True))
    num_unknown = sum(line.count(_UNKNOWN) for line in lines)
    names, terms = rare.draw_names(rng, num_unknown), rare.draw_terms(rng, num_unknown)
    filled = []
    for line in lines:
        pieces = line.split(" ")
        for i, word in enumerate(pieces):
            if word == _UNKNOWN:
                around = pieces[max(0, i - 1) : i] + pieces[i + 1 : i + 2]
                is_name = rng.random() < (0.85 if any(w[:1].isupper() for w in around) else 0.55)
                pieces[i] = names.pop() if is_name else terms.pop()
            else:
                pieces[i] = renamed.get(word, word)
        filled.append(" ".join(pieces))
    return filled
