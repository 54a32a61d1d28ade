"""Prefixes of bit planes beside matrices of one array: the same shapes, a repetition in turn.

Four bits in two planes, each in an array of its own and in another order, stand beside INT4; two
bits of a pool that also holds refinements beside INT2. Rows end with the percentage of time more.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dequant_matmul import OPERATION
from pallas_kernels.packed import PackedMatrices
from scripts.studies.kernels.data import (
    ERROR_LIMIT,
    LAYER_ERROR_LIMIT,
    Dense,
    Moe,
    Sample,
    dense_sample,
    random_planes,
    random_rows,
    random_stack,
)
from scripts.studies.kernels.dense import KERNELS, Product, checked_slots, kernel_call
from scripts.studies.kernels.grouped import Layer, layer_call, make_case, packed_bytes
from scripts.studies.kernels.running import Bench
from scripts.studies.kernels.timing import SERIAL, Chain, time_together


class Form(NamedTuple):
    """Stored form of weights, by name, and what makes a stack of it."""

    name: str
    bits: int
    make: Callable[..., PackedMatrices]
    beside: str  # form of one array that its time is compared with; "" for such a form


def first_plane(seed: jax.Array, *, bits: int, **shape: int) -> PackedMatrices:
    """Makes two-bit matrices whose pool holds refinements as well."""
    whole = random_planes(seed, bits=4, **shape)
    pool = jnp.concatenate([whole.words, whole.refinements[0].words])
    return dataclasses.replace(whole, words=pool, bits=bits, refinements=())


FORMS = (
    Form("one array 4", 4, random_stack, ""),
    Form("planes 2,2", 4, random_planes, "one array 4"),
    Form("one array 2", 2, random_stack, ""),
    Form("planes 2", 2, first_plane, "one array 2"),
)


class Timed(NamedTuple):
    """One form's call, its values and what it must read."""

    form: Form
    case: tuple[Any, jax.Array, Any, Chain]  # of `time_together`
    samples: Sequence[Sample]
    num_bytes: float
    operations: float


def bench_planes(
    bench: Bench, shapes: Sequence[Dense], models: Sequence[Moe], rows: Sequence[int]
) -> None:
    """All forms at all shapes and layers, for each number of rows or tokens."""
    names = [name for name in bench.implementations if name in KERNELS]
    for shape in shapes:
        products = [(form, Product(bench, shape, form.bits, form.make)) for form in FORMS]
        for m in rows:
            for name in names:
                what = f"planes | {shape.name} | M {m} | {name}"
                make = functools.partial(_products, products, m, name)
                bench.attempt(what, functools.partial(_one, bench, what, make, False), ours=True)
    for moe in models:
        layers = [(form, _layer(bench, moe, form)) for form in FORMS if form.bits == 4]
        for m in rows:
            for name in names:
                what = f"planes | {moe.name} | T {m} | {name}"
                make = functools.partial(_layers, layers, m, name)
                bench.attempt(what, functools.partial(_one, bench, what, make, True), ours=True)


def _layer(bench: Bench, moe: Moe, form: Form) -> Layer:
    return Layer(bench, moe._replace(bits=form.bits), form.make)


def _products(products: Sequence[tuple[Form, Product]], m: int, name: str) -> list[Timed] | str:
    """Products of every form, or why the kernel refuses one."""
    found = []
    for form, product in products:
        x, chain = random_rows(m, (m, product.shape.num_inputs)), product.chain(m)
        if reason := OPERATION.refusal(name, x, product.weights, ()):
            return reason
        samples = [dense_sample(x, product.weights, slot) for slot in checked_slots(chain)]
        case = (kernel_call(name, chain), x, product.weights, chain)
        need = product.bytes_and_operations(m, product.weights)
        found.append(Timed(form, case, samples, *need))
    return found


def _layers(layers: Sequence[tuple[Form, Layer]], m: int, name: str) -> list[Timed] | str:
    """Layers of every form, or why the kernel refuses one."""
    found = []
    for form, layer in layers:
        case = make_case(layer, m, checked=1)
        run = layer_call(case, name)
        if isinstance(run, str):
            return run
        num_bytes = case.num_bytes(packed_bytes(layer))
        timed = Timed(form, (*run, case.chain), case.samples, num_bytes, case.operations)
        found.append(timed)
    return found


def _one(bench: Bench, what: str, make: Callable[[], list[Timed] | str], is_layer: bool) -> None:
    """Measures all forms of one case together, and compares."""
    timed = make()
    if isinstance(timed, str):
        print(f"  {what}: refuses: {timed}", flush=True)
        return
    cases = [of.case for of in timed]
    limit = LAYER_ERROR_LIMIT if is_layer else ERROR_LIMIT
    timings = time_together(cases, bench.repetitions, SERIAL)
    for of, timing in zip(timed, timings, strict=True):
        need = (of.num_bytes, of.operations)
        row = f"{what} | {of.form.name}"
        bench.record(row, timing, timing.errors(of.samples), limit, *need)
    for of in timed:
        row = f"{what} | {of.form.name}"
        bench.compare(f"{row}, more", row, f"{what} | {of.form.beside}")
