"""Converts codes in other libraries' 32-bit words to our layout and back.

A bit stream is dense, low bits first: code i of a row is at bits i b .. (i + 1) b, across words
where it comes so. GPTQ (along K of the weights, along N of the zeros) and compressed-tensors pack
like this; for 2, 4 and 8 bits it is the same as words of whole codes.

Compiled for the CPU: 14336 x 4096 codes take numpy 2.4 s to pack, XLA 0.03 s (two cores,
2026-11-21). It does so only where nothing straddles: 3-bit codes are taken in eights from 3 bytes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout

_P = ParamSpec("_P")
WORD_BITS = 32
# Code i of a word of AWQ belongs to column _AWQ_ORDER[i] of its eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def stream_words(num_codes: int, bits: int) -> int:
    """Words of a row of a bit stream."""
    return math.ceil(num_codes * bits / WORD_BITS)


def on_host(function: Callable[_P, Any]) -> Callable[_P, np.ndarray]:
    """Runs a function on the CPU, whatever JAX's default; numpy in, numpy out."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> np.ndarray:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return np.asarray(function(*args, **kwargs))

    return run


@on_host
@functools.partial(jax.jit, static_argnames=("bits", "num_codes"))
def from_stream(words: Any, *, bits: int, num_codes: int) -> jax.Array:
    """Codes uint8[..., num_codes] of rows of a bit stream, int32 or uint32[..., W]."""
    return _from_stream(_unsigned(words), bits, num_codes)


@on_host
@functools.partial(jax.jit, static_argnames="bits")
def to_stream(codes: Any, *, bits: int) -> jax.Array:
    """Bit stream of rows of codes uint8[..., K]; int32, the type in which others store words."""
    lead, num_codes = codes.shape[:-1], codes.shape[-1]
    padding = [(0, 0)] * len(lead) + [(0, -num_codes % WORD_BITS)]
    span_bits, shifts = _spans(bits)
    spans = jnp.pad(codes, padding).reshape(*lead, -1, span_bits // bits).astype(jnp.uint32)
    whole = (spans << _last_axis(shifts, spans.ndim)).sum(axis=-1, dtype=jnp.uint32)
    if span_bits < WORD_BITS:
        first_bits = _last_axis(np.arange(0, span_bits, 8), spans.ndim)
        span_bytes = (whole[..., None] >> first_bits).astype(jnp.uint8)
        words = jax.lax.bitcast_convert_type(span_bytes.reshape(*lead, -1, 4), jnp.int32)
    else:
        words = jax.lax.bitcast_convert_type(whole, jnp.int32)
    return words[..., : stream_words(num_codes, bits)]


@on_host
@functools.partial(jax.jit, static_argnames=("bits", "num_codes", "is_transposed"))
def repacked_stream(
    # int32[..., N, W]; [..., W, N] if `is_transposed`, the stream running down the columns
    words: Any,
    # int32[K], the inputs in the order in which they are stored; None: as they are
    permutation: Any | None,
    *,
    bits: int,
    num_codes: int,
    is_transposed: bool = False,
) -> jax.Array:
    """Packs rows of a bit stream in the package's layout, uint32[..., N, num_words(K, bits)]."""
    rows = _unsigned(words)
    if is_transposed:
        rows = jnp.swapaxes(rows, -1, -2)
    codes = _from_stream(rows, bits, num_codes)
    if permutation is not None:
        codes = codes[..., permutation]
    return layout.pack(codes, bits)


packed = on_host(jax.jit(layout.pack, static_argnames="bits"))
unpacked = on_host(jax.jit(layout.unpack, static_argnames=("bits", "num_codes")))


@on_host
@jax.jit
def awq_codes(words: Any) -> jax.Array:
    """Columns uint8[R, N] of AWQ words int32[R, N / 8]."""
    shifts = np.argsort(_AWQ_ORDER) * 4
    codes = (_unsigned(words)[..., None] >> _last_axis(shifts, 3)) & np.uint32(15)
    return codes.astype(jnp.uint8).reshape(words.shape[0], -1)


def _unsigned(words: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.asarray(words), jnp.uint32)


def _from_stream(words: jax.Array, bits: int, num_codes: int) -> jax.Array:
    """uint8[..., num_codes] of uint32[..., W]."""
    lead = words.shape[:-1]
    span_bits, shifts = _spans(bits)
    spans = words
    if span_bits < WORD_BITS:
        padding = [(0, 0)] * len(lead) + [(0, -words.shape[-1] % (span_bits // 8))]
        all_bytes = jax.lax.bitcast_convert_type(jnp.pad(words, padding), jnp.uint8)
        span_bytes = all_bytes.reshape(*lead, -1, span_bits // 8).astype(jnp.uint32)
        first_bits = _last_axis(np.arange(0, span_bits, 8), span_bytes.ndim)
        spans = (span_bytes << first_bits).sum(axis=-1, dtype=jnp.uint32)
    codes = (spans[..., None] >> _last_axis(shifts, len(lead) + 2)) & np.uint32((1 << bits) - 1)
    return codes.astype(jnp.uint8).reshape(*lead, -1)[..., :num_codes]


def _spans(bits: int) -> tuple[int, np.ndarray]:
    """Bits of a run of codes that ends on a byte, and the offsets of its codes."""
    span_bits = 24 if bits == 3 else WORD_BITS
    return span_bits, np.arange(0, span_bits, bits)


def _last_axis(values: np.ndarray, ndim: int) -> np.ndarray:
    """uint32[1, ..., 1, n], against implicit broadcasting of ranks."""
    return values.astype(np.uint32).reshape((1,) * (ndim - 1) + (-1,))
