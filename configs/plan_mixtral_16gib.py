"""Mixtral-8x7B, experts in INT4, on an accelerator of 16 GiB: what fits where.

    python -m moejax.plan --config=configs/plan_mixtral_16gib.py
    python -m moejax.plan --config=configs/plan_mixtral_16gib.py --config.memory.host_gib=20

It takes a second and needs neither weights nor an accelerator.
Expected: 15.99 of 16 GiB, 4 or 5 of 8 experts of a layer
in slots and 2 transient slots; 23.9 GiB of pinned host memory; at worst 5.9 GiB a token over the
link, which is 118 ms at 50 GiB/s. With 20 GiB of host memory, 79 % of the experts are in it.
"""

from ml_collections import config_dict

from moejax.config.commands import MemoryConfig, PlanConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    config = PlanConfig(
        shape="Mixtral-8x7B",
        bits=4,
        group_size=64,
        context=4096,
        memory=MemoryConfig(device_gib=16),
    )
    return to_config_dict(config)
