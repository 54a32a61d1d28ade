"""A Mixtral-shaped twin of the demo model: 8 experts, top-2, untied head. Not shipped.

    python -m scripts.demo_training.train --config=configs/train_mixtral_twin.py \
        --data=DIR --run_dir=twin_run  # gpu

Expected: as the demo's run, with weights of 4 layers.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The demo's run with another model."""
    demo = runpy.run_path(str(Path(__file__).with_name("train_demo.py")))
    config: ConfigDict = demo["get_config"]()
    config.model.update(
        {
            "family": "mixtral",
            "num_layers": 4,
            "moe_layers": tuple(range(4)),
            "num_experts": 8,
            "experts_per_token": 2,
            "expert_dim": 256,
            "norm_eps": 1e-5,
            "tied_embeddings": False,
            "qk_norm": False,
        }
    )
    config.total_steps = 5000
    return config
