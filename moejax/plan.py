"""Where every byte of a configuration goes, before anything is loaded.

    python -m moejax.plan --config=configs/qwen3_30b_a3b.py --config.memory.device_gib=24
    python -m moejax.plan --config.shape=Mixtral-8x7B --config.bits=4 --config.memory.device_gib=16

Reads config.json and the headers of the weights, or takes a named shape; needs no accelerator. The
table goes to stdout. What cannot run is refused, with the smallest budget that would do.
"""

import types
from typing import TYPE_CHECKING, cast

from absl import flags

from moejax import cli
from moejax.config import PlanConfig
from moejax.errors import MoejaxError
from moejax.memory.budget import Budget, describe, make_budget, warnings
from moejax.memory.machine import this_machine

if TYPE_CHECKING:  # they import JAX, which --help and mistakes need not wait for
    import jax

    from moejax.checkpoints.sizes import Sizes
    from moejax.models.config import ModelConfig


def define_flags(values: flags.FlagValues) -> None:
    """There are none beside `--config`."""


def plan(config: PlanConfig, values: flags.FlagValues) -> None:
    """Prints the table, what it means for speed, and the warnings."""
    del values
    from moejax.devices import PLATFORMS

    if config.platform not in PLATFORMS:
        raise MoejaxError(f"platform {config.platform!r} is none of {', '.join(PLATFORMS)}")
    name, model, sizes, itemsize = _model(config)
    budget = budget_of(config, model, sizes, itemsize)
    if budget.pooled and sizes.refusal:
        raise MoejaxError(f"the experts do not fit and cannot move: {sizes.refusal}")
    print(f"{name}, experts of {sizes.tier.name}, on a {_platform(config)}")
    for line in [*describe(budget), *_warned(budget, config)]:
        print(line)


def _warned(budget: Budget, config: PlanConfig) -> list[str]:
    found = warnings(budget, this_machine(_platform(config)))
    if not config.context:
        found.append(f"context=0 takes what the prompts need; here it is {budget.context}")
    return [f"warning: {line}" for line in found]


def budget_of(config: PlanConfig, model: "ModelConfig", sizes: "Sizes", itemsize: int) -> Budget:
    """The budget of a configuration.

    Args:
      config: of the plan.
      model: its shape.
      sizes: of its weights.
      itemsize: bytes of a number of the activations.

    Raises:
      MoejaxError: it cannot run.
    """
    from moejax.chunks import longest_chunk
    from moejax.engine import PLANNED_CONTEXT

    context = config.context or min(PLANNED_CONTEXT, model.max_positions)
    if context > model.max_positions:
        raise MoejaxError(f"context={context} is beyond the model's own {model.max_positions}")
    longest = min(context, longest_chunk(model, config.batch, context))
    return make_budget(
        model,
        sizes.weights_nbytes,
        sizes.tier,
        batch=config.batch,
        context=context,
        chunk=min(context, config.chunk or longest),
        limits=config.memory.limits(),
        platform=_platform(config),
        itemsize=itemsize,
    )


def _platform(config: PlanConfig) -> str:
    """A plan is of an accelerator unless it says otherwise, whatever this machine has."""
    return "gpu" if config.platform == "auto" else config.platform


def _model(config: PlanConfig) -> tuple[str, "ModelConfig", "Sizes", int]:
    """Name, shape, sizes of the weights, and bytes of a number of the activations."""
    import numpy as np

    from moejax.checkpoints.open import open_checkpoint
    from moejax.checkpoints.quantized.stored import CodesKind
    from moejax.checkpoints.sizes import checkpoint_sizes, shape_sizes
    from moejax.models.shapes import SHAPES

    platform = _platform(config)
    if not config.shape:
        checkpoint = open_checkpoint(config.checkpoint)
        # Of a device no more is asked than its platform, which may be one that is not here.
        device = cast("jax.Device", types.SimpleNamespace(platform=platform))
        dtype = np.dtype(checkpoint.choose_dtype(config.dtype, device))
        sizes = checkpoint_sizes(checkpoint, dtype)
        return config.checkpoint, checkpoint.config, sizes, dtype.itemsize
    model = SHAPES[config.shape]
    wide = config.dtype == "float32" or (config.dtype == "auto" and platform == "cpu")
    dtype = np.dtype(np.float32 if wide else np.float16)  # bfloat16 is of this size too

    def kind(bits: int) -> CodesKind | None:
        if bits == 16:
            return None
        return CodesKind(
            bits=bits, group_size=config.group_size, zero_kind="float", scale_dtype="float16"
        )

    try:
        sizes = shape_sizes(
            model, dtype, expert_kind=kind(config.bits), attention_kind=kind(config.attention_bits)
        )
    except ValueError as error:  # groups that are longer than a row
        raise MoejaxError(f"shape={config.shape}: {error}") from error
    return config.shape, model, sizes, dtype.itemsize


COMMAND = cli.Command(doc=__doc__, default=PlanConfig(), define_flags=define_flags, body=plan)

if __name__ == "__main__":
    cli.run(COMMAND)
