r"""Plans every byte of a configuration before anything is loaded.

    python -m moejax.plan --config=configs/qwen3_30b_a3b.py --config.memory.device_gib=24
    python -m moejax.plan --config.shape=Mixtral-8x7B --config.bits=4 --config.memory.device_gib=16
    python -m moejax.plan --config.shape=Qwen3-30B-A3B --config.planes=2,4 \
        --config.policy.name=dynaexq --config.policy.tiers=int4,int2 --config.memory.device_gib=12

Reads config.json and the headers of the weights, or takes a named shape; needs no accelerator. The
table goes to stdout. A configuration that cannot run is refused; the error names the smallest
budget that works.
"""

from absl import flags

from moejax import cli
from moejax.config.commands import PlanConfig
from moejax.errors import MoejaxError
from moejax.experts.budget import describe, warnings
from moejax.experts.machine import this_machine


def _plan(config: PlanConfig, values: flags.FlagValues) -> None:
    """Prints the table, its meaning for speed, and the warnings."""
    del values
    # They import JAX, which --help and mistakes need not wait for.
    from moejax.devices import PLATFORMS, check_dtype
    from moejax.planning import bits_line, budget_of, model_of, platform_of

    if config.platform not in PLATFORMS:
        raise MoejaxError(f"platform {config.platform!r} is none of {', '.join(PLATFORMS)}")
    check_dtype(config.dtype, platform_of(config))
    budget = budget_of(config)
    name, model, sizes, _ = model_of(config)
    form = "tiers without files" if config.policy.name else f"experts in {sizes.expert_form}"
    if config.planes:
        form += f" by bit planes {config.planes}"
    if budget.run.config.num_heads < model.num_heads:
        form += ", attention split by heads"
    lines = [f"{name}, {form}, on a {platform_of(config)}"]
    if config.policy.name and not config.shape:
        lines = []
    tiers = [tier.tier for tier in budget.tiers]
    bits = bits_line(model, sizes, tiers, budget.run.num_devices)
    found = warnings(budget, this_machine(platform_of(config)))
    print("\n".join([*lines, *describe(budget), bits, *_warned(found, config, budget.run.context)]))


def _warned(found: list[str], config: PlanConfig, context: int) -> list[str]:
    if not config.context:
        found = [*found, f"context=0 takes what the prompts need; here it is {context}"]
    return [f"warning: {line}" for line in found]


COMMAND = cli.Command(doc=__doc__, default=PlanConfig(), body=_plan)

if __name__ == "__main__":
    cli.run(COMMAND)
