"""Mixtral-8x7B in INT3 with the compensators of the paper's larger set (MiLo, Table 4, s2).

    python -m moejax.quantize --config=configs/quantize_mixtral_8x7b.py \
        --config.output=mixtral-milo  # gpu

Expected on disk: 46.4 billion of 46.7 billion weights at 3.5 bits, about 20.3 GB; compensators
(INT3 factors) 0.54 GB; embedding and head in bfloat16, 0.5 GB. One layer, 2.9 GB in bfloat16,
is read at a time.
"""

from ml_collections import config_dict

from moejax.config.commands import QuantizeConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    config = QuantizeConfig(
        checkpoint="mistralai/Mixtral-8x7B-v0.1",
        rank="mixtral-s2",
        factor_bits=3,
    )
    return to_config_dict(config)
