"""The contract of the expert MLP kernel: reference, interpreted on a CPU, compiled on a GPU.

Expectations are float64 numpy; the tolerance follows from the dtype and the lengths of the sums.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels import expert_mlp as package
from pallas_kernels.expert_mlp import api, reference, tiles, triton
from tests import gpu_targets, slow
from tests.kernel_contract import (
    UNIT_ROUNDOFF,
    Contract,
    on_device,
    on_host,
    one_program_fewer,
    outside,
    tampered,
    wrong_form,
)

# Half the distance from 1 to the next number.
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


class Shape(NamedTuple):
    """Axes of the operation: N tokens, A experts a token, E experts, D and F, M layers."""

    tokens: int
    width: int
    experts: int
    model_dim: int
    expert_dim: int
    layers: int = 2


# Shapes that a CPU can interpret. Mixtral's axes are cut to an eighth, which leaves F a multiple of
# 7 and of a power of two, as 14336 is.
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
    tolerance += ROUNDOFF[dtype] * (np.abs(expected) + tolerance)
    # Below the normal numbers rounding is no longer relative.
    return expected, tolerance + float(jnp.finfo(dtype).smallest_subnormal)


class Case(NamedTuple):
    """One row of the contract."""

    shape: Shape
    dtype: str
    ids: tuple[tuple[int, ...], ...] | None = None  # None: drawn
    layer: int = 0


def contract(shapes: dict[str, Shape]) -> dict[str, Case]:
    """Cases of every implementation: every named shape in every dtype, and ids."""
    cases = {
        f"{name}_{dtype}": Case(shape, dtype, layer=shape.layers - 1)
        for name, shape in shapes.items()
        for dtype in ROUNDOFF
    }
    small = Shape(4, 2, 3, 48, 24, 3)
    cases["one_expert_owns_all_rows"] = Case(small._replace(width=1), "bfloat16", ((1,),) * 4, 1)
    cases["experts_repeat_over_tokens"] = Case(small, "float32", ((0, 2), (2, 0), (0, 2), (0, 2)))
    cases["an_expert_twice_for_a_token"] = Case(small, "float32", ((1, 1), (2, 2), (0, 1), (1, 0)))
    cases["every_expert"] = Case(small._replace(width=3), "float16", ((2, 0, 1),) * 4, 2)
    return cases


def poisoned(operands: Operands, layer: int) -> Operands:
    """NaN wherever the operation has nothing to read: other layers, experts without a row."""
    keep = np.zeros(operands.gate_up.shape[:2], bool)
    keep[layer, np.unique(operands.ids)] = True

    def poison(stacked: np.ndarray) -> np.ndarray:
        return np.where(keep[:, :, None, None], stacked, stacked.dtype.type(np.nan))

    return operands._replace(gate_up=poison(operands.gate_up), down=poison(operands.down))


def violation(found: Any, operands: Operands, case: Case) -> str | None:
    """THE check: why `found` is not the operation's value, or None."""
    expected, tolerance = expected_and_tolerance(operands, case.layer)
    if reason := wrong_form([found], [expected.shape], [operands.x.dtype]):
        return reason
    return outside("values", found, expected, tolerance)


REFERENCE = jax.jit(reference.expert_mlp_reference, static_argnames="layer")
CALL = jax.jit(package.expert_mlp, static_argnames=("layer", "tiles", "interpret"))


def drawn(case: Case, _: str, seed: int) -> Operands:
    operands = random_operands(case.shape, case.dtype, seed, case.ids)
    return poisoned(operands, case.layer)


def in_plain_jnp(operands: Operands, case: Case) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        return REFERENCE(*operands, layer=case.layer)


def interpreted(operands: Operands, case: Case, **how: Any) -> jax.Array:
    return CALL(*operands, layer=case.layer, interpret=True, **how)


def traced_again(operands: Operands, case: Case) -> jax.Array:
    """`interpreted` without the cache of traces, for a kernel that was tampered with."""
    return package.expert_mlp(*operands, layer=case.layer, interpret=True)


def compiled(operands: Operands, case: Case) -> jax.Array:
    return CALL(*operands, layer=case.layer)


def with_three_quarters(operands: Operands, case: Case, **columns: int) -> jax.Array:
    """A kernel whose loop over D or over F ends a block early, which fits once."""
    whole = tiles.default_tiles(case.shape.model_dim, case.shape.expert_dim)
    short = dataclasses.replace(whole, **columns, num_warps=4, num_stages=2)
    return triton.expert_mlp_triton(*operands, layer=case.layer, tiles=short, interpret=True)


def with_bfloat16_between(call: Any, *body: Any, name: str, **how: Any) -> Any:
    """A launch whose hidden values are rounded: a subtle loss."""
    launched = call(*body, name=name, **how)
    if "gate_up" not in name:
        return launched
    return lambda *args: launched(*args).astype(jnp.bfloat16).astype(jnp.float32)


def gate_for_up(operands: Operands, case: Case) -> tuple[Operands, Case]:
    gate, up = np.split(operands.gate_up, 2, axis=2)
    return operands._replace(gate_up=np.concatenate([up, gate], axis=2)), case


DEMO = Case(SHAPES["demo"], "bfloat16", layer=1)
BROKEN = {
    "skips a block of D": lambda of, case: with_three_quarters(
        of, case, gate_up_columns=case.shape.model_dim // 4 * 3
    ),
    "skips a block of F": lambda of, case: with_three_quarters(
        of, case, down_columns=case.shape.expert_dim // 4 * 3
    ),
    "leaves rows unwritten": tampered(
        traced_again, triton.launch, "triton_call", one_program_fewer
    ),
    "takes up for gate": lambda of, case: interpreted(*gate_for_up(of, case)),
    "forgets the layer": lambda of, case: interpreted(of, case._replace(layer=0)),
    "takes the next expert": lambda of, case: interpreted(
        of._replace(ids=(of.ids + 1) % case.shape.experts), case
    ),
    "averages its experts": lambda of, case: interpreted(
        of._replace(weights=np.full_like(of.weights, 1 / case.shape.width)), case
    ),
    "rounds the hidden values": tampered(
        traced_again, triton.launch, "triton_call", with_bfloat16_between
    ),
}
CONTRACT = Contract(
    contract(SHAPES), contract(GPU_SHAPES), drawn, violation, in_plain_jnp, (interpreted,),
    compiled, fresh=traced_again, loosest=DEMO, broken=BROKEN, spoiled=gate_for_up, dtypes=("own",),
)  # fmt: skip


class ContractTest(on_host(CONTRACT)):
    """Zeros, bits, company, tiles."""

    @slow.repeats()
    @parameterized.parameters(in_plain_jnp, interpreted)
    def test_zero_input_and_zero_weights_yield_zero(self, run):
        operands = random_operands(DEMO.shape, "bfloat16", seed=2)
        for zeroed in (
            operands._replace(x=np.zeros_like(operands.x)),
            operands._replace(weights=np.zeros_like(operands.weights)),
        ):
            np.testing.assert_array_equal(np.asarray(run(zeroed, DEMO)).astype(np.float32), 0)

    def test_the_same_bits_every_time_and_in_any_company(self):
        case = DEMO._replace(dtype="float32")
        operands = random_operands(case.shape, case.dtype, seed=4)
        together = np.asarray(interpreted(operands, case))
        again = np.asarray(interpreted(operands, case))
        self.assertEqual(together.tobytes(), again.tobytes())
        for n in range(len(together)):
            row = slice(n, n + 1)
            alone = operands._replace(
                x=operands.x[row], ids=operands.ids[row], weights=operands.weights[row]
            )
            np.testing.assert_array_equal(interpreted(alone, case)[0], together[n])

    @slow.repeats()
    @parameterized.parameters((8, 8), (1, 16), (4, 64), (32, 32))
    def test_tiles_do_not_change_the_value(self, rows, columns):
        operands = drawn(DEMO, "", 5)
        chosen = tiles.Tiles(rows, columns, rows, columns, 4, 2)
        self.assertIsNone(violation(interpreted(operands, DEMO, tiles=chosen), operands, DEMO))


class RefusalTest(parameterized.TestCase):
    def test_every_reason_is_listed(self):
        for dtype in ROUNDOFF:
            operands = random_operands(Shape(1, 1, 1, 8, 8), dtype, seed=8)
            self.assertIsNone(package.refusal(operands.x, operands.gate_up, operands.down))
        operands = random_operands(Shape(1, 1, 2, 12, 20), "float32", seed=9)
        with self.assertRaisesRegex(ValueError, r"expert_mlp refuses: D=12 .*; F=20 "):
            traced_again(operands, Case(Shape(1, 1, 2, 12, 20), "float32"))
        operands = operands._replace(down=operands.down.astype(jnp.int8))
        reason = package.refusal(operands.x.astype(jnp.int32), operands.gate_up, operands.down)
        self.assertLen(reason.split("; "), 4)
        for part in ("D=12", "F=20", f"multiple of {api.MIN_TILE}", "x is int32", "down is int8"):
            self.assertIn(part, reason)
        self.assertNotIn("gate_up is", reason)

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


class LoweringTest(parameterized.TestCase):
    """The program for CUDA, made without a GPU."""

    @slow.repeats(lambda dtype: dtype)
    @parameterized.product(name=sorted(GPU_SHAPES), dtype=tuple(ROUNDOFF))
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
        with gpu_targets.described(gpu_targets.GPUS["H100"]):
            text = run.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        operations = re.findall(r"stablehlo\.(\w+)", text)
        self.assertEqual(operations, ["custom_call", "custom_call"])
        self.assertIn(f"expert_gate_up_{dtype}_", text)
        self.assertIn(f"expert_down_{dtype}_", text)


@pytest.mark.gpu
class DeviceContractTest(on_device(CONTRACT)):
    """The kernel compiled."""
