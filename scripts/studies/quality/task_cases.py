"""Methods whose task scores are compared, their bars, and answers document by document."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.studies.quality.cases import Claim, Comparison, rows_of
from scripts.studies.quantizers import recipes

TASKS = ("arc_easy", "hellaswag", "piqa")  # the study model is at chance on ARC-C
_RESIDENT = "policy.name=resident"
_POLICY = "scripts.studies.{}.controls:{}"
_LOW = ("policy.tiers=int4+int2", "policy.emulate=True")


def _dymoe(retention: float, *more: str) -> tuple[str, ...]:
    settings = " ".join((f"retention={retention}", "prefetch=0", *more))
    return (f"policy.name={_POLICY.format('dymoe', 'AsAsked')}", f"policy.settings={settings}",
            *_LOW)  # fmt: skip


def _dynaexq(share: float, *more: str, tiers: str = "int4+int2") -> tuple[str, ...]:
    """The share of 16 experts that is hot; asked anew every 2,048 tokens."""
    settings = " ".join(("period=2048", f"n_hot={round(16 * share)}", "max_requests=512", *more))
    return ("policy.name=dynaexq", f"policy.settings={settings}", f"policy.tiers={tiers}",
            "policy.emulate=True", "policy.slots=15+16")  # fmt: skip


def _buddies(name: str, slots: int, **settings: Any) -> tuple[str, ...]:
    """Experts of a layer in so many slots of 16, in the precision of the checkpoint."""
    given = " ".join(f"{key}={value}" for key, value in settings.items())
    return (f"policy.name={name}", f"policy.settings={_PRINTED} {given}".strip(),
            "policy.emulate=True", f"policy.slots={slots}")  # fmt: skip


def _composed(slots: int) -> tuple[str, ...]:
    """DyMoE 4/0 with buddies, experts in INT4 in so many slots of 16."""
    settings = f"parts=dymoe+buddymoe retention=0.75 low=skip prefetch=0 rho=3 {_PRINTED}"
    return ("policy.name=compose", f"policy.settings={settings}", "policy.tiers=int4",
            "policy.emulate=True", f"policy.slots={slots}")  # fmt: skip


_PRINTED = "background_bytes=0 keep_fetched=False"  # Algorithm 1 alone
_RANDOM = _POLICY.format("buddymoe", "MatchedRandom")
# The whole model in the precisions of MiLo's Table 3, attention too.
_WHOLE = {
    f"all in {of.label}": of for of in recipes.TABLE
    if of.method in ("rtn", "gptq", "autoround", "hqq", "milo", "milo+") and of.group_size == 64
}  # fmt: skip
_CRITICAL = {"": (), ", by load": ("selection=load",), ", random": ("selection=random",)}
METHODS: dict[str, tuple[str, ...]] = {
    "exact": (),
    **{f"INT{bits}": (_RESIDENT, f"policy.tiers=int{bits}") for bits in (4, 3, 2)},
    **{
        f"DyMoE {low}, r = {retention}{said}": _dymoe(retention, *how, *more)
        for said, more in _CRITICAL.items()
        for retention in (0.5, 0.625, 0.75, 0.875, 0.9)
        for low, how in (("4/2", ()), ("4/0", ("low=skip",)))
    },
    **{
        f"DynaExq 4/2, a {name} hot{said}": _dynaexq(share, *more)
        for said, more in (("", ()), (", random", ("choice=random",)))
        for name, share in (("half", 0.5), ("quarter", 0.25))
    },
    **{
        f"DynaExq bf16/INT4, a half hot{said}": _dynaexq(0.5, *more, tiers="stored+int4")
        for said, more in (("", ()), (", random", ("choice=random",)))
    },
    **{
        f"{who} c = {slots / 16:g}, rho {rho}": _buddies(policy, slots, rho=rho)
        for rho in (3, 4)
        for slots in (12, 8, 6)
        for who, policy in (("BuddyMoE", "buddymoe"), ("random", _RANDOM))
    },
    "BuddyMoE c = 0.75, rho 3, TAE": _buddies("buddymoe", 12, rho=3, tae_tau="profile"),
    "BuddyMoE c = 0.75, rho 3, TAE and beta": _buddies(
        "buddymoe", 12, rho=3, tae_tau="profile", beta=0.5
    ),
    **{
        f"BuddyMoE in INT4 c = {slots / 16:g}, rho 3": (
            *_buddies("buddymoe", slots, rho=3), "policy.tiers=int4"
        ) for slots in (12, 8)
    },
    **{f"DyMoE 4/0 + BuddyMoE c = {slots / 16:g}": _composed(slots) for slots in (12, 8)},
    "MiLo INT3": (),
    **dict.fromkeys(_WHOLE, ()),
}  # fmt: skip
# Flags of `moejax.quantize`, for methods that read a checkpoint of their own.
QUANTIZED = {
    "MiLo INT3": ("method=none", "rank=Uniform-0", "rules=*experts*: method=milo bits=3 rank=16"),
    **{
        name: tuple(f"{field}={value}" for field, value in of.settings().items())
        for name, of in _WHOLE.items()
    },
}
# Methods of the picture of `tables.decisions`: its name, and the share of experts in slots. There
# BuddyMoE's experts are in INT4, which those of its tasks are not.
IN_PICTURE = {
    "exact": ("bf16", 0.0),
    **{name: (name, 0.0) for name in ("INT4", "INT3", "INT2", "MiLo INT3")},
    **{f"DyMoE {low}, r = 0.75": (f"DyMoE {low}", 0.0) for low in ("4/2", "4/0")},
    "DynaExq 4/2, a half hot": ("DynaExq 4/2", 0.5),
    "DynaExq 4/2, a quarter hot": ("DynaExq 4/2", 0.25),
    "DyMoE 4/0 + BuddyMoE c = 0.5": ("DyMoE 4/0 + BuddyMoE", 0.5),
}
_S1 = "all in INT3 milo, Dense-25% + Kurtosis-8, INT3 factors"
ALL = "mean of the tasks"
DEFAULT = "default"  # text of calibration: the one that ships
BATCH = 16  # documents at once; one under a policy that decides, as `moejax.lm_eval` reads them


def _wrong(*terms: tuple[float, str], margin: float = 0.0) -> Comparison:
    """A weighted sum of shares of wrong answers that must be at most a margin."""
    return Comparison(tuple((factor, f"{ALL} | {name}") for factor, name in terms), margin)


# Written before any row. The margins are the papers' own numbers.
CLAIMS = (
    Claim("DynaExq", "of the gap between INT4 and INT2, 79 % comes back", "Table 1, 80B, A6000",
          "with a half hot, at least 79 % of the gap in wrong answers comes back",
          (_wrong((1, "DynaExq 4/2, a half hot"), (-0.21, "INT2"), (-0.79, "INT4")),)),
    Claim("DynaExq", "of the gap between INT4 and INT2, 24 % comes back", "Table 1, 80B, 5090",
          "with a quarter hot, at least 24 % of the gap in wrong answers comes back",
          (_wrong((1, "DynaExq 4/2, a quarter hot"), (-0.76, "INT2"), (-0.24, "INT4")),)),
    Claim("DyMoE", "4/2 at r = 0.75 loses 1.74 points at most to INT4", "Table 2, Mixtral, GSM8K",
          "at most 0.0174 more wrong answers than INT4",
          (_wrong((1, "DyMoE 4/2, r = 0.75"), (-1, "INT4"), margin=0.0174),)),
    Claim("DyMoE", "4/0 at r = 0.75 loses 2.58 points at most to INT4", "Table 2, Mixtral, GSM8K",
          "at most 0.0258 more wrong answers than INT4",
          (_wrong((1, "DyMoE 4/0, r = 0.75"), (-1, "INT4"), margin=0.0258),)),
    Claim("DyMoE", "INT2 in place of skipping helps", "Table 2",
          "4/2 has fewer wrong answers than 4/0, both at r = 0.75",
          (_wrong((1, "DyMoE 4/2, r = 0.75"), (-1, "DyMoE 4/0, r = 0.75")),)),
    Claim("DyMoE", "heavy hitters tell critical experts", "6.3, Figure 11",
          "4/2 has fewer wrong answers than 4/2 by plain load, both at r = 0.75",
          (_wrong((1, "DyMoE 4/2, r = 0.75"), (-1, "DyMoE 4/2, r = 0.75, by load")),)),
    *(Claim(paper, f"{said} on tasks", where, f"fewer wrong answers than {null}",
            tuple(_wrong((1, name), (-1, name + end)) for name in names))
      for paper, said, where, null, end, names in (  # of 2026-11-29, when the nulls had no rows
          ("DynaExq", "hot experts beat a random choice", "3.3", "as many experts at random",
           ", random", ("DynaExq 4/2, a half hot", "DynaExq 4/2, a quarter hot")),
          ("DyMoE", "important experts beat a random choice", "6.3, Figure 3",
           "as many experts at random", ", random", ("DyMoE 4/2, r = 0.75", "DyMoE 4/0, r = 0.75")),
          ("DyMoE", "heavy hitters tell critical experts with 4/0", "6.3, Figure 11", "plain load",
           ", by load", ("DyMoE 4/0, r = 0.75",)),
      )),
    *(Claim("BuddyMoE", f"loses {share} of what random experts lose, c = {rate}", f"Table {table}",
            f"loses at most {share} of what random experts lose for the same pairs",
            (_wrong((1, f"BuddyMoE c = {rate}, rho 3"), (-share, f"random c = {rate}, rho 3"),
                    (share - 1, "exact")),))
      for rate, table, share in ((0.75, 2, 0.216), (0.5, 3, 0.198), (0.375, 4, 0.157))),
    # Of 2026-11-29, when of these only DyMoE's at r = 0.9 had rows, of the fifth model.
    Claim("DynaExq", "of the gap between bf16 and INT4, 35 % comes back", "Table 1, 30B, A6000",
          "with a half hot, at least 35 % of the gap in wrong answers comes back",
          (_wrong((1, "DynaExq bf16/INT4, a half hot"), (-0.65, "INT4"), (-0.35, "exact")),)),
    *(Claim("DyMoE", f"heavy hitters tell critical experts of {low} at other retentions",
            "6.3, Figure 11", "fewer wrong answers than plain load",
            tuple(_wrong((1, f"DyMoE {low}, r = {r}"), (-1, f"DyMoE {low}, r = {r}, by load"))
                  for r in (0.5, 0.625, 0.875, 0.9)))
      for low in ("4/2", "4/0")),
    Claim("MiLo", "MiLo is better than HQQ and GPTQ in INT3 on tasks", "4.1, Table 3",
          "as s1 fewer wrong answers than either",
          tuple(_wrong((1, _S1), (-1, f"all in INT3 {null}")) for null in ("hqq", "gptq"))),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Scored:
    """Answers of one task: right or not by document, and the score by plain log-likelihood."""

    right: np.ndarray  # bool[documents], by acc_norm
    plain: float  # acc

    @staticmethod
    def read(folder: Path, task: str) -> "Scored":
        """Reads the samples that lm_eval wrote."""
        (path,) = folder.rglob(f"samples_{task}_*.jsonl")
        rows = sorted(rows_of(path), key=lambda row: row["doc_id"])
        return Scored(
            np.array([row["acc_norm"] == 1 for row in rows]),
            float(np.mean([row["acc"] for row in rows])),
        )


def packed(right: np.ndarray) -> str:
    """The answers bool[n] as hexadecimal digits, the first document in the highest bit."""
    return np.packbits(right).tobytes().hex()


def unpacked(text: str, count: int) -> np.ndarray:
    """The answers bool[count] of `packed`."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=count).astype(bool)


def wrong_of(rows: Iterable[Mapping[str, Any]], label: str) -> dict[str, Sequence[float]]:
    """Wrong answers (0 or 1) by document of each row, and of all tasks of a method together.

    A document counts so much that tasks count equally in the mean over all of them.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    for row in rows:
        section, task, method, *model = row["what"].split(" | ")
        if section == "tasks" and model == [label]:
            beside = row["baseline"]
            right = unpacked(beside["right"], beside["documents"])
            found.setdefault(method, {})[task] = 1.0 - right
    together: dict[str, Sequence[float]] = {}
    for method, of in found.items():
        total = sum(map(len, of.values()))
        for task, wrong in of.items():
            together[f"{task} | {method}"] = wrong.tolist()
        together[f"{ALL} | {method}"] = np.concatenate(
            [of[task] * (total / len(of) / len(of[task])) for task in sorted(of)]
        ).tolist()
    return together


def batch_of(method: str) -> int:
    """Documents at once."""
    return BATCH if METHODS[method][:1] in ((), (_RESIDENT,)) else 1


def checkpoint_of(method: str, checkpoint: str, text: str = DEFAULT) -> str:
    """The checkpoint that a method reads, beside the model's where it has its own by that text."""
    checkpoint = checkpoint.rstrip("/")
    name = method if text == DEFAULT else f"{method} {Path(text).stem}"
    said = "".join(c if c.isalnum() else "-" for c in name)  # a list of arguments has commas
    return f"{checkpoint}-{said}" if method in QUANTIZED else checkpoint


def arguments_of(method: str, checkpoint: str, text: str = DEFAULT) -> str:
    """Model arguments of lm_eval."""
    read = checkpoint_of(method, checkpoint, text)
    return ",".join([f"pretrained={read}", "dtype=float32", *METHODS[method]])
