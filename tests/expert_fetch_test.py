"""The contract of the fetch kernel on the host: the reference, and the kernel interpreted."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from pallas_kernels import expert_fetch as package
from pallas_kernels import op
from pallas_kernels.expert_fetch import (
    api,
    copying,
    fetch,
    fetch_all,
    triton,
)
from pallas_kernels.target import Target
from tests import slow
from tests.expert_fetch_contract import (
    CASES,
    QWEN3,
    SMALL_BLOCKS,
    Case,
    Operands,
    random_operands,
    violation,
)
from tests.host_test_case import HostTestCase

HOPPER = Target("gpu", (9, 0))


def in_plain_jnp(operands: Operands, case: Case) -> tuple[jax.Array, ...]:
    del case
    return jax.jit(functools.partial(fetch, implementation="reference"))(*operands)


def interpreted(operands: Operands, case: Case) -> tuple[jax.Array, ...]:
    """Traced anew at each call, so that a kernel may be tampered with."""
    run = functools.partial(fetch, implementation="triton", tiles=case.tiles, interpret=True)
    return jax.jit(run)(*operands)


class ContractTest(HostTestCase):
    @slow.repeats(lambda run, name: name if run is in_plain_jnp else run)
    @parameterized.product(run=(in_plain_jnp, interpreted), name=sorted(CASES))
    def test_pools_are_those_of_numpy(self, run, name):
        operands = random_operands(CASES[name], seed=len(name))
        self.assertIsNone(violation(run(operands, CASES[name]), operands))

    def test_the_reference_reads_a_store_in_host_memory(self):
        operands = random_operands(Case(), seed=1)
        device = jax.devices("cpu")[0]
        pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        placed = operands._replace(hosts=jax.device_put(operands.hosts, pinned))
        self.assertIsNone(violation(in_plain_jnp(placed, Case()), operands))

    @pytest.mark.skipif(
        jax.__version_info__ < (0, 11, 2),
        reason="before jax 0.11.2 the interpreter takes no operand in host memory",
    )
    def test_the_interpreted_kernel_reads_a_store_in_host_memory(self):
        operands = random_operands(Case(), seed=2)
        device = jax.devices("cpu")[0]
        pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        placed = operands._replace(hosts=jax.device_put(operands.hosts, pinned))
        self.assertIsNone(violation(interpreted(placed, Case()), operands))

    @slow.repeats()
    @parameterized.parameters("reference", "triton")
    def test_a_tree_keeps_its_form(self, implementation):
        operands = random_operands(Case(), seed=3)
        names = ("words", "scales", "zeros")
        pools, hosts = (
            {"a": dict(zip(names, arrays, strict=True)), "none": None}
            for arrays in (operands.pools, operands.hosts)
        )
        interpret = implementation == "triton"
        found = fetch(
            pools, hosts, *operands[2:], implementation=implementation, interpret=interpret
        )
        self.assertEqual(jax.tree.structure(found), jax.tree.structure(pools))
        self.assertIsNone(violation([found["a"][name] for name in names], operands))

    @slow.repeats()
    @parameterized.product(
        how=("reference", "triton"), sizes=(("one_element", "jobs_17"), ("whole_blocks",) * 3)
    )
    def test_several_stores_in_one_launch(self, how, sizes):
        cases = [CASES[name] for name in sizes]
        given = [random_operands(case, seed) for seed, case in enumerate(cases)]
        call, launched = triton.launch.triton_call, []

        def counted(*args: Any, **more: Any) -> Any:
            launched.append(more["name"])
            return call(*args, **more)

        with mock.patch.object(triton.launch, "triton_call", counted):
            found = fetch_all(
                [api.Job(*operands) for operands in given],
                implementation=how, tiles=SMALL_BLOCKS, interpret=how == "triton",
            )  # fmt: skip
        self.assertLen(launched, how == "triton")
        for pools, operands in zip(found, given, strict=True):
            self.assertIsNone(violation(pools, operands))

    def test_of_several_stores_one_without_jobs(self):
        given = [random_operands(Case(), seed) for seed in (5, 6)]
        given[0] = given[0]._replace(src=given[0].src[:0], dst=given[0].dst[:0])
        found = fetch_all(
            [api.Job(*operands) for operands in given], implementation="triton", interpret=True
        )
        for pools, operands in zip(found, given, strict=True):
            self.assertIsNone(violation(pools, operands))

    def test_no_jobs(self):
        operands = random_operands(Case(), seed=4)
        none = operands._replace(src=operands.src[:0], dst=operands.dst[:0])
        for run in (in_plain_jnp, interpreted):
            self.assertIsNone(violation(run(none, Case()), none))


def one_program_too_few(operands: Operands, case: Case) -> tuple[jax.Array, ...]:
    call = triton.launch.triton_call

    def change(body: Any, *, grid: tuple[int, ...], **how: Any) -> Any:
        return call(body, grid=(grid[0] - 1,), **how)

    with mock.patch.object(triton.launch, "triton_call", change):
        return interpreted(operands, case)


def the_next_row(operands: Operands, case: Case) -> tuple[jax.Array, ...]:
    return interpreted(operands._replace(src=operands.src + np.int32(1)), case)


def earlier_jobs_too(operands: Operands, case: Case) -> tuple[jax.Array, ...]:
    with mock.patch.object(copying, "_written_later", lambda *_: jnp.bool_(False)):
        return interpreted(operands, case)


def without_range_check(operands: Operands, case: Case) -> tuple[jax.Array, ...]:
    with mock.patch.object(copying, "_valid", lambda src, *_: src == src):
        return interpreted(operands, case)


def without_the_last_part(operands: Operands, case: Case) -> tuple[jax.Array, ...]:
    copy_row = copying._copy_row

    def shorter(src, dst, host, pool, program, dealt, tiles):  # type: ignore[no-untyped-def]
        whole = mock.Mock(dtype=pool.dtype, at=pool.at, shape=(*pool.shape[:1], 16))
        return copy_row(src, dst, host, whole, program, dealt, tiles)

    with mock.patch.object(copying, "_copy_row", shorter):
        return interpreted(operands, case)


class BrokenKernelTest(HostTestCase):
    @slow.repeats()
    @parameterized.parameters(
        (one_program_too_few, "three_axes"),
        (the_next_row, "a_row_twice"),
        (earlier_jobs_too, "the_last_of_a_slot"),
        (without_range_check, "all_skipped"),
        (without_the_last_part, "a_block_and_one"),
    )
    def test_fails(self, broken: Callable[..., Any], name: str):
        operands = random_operands(CASES[name], seed=5)
        self.assertIsNotNone(violation(broken(operands, CASES[name]), operands))


class RefusalTest(parameterized.TestCase):
    def shapes(self, count: int, *arrays: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct((count, *row), dtype) for row, dtype in arrays)

    def test_the_choice(self):
        pools, hosts = self.shapes(16, *QWEN3), self.shapes(6144, *QWEN3)
        self.assertEqual(package.choose(pools, hosts, HOPPER).describe(), "triton")
        for target, said in (
            (Target("cpu", None), "runs on a GPU, this is cpu"),
            (Target("gpu", (7, 5)), "needs sm_80, this is gpu sm_75"),
        ):
            choice = package.choose(pools, hosts, target)
            self.assertEqual(choice.implementation, "reference")
            self.assertIn(said, choice.describe())

    def test_every_reason_is_listed(self):
        row = ((2**20,), "uint8"), ((4,), "complex64")
        shapes = self.shapes(4, *row), self.shapes(3000, *row)
        reason = api.OPERATION.refusal("triton", *shapes, target=Target("cpu", None))
        self.assertLen(reason.split("; "), 3)
        for part in ("runs on a GPU", "complex64, none of uint8", "2 to 4 Gi elements"):
            self.assertIn(part, reason)

    @parameterized.parameters(
        ("pools", lambda a: (a[0], a[0]), "stores PyTreeDef"),
        ("pools", lambda a: (a[0][:, 1:],), "do not fit slots"),
        ("pools", lambda a: (a[0].astype(np.uint8),), "a pool is uint8, its store uint32"),
        ("src", lambda a: a.astype(np.int64), "src is int64"),
        ("dst", lambda a: a[1:], r"dst is int32\(4,\)"),
    )
    def test_operands_that_do_not_fit(self, name, change, said):
        operands = random_operands(Case((((4,), "uint32"),)), seed=10)
        changed = operands._replace(**{name: change(getattr(operands, name))})
        with self.assertRaisesRegex(ValueError, said):
            fetch(*changed)

    def test_arrays_of_different_lengths(self):
        operands = random_operands(Case(), seed=11)
        hosts = (operands.hosts[0][1:], *operands.hosts[1:])
        with self.assertRaisesRegex(ValueError, "stores of 6, 7, 7 rows"):
            fetch(operands.pools, hosts, *operands[2:])

    def test_implementations(self):
        operands = random_operands(Case(), seed=12)
        with self.assertRaisesRegex(ValueError, "'cuda' is none of triton, reference"):
            fetch(*operands, implementation="cuda")
        with (
            mock.patch.object(op, "current_target", lambda: Target("cpu", None)),
            self.assertRaisesRegex(ValueError, "triton refuses: runs on a GPU"),
        ):
            fetch(*operands, implementation="triton")


if __name__ == "__main__":
    absltest.main()
