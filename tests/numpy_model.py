"""The decoder in float64 numpy, loops and all: what tests of the models expect, and how near."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from moejax.models.config import ModelConfig

# Relative to the largest value: a few roundings of the dtype, and sums of some dozens of terms.
TOLERANCE = {"float32": 3e-6, "float16": 4e-3, "bfloat16": 3e-2}

RELATIVE_ERROR = 1e-4  # of logits in float32, by their norm

TINY = ModelConfig(
    family="qwen3_moe",
    vocab_size=29,
    model_dim=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=5,
    experts_per_token=2,
    expert_dim=8,
    mlp_dim=10,
    moe_layers=(0, 2),
    norm_topk_prob=True,
    norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=64,
    tied_embeddings=False,
    qk_norm=True,
    attention_bias=True,
    sliding_window=3,
)


def assert_near(
    found: Any, expected: np.ndarray, dtype: str = "float32", factor: float = 1
) -> None:
    """Within TOLERANCE of the largest expected magnitude."""
    assert found.dtype == jnp.dtype(dtype), found.dtype
    found = np.asarray(found).astype(np.float64)
    bound = factor * TOLERANCE[dtype] * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def relative_error(weights: Any, approximation: Any) -> np.ndarray:
    """|W - W'|_F / |W|_F of matrices [..., N, K]: float32[...], 0 if both are 0."""
    weights, approximation = np.asarray(weights), np.asarray(approximation)
    lost = np.sum(np.square(weights - approximation), axis=(-2, -1))
    whole = np.sum(np.square(weights), axis=(-2, -1))
    return np.where(lost > 0, np.sqrt(lost / np.where(whole > 0, whole, 1.0)), 0.0)


def relative_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Norm of the error over the norm of what was expected, at each position."""
    error = np.linalg.norm(found - expected, axis=-1)
    return error / np.linalg.norm(expected, axis=-1)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x over the root of its mean square, times the weight."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def rotary_angles(positions: np.ndarray, head_dim: int, theta: float) -> np.ndarray:
    """Position theta^(-2i/C), [B, T, C / 2]."""
    half = head_dim // 2
    return positions[..., None] * theta ** (-np.arange(half) / half)


def turn(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """[B, T, H, C] turned as complex numbers x_i + j x_{i + C/2} by angles [B, T, C / 2]."""
    first, second = np.split(x, 2, axis=-1)
    turned = (first + 1j * second) * np.exp(1j * angles)[:, :, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """[B, T, H, C] turned by the angles of its positions."""
    return turn(x, rotary_angles(positions, x.shape[-1], theta))


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def silu(x: np.ndarray) -> np.ndarray:
    """x times its logistic."""
    return x / (1 + np.exp(-x))


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, window: int | None
) -> np.ndarray:
    """One query at a time: [B, T, H, C] at `positions` over keys and values [B, S, K, C]."""
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(q.shape[:3]):
        last = positions[b, t]
        first = 0 if window is None else max(0, last - window + 1)
        keys, values = k[b, first : last + 1, h // group], v[b, first : last + 1, h // group]
        out[b, t, h] = softmax(keys @ q[b, t, h] / np.sqrt(q.shape[3])) @ values
    return out


def swiglu_mlp(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """[D] to [D] through one MLP."""
    gate, up = np.split(gate_up @ x, 2)
    return down @ (silu(gate) * up)


def experts(
    x: np.ndarray, ids: np.ndarray, weights: np.ndarray, gate_up: np.ndarray, down: np.ndarray
) -> np.ndarray:
    """[N, D] through the experts `ids` [N, A] of one layer, weighted and summed."""
    out = np.zeros_like(x)
    for n, a in np.ndindex(ids.shape):
        out[n] += weights[n, a] * swiglu_mlp(x[n], gate_up[ids[n, a]], down[ids[n, a]])
    return out


def route(
    x: np.ndarray, router: np.ndarray, config: ModelConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities [N, E], weights [N, A] and ids [N, A]; of equals the lower id comes first."""
    probabilities = softmax(x @ router.T)
    ids = np.argsort(-probabilities, axis=-1, kind="stable")[:, : config.experts_per_token]
    weights = np.take_along_axis(probabilities, ids, axis=-1)
    if config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdims=True)
    return probabilities, weights, ids


def forward(
    w: dict[str, np.ndarray],
    config: ModelConfig,
    tokens: np.ndarray,
    angles: np.ndarray | None = None,
    run: Callable[..., np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [B, T, V] and the router's probabilities [M, B T, E].

    `angles` [B, T, C / 2] are those of `rotary_angles` if they are not given. `run` stands for the
    experts of a sparse layer: its index, [N, D], what `route` gives, q and k to [N, D].
    """
    c, (batch, length) = config, tokens.shape
    positions = np.broadcast_to(np.arange(length), tokens.shape)
    if angles is None:
        angles = rotary_angles(positions, c.head_dim, c.rope_theta)
    x = w["embed"][tokens]
    routers = []
    for layer in range(c.num_layers):
        normed = rms_norm(x, w["attention.norm"][layer], c.norm_eps)
        qkv = normed @ w["attention.qkv_proj"][layer].T
        if c.attention_bias:
            qkv = qkv + w["attention.qkv_bias"][layer]
        qkv = qkv.reshape(batch, length, -1, c.head_dim)
        q, k, v = np.split(qkv, [c.num_heads, c.num_heads + c.num_kv_heads], axis=2)
        if c.qk_norm:
            q = rms_norm(q, w["attention.q_norm"][layer], c.norm_eps)
            k = rms_norm(k, w["attention.k_norm"][layer], c.norm_eps)
        q, k = turn(q, angles), turn(k, angles)
        attended = attend(q, k, v, positions, c.sliding_window).reshape(batch, length, -1)
        x = x + attended @ w["attention.o_proj"][layer].T
        if c.attention_bias:
            x = x + w["attention.o_bias"][layer]
        flat = rms_norm(x, w["mlp_norm"][layer], c.norm_eps).reshape(-1, c.model_dim)
        if layer in c.moe_layers:
            m = c.moe_layers.index(layer)
            probabilities, weights, ids = route(flat, w["moe.router"][m], c)
            routers.append(probabilities)
            if run is not None:
                out = run(m, flat, (probabilities, weights, ids), q, k)
            else:
                out = experts(flat, ids, weights, w["moe.gate_up"][m], w["moe.down"][m])
        else:
            n = c.dense_layers.index(layer)
            out = np.stack([swiglu_mlp(t, w["mlp.gate_up"][n], w["mlp.down"][n]) for t in flat])
        x = x + out.reshape(x.shape)
    head = w["embed"] if c.tied_embeddings else w["head"]
    return rms_norm(x, w["final_norm"], c.norm_eps) @ head.T, np.stack(routers)
