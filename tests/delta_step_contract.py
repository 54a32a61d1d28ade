"""Contract of a token's delta rule: cases, values, THE check.

Expectations are float64 numpy, token by token as the rule is written; other layers, and sequences
that rest, keep their bits.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # half the distance from 1 to the next number
DTYPES = tuple(ROUNDOFF)
IN_FLOAT32 = 2.0**-24 * 64  # sums of some hundred products, exponentials, roots


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
}
GPU_SHAPES = SHAPES | {
    "qwen3_next_8": Shape(8, 16, 2, 128, 128, layers=6),
    "qwen3_next_64": Shape(64, 16, 2, 128, 128),
    "wide_values": Shape(3, 4, 2, 64, 256, taps=3),
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
    heads = of.rows[b].reshape(s.num_keys, -1)
    ends = [s.key_dim, 2 * s.key_dim, 2 * s.key_dim + s.repeats * s.value_dim]
    *parts, gates = np.split(heads, ends, axis=1)
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
        b_of, a_of = of.b_and_a[b].astype(np.float64).reshape(s.num_keys, 2, s.repeats)[key]
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
    for array, size, dtype in zip(
        (out, states, tails), sizes, (of.rows.dtype, np.float32, of.rows.dtype), strict=True
    ):
        if array.shape != size or array.dtype != dtype:
            return f"{array.dtype}{array.shape} in place of {dtype}{size}"
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
        if (outside := ~(np.abs(states[of.layer, b] - state) <= slack)).any():
            at = tuple(np.argwhere(outside)[0])
            return f"state {b}{at} is {states[of.layer, b][at]}, not {state[at]}"
        now = out[b].astype(np.float64).reshape(value.shape)
        largest = np.abs(value).max(axis=1, keepdims=True)
        slack = short * np.abs(value) * (1 + short) + 4 * IN_FLOAT32 * largest
        if (outside := ~(np.abs(now - value) <= slack)).any():
            at = tuple(np.argwhere(outside)[0])
            return f"output {b}{at} is {now[at]}, not {value[at]}"
    others = np.arange(len(of.states)) != of.layer
    for name, now, kept in (("states", states, of.states), ("tails", tails, of.tails)):
        if now[others].tobytes() != kept[others].tobytes():
            return f"{name} of another layer have changed"
    return None
