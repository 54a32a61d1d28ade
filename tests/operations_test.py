"""One contract for every operation: which implementation is chosen, and why others refuse."""

import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels import (
    buddy_search,
    chunk_attention,
    decode_attention,
    delta_step,
    dequant_matmul,
    grouped_dequant_matmul,
    peer_sum,
    qkv_to_cache,
    residual_norm,
    router_topk,
    row_gather,
)
from pallas_kernels.gating import SWIGLU
from pallas_kernels.op import Implementation, Operation
from pallas_kernels.target import SIMULATED, Target, target_of
from tests.gpu_programs import shapes_of_matrices, shapes_of_terms
from tests.gpu_targets import leaf
from tests.packed_operands import Form

CPU = Target("cpu", None)
TURING = Target("gpu", (7, 5))
SINCE_AMPERE = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


class Case(NamedTuple):
    """An operation, operands that its first kernel takes, and some that are refused."""

    operation: Operation
    operands: tuple[Any, ...]  # shapes: neither a choice nor a refusal needs values
    static: dict[str, Any]
    # Changed operands, by position or name, and parts of every kernel's refusal on Turing.
    misfits: tuple[tuple[dict[int | str, Any], tuple[str, ...]], ...]
    # Changed operands, and parts of the last kernel's refusal on Hopper.
    on_hopper: tuple[tuple[dict[int | str, Any], tuple[str, ...]], ...] = ()

    def abstract(self, changed: dict[int | str, Any] | None = None) -> tuple[Any, ...]:
        """Facts on which refusals depend."""
        changed = changed or {}
        given = [changed.get(i, operand) for i, operand in enumerate(self.operands)]
        static = {name: changed.get(name, value) for name, value in self.static.items()}
        return self.operation.abstract(*given, **static)


def half(*sizes: int) -> jax.ShapeDtypeStruct:
    return leaf(*sizes, dtype="bfloat16")


def wide(*sizes: int) -> jax.ShapeDtypeStruct:
    return leaf(*sizes, dtype="float32")


def whole(*sizes: int) -> jax.ShapeDtypeStruct:
    return leaf(*sizes, dtype="int32")


def _layer_case() -> Case:
    # Gate and up of a tier, then down: F 256.
    each = [([shapes_of_matrices(Form(4), 3, n, 256)], [()]) for n in (512, 256)]
    pairs = grouped_dequant_matmul.Assignments(whole(2, 2), whole(2, 2), wide(2, 2))
    layer = grouped_dequant_matmul.api._Layer(half(2, 256), pairs, *each, bias=None, turn=None)
    return Case(
        grouped_dequant_matmul.OPERATION,
        (layer,),
        {"gating": SWIGLU},
        ((({0: layer._replace(x=wide(2, 256))}), ("x is float32, not bfloat16 or float16; ",)),),
    )


def _product_case() -> Case:
    weights = shapes_of_matrices(Form(3), 3, 512, 256)
    terms = (shapes_of_terms(Form(3), weights, 8),)
    return Case(
        dequant_matmul.OPERATION,
        (half(3, 256), weights, whole(), terms),
        {"out_dtype": jnp.bfloat16},
        ((({0: wide(3, 256)}), ("x is float32, not bfloat16 or float16; ",)),),
    )


def _delta_case() -> Case:
    states, tails = wide(1, 1, 32, 128, 128), half(1, 1, 3, 2 * 16 * 128 + 32 * 128)
    return Case(
        delta_step.OPERATION,
        (None, states, tails, None, whole(), None),
        {"eps": 1e-6, "floor": 1e-6},
        (
            (
                {1: wide(1, 1, 6, 24, 1024), 2: wide(1, 1, 3, 2 * 2 * 24 + 6 * 1024)},
                ("sm_80", "heads of 24 and 1024, 3 values a key", "24 x 1024", "tails are fl"),
            ),
        ),
    )


def _attention_case() -> Case:
    def queries(heads: int, width: int, dtype: str = "float16") -> jax.ShapeDtypeStruct:
        return leaf(1, heads, width, dtype=dtype)

    def cache(width: int) -> jax.ShapeDtypeStruct:
        return leaf(1, 1, 1, 8, width, dtype="float16")

    latent = decode_attention.Latent(queries(16, 24), cache(24))
    return Case(
        decode_attention.OPERATION,
        (queries(16, 64), cache(64), cache(64), whole(), whole(1)),
        {"kv_length": 8, "window": None, "scale": 1.0},
        (
            (
                {0: queries(65, 24, "float32"), 1: cache(24)},
                ("q is float32", "sm_80", "C=24", "65 query heads"),
            ),
        ),
        (
            (
                {0: queries(16, 1024), 1: cache(1024), 2: latent},
                ("C=1024 is no power of two in 16..512; P=24 is no",),
            ),
            ({0: queries(16, 64, "bfloat16")}, ("q is bfloat16, the cache float16",)),
        ),
    )


def _chunk_case() -> Case:
    def queries(width: int, dtype: str = "float16") -> jax.ShapeDtypeStruct:
        return leaf(1, 16, 4, width, dtype=dtype)

    def cache(width: int) -> jax.ShapeDtypeStruct:
        return leaf(1, 1, 1, 32, width, dtype="float16")

    return Case(
        chunk_attention.OPERATION,
        (queries(64), cache(64), cache(64), whole(), whole(1), whole(1), None),
        {"kv_length": 32, "window": None, "scale": 1.0},
        (
            (
                {0: queries(24, "float32"), 1: cache(24), 2: cache(24)},
                ("q is float32", "sm_75", "C=24"),
            ),
        ),
        (
            ({0: queries(64, "bfloat16")}, ("q is bfloat16, the cache float16",)),
            ({2: cache(512)}, ("keys of 64 and values of 512 numbers",)),
        ),
    )


def _cache_write_case() -> Case:
    def cache(width: int) -> jax.ShapeDtypeStruct:
        return leaf(2, 1, 1, 8, width, dtype="float16")

    qkv, angles = leaf(1, 4 * 64, dtype="float16"), wide(1, 32)
    return Case(
        qkv_to_cache.OPERATION,
        (qkv, cache(64), cache(64), whole(), whole(1), angles, angles, None),
        {},
        (({0: wide(1, 4 * 24), 1: cache(24)}, ("qkv is float32", "sm_80", "C=24")),),
        (({0: half(1, 4 * 64)}, ("qkv is bfloat16, the cache float16",)),),
    )


CASES = {
    "buddy_search": Case(
        buddy_search.OPERATION,
        (whole(2, 8), whole(1, 64, 16)),
        {"last_first": False},
        (
            (
                {0: whole(2, 33), 1: whole(1, 512, 300)},
                ("sm_80", "33 experts a token", "300 places"),
            ),
        ),
    ),
    "chunk_attention": _chunk_case(),
    "decode_attention": _attention_case(),
    "delta_step": _delta_case(),
    "dequant_matmul": _product_case(),
    "grouped_dequant_matmul": _layer_case(),
    "peer_sum": Case(
        peer_sum.OPERATION,
        (wide(64, 4096), whole(1, 5)),
        {"axis": "shares", "dtype": "bfloat16"},
        (
            ({0: wide(65, 4096)}, ("sm_80", "up to 262144 numbers, these are 266240")),
            ({1: None}, ("sm_80", "GPUs of one process that reach each other's memory")),
        ),
    ),
    "qkv_to_cache": _cache_write_case(),
    "residual_norm": Case(
        residual_norm.OPERATION,
        (half(1, 8192), None, half(2, 8192), whole()),
        {"eps": 1e-6, "zero_centred": False},
        (({0: wide(1, 8193)}, ("sm_80", "rows of 8193, more than 8192", "x is float32")),),
    ),
    "row_gather": Case(
        row_gather.OPERATION,
        (half(9, 16384), whole(4)),
        {},
        (({0: whole(9, 16385)}, ("sm_80", "int32, not a float", "rows of 16385, more than")),),
    ),
    "router_topk": Case(
        router_topk.OPERATION,
        (wide(1, 1024), None),
        {"k": 32, "normalise": True},
        (({0: wide(1, 1025)}, ("sm_80", "1025 experts, more than 1024")),),
    ),
}


class OperationsTest(parameterized.TestCase):
    @parameterized.parameters(sorted(CASES))
    def test_hopper_takes_the_first_kernel(self, name):
        case = CASES[name]
        choice = case.operation.choose(*case.abstract(), target=SIMULATED)
        self.assertEqual(choice, (case.operation.names[0], {}))

    @parameterized.product(name=sorted(CASES), capability=SINCE_AMPERE)
    def test_a_gpu_since_ampere_takes_a_kernel(self, name, capability):
        operation, abstract = CASES[name].operation, CASES[name].abstract()
        choice = operation.choose(*abstract, target=Target("gpu", capability))
        self.assertNotEqual(choice.implementation, "reference")
        if capability != (9, 0):
            self.assertEqual(choice.implementation, "triton")
            self.assertEqual(list(choice.refusals), list(operation.names[:-2]))

    @parameterized.parameters(sorted(CASES))
    def test_a_cpu_takes_the_reference_and_says_why(self, name):
        operation, abstract = CASES[name].operation, CASES[name].abstract()
        kernels = list(operation.names[:-1])
        choice = operation.choose(*abstract, target=CPU)
        self.assertEqual(choice.implementation, "reference")
        self.assertEqual(list(choice.refusals), kernels)
        for kernel in kernels:
            reason = choice.refusals[kernel]
            self.assertEqual(operation.refusal(kernel, *abstract, target=CPU), reason)
            self.assertIn("cpu", reason)
            self.assertIn(f"{kernel}: {reason}", choice.describe())
        self.assertIsNone(operation.refusal("reference", *abstract, target=CPU))

    @parameterized.parameters(sorted(CASES))
    def test_a_kernel_that_is_asked_for_and_refuses_is_an_error(self, name):
        case, calls_on_a_cpu = CASES[name], jax.default_backend() == "cpu"
        call = functools.partial(case.operation, *case.operands, **case.static)
        with self.assertRaisesRegex(ValueError, "implementation 'cutlass' is none of .*reference"):
            call(implementation="cutlass")
        for kernel in case.operation.names[:-1] if calls_on_a_cpu else ():
            with self.assertRaisesRegex(ValueError, f"{name} by {kernel} refuses: .*cpu"):
                call(implementation=kernel)

    @parameterized.parameters(sorted(CASES))
    def test_every_reason_is_listed(self, name):
        case = CASES[name]
        for target, misfits in ((TURING, case.misfits), (SIMULATED, case.on_hopper)):
            for changed, parts in misfits:
                abstract = case.abstract(changed)
                kernels = case.operation.names[:-1] if target is TURING else ("triton",)
                for kernel in kernels:
                    reason = case.operation.refusal(kernel, *abstract, target=target)
                    self.assertIsNotNone(reason)
                    for part in parts:
                        self.assertIn(part, reason)
                    if target is SIMULATED:
                        self.assertNotIn("sm_80", reason)

    def test_the_experts_that_a_router_chooses_are_few(self):
        reason = router_topk.OPERATION.refusal("triton", wide(1, 1024), 33, target=TURING)
        self.assertIn("33 chosen, more than 32", reason)

    def test_all_operations_are_here(self):
        self.assertEqual([case.operation.name for case in CASES.values()], list(CASES))


def operation_of(*refusals: str | None) -> Operation:
    """An operation whose kernels k0, k1, ... refuse so; each returns what it was called with."""

    def kernel(name: str, reason: str | None) -> Implementation:
        return Implementation(name, lambda x, target: reason, lambda *a, **b: (name, a, b))

    return Operation(
        "twice",
        tuple(kernel(f"k{i}", reason) for i, reason in enumerate(refusals)),
        reference=lambda *a, **b: ("reference", a, b),
        abstract=lambda x, **_: (x,),
        shared_refusals=lambda x: ["x is odd"] if x % 2 else [],
    )


class OperationTest(absltest.TestCase):
    """`Operation` itself, over kernels that are none."""

    def test_the_first_that_does_not_refuse_is_chosen(self):
        operation = operation_of("no", None, None)
        self.assertEqual(operation.choose(2), ("k1", {"k0": "no"}))
        self.assertEqual(operation.names, ("k0", "k1", "k2", "reference"))
        odd = operation.choose(3)
        self.assertEqual(odd.implementation, "reference")
        self.assertEqual(odd.refusals, {"k0": "x is odd; no", "k1": "x is odd", "k2": "x is odd"})

    def test_a_call_runs_what_is_chosen(self):
        operation = operation_of("no", None)
        name, given, how = operation(2, eps=1, interpret=True)
        self.assertEqual((name, given, how), ("k1", (2,), {"eps": 1, "target": SIMULATED}))
        _, _, how = operation(2, tiles="some", interpret=True)
        self.assertEqual(how, {"tiles": "some", "target": SIMULATED})
        # The reference is given neither tiles nor a target.
        self.assertEqual(operation(3, eps=1, tiles="some"), ("reference", (3,), {"eps": 1}))
        self.assertEqual(operation(2, implementation="reference"), ("reference", (2,), {}))
        with self.assertRaisesRegex(ValueError, "^twice by k0 refuses: x is odd; no$"):
            operation(3, implementation="k0")

    def test_cards_of_others_are_refused_and_served_by_the_reference(self):
        device = types.SimpleNamespace(platform="gpu", compute_capability="gfx942")
        amd = target_of(device)
        self.assertEqual(amd, Target("gpu", None))
        x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
        found = router_topk.OPERATION.choose(x, 2, target=amd)
        self.assertEqual(found.implementation, "reference")
        self.assertIn("it runs on NVIDIA GPUs", found.refusals["triton"])

    def test_interpreting_chooses_as_on_a_gpu(self):
        x = np.arange(16, dtype=np.float32).reshape(2, 8)
        how = {"k": 2, "normalise": True}
        found = router_topk.OPERATION(jnp.asarray(x), None, interpret=True, **how)
        np.testing.assert_array_equal(found[2], [[7, 6], [7, 6]])
        self.assertEqual(
            router_topk.OPERATION.choose(x, 2, target=SIMULATED).implementation, "triton"
        )
