r"""DynaExq's workload: 128 prompts of 2048 tokens, 256 new tokens each, batches from 1 to 32.

    python -m moejax.benchmark --config=configs/benchmark_dynaexq.py \
        --config.output=dynaexq.json  # gpu
    python -m moejax.benchmark --config=configs/benchmark_dynaexq.py --config.shape= \
        --config.checkpoint=DIR --config.policy.tiers=int4=DIR-INT4,int2=DIR-INT2  # gpu

The first command runs random weights of Qwen3-30B-A3B's shape under the policy: INT4 for the 32
hottest of a layer's 128 experts, INT2 for all. The routing of its decode steps is made up, and the
output says so. The second command takes a checkpoint and its own routing. The plan is 16.7 GiB on
the device at batch 1 and 29.4 at 32. There is one run, since 128 requests vary enough;
`--config.num_prompts=32` takes a quarter of the time.
"""

from ml_collections import config_dict

from moejax.config.benchmark import BenchmarkConfig
from moejax.config.options import to_config_dict
from moejax.config.policy import PolicyConfig


def get_config() -> config_dict.ConfigDict:
    config = BenchmarkConfig(
        shape="Qwen3-30B-A3B",
        num_prompts=128,
        prompt_tokens=2048,
        new_tokens=256,
        batches=(1, 2, 4, 8, 16, 32),
        runs=1,
        policy=PolicyConfig(name="dynaexq", tiers=("int4", "int2"), slots=("32", "128")),
    )
    return to_config_dict(config)
