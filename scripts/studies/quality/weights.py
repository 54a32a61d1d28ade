"""Shape of the demo model's matrices to a quantizer (MiLo sections 3.1 and 3.2.4)."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.quantization.pipeline.quantizers import Program, QuantizedStack, quantize_stack
from moejax.quantization.pipeline.recipe import Scheme
from moejax.quantization.statistics import excess_kurtosis
from moejax.weights.qtensor import QTensor
from scripts.studies.quality.demo import Demo, Finding, listed

GROUP_SIZE = 64
RANK = 32  # of the compensators of the histograms: an eighth of the width
TAU = 0.5  # of Table 2
BINS = 48
SHOWN_LAYER = 1
SHOWN_VALUES = 64  # of a spectrum


@dataclasses.dataclass(frozen=True)
class Stack:
    """The matrices [C, N, K] of one projection in all layers (of experts: layer by layer)."""

    name: str
    kind: str  # "attention" | "experts"
    matrices: jax.Array

    def of_layer(self, layer: int, num_layers: int) -> slice:
        """Matrices of one layer."""
        each = len(self.matrices) // num_layers
        return slice(layer * each, (layer + 1) * each)


def stacks(demo: Demo) -> list[Stack]:
    """Every projection."""
    c = demo.config
    chosen = np.array(demo.layers or range(c.num_layers))
    names = ("attention.qkv_proj", "attention.o_proj", "moe.gate_up", "moe.down")
    weights = {name: demo.weights[name][chosen] for name in names}
    widths = np.cumsum([c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim])
    parts = dict(zip("qkv", jnp.split(weights["attention.qkv_proj"], widths, axis=1), strict=True))
    gate, up = jnp.split(weights["moe.gate_up"], 2, axis=2)
    experts = {"gate": gate, "up": up, "down": weights["moe.down"]}
    return [
        *(Stack(name, "attention", part) for name, part in parts.items()),
        Stack("o", "attention", weights["attention.o_proj"]),
        *(Stack(n, "experts", part.reshape(-1, *part.shape[2:])) for n, part in experts.items()),
    ]


def measure(demo: Demo) -> Iterator[Finding]:
    """Rows of each kind, of the dots of one layer, and of two matrices."""
    num_layers = len(demo.layers) or demo.config.num_layers
    found: dict[str, dict[str, list[np.ndarray]]] = {}
    dots: dict[str, dict[str, list[np.ndarray]]] = {}
    for stack in stacks(demo):
        kurtosis = np.asarray(excess_kurtosis(stack.matrices))
        rests = [_rest(stack.matrices[stack.of_layer(i, num_layers)]) for i in range(num_layers)]
        spectra, error = (np.concatenate(part) for part in zip(*rests, strict=True))
        small = (spectra < TAU).sum(-1)
        kept = {
            "kurtosis": kurtosis, "small": small, "smaller share": 100 * small / spectra.shape[1],
            "error": error,
        }  # fmt: skip
        mine = stack.of_layer(SHOWN_LAYER, num_layers)
        for name, values in kept.items():
            found.setdefault(stack.kind, {}).setdefault(name, []).append(values)
            dots.setdefault(stack.kind, {}).setdefault(name, []).append(values[mine])
        if stack.name in ("q", "gate"):
            yield _spectrum(stack, spectra[mine])
            yield from _histograms(stack, mine.start)
    for kind, parts in found.items():
        values = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        yield from _means(kind, values, {"layers": list(demo.layers)} if demo.layers else {})
    yield from _dots(
        {kind: {n: np.concatenate(v) for n, v in p.items()} for kind, p in dots.items()}
    )


def _rest(matrices: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Singular values of what INT3 leaves, over the largest, and relative errors."""
    quantized = _quantized(matrices, "hqq", 3)
    residual = np.asarray(matrices - _values(quantized))
    spectra = np.linalg.svd(residual, compute_uv=False)
    error = np.sqrt(np.asarray(quantized.lost[0]) / np.asarray(quantized.whole))
    return spectra / spectra[:, :1], error


def _means(kind: str, values: dict[str, np.ndarray], chosen: dict[str, Any]) -> Iterator[Finding]:
    """Table 2."""
    more: dict[str, Any] = {"matrices": len(values["kurtosis"]), **chosen}
    kurtosis = values["kurtosis"]
    spread = {"least": float(kurtosis.min()), "most": float(kurtosis.max())}
    yield Finding(f"excess kurtosis | {kind}", float(kurtosis.mean()), "", more | spread)
    rank = more | {"tau": TAU, "share of all, percent": float(values["smaller share"].mean())}
    what = f"singular values of the INT3 residual below tau of the largest | {kind}"
    yield Finding(what, float(values["small"].mean()), "", rank)
    yield Finding(f"relative error, INT3 hqq | {kind}", float(values["error"].mean()), "", more)


def _dots(kinds: dict[str, dict[str, np.ndarray]]) -> Iterator[Finding]:
    """Figure 5: each matrix of a layer."""
    for kind, values in kinds.items():
        more = {name: listed(values[name], 4) for name in ("kurtosis", "error")}
        both = float(np.corrcoef(values["kurtosis"], values["error"])[0, 1])
        what = f"kurtosis and error, correlation | {kind} | layer {SHOWN_LAYER}"
        yield Finding(what, both, "", more)
    x, y = (np.concatenate([v[n] for v in kinds.values()]) for n in ("kurtosis", "error"))
    what = f"kurtosis and error, correlation | both | layer {SHOWN_LAYER}"
    yield Finding(what, float(np.corrcoef(x, y)[0, 1]), "", {"matrices": len(x)})


def _spectrum(stack: Stack, spectra: np.ndarray) -> Finding:
    """The mean over a layer's matrices of the residual's singular values."""
    mean = spectra.mean(0)
    shown = mean[:: max(1, len(mean) // SHOWN_VALUES)]
    more = {"of": len(mean), "spectrum": listed(shown, 4)}
    what = f"spectrum of the INT3 residual, first quarter | {stack.kind}, {stack.name}"
    energy = (mean[: len(mean) // 4] ** 2).sum() / (mean**2).sum()
    return Finding(f"{what} | layer {SHOWN_LAYER}", float(100 * energy), "%", more)


def _histograms(stack: Stack, place: int) -> Iterator[Finding]:
    """Figures 2 and 4: one matrix as it is and as it is stored."""
    matrix = stack.matrices[place : place + 1]
    for label, method, bits, rank in (
        ("INT3", "hqq", 3, 0), ("INT4", "hqq", 4, 0), (f"INT3 and rank {RANK}", "milo", 3, RANK),
    ):  # fmt: skip
        stored = np.asarray(_values(_quantized(matrix, method, bits, rank)))[0].ravel()
        plain = np.asarray(matrix)[0].ravel()
        limit = float(np.abs(plain).max())
        edges = np.linspace(-limit, limit, BINS + 1)
        shares = [
            np.histogram(x, edges)[0] / x.size for x in (plain, np.clip(stored, -limit, limit))
        ]
        by_size = np.argsort(np.abs(plain))
        tenths = np.array_split(((plain - stored) ** 2)[by_size], 10)
        relative = np.array_split(np.abs(plain)[by_size], 10)
        more = {
            "limit": limit, "plain": listed(shares[0], 5), "stored": listed(shares[1], 5),
            "relative error by tenth of size": [
                round(float(np.sqrt(e.mean()) / w.mean()), 4)
                for e, w in zip(tenths, relative, strict=True)
            ],
        }  # fmt: skip
        overlap = 100 * float(np.minimum(*shares).sum())
        what = f"overlap of histograms, {label} | {stack.kind}, {stack.name} | layer {SHOWN_LAYER}"
        yield Finding(what, overlap, "%", more)


def _quantized(matrices: jax.Array, method: str, bits: int, rank: int = 0) -> QuantizedStack:
    scheme = Scheme(
        method=method, bits=bits, group_size=GROUP_SIZE, zero_kind="float", scale_dtype="float16",
        factor_bits=3,
    )  # fmt: skip
    ranks = jnp.full(len(matrices), rank, jnp.int32)
    return quantize_stack(matrices, ranks, None, Program(scheme=scheme, max_rank=rank, passes=20))


def _values(quantized: QuantizedStack) -> jax.Array:
    """Values of the stored matrices, compensators added."""
    values = quantized.tensor.dequantize()
    (factors,) = quantized.factors
    if factors is None:
        return values
    u, v = (f.dequantize() if isinstance(f, QTensor) else f for f in factors)
    product = jnp.einsum("crn,crk->cnk", u.astype(jnp.float32), v.astype(jnp.float32))
    return values + product
