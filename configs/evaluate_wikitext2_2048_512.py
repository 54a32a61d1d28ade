"""WikiText-2 test, windows of 2048 tokens that advance by 512: the protocol of MiLo's tables.

    python -m moejax.evaluate --config=configs/evaluate_wikitext2_2048_512.py  # hub

As configs/evaluate_wikitext2_2048_2048.py, at four times the work: every scored token sees at least
1537 before it. The demo model has 1.308 bits a byte (its card); Mixtral-8x7B in 16 bits 3.42 a
token (MiLo, table 1).
"""

from ml_collections import config_dict

from moejax.config.commands import EvaluateConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    return to_config_dict(EvaluateConfig(text="wikitext2", preset="2048/512"))
