"""DeepSeek-MoE-16B, experts in bfloat16, on an accelerator of 24 GiB: what fits where.

    python -m moejax.plan --config=configs/plan_deepseek_moe_16b.py
    python -m moejax.plan --config=configs/plan_deepseek_moe_16b.py \
        --config.memory.device_gib=12 --config.bits=4

It takes a second and needs neither weights nor an accelerator.
Expected: 23.99 of 24 GiB, 46 or 47 of 64 experts of a
layer in slots and 6 transient slots; 28.2 GiB of pinned host memory; at worst 2.6 GiB a token over
the link, which is 52 ms at 50 GiB/s. The cache keeps 16 heads' keys and values, 896 MiB in all.
Experts of a layer in slots:

    device_gib    bits=16      bits=4
    12            18 of 64     all
    16            27 of 64     all
    24            46 of 64     all
    32            64 of 64     all
    48            all          all
"""

from ml_collections import config_dict

from moejax.config.commands import MemoryConfig, PlanConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    config = PlanConfig(
        shape="DeepSeek-MoE-16B",
        bits=16,
        group_size=64,
        context=4096,
        memory=MemoryConfig(device_gib=24),
    )
    return to_config_dict(config)
