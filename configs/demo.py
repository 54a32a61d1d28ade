"""The demo model that comes with the package, greedy, on whatever JAX finds.

    python -m moejax.generate --config=configs/demo.py --prompt="The history of"

The file has the defaults, so the command does the same without `--config`. On a laptop's CPU it
takes a few seconds, nearly all of them for importing JAX and, the first time, compiling.
"""

from ml_collections import config_dict

from moejax.config.commands import GenerateConfig, to_config_dict


def get_config() -> config_dict.ConfigDict:
    return to_config_dict(GenerateConfig())
