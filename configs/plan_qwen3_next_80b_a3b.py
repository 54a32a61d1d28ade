"""Qwen3-Next-80B-A3B, experts in INT4, on an accelerator of 32 GiB: what fits where.

    python -m moejax.plan --config=configs/plan_qwen3_next_80b_a3b.py
    python -m moejax.plan --config=configs/plan_qwen3_next_80b_a3b.py \
        --config.memory.device_gib=12 --config.bits=2

It takes a second and needs neither weights nor an accelerator.
Expected: 32.00 of 32 GiB, 342 or 343 of 512 experts of a
layer in slots and 38 transient slots; 41.1 GiB of pinned host memory; at worst 0.8 GiB a token over
the link, which is 16 ms at 50 GiB/s. Twelve layers have a cache, 192 MiB in all; the states of the
other 36 take 74 MiB a sequence, however long it is. Experts of a layer in slots:

    device_gib    bits=4        bits=2
    12            81 of 512     161 of 512
    16            132 of 512    252 of 512
    24            233 of 512    441 of 512
    32            342 of 512    all
    48            all           all
"""

from ml_collections import config_dict

from moejax.config.commands import MemoryConfig, PlanConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    config = PlanConfig(
        shape="Qwen3-Next-80B-A3B",
        bits=4,
        group_size=64,
        context=8192,
        memory=MemoryConfig(device_gib=32),
    )
    return to_config_dict(config)
