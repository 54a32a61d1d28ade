"""The contract of decode attention: reference, kernel interpreted on a CPU, compiled on a GPU."""

import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.models import attention
from pallas_kernels import decode_attention as package
from pallas_kernels.decode_attention import tiles, triton
from pallas_kernels.target import Target
from tests import gpu_programs, gpu_targets, slow
from tests.broken_kernels import BrokenKernels
from tests.decode_attention_contract import (
    DTYPES,
    GPU_SHAPES,
    SHAPES,
    Operands,
    Shape,
    expected_and_tolerance,
    random_operands,
    violation,
)
from tests.host_test_case import HostTestCase

SPLIT = tiles.AttentionTiles(block=16, splits=4, num_warps=4, num_stages=2)
WHOLE = tiles.AttentionTiles(block=32, splits=1, num_warps=4, num_stages=2)
STATIC = ("kv_length", "window", "scale", "implementation", "tiles", "interpret")
CALL = jax.jit(package.decode_attention, static_argnames=STATIC)
CACHED = jax.jit(attention.cached_attention, static_argnums=4)


def run(call: Callable[..., Any], of: Operands, shape: Shape, **how: Any) -> jax.Array:
    return call(
        of.q, of.keys, of.values, layer=np.int32(of.layer), positions=of.positions,
        kv_length=shape.kv_length, window=shape.window, **how,
    )  # fmt: skip


def in_plain_jnp(of: Operands, shape: Shape) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        return run(CALL, of, shape, implementation="reference")


def interpreted(of: Operands, shape: Shape, chosen: Any = None) -> jax.Array:
    return run(CALL, of, shape, implementation="triton", interpret=True, tiles=chosen)


def in_parts(of: Operands, shape: Shape) -> jax.Array:
    return interpreted(of, shape, SPLIT)


def in_one_part(of: Operands, shape: Shape) -> jax.Array:
    return interpreted(of, shape, WHOLE)


def traced_again(of: Operands, shape: Shape) -> jax.Array:
    """`in_parts` without the cache of traces, for a kernel that was tampered with."""
    call = package.decode_attention
    return run(call, of, shape, implementation="triton", interpret=True, tiles=SPLIT)


class ContractTest(HostTestCase):
    """On the host: the reference, and the kernel interpreted.

    The interpreter fills a kernel's outputs with NaN before it runs, so what is not written shows;
    what may not be read is NaN.
    """

    @slow.repeats(
        lambda call, name, dtype: (name, dtype) if call is in_plain_jnp else (call, dtype)
    )
    @parameterized.product(
        call=(in_plain_jnp, interpreted, in_parts), name=sorted(SHAPES), dtype=DTYPES
    )
    def test_value_is_that_of_float64(self, call, name, dtype):
        shape = SHAPES[name]
        of = random_operands(shape, dtype, seed=len(name))
        self.assertIsNone(violation(call(of, shape), of, shape))

    @slow.repeats()
    @parameterized.parameters((16, 1), (16, 8), (64, 2), (32, 64))
    def test_tiles_do_not_change_the_value(self, block, splits):
        shape = SHAPES["window"]
        of = random_operands(shape, "bfloat16", seed=1)
        found = interpreted(of, shape, tiles.AttentionTiles(block, splits, 4, 2))
        self.assertIsNone(violation(found, of, shape))

    @slow.repeats()
    @parameterized.parameters(in_one_part, in_parts)
    def test_the_same_bits_every_time_and_in_any_company(self, call):
        shape = SHAPES["qwen3_30b_4"]
        of = random_operands(shape, "bfloat16", seed=2)
        together = np.asarray(call(of, shape))
        self.assertEqual(together.tobytes(), np.asarray(call(of, shape)).tobytes())
        for b in range(shape.batch):
            row = slice(b, b + 1)
            alone = Operands(
                of.q[row], of.keys[:, row], of.values[:, row], of.layer, of.positions[row]
            )
            np.testing.assert_array_equal(call(alone, shape._replace(batch=1))[0], together[b])

    @slow.where(lambda window: window != 3)
    @parameterized.product(call=(in_plain_jnp, in_one_part, in_parts), window=(None, 3, 9))
    def test_positions_beyond_the_cache_are_as_in_cached_attention(self, call, window):
        shape = Shape(4, 4, 2, 16, 40, 40, window)
        of = random_operands(shape, "bfloat16", seed=3, poisoned=False)
        rng = np.random.default_rng(3)
        keys, values = (rng.standard_normal(of.keys.shape).astype(of.q.dtype) for _ in range(2))
        positions = np.array([38, 40, 45, 1000], np.int32)
        of = of._replace(keys=keys, values=values, positions=positions)
        found = np.asarray(call(of, shape)).astype(np.float32)
        expected = CACHED(
            of.q[:, None], keys[of.layer], values[of.layer], positions[:, None], window
        )
        expected = np.asarray(expected)[:, 0].astype(np.float32)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        self.assertEqual(np.isnan(found).any(), window is not None)
        np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)


def read_another_layer(of: Operands, shape: Shape) -> jax.Array:
    """A kernel that forgets the layer."""
    return traced_again(of._replace(layer=0), shape)


def miss_the_newest_token(of: Operands, shape: Shape) -> jax.Array:
    """A kernel that sees the slots before the position only."""
    return traced_again(of._replace(positions=of.positions - 1), shape)


def see_one_slot_too_many(of: Operands, shape: Shape) -> jax.Array:
    """A kernel that sees a slot beyond the position."""
    return traced_again(of._replace(positions=of.positions + 1), shape)


def forget_the_window(of: Operands, shape: Shape) -> jax.Array:
    """A kernel that sees everything before."""
    return traced_again(of, shape._replace(window=None))


def swap_keys_and_values(of: Operands, shape: Shape) -> jax.Array:
    """A kernel that takes values for keys."""
    return traced_again(of._replace(keys=of.values, values=of.keys), shape)


def take_the_next_head(of: Operands, shape: Shape) -> jax.Array:
    """A kernel whose queries are one head off."""
    return traced_again(of._replace(q=np.roll(of.q, 1, axis=1)), shape)


def leave_out_a_split(of: Operands, shape: Shape) -> jax.Array:
    """A kernel that launches one split too few."""
    call = triton.launch.triton_call

    def launch(body: Any, *, grid: tuple[int, int], name: str, **how: Any) -> Any:
        fewer = grid if "combine" in name else (grid[0], grid[1] - 1)
        return call(body, grid=fewer, name=name, **how)

    with mock.patch.object(triton.launch, "triton_call", launch):
        return traced_again(of, shape)


def load_without_masks(of: Operands, shape: Shape) -> jax.Array:
    """A kernel that reads whole blocks, and relies on a weight of zero."""
    load = triton.pltriton.load
    with mock.patch.object(triton.pltriton, "load", lambda ref, **_: load(ref)):
        return traced_again(of, shape)


def round_the_parts(of: Operands, shape: Shape) -> jax.Array:
    """A kernel that keeps its parts in bfloat16: a subtle loss."""
    call = triton.launch.triton_call

    def launch(body: Any, *, name: str, **how: Any) -> Any:
        launched = call(body, name=name, **how)
        if "combine" in name:
            return launched
        return lambda *args: [
            part.astype(jnp.bfloat16).astype(jnp.float32) for part in launched(*args)
        ]

    with mock.patch.object(triton.launch, "triton_call", launch):
        return traced_again(of, shape)


def forget_the_second_part(of: Operands, shape: Shape) -> jax.Array:
    """A kernel whose scores are those of the latents alone."""
    return traced_again(of._replace(values=of.values._replace(q=0 * of.values.q)), shape)


def take_another_scale(of: Operands, shape: Shape) -> jax.Array:
    """A kernel that scales by the width of the first part."""
    scale = float(shape.head_dim) ** -0.5
    how = {"implementation": "triton", "interpret": True, "tiles": SPLIT, "scale": scale}
    return run(package.decode_attention, of, shape, **how)


BROKEN = (
    read_another_layer,
    miss_the_newest_token,
    see_one_slot_too_many,
    forget_the_window,
    swap_keys_and_values,
    take_the_next_head,
    leave_out_a_split,
    load_without_masks,
    round_the_parts,
)


class CheckTest(BrokenKernels, HostTestCase):
    """The check that accepts the kernel refuses every broken one."""

    broken = BROKEN

    def sound(self):
        shape = SHAPES["window"]
        return traced_again, random_operands(shape, "bfloat16", seed=4), shape

    def violation(self, found, operands, shape):
        return violation(found, operands, shape)

    @slow.repeats()
    @parameterized.parameters(
        forget_the_second_part, take_another_scale, read_another_layer, see_one_slot_too_many,
        forget_the_window,
    )  # fmt: skip
    def test_a_broken_kernel_of_latents_fails(self, broken):
        shape = SHAPES["latent"]
        of = random_operands(shape, "bfloat16", seed=11)
        self.assertIsNone(violation(traced_again(of, shape), of, shape))
        self.assertIsNotNone(violation(broken(of, shape), of, shape))

    @slow.repeats()
    @parameterized.parameters(
        miss_the_newest_token, see_one_slot_too_many, forget_the_window, read_another_layer
    )
    def test_a_broken_kernel_fails_without_nan_too(self, broken):
        shape = SHAPES["window"]
        of = random_operands(shape, "bfloat16", seed=5, poisoned=False)
        self.assertIsNotNone(violation(broken(of, shape), of, shape))

    def test_a_wrong_dtype_or_shape_fails(self):
        shape = SHAPES["one_slot"]
        of = random_operands(shape, "bfloat16", seed=6)
        found = interpreted(of, shape)
        self.assertIsNotNone(violation(found.astype(jnp.float32), of, shape))
        self.assertIsNotNone(violation(found[:, :, :4], of, shape))


class RefusalTest(HostTestCase):
    @parameterized.parameters(
        ({"kv_length": 9}, "kv_length 9 is not in 1..8"),
        ({"kv_length": 0}, "kv_length 0"),
        ({"window": 0}, "window 0"),
        ({"positions": np.zeros(3, np.int32)}, r"int32\(3,\)"),
        ({"implementation": "mosaic"}, "none of triton, reference"),
        ({"tiles": tiles.AttentionTiles(24, 1, 4, 2)}, "no powers of two"),
        ({"tiles": tiles.AttentionTiles(8, 1, 4, 2)}, "less than 16"),
    )
    def test_what_does_not_fit_is_named(self, changed, said):
        of = random_operands(SHAPES["one_slot"], "bfloat16", seed=9)
        how = {"layer": 0, "positions": of.positions, "kv_length": 1, "interpret": True}
        how |= {"implementation": "triton"} | changed
        with self.assertRaisesRegex(ValueError, said):
            package.decode_attention(of.q, of.keys, of.values, **how)

    def test_latents_that_do_not_fit_are_named(self):
        of = random_operands(SHAPES["latent"], "bfloat16", seed=9)
        wrong = of._replace(values=of.values._replace(keys=of.keys))
        with self.assertRaisesRegex(ValueError, "latent parts bfloat16"):
            run(package.decode_attention, wrong, SHAPES["latent"], implementation="reference")

    @parameterized.parameters(
        (1, 4, 1024, 16), (1, 4, 4096, 32), (1, 4, 40, 1), (16, 4, 4096, 2), (32, 4, 4096, 1),
        (1, 8, 4096, 16), (16, 8, 4096, 1), (32, 8, 1024, 1),
    )  # fmt: skip
    def test_splits_fill_the_device(self, batch, num_kv, kv_length, splits):
        target = Target("gpu", (9, 0), 132)
        found = tiles.default_tiles(batch * num_kv, 16, kv_length, 128, 2, target)
        found.check()
        self.assertEqual(found.splits, splits)


class LoweringTest(HostTestCase):
    """Programs for CUDA, made without a GPU."""

    @parameterized.parameters((1, 4, 2), (16, 4, 2), (32, 4, 1), (1, 8, 2), (32, 8, 1))
    def test_one_launch_or_two_and_nothing_else(self, batch, num_kv, launches):
        program = gpu_programs.attention(batch, num_kv)
        text = program.lower(gpu_targets.GPUS["H100"]).as_text()
        self.assertEqual(re.findall(r"stablehlo\.(\w+)", text), ["custom_call"] * launches)
        self.assertIn(f"decode_attention_bfloat16_{32 // num_kv}x128_", text)


@pytest.mark.gpu
class DeviceContractTest(parameterized.TestCase):
    """The kernel compiled."""

    @parameterized.product(name=sorted(GPU_SHAPES), dtype=DTYPES)
    def test_value_is_that_of_float64(self, name, dtype):
        shape = GPU_SHAPES[name]
        of = random_operands(shape, dtype, seed=len(name))
        on_device = jax.device_put((of.q, of.keys, of.values, of.positions))
        call = functools.partial(
            CALL, *on_device[:3], layer=np.int32(of.layer), positions=on_device[3],
            kv_length=shape.kv_length, window=shape.window, implementation="triton",
        )  # fmt: skip
        found = call()
        self.assertIsNone(violation(found, of, shape))
        self.assertEqual(np.asarray(found).tobytes(), np.asarray(call()).tobytes())
        for chosen in (SPLIT, WHOLE):
            self.assertIsNone(violation(call(tiles=chosen), of, shape))

    def test_offsets_beyond_32_bits(self):
        shape = Shape(8, 32, 8, 128, 4096, 600, layers=1)
        of = random_operands(shape, "bfloat16", seed=12)

        @jax.jit
        def stacked(layer: jax.Array) -> jax.Array:
            rest = jnp.full((64, *layer.shape[1:]), jnp.nan, layer.dtype)
            return jnp.concatenate([rest, layer])

        keys, values = stacked(of.keys), stacked(of.values)
        self.assertGreater(keys.size, 2**31)
        for chosen in (None, SPLIT):
            found = CALL(
                of.q, keys, values, layer=np.int32(64), positions=of.positions,
                kv_length=shape.kv_length, implementation="triton", tiles=chosen,
            )  # fmt: skip
            self.assertIsNone(violation(found, of, shape))

    def test_equals_the_interpreted_kernel(self):
        shape = SHAPES["qwen3_30b_4"]
        of = random_operands(shape, "bfloat16", seed=10)
        with jax.default_device(jax.devices("cpu")[0]):
            expected = np.asarray(interpreted(of, shape, SPLIT)).astype(np.float64)
        found = run(CALL, of, shape, implementation="triton", tiles=SPLIT)
        _, tolerance = expected_and_tolerance(of, shape)
        error = np.abs(np.asarray(found).astype(np.float64) - expected)
        np.testing.assert_array_less(error, 2 * tolerance)

    def test_a_broken_kernel_fails(self):
        shape = GPU_SHAPES["mixtral_4_window"]
        of = random_operands(shape, "bfloat16", seed=11)
        swapped = of._replace(keys=of.values, values=of.keys)
        found = run(CALL, swapped, shape, implementation="triton")
        self.assertIsNotNone(violation(found, of, shape))


if __name__ == "__main__":
    absltest.main()
