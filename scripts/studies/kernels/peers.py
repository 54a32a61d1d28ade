"""Packed products by other libraries, through torch, on the same weights.

A peer that is not installed, or cannot hold a form, raises `Missing` with one line that says why.
"""

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout
from pallas_kernels.packed import PLAIN_BITS, PackedMatrices

PEERS = ("torch_bf16", "torch", "humming", "gemlite")

Calls = list[Callable[[Any], Any]]  # one a slot: x [M, K] to [M, N], torch tensors


class Missing(Exception):
    """Why a peer is not measured."""


def versions() -> dict[str, str]:
    """Versions of the libraries that are installed."""
    found = {}
    for name in ("torch", "triton", "humming-kernels", "gemlite"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def to_torch(array: jax.Array) -> Any:
    """The array's memory as a torch tensor."""
    return peer_torch().from_dlpack(jax.block_until_ready(array))


def to_numpy(tensor: Any) -> np.ndarray:
    """float32, from any float tensor."""
    return tensor.detach().float().cpu().numpy()


def peer_torch() -> Any:
    """torch, with a GPU.

    Raises:
      Missing: there is none.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise Missing(f"torch is not installed ({error})") from error
    if not torch.cuda.is_available():
        raise Missing("torch sees no GPU")
    return torch


def peer_calls(name: str, weights: PackedMatrices) -> Calls:
    """A library's product with each slot.

    Raises:
      Missing: why there is none.
    """
    torch = peer_torch()
    if name not in PEERS:
        raise ValueError(f"{name!r} is none of {', '.join(PEERS)}")
    if name == "torch_bf16":
        if weights.bits != PLAIN_BITS:
            raise Missing("serves bf16 weights only")
        matrices = [to_torch(weights.words[slot]) for slot in range(weights.num_slots)]
        return [functools.partial(_linear, torch, matrix) for matrix in matrices]
    if weights.bits == PLAIN_BITS:
        raise Missing("serves packed weights only")
    if weights.zeros is None or weights.scales is None:
        raise Missing("measured with float zero points only")
    build = {"torch": _torch_int4, "humming": _humming, "gemlite": _gemlite}
    return [build[name](weights, slot) for slot in range(weights.num_slots)]


def _linear(torch: Any, matrix: Any, x: Any) -> Any:
    return torch.nn.functional.linear(x, matrix)


@jax.jit
def _parts(weights: PackedMatrices, slot: jax.Array) -> tuple[jax.Array, ...]:
    """uint8[N, K] codes, bf16[N, G] scales and zero points of one slot."""
    assert weights.scales is not None and weights.zeros is not None
    codes = layout.unpack(weights.words[slot], weights.bits, weights.num_inputs)
    parts = (weights.scales[slot], weights.zeros[slot])
    scales, zeros = (part.astype(jnp.bfloat16) for part in parts)
    return codes, scales, zeros


def _tensors(weights: PackedMatrices, slot: int) -> tuple[Any, Any, Any]:
    codes, scales, zeros = _parts(weights, jnp.int32(slot))
    return to_torch(codes), to_torch(scales), to_torch(zeros)


def _torch_int4(weights: PackedMatrices, slot: int) -> Callable[[Any], Any]:
    """tinygemm: w = (q - 8) scale + zero, the zero rounded to bf16."""
    import torch

    if weights.bits != 4:
        raise Missing("has INT4 only")
    codes, scales, zeros = _tensors(weights, slot)
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(pairs.contiguous(), 8)
    offsets = ((8 - zeros.float()) * scales.float()).to(torch.bfloat16)
    both = torch.stack([scales, offsets], -1).transpose(0, 1).contiguous()  # [G, N, 2]
    size = weights.group_size
    return lambda x: torch._weight_int4pack_mm(x, packed, size, both)


def _humming(weights: PackedMatrices, slot: int) -> Callable[[Any], Any]:
    """humming's dense product with its own choice of tiles."""
    import torch

    try:
        layers, ops = (importlib.import_module(f"humming.{name}") for name in ("layer", "ops"))
    except ImportError as error:
        raise Missing(f"humming-kernels cannot be imported ({error})") from error
    codes, scales, zeros = _tensors(weights, slot)
    layer = layers.HummingLayer(
        shape_n=weights.num_outputs,
        shape_k=weights.num_inputs,
        weight_config={
            "dtype": f"uint{weights.bits}",
            "group_size": weights.group_size,
            "has_zero_point": True,
            "is_fp_zero_point": True,
        },
        torch_dtype=torch.bfloat16,
    ).cuda()
    packed = ops.pack_weight(codes.to(torch.int32).contiguous(), weights.bits)
    layer.load_from_tensors({"weight": packed, "weight_scale": scales, "zero_point": zeros})
    layer.transform()
    return layer


def _gemlite(weights: PackedMatrices, slot: int) -> Callable[[Any], Any]:
    """gemlite's product with its own choice of kernel and its cached or default tiles."""
    try:
        helper = importlib.import_module("gemlite.helper")
    except ImportError as error:
        raise Missing(f"gemlite cannot be imported ({error})") from error
    if weights.bits not in (1, 2, 4, 8):
        raise Missing(f"has no INT{weights.bits}")
    codes, scales, zeros = _tensors(weights, slot)
    form = (weights.bits, weights.group_size)
    return helper.A16Wn(device="cuda:0").from_weights(codes.contiguous(), scales, zeros, *form)


def grouped_torch(
    x: Any, slots: np.ndarray, weights: np.ndarray, gate_up: list[Any], down: list[Any]
) -> Calls:
    """A bf16 MoE layer by torch's grouped product, one callable a routing; sorted beforehand.

    Args:
      x: [T, D], a tensor; only its device is taken.
      slots: int32[calls, T, A], each call within one layer of the stack.
      weights: float32[calls, T, A].
      gate_up: of each layer a tensor [E, 2F, D], gate rows first.
      down: of each layer [E, D, F].

    Raises:
      Missing: this torch has no grouped product.
    """
    import torch

    grouped = getattr(torch.nn.functional, "grouped_mm", None) or getattr(
        torch, "_grouped_mm", None
    )
    if grouped is None:
        raise Missing(f"torch {torch.__version__} has no grouped product")
    num_experts = gate_up[0].shape[0]

    def build(slot: np.ndarray, weight: np.ndarray) -> Callable[[Any], Any]:
        layer = int(slot.flat[0]) // num_experts
        expert = slot.reshape(-1) - layer * num_experts
        order = np.argsort(expert, kind="stable")
        tokens = torch.tensor(order // slot.shape[1], device=x.device)
        back = torch.tensor(np.argsort(order), device=x.device)
        ends = np.cumsum(np.bincount(expert, minlength=num_experts))
        ends_tensor = torch.tensor(ends, device=x.device, dtype=torch.int32)
        share = torch.tensor(weight, device=x.device)[..., None]
        up_weights, down_weights = gate_up[layer].mT, down[layer].mT

        def call(x: Any) -> Any:
            both = grouped(x[tokens], up_weights, offs=ends_tensor)
            gate, up = both.chunk(2, dim=-1)
            y = grouped(torch.nn.functional.silu(gate) * up, down_weights, offs=ends_tensor)
            return (y[back].unflatten(0, slot.shape) * share).sum(1).to(x.dtype)

        return call

    return [build(*one) for one in zip(slots, weights, strict=True)]
