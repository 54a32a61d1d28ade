"""The contract of a token's delta rule: reference, interpreted kernel, kernel on a GPU.

Expectations are float64 numpy, token by token as the rule is written; other layers, and sequences
that rest, keep their bits.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels import delta_step as package
from pallas_kernels.delta_step import triton
from tests.host_test_case import HostTestCase
from tests.kernel_contract import (
    ROUNDOFF,
    Contract,
    on_device,
    on_host,
    one_program_fewer,
    outside,
    tampered,
    ways_of,
    wrong_form,
)

IN_FLOAT32 = 2.0**-24 * 64  # sums of some hundred products, exponentials, roots
STACKED = ("states", "tails", "conv", "dt_bias", "a_log", "norm")  # over layers


class Shape(NamedTuple):
    """Axes of the operation."""

    batch: int
    num_keys: int  # K
    repeats: int  # R
    key_dim: int
    value_dim: int
    taps: int = 4  # W
    layers: int = 2
    eps: float = 1e-6
    floor: float = 1e-6
    rows_by_head: bool = True

    @property
    def num_heads(self) -> int:
        return self.num_keys * self.repeats

    @property
    def channels(self) -> int:
        return 2 * self.num_keys * self.key_dim + self.num_heads * self.value_dim


SHAPES = {
    "qwen3_next_1": Shape(1, 16, 2, 128, 128),
    "of_one_value_head": Shape(3, 3, 1, 16, 32),
    "of_four_value_heads": Shape(2, 2, 4, 32, 16, taps=2, layers=1, floor=1e-2),
    "resting": Shape(5, 2, 2, 16, 16, eps=1e-2),
    "rows_of_all_heads": Shape(3, 2, 2, 16, 32, rows_by_head=False),
}
GPU_SHAPES = SHAPES | {
    "qwen3_next_8": Shape(8, 16, 2, 128, 128, layers=6),
    "qwen3_next_64": Shape(64, 16, 2, 128, 128),
    "wide_values": Shape(3, 4, 2, 64, 256, taps=3),
    "qwen3_5_8": Shape(8, 16, 2, 128, 128, layers=6, rows_by_head=False),
}


class Operands(NamedTuple):
    """Arguments of `delta_step`, on the host."""

    rows: np.ndarray
    b_and_a: np.ndarray
    states: np.ndarray
    tails: np.ndarray
    conv: np.ndarray
    dt_bias: np.ndarray
    a_log: np.ndarray
    norm: np.ndarray
    layer: int
    active: np.ndarray


def random_operands(shape: Shape, dtype: str, seed: int) -> Operands:
    """Operands of the last layer; others' weights are NaN, every third sequence may rest."""
    rng, s, kind = np.random.default_rng(seed), shape, jnp.dtype(dtype)
    wide = np.dtype(np.float32)

    def normal(*size: int, of: Any = wide) -> np.ndarray:
        return rng.standard_normal(size, dtype=np.float32).astype(of)

    def of_layers(*size: int, of: Any = wide) -> np.ndarray:
        found = np.full((s.layers, *size), np.nan, of)
        found[-1] = normal(*size, of=of)
        return found

    rows = s.num_keys * (2 * s.key_dim + 2 * s.repeats * s.value_dim)
    states = normal(s.layers, s.batch, s.num_heads, s.key_dim, s.value_dim)
    states[..., 0, 0] = -0.0  # the bits of which adding 0 changes
    return Operands(
        rows=normal(s.batch, rows, of=kind),
        b_and_a=2 * normal(s.batch, 2 * s.num_heads),
        states=states,
        tails=normal(s.layers, s.batch, s.taps - 1, s.channels, of=kind),
        conv=of_layers(s.channels, 1, s.taps, of=kind),
        dt_bias=of_layers(s.num_heads), a_log=of_layers(s.num_heads),
        norm=of_layers(s.value_dim, of=kind), layer=s.layers - 1,
        active=np.arange(s.batch) % 3 != 2,
    )  # fmt: skip


def silu(x: np.ndarray) -> np.ndarray:
    """x times its logistic."""
    return x / (1 + np.exp(-x))


def expected_of(of: Operands, s: Shape, b: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Results of an active sequence: [H, value dim], states [H, key dim, value dim], tail."""
    # Of one group, that of all heads, or of one a key head.
    groups, heads = (s.num_keys, 1) if s.rows_by_head else (1, s.num_keys)
    sizes = np.array([s.key_dim, s.key_dim, s.repeats * s.value_dim])
    *parts, gates = np.split(of.rows[b].reshape(groups, -1), heads * np.cumsum(sizes), axis=1)
    token = np.concatenate([part.reshape(-1) for part in parts])
    inputs = np.concatenate([of.tails[of.layer, b], token[None]])
    taps = of.conv[of.layer, :, 0].astype(np.float64)
    mixed = silu((inputs.astype(np.float64) * taps.T).sum(axis=0))
    q, k, v = np.split(mixed, [s.num_keys * s.key_dim, 2 * s.num_keys * s.key_dim])
    gates = gates.reshape(s.num_heads, s.value_dim).astype(np.float64)
    outs, states = [], []
    for head in range(s.num_heads):
        key, number = divmod(head, s.repeats)
        of_key = slice(key * s.key_dim, (key + 1) * s.key_dim)
        of_head = slice(head * s.value_dim, (head + 1) * s.value_dim)
        unit_q, unit_k = (x[of_key] / np.sqrt((x[of_key] ** 2).sum() + s.floor) for x in (q, k))
        b_and_a = of.b_and_a[b].astype(np.float64).reshape(groups, 2, heads, s.repeats)
        b_of, a_of = b_and_a.swapaxes(1, 2).reshape(s.num_keys, 2, s.repeats)[key]
        step = np.logaddexp(0, a_of[number] + of.dt_bias[of.layer, head].astype(np.float64))
        decay = np.exp(-np.exp(of.a_log[of.layer, head].astype(np.float64)) * step)
        beta = 1 / (1 + np.exp(-b_of[number]))
        state = decay * of.states[of.layer, b, head].astype(np.float64)
        state = state + np.outer(unit_k, beta * (v[of_head] - state.T @ unit_k))
        read = state.T @ unit_q / np.sqrt(s.key_dim)
        normed = read / np.sqrt((read * read).mean() + s.eps)
        outs.append(normed * of.norm[of.layer].astype(np.float64) * silu(gates[head]))
        states.append(state)
    return np.array(outs), np.array(states), inputs[1:]


def violation(found: Any, of: Operands, shape: Shape) -> str | None:
    """THE check: why `found` is not the operation's value, or None."""
    out, states, tails = (np.asarray(array) for array in found)
    sizes = ((shape.batch, shape.num_heads * shape.value_dim), of.states.shape, of.tails.shape)
    if reason := wrong_form(found, sizes, (of.rows.dtype, np.float32, of.rows.dtype)):
        return reason
    short = ROUNDOFF[of.rows.dtype.name]
    for b in range(shape.batch):
        if not of.active[b]:
            for name, now, kept in (("state", states, of.states), ("tail", tails, of.tails)):
                if now[of.layer, b].tobytes() != kept[of.layer, b].tobytes():
                    return f"the {name} of sequence {b}, which rests, has changed"
            continue
        value, state, tail = expected_of(of, shape, b)
        if tails[of.layer, b].tobytes() != tail.tobytes():
            return f"the tail of sequence {b} is wrong"
        slack = IN_FLOAT32 * max(1.0, np.abs(state).max())
        if reason := outside(f"states of sequence {b}", states[of.layer, b], state, slack):
            return reason
        largest = np.abs(value).max(axis=1, keepdims=True)
        slack = short * np.abs(value) * (1 + short) + 4 * IN_FLOAT32 * largest
        if reason := outside(f"outputs of sequence {b}", out[b].reshape(value.shape), value, slack):
            return reason
    others = np.arange(len(of.states)) != of.layer
    for name, now, kept in (("states", states, of.states), ("tails", tails, of.tails)):
        if now[others].tobytes() != kept[others].tobytes():
            return f"{name} of another layer have changed"
    return None


def call(
    rows: Any, b_and_a: Any, states: Any, tails: Any, conv: Any, dt_bias: Any, a_log: Any,
    norm: Any, layer: Any, active: Any, **how: Any,
) -> Any:  # fmt: skip
    weights = package.DeltaWeights(conv, dt_bias, a_log, norm)
    projection = package.Projection(rows, b_and_a)
    return package.delta_step(projection, states, tails, weights, layer=layer, active=active, **how)


STATIC = ("eps", "floor", "rows_by_head", "implementation", "interpret")
COMPILED = jax.jit(call, static_argnames=STATIC)


def run(function: Any, of: Operands, shape: Shape, **how: Any) -> Any:
    operands = jax.tree.map(jnp.asarray, of._replace(layer=np.int32(of.layer)))
    static = {"eps": shape.eps, "floor": shape.floor, "rows_by_head": shape.rows_by_head}
    return function(*operands, **static, **how)


in_plain_jnp, interpreted, traced_again, on_gpu = ways_of(run, COMPILED, call)


def taking_another_layer(of: Operands, shape: Shape) -> Any:
    weights = {name: getattr(of, name)[::-1] for name in ("conv", "dt_bias", "a_log", "norm")}
    return traced_again(of._replace(layer=0, **weights), shape)


def b_for_a(of: Operands, shape: Shape) -> Any:
    heads = of.b_and_a.reshape(shape.batch, shape.num_keys, 2, shape.repeats)
    return traced_again(of._replace(b_and_a=heads[:, :, ::-1].reshape(of.b_and_a.shape)), shape)


def heads_in_turn(of: Operands, shape: Shape) -> Any:
    states = of.states.reshape(*of.states.shape[:2], shape.num_keys, shape.repeats, -1)
    states = np.swapaxes(states, 2, 3).reshape(of.states.shape)
    return traced_again(of._replace(states=states), shape)


BROKEN = {
    "forgets the layer": taking_another_layer,
    "wakes those that rest": lambda of, shape: traced_again(
        of._replace(active=np.ones_like(of.active)), shape
    ),
    "swaps b and a": b_for_a,
    "turns the taps": lambda of, shape: traced_again(of._replace(conv=of.conv[..., ::-1]), shape),
    "forgets the tail": lambda of, shape: (*traced_again(of, shape)[:2], of.tails),
    "shares key heads in turn": heads_in_turn,
    "leaves out a head": tampered(traced_again, triton.launch, "triton_call", one_program_fewer),
    "forgets eps": lambda of, shape: traced_again(of, shape._replace(eps=0.0)),
}


CONTRACT = Contract(
    SHAPES, GPU_SHAPES, random_operands, violation, in_plain_jnp, (interpreted,), on_gpu,
    fresh=traced_again, loosest=SHAPES["resting"]._replace(eps=1.0), broken=BROKEN,
    spoiled=lambda of, shape: (of._replace(conv=of.conv[..., ::-1]), shape),
)  # fmt: skip


class ContractTest(on_host(CONTRACT)):
    """A sequence does not depend on the others."""

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


class RefusalTest(HostTestCase):
    @parameterized.parameters(
        ({"rows": np.zeros((5, 300), jnp.bfloat16)}, r"rows \(5, 300\) are not of states"),
        ({"rows": np.zeros(8, jnp.bfloat16)}, r"rows: bfloat16\[8\], not \[B, \.\]"),
        (
            {"b_and_a": np.zeros((5, 8), jnp.bfloat16)},
            r"b and a: bfloat16\[5, 8\], not float32\[5, 8\]",
        ),
        ({"tails": np.zeros((2, 5, 3, 9), jnp.bfloat16)}, "tails: "),
        ({"conv": np.zeros((2, 128, 1, 3), jnp.bfloat16)}, "taps: "),
        ({"norm": np.zeros((2, 16), np.float32)}, "scales of the norm: float32"),
        ({"active": np.zeros(4, bool)}, r"active: bool\[4\], not bool\[5\]"),
    )
    def test_what_does_not_fit_is_named(self, changed, said):
        of = random_operands(SHAPES["resting"], "bfloat16", seed=9)._replace(**changed)
        with self.assertRaisesRegex(ValueError, said):
            run(call, of, SHAPES["resting"], implementation="triton", interpret=True)


@pytest.mark.gpu
class DeviceContractTest(on_device(CONTRACT)):
    """The kernel compiled."""

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

    @pytest.mark.gpu(gib=40)
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
