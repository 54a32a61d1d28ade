"""Qwen3-30B-A3B in INT4 under LRU at every number of slots, on PCIe 5, PCIe 4 and PCIe 3 x16.

    python -m scripts.make_trace --shape=Qwen3-30B-A3B --tokens=10000 --out=qwen3.trace  # long
    python -m moejax.sweep --config=configs/sweep_qwen3_lru.py --config.trace=qwen3.trace  # long

100 settings x 10,000 tokens x 48 layers x 128 experts take half a minute of one core, and as long
again for Belady's cache. base_ms is the time of the resident model on an H200; give your own, or a
calibration. An expert has 2,654,208 bytes: 3 x 768 x 2048 weights at 4 bits and, for each 64 of
them, a scale and a zero point in 16 bits.
"""

from ml_collections import config_dict

from moejax.config.commands import to_config_dict
from moejax.config.sweep import SweepConfig


def get_config() -> config_dict.ConfigDict:
    return to_config_dict(
        SweepConfig(
            trace="qwen3.trace",
            grid=("slots=8:107",),
            tiers=("int4=2654208",),
            links=("50", "25", "12"),
            base_ms=4.0,
        )
    )
