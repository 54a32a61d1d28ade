"""How a kernel is timed: chains of calls in one program; ceilings.

A figure is microseconds a call of a chain of calls that XLA captures in one CUDA graph a round. The
calls take different slots of a stack of weights, so that none finds its own in the L2. Chains of
different lengths are subtracted, so that dispatch and the wait at the end are in neither. Launching
the graph of a round stays in: `empty_call` measures what a call that does nothing costs like this.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scripts.studies.kernels.data import Sample

# Serial: left alone XLA orders the nodes of a graph by their buffers, and calls that share none may
# overlap, which the products of a decoder cannot. Without Triton: `jnp.dot` is cuBLAS.
Options = dict[str, str | bool]  # of XLA
SERIAL: Options = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
CUBLAS: Options = {**SERIAL, "xla_gpu_enable_triton_gemm": False}
ROTATED_BYTES = 300e6  # of weights before a slot comes again; the L2 of an H200 holds 60 MB
MIN_CALLS, MAX_CALLS = 24, 96
EXEC_SECONDS = 3e-3  # of one timed program; dispatching it takes a tenth
SHORT, LONG = 1, 4  # programs of the two queues that are subtracted

Call = Callable[[jax.Array, Any, int], jax.Array]  # (x, operands, number of the call) -> y


class Timing(NamedTuple):
    """Times of one call in a chain."""

    microseconds: float  # the median
    spread: float  # half the distance of the quartiles, microseconds
    first: Any  # the output of call 0
    last: Any  # the output of the last call

    def errors(self, samples: Sequence[Sample]) -> list[float]:
        """Errors of the outputs of call 0 and of the last call, against a sample of each."""
        outputs = (np.asarray(self.first), np.asarray(self.last))
        return [sample.error(y) for sample, y in zip(samples, outputs, strict=True)]

    def difference(self, other: "Timing") -> float:
        """Difference of the last outputs, as a share of the other's norm."""
        x, y = (np.asarray(of.last).astype(np.float64) for of in (self, other))
        return float(np.linalg.norm(x - y) / np.linalg.norm(y))


class Chain(NamedTuple):
    """Operands and calls of a timed program."""

    num_slots: int  # calls take slot i % num_slots
    num_calls: int  # unrolled, a multiple of num_slots
    num_rounds: int  # of a loop over them


def chain_for(slot_bytes: int, call_seconds: float) -> Chain:
    """A chain that rotates past the L2 and is long enough to be timed.

    Args:
      slot_bytes: of the weights that one call reads.
      call_seconds: a guess at one call's time.
    """
    slots = max(1, min(math.ceil(ROTATED_BYTES / slot_bytes), MAX_CALLS))
    least = MIN_CALLS if call_seconds < 100e-6 else 4  # the longest write gigabytes of outputs
    calls = slots * max(1, math.ceil(least / slots))
    if call_seconds >= 100e-6 and calls > 8:
        slots = calls = 8
    return Chain(slots, calls, max(1, round(EXEC_SECONDS / (calls * call_seconds))))


def chained(call: Call, chain: Chain) -> Callable[[jax.Array, Any], tuple[jax.Array, ...]]:
    """`program(x, operands)` that runs the chain and returns the outputs of its last round.

    A barrier between two calls ties x and all operands to the output before, so that nothing is
    dropped, shared or hoisted out of the loop; it costs no kernel.
    """

    def program(x: jax.Array, operands: Any) -> tuple[jax.Array, ...]:
        def one_round(_: jax.Array, carry: Any) -> Any:
            x, _ = carry
            x, held = lax.optimization_barrier((x, operands))
            outputs = []
            for i in range(chain.num_calls):
                x, y, held = lax.optimization_barrier((x, call(x, held, i), held))
                outputs.append(y)
            return x, tuple(outputs)

        shape = jax.eval_shape(lambda x, held: call(x, held, 0), x, operands)
        empty = tuple(jnp.zeros(shape.shape, shape.dtype) for _ in range(chain.num_calls))
        return lax.fori_loop(0, chain.num_rounds, one_round, (x, empty))[1]

    return program


def differences(
    runs: Sequence[Callable[[int], None]], repetitions: int
) -> list[tuple[float, float]]:
    """Seconds of each program: the median over pairs of queues, and half its quartiles' distance.

    Args:
      runs: each queues so many programs and waits for them; a pair of queues of each in turn.
      repetitions: pairs of queues, at least 2.
    """
    found: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run(SHORT)
    for _ in range(repetitions):
        for run, of_run in zip(runs, found, strict=True):
            times = []
            for count in (SHORT, LONG):
                start = time.perf_counter()
                run(count)
                times.append(time.perf_counter() - start)
            of_run.append((times[1] - times[0]) / (LONG - SHORT))
    quartiles = [statistics.quantiles(of_run, n=4) for of_run in found]
    return [(middle, (high - low) / 2) for low, middle, high in quartiles]


def time_jax(
    call: Call,
    x: jax.Array,
    operands: Any,
    chain: Chain,
    repetitions: int,
    options: Options | None = None,
) -> Timing:
    """Times a call inside one compiled program."""
    return time_together([(call, x, operands, chain)], repetitions, options)[0]


def time_together(
    cases: Sequence[tuple[Call, jax.Array, Any, Chain]],
    repetitions: int,
    options: Options | None = None,
) -> list[Timing]:
    """Times calls, each inside its compiled program, a repetition of each in turn."""
    parts = [_compiled(*case, options) for case in cases]
    found = []
    for case, (_, outputs), (took, spread) in zip(
        cases, parts, differences([run for run, _ in parts], repetitions), strict=True
    ):
        chain = case[-1]
        scale = 1e6 / (chain.num_calls * chain.num_rounds)
        found.append(Timing(took * scale, spread * scale, outputs[0], outputs[-1]))
    return found


def _compiled(
    call: Call, x: jax.Array, operands: Any, chain: Chain, options: Options | None
) -> tuple[Callable[[int], None], tuple[jax.Array, ...]]:
    """Compiles a chain: a function that runs so many of it, and the outputs of one."""
    program = jax.jit(chained(call, chain)).lower(x, operands)
    compiled = program.compile(compiler_options=SERIAL if options is None else options)
    outputs = jax.block_until_ready(compiled(x, operands))

    def run(count: int) -> None:
        jax.block_until_ready([compiled(x, operands) for _ in range(count)])

    return run, outputs


def empty_call(repetitions: int) -> float:
    """Microseconds of a call that adds one to 128 numbers: what a launch costs in a chain."""
    chain = Chain(1, MIN_CALLS, 50)
    x = jnp.ones((1, 128), jnp.bfloat16)
    one = jnp.ones((), jnp.bfloat16)
    return time_jax(lambda x, held, _: x + held, x, one, chain, repetitions).microseconds


def read_bandwidth(num_bytes: int) -> float:
    """Bytes a second of a plain sum, sums queued ten at a time; the most of five."""
    x = jnp.ones((num_bytes // 2048, 1024), jnp.bfloat16)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    total(x).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([total(x) for _ in range(10)])
        times.append((time.perf_counter() - start) / 10)
    return x.nbytes / min(times)


def compute_rate(size: int) -> float:
    """Operations a second of a large bf16 product by cuBLAS, of random values."""
    x, w = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    timing = time_jax(lambda x, w, _: jnp.dot(x, w.T), x, w, Chain(1, 4, 1), 5, CUBLAS)
    return 2 * size**3 / timing.microseconds * 1e6
