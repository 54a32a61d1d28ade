"""Launches and temporary memory of a decode step of a resident model, compiled for an H100.

    python -m tests.decode_programs Qwen3-Next-80B-A3B --layers=4 --batch=8

Attention and experts in INT4, all else as the shape has it. Needs JAX's CUDA plugin and no GPU.
"""

import argparse
import functools
import os
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from moejax.inference import steps
from moejax.inference.sampling import Sampling
from moejax.models.config import ModelConfig, leaf_dtype, weight_shapes
from moejax.models.kv_cache import empty_cache
from moejax.models.leaf_kinds import leaves_of
from moejax.models.shapes import CONFIGS, with_layers
from moejax.models.transformer import ChunkSpec, model_definition
from moejax.weights import linear as ops
from pallas_kernels import op
from tests.gpu_targets import GPUS, SKIP_CHECKS, described
from tests.pooled_programs import leaf_of, packed

GPU, CONTEXT, STEPS = "H100", 1024, 8
PACKED = leaves_of("attention", "experts")
LAUNCH = re.compile(
    r" (fusion|custom-call|copy|dot|reduce|sort|scatter|dynamic-slice|dynamic-update-slice)\("
)


def operands(config: ModelConfig, batch: int) -> tuple[Any, ...]:
    """Shapes of what `moejax.inference.steps.decode` takes."""
    half = jnp.dtype("bfloat16")
    weights = {
        leaf: packed(shape) if leaf in PACKED else leaf_of(shape, leaf_dtype(leaf, half))
        for leaf, shape in weight_shapes(config).items()
    }
    each = functools.partial(leaf_of, (batch,))
    cache = jax.eval_shape(lambda: empty_cache(config, batch, CONTEXT, half))
    keys = jax.eval_shape(lambda: jax.vmap(jax.random.key)(jnp.zeros(batch, jnp.uint32)))
    state = steps.DecodeState(cache, each("int32"), each("int32"), each("bool"), keys, None)
    real = each("float32")
    sampling = Sampling(real, each("int32"), real, real, real)
    inputs = steps.StepInputs(weights, None)
    return state, None, inputs, sampling, leaf_of((batch, 1), "int32"), leaf_of((), "int32")


def compiled(config: ModelConfig, batch: int) -> jax.stages.Compiled:
    """A call of eight steps."""
    from jax.experimental import topologies

    gpu = GPUS[GPU]
    program = steps.Program(model_definition(config, ops.Kernels(gpu.target)), None)
    chunk = ChunkSpec(CONTEXT, False, "grouped_kernel", "xla", "kernel")
    step = functools.partial(steps.decode, program, chunk, True, STEPS, True)
    devices = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=gpu.description
    ).devices
    mesh = jax.sharding.Mesh(devices, ("gpu",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        operands(config, batch),
    )
    with described(gpu):
        traced = jax.jit(step, donate_argnums=(0,)).trace(*shapes)
        return traced.lower(lowering_platforms=("cuda",)).compile()


def num_launches(text: str) -> int:
    """Launches of the largest computation: the step, which a loop runs."""
    computations = re.split(r"\n(?=\S[^\n]*\{\n)", text)
    return max(sum(bool(LAUNCH.search(line)) for line in of.split("\n")) for of in computations)


def main() -> None:
    """Prints both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(CONFIGS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    given = parser.parse_args()
    os.environ[SKIP_CHECKS] = "1"
    mock.patch.object(op, "current_target", lambda: GPUS[GPU].target).start()
    program = compiled(with_layers(CONFIGS[given.shape], given.layers), given.batch)
    memory = program.memory_analysis()
    assert memory is not None
    print(
        f"{given.shape}, {given.layers} layers, batch {given.batch}: "
        f"{num_launches(program.as_text())} launches a step, "
        f"{memory.temp_size_in_bytes / 1e6:.1f} MB of temporary memory"
    )


if __name__ == "__main__":
    main()
