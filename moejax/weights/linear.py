"""Products with weights of any kind: plain arrays, packed codes, FP8 blocks.

Kernels for packed weights are chosen here alone (`_choose_product`), and every choice is recorded
where it is made, while a program is traced (`recorded_choices`). Where every kernel refuses,
packed matrices are dequantized in float32, cast to the dtype of the activations and multiplied as
plain ones: only the matrices (or rows) that a call uses, never a whole stack. Plain arrays go
through untouched.

Axes: N outputs (rows), K inputs; leading axes are layers, then experts.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.weights.qtensor import (
    FP8_BLOCK,
    Compensator,
    Factor,
    Fp8Tensor,
    QTensor,
    RecordedInput,
    Weight,
)
from pallas_kernels import dequant_matmul, packed, row_gather
from pallas_kernels.target import Choice, Target

Index = int | jax.Array

DEQUANTIZED = "dequantized"  # in place of a kernel's name in a `Choice`
SUMS = "sums over the mesh"  # a part
EMBEDDINGS = "embeddings"  # a part that `take_rows` records where they are in host memory
PLAIN = "plain"  # the same, of a weight that is not packed
REFERENCE = "reference"  # what `pallas_kernels` chooses where its kernels refuse

# A packed matrix of more bytes than this when plain is multiplied a block of rows at a time: XLA on
# a CPU dequantizes whole ones of all layers at once, for they wait for nothing (jax 0.10.2).
BLOCK_BYTES = 2**23
MIN_KERNEL_OUTPUTS = 1024  # of a plain matrix; smaller ones are too few blocks of large tiles
MIN_ROW_OUTPUTS = 8  # of a plain matrix for whole rows a program; XLA fuses fewer with what follows
MAX_TRITON_ROWS = 32  # of x, times a plain matrix


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Kernels that may multiply packed weights; static."""

    target: Target | None = None  # where the program runs; None: unknown, so no kernel is used
    implementation: str | None = None  # forced; None: the first that does not refuse on `target`


NO_KERNELS = Kernels()


class Operands(NamedTuple):
    """A weight in the form that `pallas_kernels` takes."""

    weights: packed.PackedMatrices
    low_rank: tuple[packed.LowRank, ...]


def packing(weight: Weight) -> str | None:
    """Describes a weight's packing: "INT3 in groups of 64, float zeros"; None if plain."""
    if isinstance(weight, Fp8Tensor):
        return f"FP8 in blocks of {FP8_BLOCK} x {FP8_BLOCK}"
    if isinstance(weight, QTensor):
        whole_row = weight.group_size == weight.num_inputs
        groups = "one group a row" if whole_row else f"groups of {weight.group_size}"
        zeros = "symmetric" if weight.zeros is None else f"{weight.zero_kind} zeros"
        low_rank = ", low-rank terms" if weight.terms else ""
        if weight.is_mxfp4:
            return f"MXFP4 in groups of {weight.group_size}{low_rank}"
        planes = " by bit planes" if weight.refinements else ""
        return f"INT{weight.bits}{planes} in {groups}, {zeros}{low_rank}"
    return None


def kernel_refusal(weight: Weight) -> str | None:
    """Reason why no kernel can take a weight, or None."""
    if isinstance(weight, Fp8Tensor):
        return f"it is {packing(weight)}"
    if isinstance(weight, QTensor):
        if weight.permutation is not None:
            return "its inputs are permuted (act-order)"
        factors = [factor for c in weight.terms for factor in (c.u, c.v)]
    else:
        factors = [weight]
    for factor in factors:
        if isinstance(factor, QTensor) or factor.dtype in (jnp.bfloat16, jnp.float16):
            continue
        part = "a low-rank factor" if isinstance(weight, QTensor) else "it"
        return f"{part} is {factor.dtype}, not bfloat16 or float16"
    return None


def operands(weight: Weight) -> Operands:
    """Flattens the leading axes to S slots, without a copy; `kernel_refusal` has no reason."""
    assert not isinstance(weight, Fp8Tensor)
    if not isinstance(weight, QTensor):
        return Operands(_matrices(weight), ())
    terms = tuple(
        packed.LowRank(
            u=_matrices(c.u[None]),
            v=_matrices(c.v[None]),
            start=c.start.reshape(-1),
            rank=c.rank.reshape(-1),
            first_row=c.first_row,
            max_rank=c.max_rank,
        )
        for c in weight.terms
        if c.max_rank
    )
    return Operands(_matrices(weight), terms)


def _matrices(weight: Factor) -> packed.PackedMatrices:
    def flat(array: jax.Array) -> jax.Array:
        return array.reshape(math.prod(array.shape[:-2]), *array.shape[-2:])

    if not isinstance(weight, QTensor):
        return packed.plain(flat(weight))
    slots, is_pool = weight.plane_slots, weight.plane_slots is not None
    if slots is None:
        slots = jnp.arange(math.prod(weight.shape[:-2]), dtype=jnp.int32)
    return packed.PackedMatrices(
        words=flat(weight.words),
        scales=flat(weight.scales),
        zeros=None if weight.zeros is None else flat(weight.zeros),
        num_inputs=weight.num_inputs,
        bits=weight.bits,
        group_size=weight.group_size,
        refinements=tuple(
            packed.Refinement(words=plane if is_pool else flat(plane), slots=slots.reshape(-1))
            for plane in weight.refinements
        ),
    )


def choose_part(
    name: str, form: str, kernels: Kernels, choose: Callable[[Target], Choice]
) -> Choice:
    """Chooses and records "triton", a part's kernel, or "xla" with the kernel's refusals.

    Args:
      name: of the part in the record.
      form: what it computes in.
      kernels: the permitted implementations; a reference means XLA here.
      choose: for a target.
    """
    if kernels.implementation == REFERENCE:
        choice = Choice("xla", {})
    elif kernels.target is None:
        choice = Choice("xla", {"triton": "no target was named"})
    else:
        choice = choose(kernels.target)
        if choice.implementation != "triton":
            choice = Choice("xla", choice.refusals)
    record_choice(name, choice, form)
    return choice


def form(weight: Weight) -> str:
    """Describes how a weight is stored, in a few words."""
    if isinstance(weight, jax.Array):
        return str(weight.dtype)
    if kernel_refusal(weight):
        return packing(weight) or str(weight)
    of = jax.eval_shape(operands, weight)
    ranks = "".join(f" + U V {terms.v.describe()}" for terms in of.low_rank)
    return of.weights.describe() + ranks


def record_product(leaf: str, choice: Choice, weight: Weight) -> None:
    """Records what multiplies by a leaf; nothing for ""."""
    if leaf and is_new_choice(leaf, choice):
        record_choice(leaf, choice, form(weight), packed=packing(weight) is not None)


def _choose_product(
    num_rows: int,
    dtype: jnp.dtype,
    weight: Weight,
    kernels: Kernels,
    *,
    always_kernel: bool = False,
) -> Choice:
    """Chooses the implementation of x [num_rows, K] times matrices [..., N, K].

    One of `pallas_kernels.dequant_matmul`, `PLAIN`, or `DEQUANTIZED` with the reasons why every
    kernel refuses. `always_kernel`: see `linear`.
    """
    if not isinstance(weight, QTensor | Fp8Tensor):
        return _choose_plain(num_rows, dtype, weight, kernels, always_kernel)
    if reason := kernel_refusal(weight):
        return Choice(DEQUANTIZED, {"every kernel": reason})
    if kernels.implementation:
        return Choice(kernels.implementation, {})
    if kernels.target is None:
        return Choice(DEQUANTIZED, {"every kernel": "no target was named"})
    x = jax.ShapeDtypeStruct((num_rows, weight.shape[-1]), dtype)
    shapes = jax.eval_shape(operands, weight)
    chosen = dequant_matmul.OPERATION.choose(
        x, shapes.weights, shapes.low_rank, target=kernels.target
    )
    return kernel_or_dequantized(chosen)


def _choose_plain(
    num_rows: int, dtype: jnp.dtype, weight: jax.Array, kernels: Kernels, always_kernel: bool
) -> Choice:
    """Chooses the kernel for plain weights: it reads a layer's matrix in the stack.

    XLA copies it first, two more passes over it a step; under look-ahead the copies of all layers
    live at once. Mosaic's take as long as cuBLAS without the copy: 30.8 us at [14336, 4096] and 1
    row (32.4), 179 at 1,024 rows (168; H200, jax 0.11.2, 2026-11-21). Triton's serve where the
    weights are most of the work. Few outputs, a router's, are one launch of Triton's (`RowTiles`)
    where XLA's are a copy, the parts of a sum over K, and their sum.
    """
    target, few = kernels.target, num_rows <= MAX_TRITON_ROWS
    least = MIN_ROW_OUTPUTS if few else 1 if always_kernel else MIN_KERNEL_OUTPUTS
    fits = weight.ndim == 3 and weight.shape[1] >= least
    if target is None or target.platform != "gpu" or kernels.implementation or not fits:
        return Choice(PLAIN, {})
    if reason := kernel_refusal(weight):
        return Choice(PLAIN, {"every kernel": reason})
    x = jax.ShapeDtypeStruct((num_rows, weight.shape[-1]), dtype)
    matrices = jax.eval_shape(operands, weight).weights
    if few and weight.shape[1] < MIN_KERNEL_OUTPUTS:
        reason = dequant_matmul.OPERATION.refusal("triton", x, matrices, (), target=target)
        return Choice(PLAIN, {"triton": reason}) if reason else Choice("triton", {})
    chosen = dequant_matmul.OPERATION.choose(x, matrices, (), target=target)
    by_triton = chosen.implementation == "triton" and (few or always_kernel)
    if by_triton or chosen.implementation == "mosaic":
        return chosen
    return Choice(PLAIN, chosen.refusals if chosen.implementation == REFERENCE else {})


def kernel_or_dequantized(choice: Choice) -> Choice:
    """Replaces the reference in a choice: a dequantized product is faster."""
    if choice.implementation == REFERENCE:
        return Choice(DEQUANTIZED, choice.refusals)
    return choice


@functools.partial(jax.jit, static_argnames=("out_dtype", "implementation"))
def _kernel_product(
    x: jax.Array,
    slot: jax.Array,
    of: Operands,
    *,
    out_dtype: jnp.dtype | None,
    implementation: str,
) -> jax.Array:
    """Computes [M, N], jitted with the slot an operand: all layers share a trace and kernel."""
    return dequant_matmul.dequant_matmul(
        x, of.weights, slot=slot, low_rank=of.low_rank, out_dtype=out_dtype,
        implementation=implementation,
    )  # fmt: skip


def matrix(weight: Weight, index: tuple[Index, ...], dtype: jnp.dtype) -> jax.Array:
    """Returns the matrices at an index of a weight's leading axes, plain.

    Args:
      weight: [..., N, K].
      index: one integer or integer[z] for each of the first axes, such as (layer,) or (layer,
        expert_ids); () for all.
      dtype: of the result where the weight is packed; a plain one keeps its own.
    """
    if index:
        weight = weight[index]
    return weight.dequantize(dtype) if isinstance(weight, QTensor | Fp8Tensor) else weight


def expert_matrix(
    stacked: Weight, layer: Index, expert_id: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Returns [N, K] of [M, E, N, K]; `expert_id`, int32[], is known on the device only."""
    if isinstance(stacked, QTensor | Fp8Tensor):
        return matrix(stacked, (layer, expert_id), dtype)
    zero = jnp.zeros_like(expert_id)
    start = (jnp.full_like(expert_id, layer), expert_id, zero, zero)
    return jax.lax.dynamic_slice(stacked, start, (1, 1, *stacked.shape[2:]))[0, 0]


def linear(
    x: jax.Array,
    weight: Weight | RecordedInput,
    layer: Index,
    out_dtype: jnp.dtype | None = None,
    kernels: Kernels = NO_KERNELS,
    *,
    leaf: str = "",
    always_kernel: bool = False,
) -> jax.Array:
    """Computes x W^T [..., N] of x [..., K] with one layer's matrix of `weight` [L, N, K].

    `leaf` names the weight in the record of choices, if it is recorded. With `always_kernel` many
    rows use a kernel, however small the matrix: XLA's tiles depend on the rest of the program.
    """
    if isinstance(weight, RecordedInput):
        weight.record(x)
        weight = weight.weight
    y = _by_kernel(x, weight, layer, out_dtype, kernels, leaf, always_kernel)
    return _product(x, weight[layer], out_dtype) if y is None else y


def product(
    x: jax.Array,
    weight: Weight,
    out_dtype: jnp.dtype | None = None,
    kernels: Kernels = NO_KERNELS,
    *,
    leaf: str = "",
) -> jax.Array:
    """Computes x W^T [..., N] of x [..., K] with one matrix [N, K]; sums are in `out_dtype`."""
    y = _by_kernel(x, weight, 0, out_dtype, kernels, leaf)
    if y is not None:
        return y
    # On a GPU XLA tries ways to multiply a row by a matrix with copies of it, 1.8 GiB above what is
    # in use for a head of 0.6 GiB. It compiles the sum with 0.6, and runs it in 149 us, not 156
    # (H200, jax 0.11.2, 2026-11-29).
    is_row = math.prod(x.shape[:-1]) == 1 and out_dtype == jnp.float32
    on_gpu = kernels.target is not None and kernels.target.platform == "gpu"
    if is_row and on_gpu and isinstance(weight, jax.Array):
        y = jnp.sum(weight.astype(out_dtype) * x.astype(out_dtype).reshape(1, -1), axis=-1)
        return y.reshape(*x.shape[:-1], -1)
    return _product(x, weight, out_dtype)


def _by_kernel(
    x: jax.Array, weight: Weight, slot: Index, out_dtype: jnp.dtype | None, kernels: Kernels,
    leaf: str, always_kernel: bool = False,
) -> jax.Array | None:  # fmt: skip
    """Computes [..., N] by a kernel, or returns None if every kernel refuses."""
    num_rows = math.prod(x.shape[:-1])
    choice = _choose_product(num_rows, x.dtype, weight, kernels, always_kernel=always_kernel)
    record_product(leaf, choice, weight)
    chosen = choice.implementation
    if chosen in (PLAIN, DEQUANTIZED):
        return None
    y = _kernel_product(
        x.reshape(num_rows, -1), jnp.int32(slot), operands(weight), out_dtype=out_dtype,
        implementation=chosen,
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], -1)


def _product(x: jax.Array, weight: Weight, out_dtype: jnp.dtype | None) -> jax.Array:
    """Computes `product` by XLA; a packed matrix is dequantized."""

    def times(x: jax.Array, plain: jax.Array) -> jax.Array:
        return jnp.einsum("...k,nk->...n", x, plain, preferred_element_type=out_dtype)

    if not isinstance(weight, QTensor | Fp8Tensor):
        return times(x, weight)
    num_rows, num_inputs = weight.shape
    size = max(1, BLOCK_BYTES // (x.dtype.itemsize * num_inputs * FP8_BLOCK)) * FP8_BLOCK
    if size >= num_rows:
        return times(x, weight.dequantize(x.dtype))
    if isinstance(weight, QTensor) and weight.permutation is not None:
        x = jnp.take(x, weight.permutation, axis=-1)  # in place of every block's columns
        weight = dataclasses.replace(weight, permutation=None)
    full = num_rows // size
    _, blocks = jax.lax.scan(
        lambda _, first: (None, times(x, _row_block(weight, first, size, x.dtype))),
        None,
        jnp.arange(full, dtype=jnp.int32) * size,
    )
    y = jnp.moveaxis(blocks, 0, -2).reshape(*x.shape[:-1], full * size)
    if full * size == num_rows:
        return y
    last = _row_block(weight, jnp.int32(full * size), num_rows - full * size, x.dtype)
    return jnp.concatenate([y, times(x, last)], axis=-1)


def _row_block(
    weight: QTensor | Fp8Tensor, first: jax.Array, size: int, dtype: jnp.dtype
) -> jax.Array:
    """Dequantizes [size, K] rows of one matrix from `first` on, a multiple of `FP8_BLOCK`."""

    def rows(array: jax.Array, first: jax.Array = first, size: int = size) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, first, size)

    if isinstance(weight, Fp8Tensor):
        scales = rows(weight.scales, first // FP8_BLOCK, -(-size // FP8_BLOCK))
        return Fp8Tensor(values=rows(weight.values), scales=scales).dequantize(dtype)
    return _rows(weight, rows, first + jnp.arange(size, dtype=jnp.int32)).astype(dtype)


def _rows(weight: QTensor, take: Callable[[jax.Array], jax.Array], ids: jax.Array) -> jax.Array:
    """Dequantizes float32[n, K], rows `ids` of one matrix, which `take` takes of each array."""
    rows = dataclasses.replace(
        weight,
        words=take(weight.words),
        scales=take(weight.scales),
        zeros=None if weight.zeros is None else take(weight.zeros),
        refinements=tuple(take(plane) for plane in weight.refinements),
        compensators=(),
    ).dequantize()
    for compensator in weight.terms:
        rows = rows + _compensated_rows(compensator, ids)
    return rows


def take_rows(weight: Weight, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Takes rows `ids`, int32[...], of one matrix [N, K]; no other row is dequantized.

    A plain matrix may lie in host memory; only those rows cross the link then.
    """
    if isinstance(weight, Fp8Tensor):
        inputs = np.arange(weight.shape[1]) // FP8_BLOCK
        scales = weight.scales[ids // FP8_BLOCK][..., inputs]
        return (weight.values[ids].astype(jnp.float32) * scales).astype(dtype)
    if isinstance(weight, QTensor):
        flat = ids.reshape(-1)
        rows = _rows(weight, lambda array: array[flat], flat)
        return rows.reshape(*ids.shape, -1).astype(dtype)
    if jax.typeof(weight).memory_space == jax.memory.Space.Host:
        choice = row_gather.OPERATION.choose(weight)
        record_choice(EMBEDDINGS, choice, str(weight.dtype))
        found = row_gather.gather_rows(
            weight, ids.reshape(-1), implementation=choice.implementation
        )
        return found.reshape(*ids.shape, -1)
    return weight[ids]


def _compensated_rows(compensator: Compensator, ids: jax.Array) -> jax.Array:
    """Compensator's addition float32[n, K] to rows `ids`, int32[n], of its one matrix."""
    u, v = compensator.factors()
    index = ids - compensator.first_row
    inside = (index >= 0) & (index < compensator.num_rows)
    u = jnp.where(inside[None], u[:, jnp.clip(index, 0, compensator.num_rows - 1)], 0.0)
    return jnp.einsum("rn,rk->nk", u, v, precision="highest")


class KernelChoice(NamedTuple):
    """The implementation chosen for one product."""

    implementation: str  # of `pallas_kernels`, `DEQUANTIZED`, `PLAIN`, a form of experts
    form: str  # of the stored matrices: "int4g64 float", "bfloat16", "FP8 ..."
    packed: bool
    refusals: Mapping[str, str]  # of the implementations that come before it

    def describe(self) -> str:
        """Describes the choice: "mosaic, int4g64 float", "dequantized, ... (mosaic: ...)"."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refusals.items())
        return f"{self.implementation}, {self.form}" + (f" ({reasons})" if reasons else "")


ChoiceRecord = dict[str, KernelChoice]  # by leaf, or by part: "experts", "routing", ...

_record: contextvars.ContextVar[ChoiceRecord | None] = contextvars.ContextVar(
    "record", default=None
)


@contextlib.contextmanager
def recorded_choices() -> Iterator[ChoiceRecord]:
    """Collects the choices of all that this thread traces inside the context.

    A program that is traced already adds nothing, so whoever keeps programs keeps their records.
    """
    found: ChoiceRecord = {}
    token = _record.set(found)
    try:
        yield found
    finally:
        _record.reset(token)


def is_new_choice(name: str, choice: Choice) -> bool:
    """Whether recording would change something: layers of a stack choose alike."""
    if (found := _record.get()) is None:
        return False
    if (known := found.get(name)) is None:
        return True
    return (known.implementation, known.refusals) != (choice.implementation, choice.refusals)


def record_choice(name: str, choice: Choice, form: str, *, packed: bool = False) -> None:
    """Records the choice for a leaf or a part; the last of a name counts."""
    if (found := _record.get()) is not None:
        found[name] = KernelChoice(choice.implementation, form, packed, choice.refusals)
