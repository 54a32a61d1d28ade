"""The demo model: a Qwen3-MoE of 13.5 million parameters, 3.9 million of them active a token.

    python -m scripts.demo_training.prepare_data --data=DIR --output=demo_data  # hub
    python -m scripts.demo_training.train --config=configs/train_demo.py \
        --data=demo_data --run_dir=demo_run  # gpu

Expected on one NVIDIA H200: see moejax/demo/README.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The run that made the packaged weights."""
    config = ConfigDict()
    config.seed = 0
    config.model = ConfigDict(
        {
            "family": "qwen3_moe",
            "vocab_size": 4096,
            "model_dim": 256,
            "num_layers": 7,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 64,
            "num_experts": 32,
            "experts_per_token": 4,
            "expert_dim": 64,
            "mlp_dim": 1024,  # unused: every layer is sparse
            "moe_layers": tuple(range(7)),
            "norm_topk_prob": True,
            "norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_positions": 2048,
            "tied_embeddings": True,
            "qk_norm": True,
            "attention_bias": False,
            "sliding_window": None,
        },
        type_safe=False,
    )
    config.dtype = "bfloat16"
    config.attention = "auto"  # cudnn on a GPU, xla elsewhere
    config.batch_size = 64
    config.context = 2048
    config.total_steps = 15_500

    # Shares of the streams in a batch; `final_mixture` is reached as the learning rate falls.
    config.mixture = ConfigDict(
        {
            "wikitext": 0.16,
            "wikitext_masked": 0.0,
            "books": 0.25,
            "textbooks": 0.23,
            "code": 0.14,
            "math": 0.10,
            "chinese": 0.10,
            "chat": 0.02,
        }
    )
    config.final_mixture = ConfigDict(
        {
            "wikitext": 0.30,
            "wikitext_masked": 0.0,
            "books": 0.21,
            "textbooks": 0.19,
            "code": 0.11,
            "math": 0.08,
            "chinese": 0.09,
            "chat": 0.02,
        }
    )

    config.dropout = 0.1
    config.balance_coefficient = 0.01
    config.z_coefficient = 1e-4
    config.optimizer = ConfigDict(
        {
            "name": "muon",
            "learning_rate": 4e-3,
            "adam_learning_rate": 4e-3,
            "weight_decay": 0.1,
            "adam_b2": 0.95,
            "max_grad_norm": 1.0,
            "warmup_steps": 300,
            "decay_fraction": 0.4,
        }
    )

    config.log_every = 50
    config.validate_every = 1000
    config.validation_tokens = 131072  # a stream, at most
    config.checkpoint_every_s = 120.0
    return config
