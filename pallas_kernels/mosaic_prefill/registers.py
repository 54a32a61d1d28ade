"""Reads, unpacking and writes of lanes, as functions for the body of a Pallas kernel.

Words and constants travel through a kernel's loops as arrays of which every lane holds its own
registers and no lane ever sees another's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.mosaic_decode.emit import Value, f32, i32
from pallas_kernels.mosaic_prefill import fragments, lanes
from pallas_kernels.mosaic_prefill.emit import Emitter
from pallas_kernels.mosaic_prefill.fragments import ROWS, STAGE, MatrixFormat

WARPGROUP = 128  # threads
_SCALAR = plgpu.Layout.WG_SPLAT(())
ROW_OF_128 = plgpu.SwizzleTransform(128)


def load_words(form: MatrixFormat, block: jax.Array, tiles: Sequence[Any]) -> jax.Array:
    """Loads the lane's words of a block for `unpack`.

    Args:
      block: int32[], of K.
      tiles: references to shared memory, uint32[rows, num_words], one per tile of `form.tiles`.
    """
    count = _num_words(form)

    def load(_: Any, block: Any, *refs: Value) -> mgpu.FragmentedArray:
        return _joined(lanes.read_words(Emitter(), form, _scalar(block), refs, tiles[0].shape[0]))

    types = tuple(
        plgpu.RefType((plgpu.SwizzleTransform(4 * tile.num_words),)) for tile in form.tiles
    )
    return _inline(load, (_SCALAR, *types), _type(count))(block, *tiles)


def load_constants(
    form: MatrixFormat,
    slot: jax.Array,  # int32[], index in the stack
    first_row: jax.Array,  # int32[], of the thread block
    block: jax.Array,  # int32[], of K
    operands: Sequence[Any],  # whole scales and, where there are any, zeros, in device memory
) -> jax.Array:
    """Loads the lane's scales and zeros of a block for `unpack`."""

    def load(_: Any, *given: Any) -> mgpu.FragmentedArray:
        slot, first_row, block = (_scalar(value) for value in given[:3])
        e = Emitter()
        return _joined(lanes.read_constants(e, form, slot, first_row, block, given[3:]))

    return _inline(
        load, (_SCALAR,) * 3 + (plgpu.RefType(),) * len(operands), _type(form.num_constants)
    )(slot, first_row, block, *operands)


def unpack(form: MatrixFormat, words: jax.Array, constants: jax.Array, stage: int) -> jax.Array:
    """Unpacks wgmma's register operand [64, 64] of one stage of a block."""

    def make(_: Any, words: Any, constants: Any) -> mgpu.FragmentedArray:
        e = Emitter()
        pairs = fragments.operand(e, form, _parts(e, words), _parts(e, constants), stage)
        return _operand(pairs, form.kind)

    layouts = (_layout(_num_words(form)), _layout(form.num_constants))
    return _inline(make, layouts, _operand_type(form.kind))(words, constants)


def load_plain(kind: str, tile: Any) -> jax.Array:
    """Loads the operand of paired plain weights; `tile` is shared memory [rows, 64]."""

    def load(_: Any, ref: Value) -> mgpu.FragmentedArray:
        return _operand(lanes.read_plain(Emitter(), ref, tile.shape[0]), kind)

    return _inline(load, (plgpu.RefType((ROW_OF_128,)),), _operand_type(kind))(tile)


def store_rounded(kind: str, sums: jax.Array, out: Any, first: int) -> None:
    """Stores columns of sums, transposed and rounded, in shared memory.

    Args:
      kind: the result's: "bf16" or "f16".
      sums: float32[64, N] in wgmma's layout.
      out: reference to shared memory [n, 64] of 16 bits, swizzled over 128 bytes.
      first: first of the n columns; a multiple of 16.
    """
    span = slice(first // 8, (first + out.shape[0]) // 8)

    def store(_: Any, sums: Any, ref: Value) -> None:
        e = Emitter()
        lanes.write_rounded(e, kind, _columns(e, sums)[span], ref)

    _inline(store, (plgpu.Layout.WGMMA, plgpu.RefType((ROW_OF_128,))), None)(sums, out)


def add_part(sums: jax.Array, part: jax.Array, stored: Any) -> jax.Array:
    """Adds a part that `lanes.write_part` left to sums [64, n]."""

    def add(_: Any, sums: Any, part: Any, ref: Value) -> mgpu.FragmentedArray:
        e = Emitter()
        found = lanes.add_part(e, _columns(e, sums), _scalar(part), ref)
        return _sums_of(e, found, sums)

    of = plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=plgpu.Layout.WGMMA)
    return _inline(add, (plgpu.Layout.WGMMA, _SCALAR, plgpu.RefType()), of)(sums, part, stored)


def store(
    make: Callable[..., None], sums: jax.Array, scalars: Sequence[jax.Array], refs: Sequence[Any]
) -> None:
    """Emits a function such as `lanes.write_part` for the sums of a warpgroup.

    Args:
      make: takes the instructions, the sums as in `lanes.write_rounded`, scalars and references.
      sums: float32[64, n] in wgmma's layout.
      scalars: int32[] each.
      refs: arrays in device memory, or rooms in shared memory without transforms.
    """

    def stored(_: Any, sums: Any, *rest: Any) -> None:
        e = Emitter()
        places = [_scalar(value) for value in rest[: len(scalars)]]
        make(e, _columns(e, sums), *places, *rest[len(scalars) :])

    types = (plgpu.Layout.WGMMA,) + (_SCALAR,) * len(scalars) + (plgpu.RefType(),) * len(refs)
    _inline(stored, types, None)(sums, *scalars, *refs)


def _inline(
    function: Callable[..., Any], arg_types: tuple[Any, ...], return_type: Any
) -> Callable[..., Any]:
    inlined: Callable[..., Any] = plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)(
        function
    )
    return inlined


def _dtype(kind: str) -> Any:
    return {"bf16": jnp.bfloat16, "f16": jnp.float16}[kind]


def _operand_type(kind: str) -> Any:
    return plgpu.ShapeDtypeStruct((ROWS, STAGE), _dtype(kind), layout=plgpu.Layout.WGMMA)


def _operand(pairs: Sequence[Value], kind: str) -> mgpu.FragmentedArray:
    of = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(jnp.dtype(_dtype(kind))))
    shape = mgpu.WGMMA_LAYOUT.registers_shape((ROWS, STAGE))
    return mgpu.FragmentedArray(
        _registers=_objects([llvm.bitcast(of, pair) for pair in pairs]).reshape(shape),
        _layout=mgpu.WGMMA_LAYOUT,
        _is_signed=None,
    )


def _num_words(form: MatrixFormat) -> int:
    return 16 if len(form.widths) == 2 else form.num_raw


def _layout(count: int) -> Any:
    return plgpu.Layout.WG_STRIDED((count * WARPGROUP,), vec_size=1)


def _type(count: int) -> Any:
    return plgpu.ShapeDtypeStruct((count * WARPGROUP,), jnp.int32, layout=_layout(count))


def _objects(values: Sequence[Value]) -> np.ndarray:
    found = np.empty(len(values), object)
    found[:] = values
    return found


def _joined(values: Sequence[Value]) -> mgpu.FragmentedArray:
    of = ir.VectorType.get((1,), i32())
    layout = mgpu.WGStridedFragLayout(shape=(len(values) * WARPGROUP,), vec_size=1)
    registers = _objects([vector.broadcast(of, value) for value in values])
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def _parts(e: Emitter, words: mgpu.FragmentedArray) -> list[Value]:
    return [llvm.extractelement(register, e.const(0)) for register in words.registers.flat]


def _columns(e: Emitter, sums: mgpu.FragmentedArray) -> list[list[Value]]:
    """Values per 8 columns: row g at columns 2t, 2t + 1, then row g + 8."""
    return [
        [llvm.extractelement(register, e.const(i)) for register in rows for i in range(2)]
        for rows in sums.registers.reshape(-1, 2)
    ]


def _sums_of(
    e: Emitter, columns: Sequence[Sequence[Value]], like: mgpu.FragmentedArray
) -> mgpu.FragmentedArray:
    """Inverts `_columns`."""
    registers = []
    for a, b, c, d in columns:
        for low, high in ((a, b), (c, d)):
            pair = llvm.mlir_undef(ir.VectorType.get((2,), f32()))
            for i, value in enumerate((low, high)):
                pair = llvm.insertelement(pair, value, e.const(i))
            registers.append(pair)
    return mgpu.FragmentedArray(
        _registers=_objects(registers).reshape(like.registers.shape),
        _layout=mgpu.WGMMA_LAYOUT, _is_signed=None,
    )  # fmt: skip


def _scalar(value: mgpu.FragmentedArray) -> Value:
    (register,) = value.registers.flat
    return register
