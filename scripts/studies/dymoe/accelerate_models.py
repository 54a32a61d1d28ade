"""Mixtral and Qwen3-MoE of transformers, random weights, offloaded to host memory by accelerate.

A module for each expert, so that accelerate's hooks move the experts that have tokens and no others
(as transformers makes them, two arrays a layer, they would move whole). Experts and attention have
INT4 codes in groups of 128, whose products are torch's own int4 kernels; the embeddings and the
head are bf16, as in moejax.benchmarking.random_weights.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import accelerate
import torch
import transformers
from accelerate.utils import set_module_tensor_to_device
from torch import nn

from moejax.models.config import ModelConfig
from moejax.models.shapes import CONFIGS

GROUP_SIZE = 128
FORM = f"INT4 g{GROUP_SIZE}, experts are modules, attention INT4, head bf16"
Places = dict[str, str | int]  # of modules: 0 is the device, "cpu" the host
INNER_TILES = 8  # of the kernels' layout on a GPU: K is a multiple of 16 * 8
# Groups of 128 want wider matrices than the tiny shape of other scripts has.
TINY = dataclasses.replace(
    CONFIGS["tiny"], model_dim=128, head_dim=32, expert_dim=128, num_layers=6,
    moe_layers=tuple(range(6)),
)  # fmt: skip
SHAPES = {**CONFIGS, "tiny": TINY}


def hf_config(config: ModelConfig) -> transformers.PreTrainedConfig:
    """Configuration of the shape as transformers writes it."""
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size, "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "num_experts_per_tok": config.experts_per_token, "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_positions, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if config.family == "mixtral":
        return transformers.MixtralConfig(
            intermediate_size=config.expert_dim, num_local_experts=config.num_experts, **fields
        )
    return transformers.Qwen3MoeConfig(
        intermediate_size=config.mlp_dim, moe_intermediate_size=config.expert_dim,
        num_experts=config.num_experts, norm_topk_prob=config.norm_topk_prob, **fields,
    )  # fmt: skip


class Int4Linear(nn.Module):
    """x W^T with W = (code - 8) * scale + zero, in groups along K: torch's int4 kernels.

    A GPU's `_weight_int4pack_mm` and a CPU's `_weight_int4pack_mm_for_cpu` have layouts of their
    own. Codes and scales are parameters: accelerate leaves buffers of offloaded modules on the
    device.

    Attributes:
      packed: [N/8, K/128, 32, 4] int32 on a GPU, [N, K/2] uint8 on a CPU.
      scales_and_zeros: [K/128, N, 2], of the dtype of x.
    """

    def __init__(self, num_inputs: int, num_outputs: int, dtype: torch.dtype, platform: str):
        """The matrix is [N, K] = [num_outputs, num_inputs]; "cuda" or "cpu" will run it."""
        super().__init__()
        if num_inputs % GROUP_SIZE or num_outputs % 16:
            raise ValueError(f"K={num_inputs} must be a multiple of 128, N={num_outputs} of 16")
        self.platform, self.num_outputs = platform, num_outputs
        if platform == "cpu":
            packed = torch.empty(num_outputs, num_inputs // 2, dtype=torch.uint8)
        else:
            packed = torch.empty(
                num_outputs // 8, num_inputs // (16 * INNER_TILES), 32, INNER_TILES // 2,
                dtype=torch.int32,
            )  # fmt: skip
        scales = torch.empty(num_inputs // GROUP_SIZE, num_outputs, 2, dtype=dtype)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scales_and_zeros = nn.Parameter(scales, requires_grad=False)

    @classmethod
    def of_codes(cls, codes: torch.Tensor, scales_and_zeros: torch.Tensor) -> "Int4Linear":
        """From codes [N, K] int32 in 0..15 and scales and zeros [K/128, N, 2]."""
        num_outputs, num_inputs = codes.shape
        linear = cls(num_inputs, num_outputs, scales_and_zeros.dtype, codes.device.type)
        if linear.platform == "cpu":
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, INNER_TILES)
        else:
            nibbles = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
            packed = torch.ops.aten._convert_weight_to_int4pack(nibbles, INNER_TILES)
        assert packed.shape == linear.packed.shape, (packed.shape, linear.packed.shape)
        linear.packed = nn.Parameter(packed, requires_grad=False)
        linear.scales_and_zeros = nn.Parameter(scales_and_zeros, requires_grad=False)
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] to [..., N]."""
        product = (
            torch.ops.aten._weight_int4pack_mm_for_cpu
            if self.platform == "cpu"
            else torch.ops.aten._weight_int4pack_mm
        )
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y = product(rows, self.packed, GROUP_SIZE, self.scales_and_zeros)
        return y.view(*x.shape[:-1], self.num_outputs)


def int4_error(device: torch.device, dtype: torch.dtype, num_rows: int) -> float:
    """Error of Int4Linear against float64: RMS of the error over RMS of the product."""
    generator = torch.Generator(device).manual_seed(num_rows)
    how: dict[str, Any] = {"device": device, "generator": generator}
    codes = torch.randint(0, 16, (768, 1024), dtype=torch.int32, **how)
    scales = (torch.rand(1024 // GROUP_SIZE, 768, 2, **how) + 0.1).to(dtype)
    x = torch.randn(num_rows, 1024, **how).to(dtype)
    scale, zero = scales.double().repeat_interleave(GROUP_SIZE, 0).unbind(-1)  # [K, N] each
    expected = x.double() @ ((codes.T - 8) * scale + zero)
    error = Int4Linear.of_codes(codes, scales)(x).double() - expected
    return float(error.norm() / expected.norm())


class Expert(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product: as few tensors as can be moved."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, platform: str):
        super().__init__()
        self.gate_up = Int4Linear(config.model_dim, 2 * config.expert_dim, dtype, platform)
        self.down = Int4Linear(config.expert_dim, config.model_dim, dtype, platform)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, D] to [rows, D]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


class ExpertModules(nn.ModuleList):
    """A layer's experts, of which only those with tokens are called, each once a forward."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """x [T, D], the experts that each token chose [T, A] and their weights [T, A]; [T, D].

        The host reads the choice once a layer: it must know which modules to call.
        """
        out = torch.zeros_like(x)
        if len(x) == 1:
            for i, expert_id in enumerate(chosen[0].tolist()):
                out += (self[expert_id](x) * gates[:, i, None]).to(x.dtype)
            return out
        for expert_id in chosen.unique().tolist():
            token, place = torch.where(chosen == expert_id)
            y = self[expert_id](x[token]) * gates[token, place, None]
            out.index_add_(0, token, y.to(x.dtype))
        return out


def empty_model(config: ModelConfig, dtype: torch.dtype, platform: str) -> Any:
    """The model of transformers in INT4, without weights (they are of the device "meta")."""
    name = "Mixtral" if config.family == "mixtral" else "Qwen3Moe"
    shape = hf_config(config)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(shape, dtype=dtype)
        for layer in model.model.layers:
            experts = [Expert(config, dtype, platform) for _ in range(config.num_experts)]
            layer.mlp.experts = ExpertModules(experts)
            attention = layer.self_attn
            for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
                old = getattr(attention, part)
                new = Int4Linear(old.in_features, old.out_features, dtype, platform)
                setattr(attention, part, new)
    model.model.rotary_emb = type(model.model.rotary_emb)(shape)  # a buffer: it needs its values
    model.requires_grad_(requires_grad=False)
    return model.eval()


class HostWeights(dict[str, torch.Tensor]):
    """Offloaded weights by name, as accelerate reads them; counts the bytes that it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_bytes = 0  # taken so far, of decoder layers
        self.other_bytes = 0  # of the rest: the head, where it is offloaded

    def __getitem__(self, name: str) -> torch.Tensor:
        value = super().__getitem__(name)
        if name.startswith("model.layers."):
            self.layer_bytes += value.nbytes
        else:
            self.other_bytes += value.nbytes
        return value

    def pin(self) -> None:
        """Moves all to pinned memory, one at a time: no second copy of the model.

        torch rounds each up to a power of two: a seventh more for Mixtral, a third for Qwen3-30B.
        """
        for name, value in list(self.items()):
            self[name] = value.pin_memory()


def place_of(name: str, places: Places) -> str | int:
    """Place of a module or weight: that of the entry that holds it."""
    while name not in places:
        if "." not in name:
            raise KeyError(f"the map has no place for {name}")
        name = name.rpartition(".")[0]
    return places[name]


def device_map(model: Any, device_bytes: int) -> Places:
    """Where accelerate puts modules of a model without weights: 0 is the device, "cpu" the host.

    As `device_map="auto"` of transformers does it: layers are not split, and room for the largest
    is left on the device.
    """
    found = accelerate.infer_auto_device_map(
        model, {0: device_bytes, "cpu": 2**50}, model._no_split_modules, clean_result=False
    )
    return dict(found)


def fill(model: Any, places: Places, device: torch.device) -> HostWeights:
    """Gives an empty model random weights, made on the device, each where the map says.

    Norms are one, embeddings N(0, 1), matrices N(0, 1/K) or so, codes uniform in 0..15.

    Returns:
      The weights that are offloaded; in the model they stay empty.
    """
    generator = torch.Generator(device).manual_seed(0)
    host = HostWeights()
    for name, value in _random(model, device, generator):
        if place_of(name, places) == "cpu":
            host[name] = value.cpu()
        else:
            set_module_tensor_to_device(model, name, device, value, clear_cache=False)
    return host


def _random(
    model: Any, device: torch.device, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values, one at a time."""
    how: dict[str, Any] = {"device": device, "generator": generator}
    for name, like in model.named_parameters():
        if name.endswith(".packed"):
            limits = torch.iinfo(like.dtype)
            yield (
                name,
                torch.randint(limits.min, limits.max + 1, like.shape, dtype=like.dtype, **how),
            )
        elif name.endswith(".scales_and_zeros"):
            # Codes of 0..15 about 7.5 have a variance of (16^2 - 1) / 12; the kernels subtract 8.
            scale = (12 / (255 * len(like) * GROUP_SIZE)) ** 0.5
            scales = torch.rand(like.shape[:-1], **how).mul_(0.4).add_(0.8).mul_(scale)
            yield name, torch.stack([scales, scales / 2], -1).to(like.dtype)
        elif like.ndim == 1:
            yield name, torch.ones(like.shape, dtype=like.dtype, device=device)
        else:
            std = 1.0 if "embed_tokens" in name else like.shape[-1] ** -0.5
            yield name, torch.randn(like.shape, dtype=like.dtype, **how).mul_(std)


def offload(model: Any, places: Places, host: HostWeights, device: torch.device) -> Any:
    """The model under accelerate's hooks: weights of the host are there while a module runs.

    Where the CPU itself is the device, accelerate offloads only what it takes to be on a disk.
    """
    if device.type == "cpu":
        names = {0: "cpu", "cpu": "disk"}
        places = {name: names[place] for name, place in places.items()}
        index: dict[str, str] | None = {}
    else:
        index = None
    return accelerate.dispatch_model(
        model, places, state_dict=host, offload_index=index,
        skip_keys=model._skip_keys_device_placement,
    )  # fmt: skip
