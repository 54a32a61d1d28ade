"""The study model: SmolLM2-135M cut into 16 experts a layer, 4 of which run, and trained apart.

    python -m scripts.studies.study_model.make --config=configs/train_study_model.py \
        --parent=PARENT --data=DIR --work_dir=RUN  # gpu

`scripts/studies/study_model/README.md` says where PARENT and DIR come from and what to expect.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Settings of one run of 12 minutes on an H100 or H200."""
    config = ConfigDict()
    config.seed = 0
    config.num_shards = 4  # of each MLP; so many experts run
    config.num_replicas = 4  # of each shard
    # The replica whose router rows start from a stream's text, and the stream's share of a batch.
    config.replicas = ConfigDict(
        {"wikitext": 0, "books": 0, "textbooks": 1, "code": 2, "math": 3, "chinese": 2}
    )
    config.mixture = ConfigDict(
        {
            "wikitext": 0.12,
            "books": 0.22,
            "textbooks": 0.26,
            "code": 0.18,
            "math": 0.17,
            "chinese": 0.05,
        }
    )
    config.router_scale = 1.0  # root mean square of the logits at the start
    config.router_tokens = 16_384  # of each stream, from which the router rows are made

    config.dtype = "bfloat16"
    config.attention = "auto"  # cudnn on a GPU, xla elsewhere
    config.batch_size = 16
    config.context = 1024
    config.total_steps = 2800  # 0.175 s each on an H100, 0.155 on an H200

    config.parent_share = 0.7  # weight of the parent's distribution; the rest is next tokens
    config.balance_coefficient = 0.01
    config.learning_rate = 1.5e-3  # of experts
    config.router_rate = 0.1  # of routers, over that of experts
    config.adam_b2 = 0.95
    config.max_grad_norm = 1.0
    config.warmup_steps = 100
    config.decay_fraction = 0.35

    config.log_every = 40
    config.validate_every = 800
    config.validation_tokens = 8192  # a stream, while training
    config.evaluation_tokens = 131_072  # a stream, at the end
    config.checkpoint_every_s = 420.0
    return config
