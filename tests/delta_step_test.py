"""The contract of a token's delta rule: reference, interpreted kernel, kernel on a GPU."""

import functools
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from pallas_kernels import delta_step as package
from pallas_kernels.delta_step import triton
from tests import gpu_programs, gpu_targets, slow
from tests.broken_kernels import BrokenKernels
from tests.delta_step_contract import (
    DTYPES,
    GPU_SHAPES,
    SHAPES,
    Operands,
    Shape,
    random_operands,
    violation,
)
from tests.host_test_case import HostTestCase
from tests.poisoned_outputs import after_nan

STACKED = ("states", "tails", "conv", "dt_bias", "a_log", "norm")  # over layers


def call(
    rows: Any, b_and_a: Any, states: Any, tails: Any, conv: Any, dt_bias: Any, a_log: Any,
    norm: Any, layer: Any, active: Any, **how: Any,
) -> Any:  # fmt: skip
    weights = package.DeltaWeights(conv, dt_bias, a_log, norm)
    projection = package.Projection(rows, b_and_a)
    return package.delta_step(projection, states, tails, weights, layer=layer, active=active, **how)


COMPILED = jax.jit(call, static_argnames=("eps", "floor", "implementation", "interpret"))


def run(function: Any, of: Operands, shape: Shape, **how: Any) -> Any:
    operands = jax.tree.map(jnp.asarray, of._replace(layer=np.int32(of.layer)))
    return function(*operands, eps=shape.eps, floor=shape.floor, **how)


def in_plain_jnp(of: Operands, shape: Shape) -> Any:
    return run(COMPILED, of, shape, implementation="reference")


def interpreted(of: Operands, shape: Shape) -> Any:
    return run(COMPILED, of, shape, implementation="triton", interpret=True)


def traced_again(of: Operands, shape: Shape) -> Any:
    """`interpreted` without the cache of traces, for a kernel that was tampered with."""
    return run(call, of, shape, implementation="triton", interpret=True)


class ContractTest(HostTestCase):
    """On the host: the reference, and the kernel interpreted."""

    @slow.repeats(lambda how, name, dtype: (name, dtype) if how is in_plain_jnp else (how, dtype))
    @parameterized.product(how=(in_plain_jnp, interpreted), name=sorted(SHAPES), dtype=DTYPES)
    def test_value_is_that_of_float64(self, how, name, dtype):
        shape = SHAPES[name]
        of = random_operands(shape, dtype, seed=len(name))
        self.assertIsNone(violation(how(of, shape), of, shape))

    @pytest.mark.slow
    def test_a_sequence_is_the_same_in_any_company(self):
        shape = SHAPES["resting"]
        of = random_operands(shape, "bfloat16", seed=4)
        row = slice(3, 4)
        alone = of._replace(
            rows=of.rows[row], b_and_a=of.b_and_a[row], states=of.states[:, row],
            tails=of.tails[:, row], active=of.active[row],
        )  # fmt: skip
        out, states, tails = interpreted(of, shape)
        found = interpreted(alone, shape._replace(batch=1))
        for one, all_ in zip(found, (out[row], states[:, row], tails[:, row]), strict=True):
            np.testing.assert_array_equal(one, all_)


def take_another_layer(of: Operands, shape: Shape) -> Any:
    """A kernel that forgets the layer."""
    weights = {name: getattr(of, name)[::-1] for name in ("conv", "dt_bias", "a_log", "norm")}
    return traced_again(of._replace(layer=0, **weights), shape)


def wake_those_that_rest(of: Operands, shape: Shape) -> Any:
    """A kernel that takes every sequence as active."""
    return traced_again(of._replace(active=np.ones_like(of.active)), shape)


def swap_b_and_a(of: Operands, shape: Shape) -> Any:
    """A kernel that takes one for the other."""
    heads = of.b_and_a.reshape(shape.batch, shape.num_keys, 2, shape.repeats)
    return traced_again(of._replace(b_and_a=heads[:, :, ::-1].reshape(of.b_and_a.shape)), shape)


def turn_the_taps(of: Operands, shape: Shape) -> Any:
    """A kernel that convolves the other way round."""
    return traced_again(of._replace(conv=of.conv[..., ::-1]), shape)


def forget_the_tail(of: Operands, shape: Shape) -> Any:
    """A kernel that leaves the convolution's inputs as they were."""
    out, states, _ = traced_again(of, shape)
    return out, states, of.tails


def share_by_the_wrong_heads(of: Operands, shape: Shape) -> Any:
    """A kernel whose value heads take key heads in turn."""
    states = of.states.reshape(*of.states.shape[:2], shape.num_keys, shape.repeats, -1)
    states = np.swapaxes(states, 2, 3).reshape(of.states.shape)
    return traced_again(of._replace(states=states), shape)


def leave_out_a_head(of: Operands, shape: Shape) -> Any:
    """A kernel that launches one program too few for each sequence."""
    launch = triton.launch.triton_call

    def fewer(body: Any, *, grid: tuple[int, int], **how: Any) -> Any:
        return launch(body, grid=(grid[0], grid[1] - 1), **how)

    with mock.patch.object(triton.launch, "triton_call", fewer):
        return traced_again(of, shape)


def forget_eps(of: Operands, shape: Shape) -> Any:
    """A kernel that adds nothing to the mean square."""
    return traced_again(of, shape._replace(eps=0.0))


BROKEN = (
    take_another_layer, wake_those_that_rest, swap_b_and_a, turn_the_taps, forget_the_tail,
    share_by_the_wrong_heads, leave_out_a_head, forget_eps,
)  # fmt: skip


class CheckTest(BrokenKernels, HostTestCase):
    """The check that accepts the kernel refuses every broken one."""

    broken = BROKEN

    def sound(self):
        shape = SHAPES["resting"]._replace(eps=1.0)
        return traced_again, random_operands(shape, "bfloat16", seed=5), shape

    def violation(self, found, operands, shape):
        return violation(found, operands, shape)


class RefusalTest(HostTestCase):
    @parameterized.parameters(
        ({"rows": np.zeros((5, 300), jnp.bfloat16)}, r"rows \(5, 300\) are not of states"),
        ({"rows": np.zeros(8, jnp.bfloat16)}, r"rows are \(8,\)"),
        ({"b_and_a": np.zeros((5, 8), jnp.bfloat16)}, r"b and a: bfloat16\(5, 8\), not float32"),
        ({"tails": np.zeros((2, 5, 3, 9), jnp.bfloat16)}, "tails: "),
        ({"conv": np.zeros((2, 128, 1, 3), jnp.bfloat16)}, "taps: "),
        ({"norm": np.zeros((2, 16), np.float32)}, "scales of the norm: float32"),
        ({"active": np.zeros(4, bool)}, r"active: bool\(4,\), not bool\(5,\)"),
    )
    def test_what_does_not_fit_is_named(self, changed, said):
        of = random_operands(SHAPES["resting"], "bfloat16", seed=9)._replace(**changed)
        with self.assertRaisesRegex(ValueError, said):
            run(call, of, SHAPES["resting"], implementation="triton", interpret=True)

    def test_an_unknown_implementation_is_named(self):
        of = random_operands(SHAPES["resting"], "bfloat16", seed=9)
        with self.assertRaisesRegex(ValueError, "none of triton, reference"):
            run(call, of, SHAPES["resting"], implementation="mosaic")


class LoweringTest(HostTestCase):
    """Programs for CUDA, made without a GPU."""

    @parameterized.parameters(1, 8)
    def test_two_launches_that_write_in_place(self, batch):
        program = gpu_programs.delta(batch)
        text = program.lower(gpu_targets.GPUS["H100"]).as_text()
        launched = re.findall(r"stablehlo\.(custom_call|slice|dynamic_\w+|gather|scatter)", text)
        self.assertEqual(launched, ["custom_call"] * 2)
        self.assertIn("delta_step_bfloat16_16x128_32x128", text)
        for operand in (4, 8):
            alias = rf"output_tuple_indices = \[1\],\s+operand_index = {operand},"
            self.assertRegex(text, alias)


@pytest.mark.gpu
class DeviceContractTest(parameterized.TestCase):
    """The kernel compiled."""

    @parameterized.product(name=sorted(GPU_SHAPES), dtype=DTYPES)
    def test_value_is_that_of_float64(self, name, dtype):
        shape = GPU_SHAPES[name]
        of = random_operands(shape, dtype, seed=len(name))
        found = after_nan(lambda: run(COMPILED, of, shape, implementation="triton"))[0]
        self.assertIsNone(violation(found, of, shape))
        again = run(COMPILED, of, shape, implementation="triton")
        for one, other in zip(found, again, strict=True):
            self.assertEqual(np.asarray(one).tobytes(), np.asarray(other).tobytes())

    def test_donated_states_are_written_in_place(self):
        shape = GPU_SHAPES["qwen3_next_64"]
        of = random_operands(shape, "bfloat16", seed=10)
        static = {"eps": shape.eps, "floor": shape.floor, "implementation": "triton"}
        step = jax.jit(functools.partial(call, **static), donate_argnums=(2, 3))
        on_device = jax.tree.map(jnp.asarray, of._replace(layer=np.int32(of.layer)))
        memory = step.lower(*on_device).compile().memory_analysis()
        self.assertGreaterEqual(memory.alias_size_in_bytes, of.states.nbytes + of.tails.nbytes)
        self.assertLess(memory.temp_size_in_bytes, of.states.nbytes // 8)
        self.assertIsNone(violation(step(*on_device), of, shape))

    def test_offsets_beyond_32_bits(self):
        shape, layers = Shape(1, 1, 1, 128, 128, layers=1), 2**17 + 1
        of = random_operands(shape, "bfloat16", seed=12)

        def last(array: np.ndarray) -> jax.Array:  # of so many layers
            blank = jnp.zeros((layers, *array.shape[1:]), array.dtype)
            return blank.at[-1].set(array[0])

        far = of._replace(layer=layers - 1, **{name: last(getattr(of, name)) for name in STACKED})
        self.assertGreater(far.states.size, 2**31)
        out, states, tails = run(COMPILED, far, shape, implementation="triton")
        self.assertIsNone(violation((out, states[-1:], tails[-1:]), of, shape))
        self.assertFalse(bool(jnp.any(states[:-1])) or bool(jnp.any(tails[:-1])))


if __name__ == "__main__":
    absltest.main()
