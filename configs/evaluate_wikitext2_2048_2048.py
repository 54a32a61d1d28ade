"""WikiText-2 test in windows of 2048 tokens that do not overlap, as GPTQ and most papers have it.

    python -m moejax.evaluate --config=configs/evaluate_wikitext2_2048_2048.py  # hub

The package `datasets` reads the rows from the Hub or its cache. Without it,
`--config.text=wiki.test.raw --config.join=wikitext` gives the same 1,296,370 bytes. The demo model
has 1.331 bits a byte (its card), Mixtral-8x7B in 16 bits a perplexity of about 3.84 a token. Do not
compare figures of this protocol with those of 2048/512.
"""

from ml_collections import config_dict

from moejax.config.commands import EvaluateConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    return to_config_dict(EvaluateConfig(text="wikitext2", preset="2048/2048"))
