"""MoE layers with packed weights that `grouped_dequant_matmul_contract` is checked on."""

from collections.abc import Mapping

from tests.grouped_dequant_matmul_contract import BEYOND, SKIPPED, Case, Tier, alike
from tests.packed_operands import Form, Terms

INT2, INT3, INT4 = Form(2), Form(3), Form(4, 32, "integer", "float32")
INT8, PLAIN = Form(8, 128, "symmetric"), Form(16, dtype="bfloat16")
MXFP4 = Form(4, 32, "mxfp4")
BY_ROW = Form(3, 0, "symmetric", "float32")

APART, ONE_POOL, APART_INT3 = Form(4, apart="own"), Form(4, apart="shared"), Form(3, apart="own")

_RANKS = (4, 0, 3)
_GATE = Terms(INT3, _RANKS, max_rank=5, num_rows=64)
_UP = Terms(INT8, (1, 2, 0), max_rank=2, first_row=64)
_DOWN = Terms(PLAIN, (0, 6, 2), max_rank=6)
WITH_TERMS = Tier(INT3, INT3, gate_up_terms=(_GATE, _UP), down_terms=(_DOWN,))
INT4_TERMS = Tier(INT4, INT2, gate_up_terms=(Terms(INT4, _RANKS, max_rank=4),))

CASES = {
    # Decode: every token its own experts.
    "one_token": Case((alike(INT3),), tokens=1),
    "int2_gate_up_int4_down": Case((Tier(INT2, INT4, 5),), tokens=16, dtype="float16"),
    "int8": Case((alike(INT8),), model_dim=288, expert_dim=160),
    "int3_by_row": Case((alike(BY_ROW, 4),), tokens=3, model_dim=320, expert_dim=96),
    "int4_32_tokens": Case((alike(INT4, 8),), tokens=32, skipped=0.2),
    "plain": Case((alike(PLAIN),)),
    "plain_float16": Case((alike(Form(16, dtype="float16")),), dtype="float16"),
    "low_rank": Case((WITH_TERMS,), tokens=4),
    "low_rank_17_tokens": Case((WITH_TERMS,), tokens=17, width=3, dtype="float16"),
    # Tiers.
    "int4_int2_and_skipped": Case(
        (alike(INT4), alike(INT2, 2)), tokens=2, width=4,
        pairs=(((0, 2), SKIPPED, (1, 0), (0, 0)), ((1, 1), (0, 2), BEYOND, SKIPPED)),
    ),
    "int3_and_plain": Case((alike(INT3, 2), alike(PLAIN, 4)), tokens=5),
    "mxfp4_and_int2": Case((alike(MXFP4), alike(INT2)), tokens=5, model_dim=288, skipped=0.2),
    "prefill_mxfp4": Case((alike(MXFP4, 5), alike(INT2)), tokens=150, dtype="float16"),
    "three_tiers_with_terms": Case(
        (WITH_TERMS, INT4_TERMS, alike(PLAIN, 1)), tokens=6, width=3, skipped=0.2
    ),
    "a_tier_without_a_pair": Case(
        (alike(INT4), alike(INT2)), tokens=2, pairs=(((1, 2), (1, 0)), ((1, 0), (1, 1)))
    ),
    # Planes that lie apart, of both matrices, or of one.
    "apart_and_int2": Case((alike(ONE_POOL), alike(INT2)), tokens=5, skipped=0.2),
    "apart_int3_and_int4": Case(
        (Tier(APART_INT3, APART, gate_up_terms=(_GATE,)),), tokens=17, dtype="float16"
    ),
    "prefill_apart": Case((alike(APART), alike(PLAIN)), tokens=150),
    # Skipped pairs.
    "a_token_whose_experts_are_all_skipped": Case(
        (alike(INT3),), tokens=3, pairs=(((0, 1), (0, 0)), (SKIPPED, BEYOND), (SKIPPED, (0, 1)))
    ),
    "all_is_skipped": Case((alike(INT3),), tokens=3, pairs=((SKIPPED,) * 2,) * 3),
    # Experts.
    "an_expert_twice_for_a_token": Case(
        (alike(INT3),), tokens=3, pairs=(((0, 1), (0, 1)), ((0, 2), (0, 2)), ((0, 1), (0, 0)))
    ),
    "one_expert_owns_all_rows": Case(
        (alike(INT4),), tokens=33, width=1, pairs=(((0, 1),),) * 33
    ),
    # Prefill: rows sorted by expert, some of which have none, one or most.
    "prefill": Case((alike(INT3, 5),), tokens=200, dtype="float16"),
    "prefill_tiers_and_terms": Case(
        (WITH_TERMS, alike(PLAIN, 2), INT4_TERMS), tokens=150, skipped=0.2
    ),
    "prefill_long_groups": Case(
        (alike(Form(4, 128, "integer")), Tier(Form(2, 256), INT8)), tokens=150, model_dim=512,
        expert_dim=256,
    ),
    "prefill_one_expert_owns_all_rows": Case(
        (alike(INT2),), tokens=300, width=1, pairs=(((0, 1),),) * 300
    ),
    "prefill_all_but_one_row_skipped": Case(
        (alike(INT4), alike(INT8)), tokens=150,
        pairs=((SKIPPED,) * 2,) * 149 + ((SKIPPED, (1, 2)),),
    ),
}  # fmt: skip


_WIDE_GATE = _GATE._replace(num_rows=256)
_WIDE_UP = _UP._replace(first_row=256)
_WIDE_TERMS = WITH_TERMS._replace(gate_up_terms=(_WIDE_GATE, _WIDE_UP))
_WHOLE = Case((alike(INT3),), model_dim=512, expert_dim=256)
# Whole blocks of D and F, for kernels that refuse others.
WHOLE = {
    f"whole_{name}": CASES[name]._replace(model_dim=512, expert_dim=256)
    for name in (
        "one_token", "int2_gate_up_int4_down", "int8", "int3_by_row", "plain", "plain_float16",
        "int4_int2_and_skipped", "int3_and_plain", "a_tier_without_a_pair",
        "a_token_whose_experts_are_all_skipped", "all_is_skipped", "an_expert_twice_for_a_token",
        "apart_and_int2", "prefill_apart",
    )
} | {
    "whole_int4_32_tokens": _WHOLE._replace(tiers=(alike(INT4, 8),), tokens=32, skipped=0.2),
    "whole_one_expert_owns_all_rows": _WHOLE._replace(
        tokens=19, width=1, pairs=(((0, 1),),) * 19
    ),
    # More pairs of an expert than a kernel that finds them by itself takes at a time.
    "whole_8_experts_of_a_token": _WHOLE._replace(
        tiers=(alike(INT3, 9),), tokens=10, width=8, model_dim=256
    ),
    "whole_two_prefixes": _WHOLE._replace(
        tiers=(alike(ONE_POOL),), pairs=(((0, 0), (0, 1)), ((0, 2), (0, 0)), ((0, 1), (0, 2)),
                                         ((0, 2), (0, 1)))
    ),
    "whole_apart_8_experts_of_a_token": _WHOLE._replace(
        tiers=(Tier(APART, APART_INT3, 9),), tokens=10, width=8, model_dim=256
    ),
    "whole_apart_low_rank": _WHOLE._replace(
        tiers=(Tier(ONE_POOL, APART, gate_up_terms=(_WIDE_GATE,)),), dtype="float16"
    ),
    "whole_apart_longer_rows": _WHOLE._replace(
        tiers=(alike(APART),), tokens=2, model_dim=2304, expert_dim=768
    ),
    "whole_longer_rows": _WHOLE._replace(tokens=2, model_dim=2304, expert_dim=768),
    "whole_low_rank": _WHOLE._replace(tiers=(_WIDE_TERMS,)),
    "whole_low_rank_and_plain": _WHOLE._replace(
        tiers=(_WIDE_TERMS, alike(PLAIN)), tokens=6, skipped=0.2
    ),
    # A last block of half or a quarter, whose rows of scales end within a word.
    "whole_mxfp4_short_rows": _WHOLE._replace(
        tiers=(alike(MXFP4), alike(Form(4))), tokens=5, model_dim=576, expert_dim=320, skipped=0.2
    ),
    "whole_mxfp4_float16": _WHOLE._replace(
        tiers=(alike(MXFP4, 8),), tokens=12, model_dim=384, expert_dim=832, dtype="float16"
    ),
    "whole_mxfp4_gpt_oss": _WHOLE._replace(
        tiers=(alike(MXFP4),), tokens=1, width=1, model_dim=2880, expert_dim=2880
    ),
    "whole_int8_short_rows": _WHOLE._replace(
        tiers=(Tier(Form(8), Form(4, 128)),), tokens=2, model_dim=320, expert_dim=576
    ),
    "whole_prefill": _WHOLE._replace(tiers=(alike(INT3, 5),), tokens=200, dtype="float16"),
    "whole_prefill_tiers": _WHOLE._replace(
        tiers=(alike(INT4), alike(PLAIN, 2), Tier(INT2, INT8)), tokens=150, skipped=0.2
    ),
}  # fmt: skip
CASES |= WHOLE


# An interpreted Triton kernel takes seconds to compile: of these, others meet all that a kernel
# sees.
NOT_INTERPRETED = ("int3_and_plain", "low_rank", "plain_float16", *WHOLE)


def reduced(shapes: Mapping[str, tuple[int, int, int]]) -> dict[str, Case]:
    """Named layers (D, F, A) as a CPU can interpret them, one token each."""
    return {
        name: Case(
            (alike(INT3),), tokens=1, width=2,
            model_dim=_fewer_blocks(model_dim, 256), expert_dim=_fewer_blocks(expert_dim, 768),
        )
        for name, (model_dim, expert_dim, _) in shapes.items()
    }  # fmt: skip


def _fewer_blocks(size: int, least: int) -> int:
    """`size` halved while it is above `least` and stays a multiple of 256."""
    while size > least and size % 512 == 0:
        size //= 2
    return size


def full(shapes: Mapping[str, tuple[int, int, int]]) -> dict[str, Case]:
    """Named layers for a GPU: decode sizes and a prefill."""
    cases = {}
    for name, (model_dim, expert_dim, width) in shapes.items():
        terms = (Terms(INT3, (3, 16, 0, 9), max_rank=16),)
        with_terms = Tier(INT3, INT3, 4, gate_up_terms=terms, down_terms=terms)
        one = (alike(Form(4), 2 * width),)
        several = (with_terms, alike(INT2, 2 * width), alike(PLAIN, 1))
        whole = Case(one, width=width, model_dim=model_dim, expert_dim=expert_dim)
        apart = (alike(ONE_POOL, 2 * width), alike(INT2, 2 * width))
        cases[f"{name}_int4_1_token"] = whole._replace(tokens=1)
        cases[f"{name}_apart_3_tokens"] = whole._replace(tokens=3, tiers=apart)
        cases[f"{name}_tiers_4_tokens"] = whole._replace(tiers=several, skipped=0.2)
        if expert_dim < 4096:  # what float64 on the host solves in seconds
            for tokens in (16, 64, 300):
                cases[f"{name}_apart_{tokens}_tokens"] = whole._replace(tokens=tokens, tiers=apart)
            cases[f"{name}_int4_16_tokens"] = whole._replace(tokens=16)
            cases[f"{name}_tiers_32_tokens"] = whole._replace(tokens=32, tiers=several)
            cases[f"{name}_tiers_700_tokens"] = whole._replace(tokens=700, tiers=several)
            cases[f"{name}_int4_300_tokens"] = whole._replace(tokens=300)
    return cases
