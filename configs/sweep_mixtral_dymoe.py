"""DyMoE on Mixtral-8x7B (Table 3): retention, 4/2 and 4/0, look-ahead, at PCIe 3 x16.

    python -m moejax.sweep --config=configs/sweep_mixtral_dymoe.py \
        --config.trace=mixtral.trace  # gpu

The trace must foresee the next layer (--config.record_foreseen, 8 by default) for prefetch other
than 0. Slots are those of a layer in INT4 and INT2; two INT2 experts take the place of one INT4.
selection=load, since no attention was recorded: a prompt's tokens count alike. An expert of
3 x 14336 x 4096 weights takes 99,090,432 bytes in INT4 and 55,050,240 in INT2.
"""

from ml_collections import config_dict

from moejax.config.commands import to_config_dict
from moejax.config.sweep import SweepConfig


def get_config() -> config_dict.ConfigDict:
    return to_config_dict(
        SweepConfig(
            trace="mixtral.trace",
            policy="dymoe",
            grid=(
                "slots=1/1,1/2,2/2,2/3,3/3,3/4,4/4",
                "retention=0.5:1.0:0.05",
                "low=int2,skip",
                "prefetch=0,-1",
                "selection=load",
            ),
            tiers=("int4=99090432", "int2=55050240"),
            links=("12", "50"),
            base_ms=8.0,
            overlap=1.0,
        )
    )
