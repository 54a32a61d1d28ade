"""Random weights of real shapes, plain or packed, made on the device."""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.config import FLOAT32_LEAVES, ModelConfig, leaf_dtype, weight_shapes
from moejax.models.hf.names import expert_spelling, placements
from moejax.models.leaf_kinds import EXPERT_LEAVES, kind_of
from moejax.weights.qtensor import FACTOR_GROUP_SIZE, MXFP4, CodesKind, Compensator, QTensor, Weight
from pallas_kernels import mxfp4

FACTOR_BITS = 3  # of compensators


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
    # Ranks of INT3 compensators of packed matrices (MiLo), at most their width; 0: none.
    dense_rank: int = 0  # of attention, the experts that every token takes, and dense MLPs
    expert_rank: int = 0  # of routed experts

    def _bits_of(self, leaf: str) -> int:
        """Bits of a leaf of `weight_shapes`; 16: plain."""
        bits_of_kind = {
            "experts": self.bits,
            "mlp": self.bits,
            "attention": self.attention_bits,
            "shared_experts": self.shared_bits,
            "head": self.head_bits,
        }
        return bits_of_kind.get(kind_of(leaf), 16)

    def _rank_of(self, leaf: str) -> int:
        """Rank of the compensators of a leaf of `weight_shapes`; 0: it has none."""
        kind = kind_of(leaf)
        if kind == "experts":
            return self.expert_rank
        return self.dense_rank if kind in ("attention", "shared_experts", "mlp") else 0

    def kind(self, bits: int, *, may_be_mxfp4: bool = True) -> CodesKind:
        """Stored form of packed matrices of so many bits, by default of experts."""
        if self.mxfp4 and may_be_mxfp4 and bits == mxfp4.BITS:
            return MXFP4
        return CodesKind(bits=bits, group_size=self.group_size, zero_kind=self.zero_kind)

    def describe(self) -> str:
        """Such as "INT3 g64 float, attention INT3, head bf16"."""
        names = ["bf16" if b == 16 else f"INT{b}" for b in (self.attention_bits, self.head_bits)]
        if (self.bits, self.shared_bits, *names) == (16, 16, "bf16", "bf16"):
            return "bf16"
        experts = "bf16" if self.bits == 16 else f"INT{self.bits} g{self.group_size}"
        experts = f"{experts} {self.zero_kind}"
        if self.mxfp4 and self.bits == mxfp4.BITS:
            experts = "MXFP4"
        shared = f", shared experts INT{self.shared_bits}" if self.shared_bits != 16 else ""
        ranks = ""
        if self.dense_rank or self.expert_rank:
            ranks = f", compensators of rank {self.dense_rank}, of experts {self.expert_rank}"
        return f"{experts}, attention {names[0]}{shared}, head {names[1]}{ranks}"


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

    def __init__(self, device: jax.Device | None):
        self._device = device
        self._key = jax.device_put(jax.random.key(0, impl="rbg"), device)

    def leaf(
        self, shape: tuple[int, ...], dtype: jnp.dtype, std: float = 0.0, **how: Any
    ) -> jax.Array:
        flat = shape if len(shape) > 2 else (1, *shape)
        with jax.default_device(self._device):  # `device=` makes it on the first, and copies it
            leaf = jnp.zeros(flat, dtype)
        for layer in range(flat[0]):
            self._key, new = jax.random.split(self._key)
            leaf = _fill(leaf, jnp.int32(layer), new, jnp.float32(std), **how)
        return leaf if len(shape) > 2 else leaf[0]

    def packed(self, shape: tuple[int, ...], kind: CodesKind) -> QTensor:
        """Any codes, with scales and zeros by which weights are N(0, 1/K) wide or so."""
        inputs, middle = shape[-1], (2**kind.bits - 1) / 2
        scale = (12 / ((4**kind.bits - 1) * inputs)) ** 0.5
        ranges = {"scales": (0.8 * scale, 1.2 * scale), "zeros": (middle - 0.25, middle + 0.25)}
        if kind.zero_kind == "symmetric":
            # Codes lie half a step below zero in the mean. With one sign a large rank's terms add
            # up to the same output for every input, and all tokens choose the same experts.
            ranges = {"scales": (-(3**0.5) * scale, 3**0.5 * scale)}
        if kind.is_mxfp4:
            exponent = 127 - 0.5 * math.log2(inputs * float(np.mean(mxfp4.VALUES**2)))
            ranges = {"scales": (exponent - 1, exponent + 1)}
        found = {}
        for name, array in kind.arrays(shape).items():
            low, high = ranges.get(name, (0.0, 0.0))
            found[name] = self.leaf(
                array.shape, array.dtype, words=name == "words", low=low, high=high
            )
        return kind.tensor(inputs, found)

    def with_terms(self, tensor: QTensor, parts: Mapping[int, int], rank: int) -> QTensor:
        """Adds a compensator of each part of the rows."""
        found = self.terms(tensor.shape[:-2], tensor.num_inputs, parts, rank)
        tensor = dataclasses.replace(tensor, compensators=found)
        tensor.check()
        return tensor

    def terms(
        self, lead: tuple[int, ...], num_inputs: int, parts: Mapping[int, int], rank: int
    ) -> tuple[Compensator, ...]:
        """Compensators in INT3 of matrices [*lead, N, K]; `parts` are rows by the first."""
        found, count = [], math.prod(lead)
        for first, num_rows in parts.items():
            own = min(rank, num_rows, num_inputs)
            u, v = (
                self.packed((count * own, length), _factor_kind(length))
                for length in (num_rows, num_inputs)
            )
            start = np.arange(count, dtype=np.int32).reshape(lead) * np.int32(own)
            where = jax.device_put((start, np.full_like(start, own)), self._device)
            found.append(Compensator(
                u=u, v=v, start=where[0], rank=where[1], first_row=first, num_rows=num_rows,
                max_rank=own,
            ))  # fmt: skip
        return tuple(found)


def _factor_kind(length: int) -> CodesKind:
    """Stored form of a compensator's factors of so many numbers."""
    return CodesKind(bits=FACTOR_BITS, group_size=min(FACTOR_GROUP_SIZE, length))


def _parts(config: ModelConfig) -> dict[str, dict[int, int]]:
    """By leaf, the matrices of a checkpoint that its rows are: number of rows by the first."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for placement in placements(config, expert_spelling(config.family)):
        if len(placement.shape) == 2:
            found[placement.leaf][placement.start] = placement.shape[0]
    return found


def expert_terms(
    config: ModelConfig, packing: Packing, device: jax.Device | None = None
) -> tuple[tuple[Compensator, ...], tuple[Compensator, ...]]:
    """Compensators of all experts' `gate_up` and `down`, as `HostRows.terms`; of rank 0 none."""
    drawing, shapes = _Drawing(device), weight_shapes(config)
    parts = _parts(config) if packing.expert_rank else {}
    gate_up, down = (
        drawing.terms(shapes[of][:-2], shapes[of][-1], parts.get(of, {}), packing.expert_rank)
        for of in EXPERT_LEAVES
    )
    return gate_up, down


def expert_terms_nbytes(config: ModelConfig, packing: Packing) -> int:
    """Bytes of `expert_terms`, none of which is drawn."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: expert_terms(config, packing)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


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
    parts = _parts(config) if packing.dense_rank or packing.expert_rank else {}
    for name, shape in weight_shapes(config).items():
        bits = packing._bits_of(name)
        if not (experts if name in EXPERT_LEAVES else dense):
            continue
        dtype = jnp.dtype(leaf_dtype(name, jnp.bfloat16))
        if name.endswith("norm"):
            is_centred = config.zero_centred_norm and name != "delta.norm"
            weights[name] = jnp.full(shape, 0 if is_centred else 1, dtype, device=device)
        elif name in FLOAT32_LEAVES:
            weights[name] = jnp.zeros(shape, dtype, device=device)
        elif bits != 16:
            may_be_mxfp4 = kind_of(name) in ("experts", "mlp")
            kind = packing.kind(bits, may_be_mxfp4=may_be_mxfp4)
            packed = drawing.packed(shape, kind)
            rank = 0 if kind.is_mxfp4 else packing._rank_of(name)
            weights[name] = drawing.with_terms(packed, parts[name], rank) if rank else packed
        else:
            std = 1.0 if name == "embed" else shape[-1] ** -0.5
            weights[name] = drawing.leaf(shape, dtype, std)
    return weights
