"""Single products: ours, cuBLAS, unpack-then-cuBLAS; compensators on and off."""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dequant_matmul import OPERATION, dequant_matmul
from pallas_kernels.mosaic_prefill.tiles import WgmmaTiles, fitted_tiles
from pallas_kernels.packed import PLAIN_BITS, LowRank, PackedMatrices, dequantize
from scripts.studies.kernels.data import (
    ERROR_LIMIT,
    PEER_ERROR_LIMIT,
    RANK,
    Dense,
    Sample,
    as_bf16,
    dense_sample,
    random_rows,
    random_stack,
    random_terms,
)
from scripts.studies.kernels.running import OWN, Bench
from scripts.studies.kernels.timing import CUBLAS, Chain, Options, time_jax

KERNELS = (*OWN, "reference")
INT8_ROWS = (1, 16)


class Product:
    """One shape and one form of weights, with what the calls take."""

    def __init__(self, bench: Bench, shape: Dense, bits: int, make: Any = random_stack) -> None:
        self.bench, self.shape, self.bits = bench, shape, bits
        elements = shape.num_inputs * shape.num_outputs
        slots = bench.chain(elements * bits // 8, elements * bits / 8, 0).num_slots
        self.weights = make(
            jnp.uint32(bits), slots=slots, rows=shape.num_outputs, inputs=shape.num_inputs,
            bits=bits,
        )  # fmt: skip

    def label(self, rows: int) -> str:
        """The row's name, without the implementation."""
        return f"dense | {self.shape.name} {self.weights.describe()} | M {rows}"

    def bytes_and_operations(self, rows: int, weights: PackedMatrices) -> tuple[float, float]:
        """Bytes and operations that one call must take: its matrix, x and y."""
        activations = 2 * rows * (self.shape.num_inputs + self.shape.num_outputs)
        operations = 2.0 * rows * self.shape.num_inputs * self.shape.num_outputs
        return weights.slot_nbytes + activations, operations

    def chain(self, rows: int) -> Chain:
        """Chain of calls of any implementation; its slots are at most those of the stack."""
        num_bytes, operations = self.bytes_and_operations(rows, self.weights)
        chain = self.bench.chain(self.weights.slot_nbytes, num_bytes, operations)
        if chain.num_slots <= self.weights.num_slots:
            return chain
        return chain._replace(num_slots=self.weights.num_slots)

    @functools.cached_property
    def matrices(self) -> tuple[jax.Array, ...]:
        """In bf16, an array a slot."""
        return as_bf16(self.weights)


def bench_dense(
    bench: Bench, shapes: Sequence[Dense], widths: Sequence[int], rows: Sequence[int],
    tiles: Sequence[str] = (),
) -> None:  # fmt: skip
    """All implementations at all shapes; bf16 first, which others stand beside.

    Args:
      tiles: tried by Mosaic beside its rule's, of packed weights; see `parsed_tiles`.
    """
    for shape in shapes:
        for bits in sorted(widths, key=lambda bits: (bits != PLAIN_BITS, widths.index(bits))):
            product = Product(bench, shape, bits)
            for m in rows:
                if bits != 8 or m in INT8_ROWS or bench.smoke:
                    _one_case(product, m, () if bits == PLAIN_BITS else tiles)


def _one_case(product: Product, m: int, tiles: Sequence[str]) -> None:
    bench, weights = product.bench, product.weights
    x = random_rows(m, (m, product.shape.num_inputs))
    choice = OPERATION.choose(x, weights, ())
    print(f"{product.label(m)}: {choice.describe()}", flush=True)
    bench.check_choice(product.label(m), choice, product.bits)
    chain = product.chain(m)
    samples = [dense_sample(x, weights, slot) for slot in checked_slots(chain)]
    for name in bench.implementations:
        what = f"{product.label(m)} | {name}"
        if name in KERNELS:
            part = functools.partial(_kernel, product, name, x, chain, samples)
        elif name in ("cublas", "unpack"):
            if (name == "cublas") != (product.bits == PLAIN_BITS):
                continue  # cuBLAS reads bf16, and is measured once a shape
            part = functools.partial(_through_xla, product, name, x, chain, samples)
        else:
            continue
        bench.attempt(what, part, ours=name in KERNELS)
    for text in tiles:
        found = parsed_tiles(text, product.bits)
        part = functools.partial(_kernel, product, "mosaic", x, chain, samples, found)
        bench.attempt(f"{product.label(m)} | mosaic {text}", part, ours=True)


def parsed_tiles(text: str, bits: int) -> WgmmaTiles:
    """Tiles such as 128 or 256k: their tokens, and k where they share K.

    Raises:
      ValueError: another text.
    """
    found = re.fullmatch(r"(\d+)(k?)", text)
    if not found:
        raise ValueError(f"tiles {text!r}: not such as 128 or 256k")
    return fitted_tiles(int(found[1]), bits, shares_k=bool(found[2]))


def checked_slots(chain: Chain) -> tuple[int, int]:
    """Slots of the first and of the last call."""
    return 0, (chain.num_calls - 1) % chain.num_slots


def _kernel(
    product: Product, name: str, x: jax.Array, chain: Chain, samples: Sequence[Sample],
    tiles: WgmmaTiles | None = None,
) -> None:  # fmt: skip
    reason = OPERATION.refusal(name, x, product.weights, ())
    if reason:
        print(f"  {product.label(x.shape[0])} | {name}: refuses: {reason}", flush=True)
        return

    call = kernel_call(name, chain, tiles)
    name = f"{name} {tiles.describe()}" if tiles else name
    _record(product, name, x, chain, samples, call, product.weights, ERROR_LIMIT)


def kernel_call(name: str, chain: Chain, tiles: WgmmaTiles | None = None) -> Any:
    """Product of a chain by one of our kernels, for `time_jax`."""

    @jax.jit  # lowered once for all calls of a chain
    def product(x: jax.Array, weights: Any, slot: jax.Array) -> jax.Array:
        return dequant_matmul(x, weights, slot=slot, implementation=name, tiles=tiles)

    return lambda x, weights, i: product(x, weights, jnp.int32(i % chain.num_slots))


def _through_xla(
    product: Product, name: str, x: jax.Array, chain: Chain, samples: Sequence[Sample]
) -> None:
    """cuBLAS on bf16 weights; or weights unpacked to bf16 by XLA's own kernels, then cuBLAS."""

    def dot(x: jax.Array, matrices: Any, i: int) -> jax.Array:
        return jnp.dot(x, matrices[i % chain.num_slots].T)

    def unpack(x: jax.Array, weights: Any, i: int) -> jax.Array:
        matrix = dequantize(weights, jnp.int32(i % chain.num_slots))
        return jnp.dot(x, matrix.astype(jnp.bfloat16).T)

    if name == "cublas":
        _record(product, name, x, chain, samples, dot, product.matrices, PEER_ERROR_LIMIT, CUBLAS)
    else:
        _record(product, name, x, chain, samples, unpack, product.weights, PEER_ERROR_LIMIT, CUBLAS)


def _record(
    product: Product,
    name: str,
    x: jax.Array,
    chain: Chain,
    samples: Sequence[Sample],
    call: Any,
    operands: Any,
    limit: float,
    options: Options | None = None,
) -> None:
    m, bench = x.shape[0], product.bench
    timing = time_jax(call, x, operands, chain, bench.repetitions, options)
    need = product.bytes_and_operations(m, product.weights)
    bench.record(f"{product.label(m)} | {name}", timing, timing.errors(samples), limit, *need)


def bench_compensator(
    bench: Bench, shape: Dense, rows: Sequence[int], ranks: Sequence[int]
) -> None:
    """INT3 without compensators, with INT3 ones of each rank, and the percentages between them."""
    product = Product(bench, shape, 3)
    terms = {rank: random_terms(product.weights, rank) for rank in ranks}
    for m in rows:
        x = random_rows(m, (m, shape.num_inputs))
        chain = product.chain(m)
        for name in bench.implementations:
            if name in KERNELS:
                what = f"compensator | {shape.name} | M {m} | {name}"
                part = functools.partial(_with_and_without, product, name, x, chain, terms)
                bench.attempt(what, part, ours=True)


def _with_and_without(
    product: Product, name: str, x: jax.Array, chain: Chain, terms: Mapping[int, LowRank]
) -> None:
    bench, m, weights = product.bench, x.shape[0], product.weights
    what = f"compensator | {product.shape.name} {weights.describe()} | M {m}"
    for rank, low_rank in {0: None, **terms}.items():
        own = () if low_rank is None else (low_rank,)
        label = f"rank {rank}" if rank else "without"
        if reason := OPERATION.refusal(name, x, weights, own):
            print(f"  {what}, {label} | {name}: refuses: {reason}", flush=True)
            continue
        num_bytes, operations = product.bytes_and_operations(m, weights)

        def call(x: jax.Array, held: Any, i: int) -> jax.Array:
            weights, low_rank = held
            slot, own = jnp.int32(i % chain.num_slots), () if low_rank is None else (low_rank,)
            return dequant_matmul(x, weights, slot=slot, low_rank=own, implementation=name)

        timing = time_jax(call, x, (weights, low_rank), chain, bench.repetitions)
        samples = [dense_sample(x, weights, slot, low_rank) for slot in checked_slots(chain)]
        if low_rank is not None:
            num_bytes += (low_rank.u.slot_nbytes + low_rank.v.slot_nbytes) / weights.num_slots
            operations += 2.0 * m * rank * (product.shape.num_inputs + product.shape.num_outputs)
        row, errors = f"{what}, {label} | {name}", timing.errors(samples)
        bench.record(row, timing, errors, ERROR_LIMIT, num_bytes, operations)
        if rank:
            more = "more" if rank == RANK else f"more by {label}"
            bench.compare(f"{what}, {more} | {name}", row, f"{what}, without | {name}")
