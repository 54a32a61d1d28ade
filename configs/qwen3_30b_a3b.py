"""Qwen3-30B-A3B in bfloat16: 48 layers, 128 experts, 8 a token, 30.5 billion parameters.

    python -m moejax.generate --config=configs/qwen3_30b_a3b.py --chat --prompt="Why?"  # gpu

Expected memory on the device: weights 56.9 GiB (61.1 GB, which is also the download), cache 96 KiB
a token, so 0.75 GiB for the 8192 tokens here. It needs an accelerator of 80 GB. The settings of
sampling are those that the model's card recommends for thinking.
"""

from ml_collections import config_dict

from moejax.config.commands import GenerateConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    config = GenerateConfig(
        checkpoint="Qwen/Qwen3-30B-A3B",
        dtype="bfloat16",
        context=8192,
        max_new_tokens=4096,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
    )
    return to_config_dict(config)
