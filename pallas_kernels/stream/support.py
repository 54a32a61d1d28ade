"""What the streaming kernels serve."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.packed import PLAIN_BITS, PackedMatrices
from pallas_kernels.stream.fragments import STEP, Form
from pallas_kernels.stream.matrix import ROWS
from pallas_kernels.target import Target

Operand = jax.Array | jax.ShapeDtypeStruct
OLDEST_JAX = (0, 11, 1)
KINDS = {"bfloat16": "bf16", "float16": "f16"}


def refusals(x: Operand, tiers: Sequence[PackedMatrices], target: Target) -> list[str]:
    """Every reason why the kernels cannot multiply rows like x [..., K] by the tiers' matrices."""
    found = []
    if target.platform != "gpu" or (target.capability or (0, 0)) != (9, 0):
        found.append(f"it runs on a gpu sm_90, this is {target.describe()}")
    if jax.__version_info__ < OLDEST_JAX and not target.simulated:
        found.append(f"jax {jax.__version__} is older than {'.'.join(map(str, OLDEST_JAX))}")
    if x.dtype.name not in KINDS:
        return [*found, f"x is {x.dtype}, not bfloat16 or float16"]
    for weights in tiers:
        found += [reason for reason in _of_matrices(x, weights) if reason not in found]
    return found


def _of_matrices(x: Operand, weights: PackedMatrices) -> list[str]:
    found, form = [], Form(weights.bits, KINDS[x.dtype.name])
    if weights.num_inputs % form.block:
        found.append(f"K {weights.num_inputs} is no multiple of {form.block}")
    if weights.num_outputs % ROWS:
        found.append(f"N {weights.num_outputs} is no multiple of {ROWS}")
    if weights.bits == PLAIN_BITS:
        if weights.words.dtype != x.dtype:
            found.append(f"plain weights are {weights.words.dtype} and x {x.dtype}")
        return found
    group = weights.group_size
    if group % STEP or (form.block % group and group % form.block):
        found.append(f"groups of {group} are not 32, 64, 128 or a multiple of {form.block}")
    if weights.scales is not None and weights.scales.dtype not in (jnp.float16, jnp.float32):
        found.append(f"scales are {weights.scales.dtype}")
    return found
