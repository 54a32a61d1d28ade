"""INT4 by GPTQ in the GPTQ format, for other engines; the head in INT8 beside it.

    python -m moejax.quantize --config=configs/quantize_gptq_4bit.py \
        --config.checkpoint=Qwen/Qwen3-30B-A3B --config.output=qwen3-gptq  # gpu

It calibrates on the text that ships, 128 samples of 2048 tokens or as many as the text has.
"""

from ml_collections import config_dict

from moejax.config.commands import QuantizeConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    config = QuantizeConfig(
        format="gptq",
        method="gptq",
        bits=4,
        group_size=128,
        zero_kind="symmetric",
        rules="head: method=rtn bits=8",
    )
    return to_config_dict(config)
