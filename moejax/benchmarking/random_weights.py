"""Random weights of real shapes, plain or packed, made on the device."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.config import FLOAT32_LEAVES, ModelConfig, leaf_dtype, weight_shapes
from moejax.models.leaf_kinds import EXPERT_LEAVES, kind_of
from moejax.weights.qtensor import MXFP4, QTensor, Weight
from pallas_kernels import layout, mxfp4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """Bits and groups of each part of a model."""

    bits: int = 16  # of routed experts and dense MLPs; 16 for bf16
    group_size: int = 64  # of every packed matrix
    zero_kind: str = "float"  # "float", "integer" or "symmetric"
    attention_bits: int = 16  # of the projections of attention, or of a delta rule; 16 for bf16
    shared_bits: int = 16  # of the experts that every token takes; 16 for bf16
    head_bits: int = 16  # of the head; 16 for bf16
    mxfp4: bool = False  # experts and dense MLPs of 4 bits are in MXFP4

    def bits_of(self, leaf: str) -> int:
        """Bits of a leaf of `weight_shapes`; 16: plain."""
        bits_of_kind = {
            "experts": self.bits,
            "mlp": self.bits,
            "attention": self.attention_bits,
            "shared_experts": self.shared_bits,
            "head": self.head_bits,
        }
        return bits_of_kind.get(kind_of(leaf), 16)

    def describe(self) -> str:
        """Such as "INT3 g64 float, attention INT3, head bf16"."""
        names = ["bf16" if b == 16 else f"INT{b}" for b in (self.attention_bits, self.head_bits)]
        if (self.bits, self.shared_bits, *names) == (16, 16, "bf16", "bf16"):
            return "bf16"
        if self.mxfp4 and self.bits == mxfp4.BITS:
            return f"MXFP4, attention {names[0]}, head {names[1]}"
        experts = "bf16" if self.bits == 16 else f"INT{self.bits} g{self.group_size}"
        shared = f", shared experts INT{self.shared_bits}" if self.shared_bits != 16 else ""
        return f"{experts} {self.zero_kind}, attention {names[0]}{shared}, head {names[1]}"


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("words", "low", "high"))
def _fill(
    leaf: jax.Array,
    index: jax.Array,
    key: jax.Array,
    std: jax.Array,
    *,
    words: bool = False,
    low: float = 0.0,
    high: float = 0.0,
) -> jax.Array:
    """One layer of a leaf: random words, uniform values in low..high, or N(0, std^2)."""
    shape = leaf.shape[1:]
    if words:
        values = jax.random.bits(key, shape, leaf.dtype)
    elif high > low:
        values = jax.random.uniform(key, shape, jnp.float32, low, high)
        values = (jnp.round(values) if leaf.dtype == jnp.uint8 else values).astype(leaf.dtype)
    else:
        values = jax.random.normal(key, shape, leaf.dtype) * std.astype(leaf.dtype)
    return jax.lax.dynamic_update_index_in_dim(leaf, values, index, 0)


class _Drawing:
    """Draws leaves a layer at a time, so that nothing temporary is large."""

    def __init__(self, device: jax.Device):
        self._device = device
        self._key = jax.device_put(jax.random.key(0, impl="rbg"), device)

    def leaf(
        self, shape: tuple[int, ...], dtype: jnp.dtype, std: float = 0.0, **how: Any
    ) -> jax.Array:
        flat = shape if len(shape) > 2 else (1, *shape)
        leaf = jnp.zeros(flat, dtype, device=self._device)
        for layer in range(flat[0]):
            self._key, new = jax.random.split(self._key)
            leaf = _fill(leaf, jnp.int32(layer), new, jnp.float32(std), **how)
        return leaf if len(shape) > 2 else leaf[0]

    def in_mxfp4(self, shape: tuple[int, ...]) -> QTensor:
        """Any codes, with scales by which weights are N(0, 1/K) wide or so."""
        inputs = shape[-1]
        exponent = 127 - 0.5 * math.log2(inputs * float(np.mean(mxfp4.VALUES**2)))
        arrays = MXFP4.arrays(shape)
        found = {
            "words": self.leaf(arrays["words"].shape, arrays["words"].dtype, words=True),
            "scales": self.leaf(
                arrays["scales"].shape, arrays["scales"].dtype, low=exponent - 1, high=exponent + 1
            ),
        }
        return MXFP4.tensor(inputs, found)

    def packed(self, shape: tuple[int, ...], bits: int, packing: Packing) -> QTensor:
        """Codes uniform in 0..2^bits - 1 about their middle, so that weights are N(0, 1/K) wide."""
        *lead, inputs = shape
        middle = (2**bits - 1) / 2
        scale = (12 / ((4**bits - 1) * inputs)) ** 0.5
        groups = (*lead, layout.num_groups(inputs, packing.group_size))
        f16 = jnp.dtype(jnp.float16)
        zeros = None
        if packing.zero_kind != "symmetric":
            dtype = jnp.dtype(jnp.uint8) if packing.zero_kind == "integer" else f16
            zeros = self.leaf(groups, dtype, low=middle - 0.25, high=middle + 0.25)
        words = (*lead, layout.num_words(inputs, bits))
        tensor = QTensor(
            words=self.leaf(words, jnp.dtype(jnp.uint32), words=True),
            scales=self.leaf(groups, f16, low=0.8 * scale, high=1.2 * scale),
            zeros=zeros,
            num_inputs=inputs,
            bits=bits,
            group_size=packing.group_size,
        )
        tensor.check()
        return tensor


def random_weights(
    config: ModelConfig,
    packing: Packing,  # which matrices are packed; the others, and norms, are bf16
    device: jax.Device,
    *,
    dense: bool = True,  # whether all but the experts are among the leaves
    experts: bool = True,  # whether they are
) -> dict[str, Weight]:
    """Leaves made on the device: norms one, embeddings N(0, 1), matrices N(0, 1/fan_in) or so.

    Norms whose weights are centred on zero are zero, and so are decays' biases and logarithms and
    what is added to routers' scores.
    """
    drawing = _Drawing(device)
    weights: dict[str, Weight] = {}
    for name, shape in weight_shapes(config).items():
        bits = packing.bits_of(name)
        if not (experts if name in EXPERT_LEAVES else dense):
            continue
        dtype = jnp.dtype(leaf_dtype(name, jnp.bfloat16))
        if name.endswith("norm"):
            is_centred = config.zero_centred_norm and name != "delta.norm"
            weights[name] = jnp.full(shape, 0 if is_centred else 1, dtype, device=device)
        elif name in FLOAT32_LEAVES:
            weights[name] = jnp.zeros(shape, dtype, device=device)
        elif packing.mxfp4 and bits == mxfp4.BITS and kind_of(name) in ("experts", "mlp"):
            weights[name] = drawing.in_mxfp4(shape)
        elif bits != 16:
            weights[name] = drawing.packed(shape, bits, packing)
        else:
            std = 1.0 if name == "embed" else shape[-1] ** -0.5
            weights[name] = drawing.leaf(shape, dtype, std)
    return weights
