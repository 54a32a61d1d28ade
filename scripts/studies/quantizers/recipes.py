"""The rows that `demo_quantization.py` measures."""

import dataclasses

from scripts.studies.quantizers.methods import Recipe

FULL = Recipe(method="fp")
HQQ = Recipe(method="hqq")
PLUS = Recipe(method="milo+", zero_kind="symmetric", factor_bits=3)
# Ranks are shares of the width: experts are 64 wide, attention 256 and 128.
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
)
RANKS = tuple(
    dataclasses.replace(recipe, policy=f"Uniform-{rank}")
    for recipe in (
        Recipe(method="milo", factor_bits=8), Recipe(method="milo", factor_bits=3), PLUS,
    )
    for rank in (2, 4, 8, 16, 32)
)  # fmt: skip
# Table 7: one pass. The first three have the bytes of Dense-25%; the others share what experts get
# beside Dense-25%.
POLICIES = tuple(
    Recipe(method="milo", policy=policy, factor_bits=8, passes=1)
    for policy in (
        "Uniform-8 within 650 KB", "Dense-8 within 650 KB", "Sparse-8 within 650 KB",
        "Dense-25% + Sparse-8", "Dense-25% + Kurtosis-8", "Dense-25% + Frequency-8",
    )
)  # fmt: skip
