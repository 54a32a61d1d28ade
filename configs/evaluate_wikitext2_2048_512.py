"""WikiText-2 test in windows of 2048 tokens that advance by 512, the protocol of MiLo's tables.

    python -m moejax.evaluate --config=configs/evaluate_wikitext2_2048_512.py  # hub

This takes four times the work of configs/evaluate_wikitext2_2048_2048.py: every scored token sees
at least 1537 tokens before it. The demo model has 1.308 bits a byte (its card), Mixtral-8x7B in 16
bits a perplexity of 3.42 a token (MiLo, table 1).
"""

from ml_collections import config_dict

from moejax.config.commands import EvaluateConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    return to_config_dict(EvaluateConfig(text="wikitext2", preset="2048/512"))
