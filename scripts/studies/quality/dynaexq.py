"""DynaExq's Figure 4 and its shift of the workload, and the ends of Table 1.

Every choice warms up on text of the same kind that is not scored. "static" is a fair null: the
experts that this text uses most, which then stay; "random" and "first" know nothing. A static
choice warms up in high precision, but for one expert of a layer, and is asked two steps before the
end, so that its transfers arrive. That of all texts of the shift reads them in turn, window by
window. (Rows until 2026-11-26: text after text, which weighs the first one, prose, least.)
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moejax.policies.dynaexq import DynaExq
from scripts.studies.quality.bench import Measured, Served, Windows
from scripts.studies.quality.cases import Case, Claim, Comparison, Point, fewer
from scripts.studies.quality.subject import BATCH, Subject, point

PAIRS = (("int4", "int2"), ("bf16", "int4"))
SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)  # of the experts in high precision
CHOICES = {"hot": (0,), "static": (0,), "random": (0, 1), "first": (0,)}  # and their seeds
PERIOD = 2048  # tokens between updates; less than a chunk of `BATCH` windows of 512
NEVER = 2**30
SEGMENTS = ("books", "code", "math")
SHIFT_SHARE, SHIFT_PERIOD = 0.25, 512
RECOVERED = {0.5: 0.79, 0.25: 0.24}  # of Table 1's gap, 80B: on an A6000, on a 5090


def cases(subject: Subject) -> Iterator[Case]:
    """Uniform precisions, then every pair, choice and share."""
    for tier in ("bf16", "int4", "int3", "int2"):
        yield Case(f"uniform {tier}", functools.partial(_uniform, subject, tier))
    for pair in PAIRS:
        for choice in CHOICES:
            yield Case(
                f"{'/'.join(pair)} {choice}", functools.partial(_shares, subject, pair, choice)
            )


def _uniform(subject: Subject, tier: str) -> Iterator[Point]:
    for windows in subject.both:
        yield point(windows, f"uniform {tier}", 0, subject.uniform(tier, windows))


def _static(text: Windows, batch: int) -> dict[str, Any]:
    """Settings of a choice by the use of a text, asked once, two steps before its end."""
    tokens, last = text.num_targets, 2 * batch * (text.tokens.shape[1] - 1)
    return {"period": NEVER, "alpha": 1 - 1 / tokens, "warmup": max(1, tokens - last)}


def _shares(subject: Subject, pair: tuple[str, str], choice: str) -> Iterator[Point]:
    num_experts = subject.num_experts
    most = 2 * num_experts * subject.model.num_layers
    how: dict[str, Any] = {"max_requests": min(512, most)}
    held = None if choice == "static" else subject.none_held()
    # Slots for all but one expert: how many are hot is then a setting that sweeps.
    served = Served(subject.model, DynaExq(**how), pair, (num_experts - 1, num_experts))
    for share in SHARES:
        for windows in subject.both:
            runs = []
            for seed in CHOICES[choice]:
                others = subject.others[windows.name]
                if choice == "static":
                    given = how | _static(others, BATCH)
                else:
                    given = how | {"choice": choice, "period": PERIOD, "seed": seed}
                policy = DynaExq(**given, n_hot=subject.part(share))
                served.begin(policy, (held, None))
                served.run(others, BATCH)
                runs.append(served.run(windows, BATCH))
            mean = dataclasses.replace(runs[0], nats=np.mean([run.nats for run in runs], axis=0))
            yield point(windows, f"{'/'.join(pair)} {choice}", 1 - share, mean, runs=len(runs))


def shift(subject: Subject) -> Iterator[Case]:
    """Prose, then code, then maths: a choice that follows, and choices that do not."""
    for tier in ("int4", "int2"):
        yield Case(f"all {tier}", functools.partial(_segments_uniform, subject, tier))
    for name in ("dynaexq", "static of prose", "static of all"):
        yield Case(name, functools.partial(_segments, subject, name))


def _parts(subject: Subject, *, scored: bool) -> dict[str, Windows]:
    count = max(4, len(subject.mixed.tokens) // 5)
    return {name: subject.texts.domain(name, count, scored=scored) for name in SEGMENTS}


def _segments_uniform(subject: Subject, tier: str) -> Iterator[Point]:
    for windows in _parts(subject, scored=True).values():
        yield point(windows, f"all {tier}", 0, subject.uniform(tier, windows, 1))


def _segments(subject: Subject, name: str) -> Iterator[Point]:
    num_experts, count = subject.num_experts, subject.part(SHIFT_SHARE)
    warm = _parts(subject, scored=False)
    parts = list(warm.values()) if name == "static of all" else [warm["books"]]
    tokens = np.stack([part.tokens for part in parts], axis=1)  # in turn, as scores fade
    text = dataclasses.replace(parts[0], tokens=tokens.reshape(-1, tokens.shape[-1]))
    is_static = name != "dynaexq"
    how: dict[str, Any] = _static(text, 1) if is_static else {"period": SHIFT_PERIOD}
    policy = DynaExq(**how, n_hot=count, max_requests=512)
    served = Served(subject.model, policy, ("int4", "int2"), (num_experts - 1, num_experts))
    served.begin(policy, (None if is_static else subject.none_held(), None))
    served.run(text, 1)
    for windows in _parts(subject, scored=True).values():
        runs = [
            served.run(dataclasses.replace(windows, tokens=row[None]), 1) for row in windows.tokens
        ]
        nats = np.concatenate([run.nats for run in runs])
        hot = float(np.mean([run.shares["int4"] for run in runs]))
        found = Measured(nats, windows.num_targets, {}, 0)
        yield point(windows, name, 0, found, **{"gate int4": hot, "promoted": runs[-1].promoted})


def _row(text: str, series: str, share: float) -> str:
    return f"dynaexq | {text} | {series} | {1 - share:g}"


def _gap(text: str, share: float, recovered: float) -> Comparison:
    """Whether so much of the gap in log-perplexity between INT2 and INT4 is recovered."""
    low, high = (f"dynaexq | {text} | uniform {tier} | 0" for tier in ("int2", "int4"))
    terms = (1.0, _row(text, "int4/int2 hot", share)), (recovered - 1, low), (-recovered, high)
    return Comparison(terms)


def _against(null: str, texts: Sequence[str]) -> tuple[Comparison, ...]:
    """Whether DynaExq takes fewer nats than a static choice as the workload shifts."""
    return tuple(
        fewer(f"shift | {text} | dynaexq | 0", f"shift | {text} | {null} | 0") for text in texts
    )


TEXTS = ("wikitext-2", "mixed")
CLAIMS = (
    *(
        Claim(
            "dynaexq", f"choosing experts by use is better than {said}, {'/'.join(pair)}",
            "4.2, Figure 4",
            f"fewer nats than {null} with a quarter and a half of the experts in high precision",
            tuple(
                fewer(
                    _row(text, f"{'/'.join(pair)} hot", share),
                    _row(text, f"{'/'.join(pair)} {null}", share),
                )
                for text in TEXTS
                for share in (0.25, 0.5)
            ),
        )
        for pair in PAIRS
        for null, said in (("random", "at random"), ("static", "once, by other text"))
    ),
    *(
        Claim(
            "dynaexq",
            f"{100 * recovered:.0f} % of the gap between INT4 and INT2 comes back",
            "4.3, Table 1", f"of log-perplexity, with {100 * share:.0f} % of the experts in INT4",
            tuple(_gap(text, share, recovered) for text in TEXTS),
        )
        for share, recovered in RECOVERED.items()
    ),
    Claim(
        "dynaexq", "adapts when the workload shifts, which static precisions cannot", "1, 3.2",
        "fewer nats in code and in maths than the prose's hottest experts",
        _against("static of prose", ("code", "math")),
    ),
    Claim(
        "dynaexq", "adapts better than a choice by all of the workload", "ours",
        "fewer nats in prose, code and maths than the hottest experts of all three",
        _against("static of all", SEGMENTS),
    ),
)  # fmt: skip
