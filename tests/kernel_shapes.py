"""Products and MoE layers of real models, which contracts of kernels go through."""

# name -> K, N. gate_up is one matrix of 2F rows, its gate alone the shape of published tables.
PRODUCTS: dict[str, tuple[int, int]] = {
    "mixtral_8x7b_gate": (4096, 14336),
    "mixtral_8x7b_gate_up": (4096, 28672),
    "mixtral_8x7b_down": (14336, 4096),
    "mixtral_8x7b_q": (4096, 4096),
    "mixtral_8x7b_k": (4096, 1024),
    "mixtral_8x7b_v": (4096, 1024),
    "mixtral_8x7b_o": (4096, 4096),
    "qwen3_30b_a3b_gate_up": (2048, 1536),
    "qwen3_30b_a3b_down": (768, 2048),
    "qwen3_30b_a3b_q": (2048, 4096),
    "qwen3_30b_a3b_k": (2048, 512),
    "qwen3_30b_a3b_v": (2048, 512),
    "qwen3_30b_a3b_o": (4096, 2048),
    "deepseek_v2_lite_gate": (2048, 1408),  # and of DeepSeek-MoE-16B, as the next two
    "deepseek_v2_lite_gate_up": (2048, 2816),
    "deepseek_v2_lite_down": (1408, 2048),
    "qwen3_next_80b_a3b_gate_up": (2048, 1024),
    "qwen3_next_80b_a3b_down": (512, 2048),  # and of Qwen3.6-35B-A3B, as the one before
    "qwen3_5_122b_a10b_gate_up": (3072, 2048),
    "qwen3_5_122b_a10b_down": (1024, 3072),
    "qwen3_5_397b_a17b_gate_up": (4096, 2048),
    "qwen3_5_397b_a17b_down": (1024, 4096),
    "qwen3_235b_a22b_gate_up": (4096, 3072),
    "qwen3_235b_a22b_down": (1536, 4096),
    "olmoe_1b_7b_gate_up": (2048, 2048),
    "olmoe_1b_7b_down": (1024, 2048),
    "glm_4_5_air_gate_up": (4096, 2816),
    "glm_4_5_air_down": (1408, 4096),
    "glm_4_7_gate_up": (5120, 3072),
    "glm_4_7_down": (1536, 5120),
    "glm_4_7_flash_gate_up": (2048, 3072),
    "glm_4_7_flash_down": (1536, 2048),
    "gpt_oss_gate_up": (2880, 5760),  # K ends in a quarter of a block
    "gpt_oss_down": (2880, 2880),
}

# name -> D, F, A.
LAYERS: dict[str, tuple[int, int, int]] = {
    "qwen3_30b_a3b": (2048, 768, 8),
    "mixtral_8x7b": (4096, 14336, 2),
    "deepseek_v2_lite": (2048, 1408, 6),  # and DeepSeek-MoE-16B
    "qwen3_next_80b_a3b": (2048, 512, 10),
    "qwen3_6_35b_a3b": (2048, 512, 8),
    "qwen3_5_122b_a10b": (3072, 1024, 8),
    "qwen3_5_397b_a17b": (4096, 1024, 10),
    "qwen3_235b_a22b": (4096, 1536, 8),
    "olmoe_1b_7b": (2048, 1024, 8),
    "glm_4_5_air": (4096, 1408, 8),
    "glm_4_7": (5120, 1536, 8),
    "glm_4_7_flash": (2048, 1536, 4),
    "gpt_oss": (2880, 2880, 4),  # 20b and 120b
}
