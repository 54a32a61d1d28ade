"""The rows that `demo_quantization.py` measures, and the bars of MiLo's claims."""

import dataclasses
from typing import Any

from scripts.studies.quality.cases import Claim, Comparison, fewer, share_of_loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One row of the table."""

    method: str  # "fp", or one of `moejax.quantization.pipeline.recipe.METHODS`
    bits: int = 3
    group_size: int = 64
    zero_kind: str = "float"
    policy: str = ""  # of ranks; "": no compensators
    factor_bits: int = 8
    passes: int = 20

    @property
    def label(self) -> str:
        """Label that the table prints."""
        if self.method == "fp":
            return "unquantized"
        parts = [f"INT{self.bits} {self.method}"]
        if self.zero_kind != "float":
            parts.append(f"{self.zero_kind} zero")
        if self.group_size != 64:
            parts.append(f"group {self.group_size}")
        if self.policy:
            parts.append(f"{self.policy}, INT{self.factor_bits} factors")
        if self.passes != 20:
            parts.append(f"{self.passes} pass{'es' * (self.passes > 1)}")
        return ", ".join(parts)

    def settings(self) -> dict[str, Any]:
        """Fields of `QuantizeConfig`."""
        names = ["method", "bits", "group_size", "zero_kind", "passes"]
        found = {name: getattr(self, name) for name in names}
        if self.policy:
            found |= {"rank": self.policy, "factor_bits": self.factor_bits}
        return found


FULL = Recipe(method="fp")
HQQ = Recipe(method="hqq")
PLUS = Recipe(method="milo+", zero_kind="symmetric", factor_bits=3)
DEMO_KB = 650  # of Dense-25% on the demo, by which older rows are named
# Ranks are shares of the width: the demo's experts are 64 wide, attention 256 and 128.
TABLE = (
    FULL,
    Recipe(method="rtn", bits=4),
    Recipe(method="rtn"),
    Recipe(method="gptq"),
    Recipe(method="autoround"),
    HQQ,
    Recipe(method="hqq", group_size=32),
    Recipe(method="hqq", group_size=16),
    Recipe(method="least_squares"),
    *(
        Recipe(method="milo", policy=policy, factor_bits=3)
        for policy in ("Dense-25%", "Dense-25% + Kurtosis-8", "Dense-50% + Sparse-16")
    ),
    *(
        dataclasses.replace(PLUS, policy=policy)
        for policy in ("Dense-25% + Sparse-4", "Dense-50% + Sparse-12")
    ),
    # The grid that MiLo has, to see what the symmetric one brings.
    dataclasses.replace(PLUS, policy="Dense-25% + Sparse-4", zero_kind="float"),
    Recipe(method="hqq", bits=4),
    Recipe(method="gptq", bits=4),
    Recipe(method="milo", bits=4, policy="Dense-25%", factor_bits=3),
    dataclasses.replace(PLUS, bits=4, policy="Dense-25% + Sparse-4"),
)
RANKS = tuple(
    dataclasses.replace(recipe, policy=f"Uniform-{rank}")
    for recipe in (
        Recipe(method="milo", factor_bits=8), Recipe(method="milo", factor_bits=3), PLUS,
    )
    for rank in (2, 4, 8, 16, 32)
)  # fmt: skip


def policies(kilobytes: int) -> tuple[Recipe, ...]:
    """Table 7: one pass; three have the bytes of Dense-25%, three the same ranks of experts on it.

    Args:
      kilobytes: that Dense-25% takes.
    """
    return tuple(
        Recipe(method="milo", policy=policy, factor_bits=8, passes=1)
        for policy in (
            *(f"{name}-8 within {kilobytes} KB" for name in ("Uniform", "Dense", "Sparse")),
            "Dense-25% + Sparse-8", "Dense-25% + Kurtosis-8", "Dense-25% + Frequency-8",
            "Dense-25%",
        )
    )  # fmt: skip


def _less(own: Recipe, null: Recipe, section: str = "table", margin: float = 0.0) -> Comparison:
    """Whether a recipe takes fewer nats than another."""
    return fewer(f"{section} | {own.label}", f"{section} | {null.label}", margin)


def claims(kilobytes: int) -> tuple[Claim, ...]:
    """Bars of MiLo's claims, by the paper's numbers, in nats a token; see `policies`."""
    dense, s1, s2 = (recipe for recipe in TABLE if recipe.method == "milo" and recipe.bits == 3)
    uniform, one_dense, sparse, even, kurtosis, frequency, _ = policies(kilobytes)
    pairs = [
        [recipe for recipe in RANKS if recipe.method == "milo" and recipe.factor_bits == bits]
        for bits in (3, 8)
    ]
    return (
        *(
            Claim(
                "milo", f"brings back {share:.1%} of HQQ's loss ({name})", "4.1, Table 3",
                "that share of the loss in log-perplexity",
                (share_of_loss(1 - share, *(f"table | {r.label}" for r in (recipe, HQQ, FULL))),),
            )
            for name, recipe, share in (("s1", s1, 0.485), ("s2", s2, 0.591))
        ),
        Claim(
            "milo", "better than GPTQ and HQQ in INT3", "4.1, Table 3",
            "Dense-25% alone takes fewer nats than either",
            tuple(_less(dense, Recipe(method=method)) for method in ("gptq", "hqq")),
        ),
        Claim(
            "milo", "factors in INT3 cost 0.2 % more perplexity than in INT8", "4.2, Table 5",
            "at most 0.002 nats more at each rank",
            tuple(
                _less(three, eight, "ranks", 0.002)
                for three, eight in zip(*pairs, strict=True)
            ),
        ),
        Claim(
            "milo", "in one memory, Dense is better than Uniform and Sparse", "4.2, Table 7",
            "fewer nats", tuple(_less(one_dense, other, "policies") for other in (uniform, sparse)),
        ),
        Claim(
            "milo", "on top of Dense, ranks by kurtosis are the best", "4.2, Table 7",
            "fewer nats than equal ranks and than those by frequency",
            tuple(_less(kurtosis, other, "policies") for other in (even, frequency)),
        ),
    )  # fmt: skip
