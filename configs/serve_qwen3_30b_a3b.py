"""Qwen3-30B-A3B in bfloat16 behind the server: up to 16 answers at once, each in 8192 tokens.

    python -m moejax.serve --config=configs/serve_qwen3_30b_a3b.py --config.port=8000  # gpu

Expected memory on the device: weights 56.9 GiB, and a cache of 96 KiB a token, so 12 GiB for 16
answers of 8192 tokens. It needs an accelerator of 80 GB and has not run on one yet. A request that
gives no settings of sampling gets those that the model's card recommends for thinking.
"""

from ml_collections import config_dict

from moejax.config.commands import to_config_dict
from moejax.config.serve import ServeConfig


def get_config() -> config_dict.ConfigDict:
    config = ServeConfig(
        checkpoint="Qwen/Qwen3-30B-A3B",
        dtype="bfloat16",
        context=8192,
        max_new_tokens=4096,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        max_batch=16,
        warm_up=True,
    )
    return to_config_dict(config)
