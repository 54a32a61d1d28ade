"""Which layers of a model accelerate keeps on a device, of all layers and of fewer of them."""

import dataclasses
from typing import Any

import accelerate
import torch
from torch import nn

from moejax.models.config import ModelConfig
from scripts.studies.dymoe.accelerate_models import Form, Places, empty_model, place_of


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where layers are, of the real depth and of the measured one.

    Attributes:
      config: of the measured depth.
      num_layers: of the real depth.
      all_resident: of those, how many accelerate puts on the device.
      resident: of the measured layers, how many are there.
      places: of the measured model.
      cap_bytes: of the device, so that the measured model leaves as much free as the real one.
    """

    config: ModelConfig
    num_layers: int
    all_resident: int
    resident: int
    places: Places
    cap_bytes: int

    @property
    def depth(self) -> int:
        """Layers that are measured."""
        return self.config.num_layers

    @property
    def scaled(self) -> bool:
        """Whether figures of the real depth are computed from fewer layers."""
        return self.depth != self.num_layers

    def of_all(self, rest: float, resident: float, offloaded: float) -> float:
        """A total of the real depth; the arguments are sums over the measured layers."""
        num_offloaded = self.depth - self.resident
        total = rest
        if self.resident:
            total += resident / self.resident * self.all_resident
        if num_offloaded:
            total += offloaded / num_offloaded * (self.num_layers - self.all_resident)
        return total


def make_plan(
    config: ModelConfig, form: Form, platform: str, cap_bytes: int, share: float, depth: int
) -> Plan:
    """Asks accelerate for a map of the real depth, and makes one of the measured depth.

    Args:
      config: of the real depth.
      form: of the weights.
      platform: "cuda" or "cpu".
      cap_bytes: of the device; 0: half of the model.
      share: of the cap that accelerate may fill with weights.
      depth: layers to measure.
    """
    model = empty_model(config, form, torch.bfloat16, platform)
    cap_bytes = cap_bytes or sum(parameter.nbytes for parameter in model.parameters()) // 2
    places = device_map(model, int(share * cap_bytes))
    num_layers = config.num_layers
    all_resident = sum(place_of(f"model.layers.{i}", places) == 0 for i in range(num_layers))
    resident = round(all_resident * depth / num_layers)
    if depth > 1:  # some of each kind, where there are some
        resident = max(resident, min(all_resident, 1))
        resident = min(resident, depth - min(num_layers - all_resident, 1))
    free = cap_bytes - _bytes_on_device(model, places)
    measured = dataclasses.replace(config, num_layers=depth, moe_layers=tuple(range(depth)))
    places = layer_places(places, depth, resident)
    model = empty_model(measured, form, torch.bfloat16, platform)
    cap_bytes = _bytes_on_device(model, places) + free
    return Plan(measured, num_layers, all_resident, resident, places, cap_bytes)


def device_map(model: Any, device_bytes: int) -> Places:
    """Where accelerate puts modules of a model without weights: 0 is the device, "cpu" the host.

    As `device_map="auto"` of transformers does it: layers are not split, and room for the largest
    is left on the device.
    """
    found = accelerate.infer_auto_device_map(
        model, {0: device_bytes, "cpu": 2**50}, model._no_split_modules, clean_result=False
    )
    return dict(found)


def layer_places(places: Places, depth: int, resident: int) -> Places:
    """A map of `depth` layers, the first `resident` on the device; the rest as in `places`."""
    outside = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    found = {name: place_of(name, places) for name in outside}
    return found | {f"model.layers.{i}": 0 if i < resident else "cpu" for i in range(depth)}


def _bytes_on_device(model: nn.Module, places: Places) -> int:
    named = model.named_parameters()
    return sum(value.nbytes for name, value in named if place_of(name, places) == 0)
