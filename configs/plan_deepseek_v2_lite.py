"""DeepSeek-V2-Lite, experts in bfloat16, on an accelerator of 24 GiB: what fits where.

    python -m moejax.plan --config=configs/plan_deepseek_v2_lite.py
    python -m moejax.plan --config=configs/plan_deepseek_v2_lite.py \
        --config.memory.device_gib=12 --config.bits=4

It takes a second and needs neither weights nor an accelerator.
Expected: 23.99 of 24 GiB, 49 or 50 of 64 experts of a
layer in slots and 6 transient slots; 27.2 GiB of pinned host memory; at worst 2.5 GiB a token over
the link, which is 50 ms at 50 GiB/s. The cache keeps a latent of 512 numbers and a rotated key of
64 a token and layer, 243 MiB in all. Experts of a layer in slots:

    device_gib    bits=16      bits=4
    12            21 of 64     all
    16            30 of 64     all
    24            49 of 64     all
    32            all          all
    48            all          all
"""

from ml_collections import config_dict

from moejax.config.commands import MemoryConfig, PlanConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    config = PlanConfig(
        shape="DeepSeek-V2-Lite",
        bits=16,
        group_size=64,
        context=8192,
        memory=MemoryConfig(device_gib=24),
    )
    return to_config_dict(config)
