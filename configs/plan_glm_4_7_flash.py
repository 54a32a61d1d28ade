"""GLM-4.7-Flash and GLM-4.5-Air, experts in INT4, on an accelerator of 12 GiB: what fits where.

    python -m moejax.plan --config=configs/plan_glm_4_7_flash.py
    python -m moejax.plan --config=configs/plan_glm_4_7_flash.py --config.shape=GLM-4.5-Air \
        --config.memory.device_gib=24

It takes a second and needs neither weights nor an accelerator.
Expected: 12.00 of 12 GiB, 32 or 33 of 64 experts of a layer in slots and 13 transient slots; 15.1
GiB of pinned host memory; at worst 0.91 GiB a token over the link, which is 18 ms at 50 GiB/s.
Attention of GLM-4.5-Air takes 9.3 GiB in bfloat16. Experts of a layer in slots:

    device_gib    shape=GLM-4.7-Flash    shape=GLM-4.5-Air
    12            32 of 64               none
    16            49 of 64               1 of 128
    24            all                    21 of 128
    32            all                    41 of 128
    48            all                    82 of 128
"""

from ml_collections import config_dict

from moejax.config.commands import MemoryConfig, PlanConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    config = PlanConfig(
        shape="GLM-4.7-Flash",
        bits=4,
        group_size=64,
        context=8192,
        memory=MemoryConfig(device_gib=12),
    )
    return to_config_dict(config)
