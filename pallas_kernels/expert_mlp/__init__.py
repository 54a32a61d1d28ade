"""SwiGLU experts of a few tokens, read straight from the layer-stacked weights."""

from pallas_kernels.expert_mlp.api import expert_mlp as expert_mlp
from pallas_kernels.expert_mlp.api import refusal as refusal
