"""The demo model with experts and attention in INT3 by MiLo, groups of 64.

    python -m moejax.quantize --config=configs/quantize_demo.py --config.output=demo-milo  # long

The file has the defaults. On two CPU cores the command takes 15 s, compiling included. The tensors
take 8.3 MB in place of 27; the embedding, which stays in bfloat16, has 2.1 of them.
"""

from ml_collections import config_dict

from moejax.config.commands import QuantizeConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    return to_config_dict(QuantizeConfig())
