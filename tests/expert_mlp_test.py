"""The contract of the expert MLP kernel: reference, interpreted on a CPU, compiled on a GPU."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from pallas_kernels import expert_mlp as package
from pallas_kernels.expert_mlp import api, reference, tiles, triton
from tests import slow
from tests.expert_mlp_contract import (
    DTYPES,
    GPU_SHAPES,
    SHAPES,
    Operands,
    Shape,
    contract,
    expected_and_tolerance,
    poisoned,
    random_operands,
    violation,
)
from tests.host_test_case import HostTestCase

REFERENCE = jax.jit(reference.expert_mlp_reference, static_argnames="layer")
INTERPRETED = jax.jit(
    functools.partial(package.expert_mlp, interpret=True), static_argnames=("layer", "tiles")
)


def interpreted(operands: Operands, *, layer: int, **how: Any) -> jax.Array:
    return INTERPRETED(*operands, layer=layer, **how)


def traced_again(operands: Operands, *, layer: int) -> jax.Array:
    """`interpreted` without the cache of traces, for a kernel that was tampered with."""
    return package.expert_mlp(*operands, layer=layer, interpret=True)


def in_plain_jnp(operands: Operands, *, layer: int) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        return REFERENCE(*operands, layer=layer)


def compiled(operands: Operands, *, layer: int, **how: Any) -> jax.Array:
    run = jax.jit(functools.partial(package.expert_mlp, layer=layer, **how))
    return run(*operands)


HOST_CONTRACT, DEVICE_CONTRACT = contract(SHAPES), contract(GPU_SHAPES)


class ContractTest(HostTestCase):
    """On the host: the reference, and the kernel interpreted.

    The interpreter fills a kernel's outputs with NaN before it runs, so what is not written shows.
    """

    @slow.where(lambda run, name: run is interpreted and name not in sorted(HOST_CONTRACT)[::8])
    @parameterized.product(run=(in_plain_jnp, interpreted), name=sorted(HOST_CONTRACT))
    def test_value_is_that_of_float64(self, run, name):
        case = HOST_CONTRACT[name]
        operands = random_operands(case.shape, case.dtype, seed=len(name), ids=case.ids)
        found = run(poisoned(operands, case.layer), layer=case.layer)
        self.assertIsNone(violation(found, operands, case.layer))

    @parameterized.parameters(in_plain_jnp, interpreted)
    def test_zero_input_and_zero_weights_yield_zero(self, run):
        operands = random_operands(SHAPES["demo"], "bfloat16", seed=2)
        for zeroed in (
            operands._replace(x=np.zeros_like(operands.x)),
            operands._replace(weights=np.zeros_like(operands.weights)),
        ):
            np.testing.assert_array_equal(np.asarray(run(zeroed, layer=0)).astype(np.float32), 0)

    def test_the_same_bits_every_time(self):
        operands = random_operands(SHAPES["demo"], "bfloat16", seed=3)
        first, second = (np.asarray(interpreted(operands, layer=1)) for _ in range(2))
        self.assertEqual(first.tobytes(), second.tobytes())

    def test_a_row_does_not_depend_on_the_others(self):
        operands = random_operands(SHAPES["demo"], "float32", seed=4)
        together = np.asarray(interpreted(operands, layer=0))
        for n in range(len(together)):
            alone = operands._replace(
                x=operands.x[n : n + 1],
                ids=operands.ids[n : n + 1],
                weights=operands.weights[n : n + 1],
            )
            np.testing.assert_array_equal(interpreted(alone, layer=0)[0], together[n])

    @slow.repeats()
    @parameterized.parameters((8, 8), (1, 16), (4, 64), (32, 32))
    def test_tiles_do_not_change_the_value(self, rows, columns):
        operands = random_operands(SHAPES["demo"], "bfloat16", seed=5)
        found = interpreted(
            operands, layer=0, tiles=tiles.Tiles(rows, columns, rows, columns, 4, 2)
        )
        self.assertIsNone(violation(found, operands, 0))


def skip_a_column_block(operands: Operands, *, layer: int) -> jax.Array:
    """A kernel whose loop over D ends one block early."""
    whole = tiles.default_tiles(operands.x.shape[1], operands.down.shape[3])
    columns = operands.x.shape[1] // 4 * 3  # fits once
    return triton.expert_mlp_triton(
        *operands,
        layer=layer,
        tiles=tiles.Tiles(whole.gate_up_rows, columns, whole.down_rows, whole.down_columns, 4, 2),
        interpret=True,
    )


def skip_a_column_block_of_down(operands: Operands, *, layer: int) -> jax.Array:
    """A kernel whose loop over F ends one block early."""
    whole = tiles.default_tiles(operands.x.shape[1], operands.down.shape[3])
    columns = operands.down.shape[3] // 4 * 3
    return triton.expert_mlp_triton(
        *operands,
        layer=layer,
        tiles=tiles.Tiles(
            whole.gate_up_rows, whole.gate_up_columns, whole.down_rows, columns, 4, 2
        ),
        interpret=True,
    )


def with_launches(change: Callable[..., Any], operands: Operands, layer: int) -> jax.Array:
    """The kernel with `change(call, body, **how)` in place of each launch `call(body, **how)`."""
    call = triton.launch.triton_call
    with mock.patch.object(triton.launch, "triton_call", functools.partial(change, call)):
        return traced_again(operands, layer=layer)


def leave_rows_unwritten(operands: Operands, *, layer: int) -> jax.Array:
    """A kernel that launches one program too few for each token."""

    def change(call: Callable[..., Any], *body: Any, grid: tuple[int, ...], **how: Any) -> Any:
        return call(*body, grid=(grid[0], grid[1] - 1), **how)

    return with_launches(change, operands, layer)


def swap_gate_and_up(operands: Operands, *, layer: int) -> jax.Array:
    """A kernel that takes up for gate."""
    gate, up = np.split(operands.gate_up, 2, axis=2)
    swapped = operands._replace(gate_up=np.concatenate([up, gate], axis=2))
    return interpreted(swapped, layer=layer)


def read_another_layer(operands: Operands, *, layer: int) -> jax.Array:
    """A kernel that forgets the layer."""
    return interpreted(operands, layer=layer - 1)


def take_the_next_expert(operands: Operands, *, layer: int) -> jax.Array:
    """A kernel that is one expert off."""
    ids = (operands.ids + 1) % operands.gate_up.shape[1]
    return interpreted(operands._replace(ids=ids), layer=layer)


def sum_without_weights(operands: Operands, *, layer: int) -> jax.Array:
    """A kernel that averages its experts."""
    even = np.full_like(operands.weights, 1 / operands.ids.shape[1])
    return interpreted(operands._replace(weights=even), layer=layer)


def keep_the_hidden_in_bfloat16(operands: Operands, *, layer: int) -> jax.Array:
    """A kernel that rounds the hidden values between its launches: a subtle loss."""

    def change(call: Callable[..., Any], *body: Any, name: str, **how: Any) -> Any:
        launched = call(*body, name=name, **how)
        if "gate_up" not in name:
            return launched
        return lambda *args: launched(*args).astype(jnp.bfloat16).astype(jnp.float32)

    return with_launches(change, operands, layer)


BROKEN = (
    skip_a_column_block,
    skip_a_column_block_of_down,
    leave_rows_unwritten,
    swap_gate_and_up,
    read_another_layer,
    take_the_next_expert,
    sum_without_weights,
    keep_the_hidden_in_bfloat16,
)


class CheckTest(HostTestCase):
    """The check that accepts the kernel refuses every broken one, at the loosest tolerance."""

    @parameterized.parameters([(broken,) for broken in BROKEN])
    def test_a_broken_kernel_fails(self, broken):
        operands = random_operands(SHAPES["demo"], "bfloat16", seed=6)
        self.assertIsNone(violation(interpreted(operands, layer=1), operands, 1))
        self.assertIsNotNone(violation(broken(operands, layer=1), operands, 1))

    def test_a_nan_and_a_wrong_dtype_fail(self):
        operands = random_operands(SHAPES["one_tile"], "bfloat16", seed=7)
        found = interpreted(operands, layer=0)
        self.assertIsNotNone(violation(found.at[0, 3].set(jnp.nan), operands, 0))
        self.assertIsNotNone(violation(found.astype(jnp.float32), operands, 0))
        self.assertIsNotNone(violation(found[:, :4], operands, 0))


class RefusalTest(parameterized.TestCase):
    def test_nothing_to_refuse(self):
        for dtype in DTYPES:
            operands = random_operands(SHAPES["one_tile"], dtype, seed=8)
            self.assertIsNone(package.refusal(operands.x, operands.gate_up, operands.down))

    def test_every_reason_is_listed(self):
        operands = random_operands(Shape(1, 1, 2, 12, 20), "float32", seed=9)
        operands = operands._replace(down=operands.down.astype(jnp.int8))
        reason = package.refusal(operands.x.astype(jnp.int32), operands.gate_up, operands.down)
        self.assertLen(reason.split("; "), 4)
        for part in ("D=12", "F=20", f"multiple of {api.MIN_TILE}", "x is int32", "down is int8"):
            self.assertIn(part, reason)
        self.assertNotIn("gate_up is", reason)

    def test_a_call_raises_every_reason(self):
        operands = random_operands(Shape(1, 1, 2, 12, 20), "float32", seed=9)
        with self.assertRaisesRegex(ValueError, r"expert_mlp refuses: D=12 .*; F=20 "):
            interpreted(operands, layer=0)

    @parameterized.parameters((2048, 768), (4096, 14336), (256, 64), (72, 40), (8, 8))
    def test_default_tiles_divide_the_matrices(self, model_dim, expert_dim):
        t = tiles.default_tiles(model_dim, expert_dim)
        for size, tile in (
            (expert_dim, t.gate_up_rows),
            (model_dim, t.gate_up_columns),
            (model_dim, t.down_rows),
            (expert_dim, t.down_columns),
        ):
            self.assertEqual(size % tile, 0)
            self.assertEqual(tile & (tile - 1), 0)


@contextlib.contextmanager
def described_gpu() -> Iterator[None]:
    """From jax 0.11.2 on, Triton's lowering asks for a device: an abstract one does."""
    abstract_device = getattr(jax.sharding, "AbstractDevice", None)
    if jax.__version_info__ < (0, 11, 2) or abstract_device is None:
        yield
        return
    device = abstract_device(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


class LoweringTest(parameterized.TestCase):
    """The program for CUDA, made without a GPU."""

    @parameterized.product(name=sorted(GPU_SHAPES), dtype=DTYPES)
    def test_two_launches_and_no_copy_of_the_weights(self, name, dtype):
        shape = GPU_SHAPES[name]
        gate_up = (shape.layers, shape.experts, 2 * shape.expert_dim, shape.model_dim)
        down = (shape.layers, shape.experts, shape.model_dim, shape.expert_dim)
        operands = Operands(
            x=jax.ShapeDtypeStruct((shape.tokens, shape.model_dim), dtype),
            ids=jax.ShapeDtypeStruct((shape.tokens, shape.width), jnp.int32),
            weights=jax.ShapeDtypeStruct((shape.tokens, shape.width), jnp.float32),
            gate_up=jax.ShapeDtypeStruct(gate_up, dtype),
            down=jax.ShapeDtypeStruct(down, dtype),
        )
        run = jax.jit(functools.partial(package.expert_mlp, layer=shape.layers - 1))
        with described_gpu():
            text = run.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        operations = re.findall(r"stablehlo\.(\w+)", text)
        self.assertEqual(operations, ["custom_call", "custom_call"])
        self.assertIn(f"expert_gate_up_{dtype}_", text)
        self.assertIn(f"expert_down_{dtype}_", text)


@pytest.mark.gpu
class DeviceContractTest(parameterized.TestCase):
    """The kernel compiled."""

    @parameterized.parameters(sorted(DEVICE_CONTRACT))
    def test_value_is_that_of_float64(self, name):
        case = DEVICE_CONTRACT[name]
        operands = random_operands(case.shape, case.dtype, seed=len(name), ids=case.ids)
        found = compiled(poisoned(operands, case.layer), layer=case.layer)
        self.assertIsNone(violation(found, operands, case.layer))
        again = compiled(operands, layer=case.layer)
        self.assertEqual(np.asarray(found).tobytes(), np.asarray(again).tobytes())

    @parameterized.parameters(*DTYPES)
    def test_equals_the_interpreted_kernel(self, dtype):
        operands = random_operands(SHAPES["demo"], dtype, seed=10)
        host = jax.device_put(operands, jax.devices("cpu")[0])
        found, expected = compiled(operands, layer=1), interpreted(host, layer=1)
        _, tolerance = expected_and_tolerance(operands, 1)
        error = np.abs(
            np.asarray(found).astype(np.float64) - np.asarray(expected).astype(np.float64)
        )
        np.testing.assert_array_less(error, 2 * tolerance)

    def test_a_broken_kernel_fails(self):
        operands = random_operands(SHAPES["demo"], "bfloat16", seed=11)
        gate, up = np.split(operands.gate_up, 2, axis=2)
        swapped = operands._replace(gate_up=np.concatenate([up, gate], axis=2))
        self.assertIsNotNone(violation(compiled(swapped, layer=1), operands, 1))


if __name__ == "__main__":
    absltest.main()
