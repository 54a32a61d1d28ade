"""gpt-oss-120b, experts in MXFP4 as it is published, on an accelerator of 24 GiB: what fits where.

    python -m moejax.plan --config=configs/plan_gpt_oss_120b.py
    python -m moejax.plan --config=configs/plan_gpt_oss_120b.py --config.shape=gpt-oss-20b \
        --config.memory.device_gib=12

It takes a second and needs neither weights nor an accelerator.
Expected: 23.99 of 24 GiB, 43 or 44 of 128 experts of a layer in slots and 6 transient slots; 57.8
GiB of pinned host memory; at worst 1.77 GiB a token over the link, which is 35 ms at 50 GiB/s. All
128 fit in 80 GiB. Of gpt-oss-20b 29 of 32 fit in 12 GiB, and all in 16. Experts of a layer in
slots, in MXFP4 and in INT4 of groups of 64:

    device_gib    mxfp4=True    mxfp4=False
    12            16 of 128     15 of 128
    16            25 of 128     23 of 128
    24            43 of 128     40 of 128
    32            61 of 128     57 of 128
    48            98 of 128     93 of 128
"""

from ml_collections import config_dict

from moejax.config.commands import MemoryConfig, PlanConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    config = PlanConfig(
        shape="gpt-oss-120b",
        mxfp4=True,
        context=8192,
        memory=MemoryConfig(device_gib=24),
    )
    return to_config_dict(config)
