"""One packed product, launched a few times, for a profiler to look at.

    ncu --clock-control none --launch-skip 4 --launch-count 1 -k regex:dequant_matmul \
        --section SpeedOfLight --section SchedulerStats --section WarpStateStats \
        --section LaunchStats --section Occupancy \
        python -m scripts.profile_kernel --inputs=4096 --outputs=14336 --bits=3 --rows=64

Weights are random, each launch reads a matrix of its own, and the kernel is the one that the
dispatch chooses, or the one that is named.
"""

import jax
import jax.numpy as jnp
from absl import app, flags

from moejax.devices import choose_device
from pallas_kernels.dequant_matmul import OPERATION, dequant_matmul
from scripts.bench_kernels_data import random_rows, random_stack, random_terms

LAUNCHES = 6

_INPUTS = flags.DEFINE_integer("inputs", 4096, "K")
_OUTPUTS = flags.DEFINE_integer("outputs", 14336, "N")
_BITS = flags.DEFINE_enum("bits", "3", ["2", "3", "4", "8", "16"], "of the weights")
_ROWS = flags.DEFINE_integer("rows", 1, "M, rows of x")
_TERMS = flags.DEFINE_bool("terms", False, "with a compensator of rank 32 in INT3")
_NAME = flags.DEFINE_string("implementation", "", "mosaic, triton; '': the dispatch's")


def main(argv: list[str]) -> None:
    """Launches."""
    del argv
    choose_device("gpu")
    weights = random_stack(
        jnp.uint32(0), slots=LAUNCHES, rows=_OUTPUTS.value, inputs=_INPUTS.value,
        bits=int(_BITS.value),
    )  # fmt: skip
    low_rank = (random_terms(weights),) if _TERMS.value else ()
    x = random_rows(1, (_ROWS.value, _INPUTS.value))
    name = _NAME.value or OPERATION.choose(x, weights, low_rank).implementation
    product = jax.jit(
        lambda x, weights, low_rank, slot: dequant_matmul(
            x, weights, slot=slot, low_rank=low_rank, implementation=name
        )
    )
    for slot in range(LAUNCHES):
        jax.block_until_ready(product(x, weights, low_rank, jnp.int32(slot)))
    print(f"{LAUNCHES} launches of {name}: {weights.describe()}, M {_ROWS.value}")


if __name__ == "__main__":
    app.run(main)
