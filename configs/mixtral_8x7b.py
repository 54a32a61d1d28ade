"""Mixtral-8x7B in bfloat16: 32 layers, 8 experts, 2 a token, 46.7 billion parameters.

    python -m moejax.generate --config=configs/mixtral_8x7b.py \
        --prompt="My favourite condiment is"  # gpu

Expected memory on the device: weights 87.0 GiB (93.4 GB, which is also the download), cache 128 KiB
a token, so 0.5 GiB for the 4096 tokens here. It needs an accelerator of over 96 GB. This is the
base model; to chat, use `--chat --config.checkpoint=mistralai/Mixtral-8x7B-Instruct-v0.1`.
"""

from ml_collections import config_dict

from moejax.config.commands import GenerateConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    config = GenerateConfig(
        checkpoint="mistralai/Mixtral-8x7B-v0.1", dtype="bfloat16", context=4096
    )
    return to_config_dict(config)
