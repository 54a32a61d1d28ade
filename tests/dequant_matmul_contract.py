"""Contract of products with packed weights: cases, random operands, broken kernels.

The values, the tolerance and the check are those of `packed_operands`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.dequant_matmul.low_rank import MAX_FEW_ROWS, are_fused
from pallas_kernels.packed import LowRank, PackedMatrices
from tests import packed_operands
from tests.packed_operands import Form, Terms

WIDTHS = (2, 3, 4, 8)
GROUPS = (32, 64, 128, 0)
ZERO_KINDS = ("float", "integer", "symmetric")
SCALES = ("float16", "float32")
ACTIVATIONS = ("bfloat16", "float16")
# No tile divides 3, 17, 33, 40 and 200. 800 is three blocks of 256 and 32 codes; with groups of 64
# and 128 its last group is short too.
NUM_ROWS = (1, 16, 3, 33, 17)
NUM_OUTPUTS = (40, 200, 64)
NUM_INPUTS = (800, 256, 544, 288)


class Case(NamedTuple):
    """One product x [M, K] W^T of one of three slots."""

    form: Form
    rows: int = 3  # M
    outputs: int = 40  # N
    inputs: int = 800  # K
    dtype: str = "bfloat16"  # of x
    out_dtype: str | None = None
    terms: tuple[Terms, ...] = ()
    slot: int = 1
    every_code: bool = False  # row n holds code (n + k) mod 2^bits at k


class Operands(NamedTuple):
    """On the host."""

    x: np.ndarray
    weights: PackedMatrices
    slot: np.ndarray  # int32[]
    low_rank: tuple[LowRank, ...]


def random_operands(case: Case, seed: int, num_slots: int = 3) -> Operands:
    """Fresh operands; every slot but the case's is NaN."""
    rng = np.random.default_rng(seed)
    codes = None
    if case.every_code:
        codes = (np.arange(case.outputs)[:, None] + np.arange(case.inputs)) % 2**case.form.bits
    weights = packed_operands.random_matrices(
        rng, case.form, num_slots=num_slots, shape=(case.outputs, case.inputs), used={case.slot},
        codes=codes,
    )  # fmt: skip
    terms = tuple(packed_operands.random_terms(rng, t, weights, {case.slot}) for t in case.terms)
    x = packed_operands.random_activations(rng, (case.rows, case.inputs), case.dtype)
    return Operands(x, weights, np.asarray(case.slot, np.int32), terms)


def violation(
    found: Any, operands: Operands, case: Case, rounds_weights: bool = False
) -> str | None:
    """THE check: why `found` is not the case's value, or None."""
    dtype = case.out_dtype or case.dtype
    if found.dtype.name != dtype:
        return f"{found.dtype} in place of {dtype}"
    # Apart, many rows' terms are products of XLA with factors in x's dtype.
    apart = rounds_weights or not are_fused(operands.low_rank)
    expected, slack = packed_operands.product(
        operands.x, operands.weights, int(operands.slot), operands.low_rank, rounds_weights,
        apart and len(operands.x) > MAX_FEW_ROWS,
    )  # fmt: skip
    return packed_operands.violation(found, expected, slack, case.dtype)


def _form_cases() -> dict[str, Case]:
    """Every width with every group; the rest in turn, so that any two values meet somewhere."""
    cases = {}
    for i, bits in enumerate(WIDTHS):
        for j, group_size in enumerate(GROUPS):
            form = Form(bits, group_size, ZERO_KINDS[(i + j) % 3], SCALES[(i // 2 + j) % 2])
            cases[f"int{bits}g{group_size or 'row'}_{form.zero_kind}"] = Case(
                form,
                rows=NUM_ROWS[(3 * i + j) % 5],
                outputs=NUM_OUTPUTS[(i + 2 * j) % 3],
                inputs=NUM_INPUTS[(i + j) % 4],
                dtype=ACTIVATIONS[(i + j // 2) % 2],
                slot=(i + j) % 3,
            )
    mxfp4 = Form(4, 32, "mxfp4")
    cases["mxfp4"] = Case(mxfp4)
    cases["mxfp4_row"] = Case(mxfp4, rows=1, inputs=512, dtype="float16", out_dtype="float32")
    cases["mxfp4_33_rows"] = Case(mxfp4, rows=33, outputs=200, inputs=544, slot=0)
    cases["mxfp4_scale_pairs"] = Case(mxfp4, rows=3, inputs=576)  # 18 groups, 2 of the last block
    cases["mxfp4_of_one_group"] = Case(mxfp4, inputs=32, slot=2)
    cases["every_code_mxfp4"] = Case(
        mxfp4, rows=4, outputs=16, inputs=288, out_dtype="float32", every_code=True
    )
    for dtype in ACTIVATIONS:
        cases[f"plain_{dtype}"] = Case(Form(16, dtype=dtype), dtype=dtype, rows=33)
    return cases


def _whole_row_cases() -> dict[str, Case]:
    """Few rows, few plain outputs: a router's, and what is no power of two."""
    plain = Case(Form(16, dtype="bfloat16"), out_dtype="float32")
    half = Case(Form(16, dtype="float16"), dtype="float16")
    return {
        "rows_of_a_router": plain._replace(rows=1, outputs=128, inputs=2048),
        "rows_of_few_outputs": plain._replace(rows=3, outputs=8, inputs=4096),
        "rows_of_half_precision": half._replace(rows=17, outputs=40, inputs=800, slot=2),
        "rows_of_several_a_program": plain._replace(
            rows=9, outputs=500, inputs=288, out_dtype=None
        ),
    }


def _long_group_cases() -> dict[str, Case]:
    """Many rows: sums that a kernel may take beforehand, long groups, half a block at the end."""
    half_blocks = {
        f"half_block_int{bits}_33_rows": Case(Form(bits), rows=33, outputs=64, inputs=384)
        for bits in (2, 4, 8)
    }
    return half_blocks | {
        f"int{bits}g{group_size}_33_rows": Case(
            Form(bits, group_size, zero_kind), rows=33, outputs=64, inputs=512, dtype=dtype
        )
        for bits, group_size, zero_kind, dtype in (
            (2, 128, "float", "float16"),
            (3, 128, "symmetric", "bfloat16"),
            (4, 128, "integer", "bfloat16"),
            (8, 128, "integer", "float16"),
        )
    }


def _low_rank_cases() -> dict[str, Case]:
    """Factors of every kind. Pools hold other matrices' rows, and the third matrix has none."""
    ranks = (5, 2, 0)
    gate = Terms(Form(3), ranks, max_rank=8, num_rows=48)
    up = Terms(Form(8, dtype="float32"), (3, 0, 1), max_rank=4, first_row=48)
    cases = {
        f"low_rank_int{bits}": Case(Form(3), rows=rows, terms=(Terms(Form(bits), ranks, 6),))
        for bits, rows in ((3, 1), (4, 16), (8, 33))
    }
    plain = Terms(Form(16, dtype="bfloat16"), ranks, max_rank=6, first_row=8, num_rows=24)
    large = Terms(Form(3), (9, 150, 0), max_rank=160, first_row=3, num_rows=101)
    small = Terms(Form(8), (5, 2, 0), max_rank=6)
    # Whole blocks and short ones, the second's beside rows that came first; some rows have no term.
    blocks = [
        Terms(form, ranks, max(ranks), first_row=first, num_rows=count)
        for form, ranks, first, count in (
            (Form(4, 128, "integer"), (9, 33, 0), 320, 259),
            (Form(3), (70, 65, 0), 3, 300),
            (Form(2, 32, "float", "float32"), (0, 90, 7), 260, 200),
        )
    ]
    kinds = [
        Terms(form, (3, 100, 0), 100, first_row=first, num_rows=300)
        for first, form in ((0, Form(16, dtype="bfloat16")), (300, Form(8, 0, "symmetric")))
    ]
    return cases | {
        "low_rank_plain": Case(Form(2, 32, "integer", "float32"), terms=(plain,), dtype="float16"),
        "low_rank_gate_and_up": Case(Form(3), rows=4, outputs=96, inputs=288, terms=(gate, up)),
        "low_rank_first_slot": Case(
            Form(4, 128, "symmetric"), rows=17, outputs=96, terms=(gate, up), slot=0
        ),
        "low_rank_none": Case(Form(4), terms=(Terms(Form(3), ranks, max_rank=6),), slot=2),
        "low_rank_32": Case(
            Form(3), rows=2, inputs=512, outputs=128, terms=(Terms(Form(3), (0, 32, 7), 32),)
        ),
        # Ranks that no kernel of the product holds, in more than one part; an odd range of rows.
        "low_rank_large": Case(
            Form(3), rows=2, inputs=512, outputs=128, terms=(large, small), out_dtype="float32"
        ),
        "low_rank_large_blocks": Case(
            Form(3), rows=2, inputs=512, outputs=600, terms=tuple(blocks), out_dtype="float32"
        ),
        "low_rank_large_kinds": Case(
            Form(3), rows=17, inputs=512, outputs=600, terms=tuple(kinds), out_dtype="float32"
        ),
        "low_rank_large_33_rows": Case(
            Form(4), rows=33, inputs=512, outputs=128, terms=(large, small)
        ),
    }


def _code_cases() -> dict[str, Case]:
    """Every code of every width at every place of a whole block and of a short one.

    In float32, where the result's rounding cannot hide a code that is one off.
    """
    return {
        f"every_code_int{bits}_{rows}_rows": Case(
            Form(bits, 32, dtype="float32"), rows=rows, outputs=2**bits, inputs=288,
            out_dtype="float32", every_code=True,
        )
        for bits in WIDTHS
        for rows in (4, 40)
    }  # fmt: skip


def _apart_cases() -> dict[str, Case]:
    """Planes in arrays of their own, or in one pool with other matrices' refinements."""
    terms = (Terms(Form(3), (5, 2, 0), 6),)
    int3, int4 = Form(3, apart="own"), Form(4, apart="own")
    row = Form(4, 0, dtype="float32", apart="shared")
    cases = {
        "apart_int4": Case(int4, rows=3),
        "apart_int4_shared": Case(row, rows=33, inputs=544, slot=2, dtype="float16"),
        "apart_int3": Case(int3._replace(group_size=32), rows=17, inputs=288, slot=0),
        "apart_low_rank": Case(Form(4, apart="shared"), rows=4, inputs=288, terms=terms),
        "whole_apart_int4": Case(int4, rows=9, outputs=48, inputs=1792, dtype="float16", slot=0),
        "whole_apart_int4_shared": Case(
            Form(4, 128, apart="shared"), rows=16, outputs=208, inputs=4352
        ),
        "whole_apart_int4_1_row": Case(row, rows=1, outputs=48, inputs=768, slot=2),
        "whole_apart_int3": Case(int3, rows=9, outputs=48, inputs=768),
        "whole_apart_low_rank": Case(
            Form(4, apart="shared"), rows=2, outputs=48, inputs=512, terms=terms
        ),
    }  # fmt: skip
    for bits, form in ((3, int3), (4, int4)):
        every = Case(
            form._replace(group_size=32, dtype="float32"), rows=4, outputs=2**bits, inputs=288,
            out_dtype="float32", every_code=True,
        )  # fmt: skip
        cases[f"every_code_apart_int{bits}"] = every
        cases[f"whole_every_code_apart_int{bits}"] = every._replace(outputs=16, inputs=256)
    return cases


def _whole_cases() -> dict[str, Case]:
    """Whole blocks of K and of 16 outputs, for kernels that refuse others; few rows.

    256 is less than the warps of a thread block, 4352 is more.
    """
    groups, outputs, inputs = (*GROUPS, 512), (16, 208, 48), (768, 4352, 256, 1792)
    rows = (1, 16, 3, 8, 9)
    cases = {}
    for i, bits in enumerate(WIDTHS):
        for j, group_size in enumerate(groups):
            form = Form(bits, group_size, ZERO_KINDS[(i + j) % 3], SCALES[(i // 2 + j) % 2])
            cases[f"whole_int{bits}g{group_size or 'row'}_{form.zero_kind}"] = Case(
                form,
                rows=rows[(2 * i + j) % 5],
                outputs=outputs[(i + 2 * j) % 3],
                inputs=inputs[(i + j) % 4],
                dtype=ACTIVATIONS[(i + j // 2) % 2],
                slot=(i + j) % 3,
            )
        cases[f"whole_every_code_int{bits}"] = Case(
            Form(bits, 32, dtype="float32"), rows=4, outputs=max(16, 2**bits), inputs=256,
            out_dtype="float32", every_code=True,
        )  # fmt: skip
    for dtype in ACTIVATIONS:
        form = Form(16, dtype=dtype)
        cases[f"whole_plain_{dtype}"] = Case(form, 9, 48, 1088, dtype)
    ranks = (5, 2, 0)
    gate = Terms(Form(3), ranks, max_rank=8, num_rows=48)
    up = Terms(Form(8, dtype="float32"), (3, 0, 1), max_rank=4, first_row=48)
    plain = Terms(Form(16, dtype="float16"), ranks, max_rank=6, first_row=16, num_rows=16)
    whole = Case(Form(3), rows=2, outputs=48, inputs=512)
    return cases | {
        "whole_low_rank_gate_and_up": whole._replace(rows=9, outputs=96, terms=(gate, up)),
        "whole_low_rank_plain": whole._replace(dtype="float16", terms=(plain,)),
        "whole_low_rank_32": whole._replace(terms=(Terms(Form(3), (0, 32, 7), 32),)),
        "whole_low_rank_none": whole._replace(terms=(Terms(Form(3), ranks, 6),), slot=2),
    }


def _half_block_cases() -> dict[str, Case]:
    """A last block of 128, as a share of an expert has: every width, and rows of it alone."""
    return {
        f"whole_half_block_{name}": Case(
            form, rows=rows, outputs=48, inputs=inputs, dtype=dtype, slot=2
        )
        for name, form, inputs, rows, dtype in (
            ("int4", Form(4), 384, 9, "bfloat16"),
            ("int4_alone", Form(4, 32, "integer"), 128, 1, "float16"),
            ("int3", Form(3, 32, "integer"), 640, 3, "bfloat16"),
            ("int2", Form(2, 64, "symmetric"), 384, 16, "float16"),
            ("int8", Form(8, 128, dtype="float32"), 640, 3, "bfloat16"),
            ("apart_int4", Form(4, apart="own"), 384, 8, "bfloat16"),
            ("apart_int3", Form(3, apart="own"), 128, 8, "bfloat16"),
        )
    }


_APART = _apart_cases()
WHOLE = (
    _whole_cases()
    | _half_block_cases()
    | {name: c for name, c in _APART.items() if name.startswith("whole_")}
)
CASES = (
    _form_cases() | _whole_row_cases() | _long_group_cases() | _low_rank_cases() | _code_cases()
    | _APART | WHOLE
)  # fmt: skip


# An interpreted Triton kernel takes seconds to compile: what differs from other cases in numbers
# alone is left to the reference and to GPUs.
NOT_INTERPRETED = (
    *WHOLE,
    "every_code_int2_40_rows",
    "every_code_int4_40_rows",
    "low_rank_first_slot",
    "low_rank_int4",
    "low_rank_none",
    "every_code_apart_int3",
)


def every_form() -> dict[str, Case]:
    """For a GPU: every width with every group and zero kind; dtypes and rows in turn.

    Once with blocks and tiles that are not whole, once with those that every kernel serves.
    """
    turns = itertools.cycle((("bfloat16", 3), ("float16", 33), ("bfloat16", 17), ("float16", 1)))
    kinds = [(bits, zero_kind, "") for bits in WIDTHS for zero_kind in ZERO_KINDS]
    kinds += [(3, "float", "own"), (4, "float", "own"), (4, "float", "shared")]
    return {
        f"{whole}int{bits}g{group_size or 'row'}_{apart or zero_kind}_{dtype}_{rows}_rows": Case(
            Form(bits, group_size, zero_kind, SCALES[i % 3 % 2], apart),
            rows=rows,
            outputs=outputs,
            inputs=inputs,
            dtype=dtype,
        )
        for whole, outputs, inputs in (("", 200, 800), ("whole_", 192, 768))
        for i, (group_size, (bits, zero_kind, apart)) in enumerate(itertools.product(GROUPS, kinds))
        for dtype, rows in [next(turns)]
    }


def distinct(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The first name of each shape."""
    first: dict[tuple[int, ...], str] = {}
    for name, shape in shapes.items():
        first.setdefault(shape, name)
    return {name: shape for shape, name in first.items()}


def reduced(shapes: Mapping[str, tuple[int, int]]) -> dict[str, Case]:
    """Named shapes (K, N) as a CPU can interpret them: as odd a number of blocks, fewer rows."""
    fewer = {
        name: (_fewer_blocks(inputs), min(outputs, 80))
        for name, (inputs, outputs) in shapes.items()
    }
    return {
        name: Case(Form(3), rows=1, outputs=outputs, inputs=inputs)
        for name, (inputs, outputs) in distinct(fewer).items()
    }


def _fewer_blocks(inputs: int) -> int:
    """K halved while it is above 1024 and a multiple of 512."""
    while inputs > 1024 and inputs % 512 == 0:
        inputs //= 2
    return inputs


def full(shapes: Mapping[str, tuple[int, int]]) -> dict[str, Case]:
    """Named shapes for a GPU: every width at decode; INT3 with rank 32 at 1, 64 and 1024 rows."""
    cases = {}
    rank_32 = (Terms(Form(3), (7, 32, 0), max_rank=32),)
    for i, (name, (inputs, outputs)) in enumerate(distinct(shapes).items()):
        whole = Case(Form(3), outputs=outputs, inputs=inputs)
        for j, bits in enumerate((2, 4)):
            cases[f"{name}_int{bits}"] = whole._replace(form=Form(bits), rows=NUM_ROWS[(i + j) % 5])
        form = Form(4, apart="shared" if i % 2 else "own")
        cases[f"{name}_apart"] = whole._replace(form=form, rows=(1, 64, 16, 1024)[i % 4])
        other = Form(8) if i % 2 else Form(16, dtype="bfloat16")
        cases[f"{name}_int{other.bits}"] = whole._replace(form=other, rows=16)
        for rows in (1, 64, 1024)[: 1 + i % 3]:
            cases[f"{name}_rank_32_{rows}_rows"] = whole._replace(rows=rows, terms=rank_32)
    return cases


def _with(operands: Operands, name: str, change: Callable[[Any], Any]) -> Operands:
    part = change(np.asarray(getattr(operands.weights, name)))
    return operands._replace(weights=dataclasses.replace(operands.weights, **{name: part}))


def _with_slots(operands: Operands, change: Callable[[np.ndarray], np.ndarray]) -> Operands:
    refinements = operands.weights.refinements
    moved = tuple(dataclasses.replace(of, slots=change(of.slots)) for of in refinements)
    return operands._replace(weights=dataclasses.replace(operands.weights, refinements=moved))


def _with_terms(operands: Operands, name: str, change: Callable[[Any], Any]) -> Operands:
    changed = tuple(
        dataclasses.replace(terms, **{name: change(getattr(terms, name))})
        for terms in operands.low_rank
    )
    return operands._replace(low_rank=changed)


def _one_code_off(words: np.ndarray) -> np.ndarray:
    words = words.copy()
    words[..., -1] ^= np.uint32(1)
    return words


def _without_the_last_block(x: np.ndarray) -> np.ndarray:
    end = (x.shape[1] - 1) // 256 * 256
    return np.concatenate([x[:, :end], np.zeros_like(x[:, end:])], axis=1)


# Kernels with one mistake: the operands from which a right one computes the same, and a case.
BROKEN: dict[str, tuple[Callable[[Operands], Operands], str]] = {
    "zeros one too high": (
        lambda of: _with(of, "zeros", lambda zeros: zeros + zeros.dtype.type(1)), "int4g64_float"
    ),
    "even codes for odd ones": (
        lambda of: _with(of, "words", lambda w: w << np.uint32(16) | w >> np.uint32(16)),
        "int3g32_integer",
    ),
    "one bit of one code of a row": (
        lambda of: _with(of, "words", _one_code_off), "every_code_int3_4_rows"
    ),
    "a loop over K that ends a block early": (
        lambda of: of._replace(x=_without_the_last_block(of.x)), "low_rank_int3"
    ),
    "the scales of the next group": (
        lambda of: _with(of, "scales", lambda scales: np.roll(scales, 1, axis=2)), "low_rank_int4"
    ),
    "the next matrix of the stack": (
        lambda of: of._replace(slot=np.asarray((of.slot + 1) % 3, np.int32)), "low_rank_int3"
    ),
    "refinements where the first planes lie": (
        lambda of: _with_slots(of, lambda slots: np.arange(len(slots), dtype=np.int32)),
        "apart_int4_shared",
    ),
    "refinements of another matrix": (
        lambda of: _with_slots(of, lambda slots: slots - np.int32(1)), "apart_int4_shared"
    ),
    "the row of x before": (
        lambda of: of._replace(x=np.roll(of.x, 1, axis=0)), "low_rank_int4"
    ),
    "no terms": (lambda of: of._replace(low_rank=()), "low_rank_int8"),
    "the last term left out": (
        lambda of: _with_terms(of, "rank", lambda rank: np.maximum(rank - np.int32(1), 0)),
        "low_rank_int4",
    ),
    "another matrix's term": (
        lambda of: _with_terms(of, "rank", lambda rank: rank + np.int32(1)), "low_rank_int3"
    ),
    "terms added to the rows before": (
        lambda of: _with_terms(of, "first_row", lambda row: row - 1), "low_rank_plain"
    ),
}  # fmt: skip
