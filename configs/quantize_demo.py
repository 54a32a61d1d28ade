"""The demo model with experts and attention in INT3 by MiLo, groups of 64.

    python -m moejax.quantize --config=configs/quantize_demo.py --config.output=demo-milo  # long

These are the defaults. On two CPU cores it takes 15 s, compiling included; the tensors take
8.3 MB in place of 27, of which the embedding, left in bfloat16, is 2.1.
"""

from ml_collections import config_dict

from moejax.config.commands import QuantizeConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    return to_config_dict(QuantizeConfig())
