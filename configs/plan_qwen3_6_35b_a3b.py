"""Qwen3.6-35B-A3B and the larger Qwen3.5, experts in INT4, on an accelerator of 12 GiB: what fits.

    python -m moejax.plan --config=configs/plan_qwen3_6_35b_a3b.py
    python -m moejax.plan --config=configs/plan_qwen3_6_35b_a3b.py \
        --config.shape=Qwen3.5-122B-A10B --config.memory.device_gib=24

It takes a second and needs neither weights nor an accelerator.
Expected: 12.00 of 12 GiB, 111 or 112 of 256 experts of a layer in slots and 38 transient slots;
17.8 GiB of pinned host memory; at worst 0.53 GiB a token over the link, which is 11 ms at 50 GiB/s.
What is not experts, in bfloat16, takes 11.1 GiB of Qwen3.5-122B-A10B and 17.5 of 397B-A17B. Experts
of a layer in slots:

    device_gib    shape=Qwen3.6-35B-A3B    shape=Qwen3.5-122B-A10B    shape=Qwen3.5-397B-A17B
    12            111 of 256               1 of 256                   none
    16            176 of 256               13 of 256                  none
    24            all                      46 of 256                  11 of 512
    32            all                      80 of 256                  32 of 512
    48            all                      152 of 256                 72 of 512
"""

from ml_collections import config_dict

from moejax.config.commands import MemoryConfig, PlanConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    config = PlanConfig(
        shape="Qwen3.6-35B-A3B",
        bits=4,
        group_size=64,
        context=8192,
        memory=MemoryConfig(device_gib=12),
    )
    return to_config_dict(config)
