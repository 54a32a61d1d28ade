"""The contract of the expert MLP kernel: reference, interpreted on a CPU, compiled on a GPU.

Expectations are float64 numpy; the tolerance follows from the dtype and the lengths of the sums.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from pallas_kernels import expert_mlp as package
from pallas_kernels.expert_mlp import api, reference, tiles, triton

UNIT_ROUNDOFF = 2.0**-24  # of float32, in which products and sums are
# Of the output's dtype: half the distance from 1 to the next number.
OUTPUT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


class Shape(NamedTuple):
    """Axes of the operation: N tokens, A experts a token, E experts, D and F, M layers."""

    tokens: int
    width: int
    experts: int
    model_dim: int
    expert_dim: int
    layers: int = 2


# What a CPU can interpret. Mixtral's axes are cut to an eighth, which leaves F a multiple of 7 and
# of a power of two, as 14336 is.
SHAPES = {
    "qwen3_30b": Shape(1, 2, 3, 2048, 768, 1),
    "mixtral_reduced": Shape(2, 2, 3, 512, 1792, 1),
    "one_tile": Shape(1, 1, 1, 8, 8),
    "no_power_of_two": Shape(3, 2, 5, 72, 40),
    "demo": Shape(4, 4, 8, 256, 64),
}
GPU_SHAPES = {
    "qwen3_30b": Shape(4, 8, 16, 2048, 768),
    "mixtral": Shape(2, 2, 2, 4096, 14336, 1),
    "no_power_of_two": Shape(32, 2, 5, 72, 40),
    "demo": Shape(32, 4, 32, 256, 64, 7),
}
DTYPES = tuple(OUTPUT_ROUNDOFF)
REFERENCE = jax.jit(reference.expert_mlp_reference, static_argnames="layer")
INTERPRETED = jax.jit(
    functools.partial(package.expert_mlp, interpret=True), static_argnames=("layer", "tiles")
)


class Operands(NamedTuple):
    """Arguments of `expert_mlp`, on the host."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


def random_operands(shape: Shape, dtype: str, seed: int, ids: Any = None) -> Operands:
    """Fresh operands; without `ids`, experts are drawn without repetition within a token."""
    rng = np.random.default_rng(seed)

    def normal(*size: int, scale: float = 1.0) -> np.ndarray:
        values = rng.standard_normal(size, dtype=np.float32) * np.float32(scale)
        return values.astype(jnp.dtype(dtype))

    s = shape
    if ids is None:
        ids = [rng.permutation(s.experts)[: s.width] for _ in range(s.tokens)]
    return Operands(
        x=normal(s.tokens, s.model_dim),
        ids=np.asarray(ids, np.int32),
        weights=rng.dirichlet(np.ones(s.width), s.tokens).astype(np.float32),
        gate_up=normal(s.layers, s.experts, 2 * s.expert_dim, s.model_dim, scale=s.model_dim**-0.5),
        down=normal(s.layers, s.experts, s.model_dim, s.expert_dim, scale=s.expert_dim**-0.5),
    )


def expected_and_tolerance(operands: Operands, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """float64[N, D] of the formula, and how far a right float32 sum in any order may be from it.

    A sum of k products in float32 differs by at most k u sum |products|, and by about the root of
    k in place of k when roundings are independent (Higham and Mary 2019): four times
    that is allowed. The error of a gate and an up value goes through SwiGLU, |d silu| <= 1.1, and
    then through the down projection. Last comes one rounding to the output's dtype.
    """
    dtype = operands.x.dtype.name
    x, weights = (a.astype(np.float64) for a in (operands.x, operands.weights))
    ids, expert_dim, model_dim = operands.ids, operands.down.shape[3], x.shape[1]
    u_inner = 4 * np.sqrt(model_dim) * UNIT_ROUNDOFF
    u_outer = 4 * np.sqrt(expert_dim * ids.shape[1]) * UNIT_ROUNDOFF
    expected, tolerance = np.zeros_like(x), np.zeros_like(x)
    for n in range(len(x)):
        for expert_id, weight in zip(ids[n], weights[n], strict=True):
            gate_up = operands.gate_up[layer, expert_id].astype(np.float64)
            down = operands.down[layer, expert_id].astype(np.float64)
            gate, up = np.split(gate_up @ x[n], 2)
            gate_error, up_error = np.split(u_inner * (np.abs(gate_up) @ np.abs(x[n])), 2)
            silu = gate / (1 + np.exp(-gate))
            hidden = silu * up
            hidden_error = 1.1 * gate_error * np.abs(up) + np.abs(silu) * up_error
            hidden_error += 8 * UNIT_ROUNDOFF * np.abs(hidden)  # exp, divide, two products
            expected[n] += weight * (down @ hidden)
            slack = hidden_error + u_outer * np.abs(hidden)
            tolerance[n] += weight * (np.abs(down) @ slack)
    tolerance += OUTPUT_ROUNDOFF[dtype] * (np.abs(expected) + tolerance)
    # Below the normal numbers rounding is no longer relative.
    return expected, tolerance + float(jnp.finfo(dtype).smallest_subnormal)


def violation(found: Any, operands: Operands, layer: int) -> str | None:
    """THE check: why `found` is not the operation's value, or None."""
    expected, tolerance = expected_and_tolerance(operands, layer)
    if found.shape != expected.shape or found.dtype != operands.x.dtype:
        return f"{found.dtype}{found.shape} in place of {operands.x.dtype}{expected.shape}"
    error = np.abs(np.asarray(found).astype(np.float64) - expected)
    outside = ~(error <= tolerance)  # NaN is outside
    if not outside.any():
        return None
    excess = np.where(outside, np.nan_to_num(error / tolerance, nan=np.inf), 0)
    worst = np.unravel_index(excess.argmax(), excess.shape)
    return (
        f"{outside.sum()} of {outside.size} values are out of tolerance, the worst at {worst}: "
        f"{error[worst]:.3g} from {expected[worst]:.3g}, allowed {tolerance[worst]:.3g}"
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


class Case(NamedTuple):
    """One row of the contract."""

    shape: Shape
    dtype: str
    ids: tuple[tuple[int, ...], ...] | None = None  # None: drawn
    layer: int = 0


def contract(shapes: dict[str, Shape]) -> dict[str, Case]:
    """What every implementation must compute rightly: every named shape in every dtype, and ids."""
    cases = {
        f"{name}_{dtype}": Case(shape, dtype, layer=shape.layers - 1)
        for name, shape in shapes.items()
        for dtype in OUTPUT_ROUNDOFF
    }
    small = Shape(4, 2, 3, 48, 24, 3)
    cases["one_expert_owns_all_rows"] = Case(small._replace(width=1), "bfloat16", ((1,),) * 4, 1)
    cases["experts_repeat_over_tokens"] = Case(small, "float32", ((0, 2), (2, 0), (0, 2), (0, 2)))
    cases["an_expert_twice_for_a_token"] = Case(small, "float32", ((1, 1), (2, 2), (0, 1), (1, 0)))
    cases["every_expert"] = Case(small._replace(width=3), "float16", ((2, 0, 1),) * 4, 2)
    return cases


HOST_CONTRACT, DEVICE_CONTRACT = contract(SHAPES), contract(GPU_SHAPES)


def poisoned(operands: Operands, layer: int) -> Operands:
    """NaN wherever the operation has nothing to read: other layers, experts without a row."""
    keep = np.zeros(operands.gate_up.shape[:2], bool)
    keep[layer, np.unique(operands.ids)] = True

    def poison(stacked: np.ndarray) -> np.ndarray:
        return np.where(keep[:, :, None, None], stacked, stacked.dtype.type(np.nan))

    return operands._replace(gate_up=poison(operands.gate_up), down=poison(operands.down))


class ContractTest(parameterized.TestCase):
    """On the host: the reference, and the kernel interpreted.

    The interpreter fills a kernel's outputs with NaN before it runs, so what is not written shows.
    """

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


class CheckTest(parameterized.TestCase):
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

    @parameterized.parameters(DTYPES)
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
