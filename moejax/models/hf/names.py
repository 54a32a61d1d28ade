"""Name tables: which Hugging Face tensor fills which part of which weight leaf.

Experts are stored under two spellings. Published checkpoints hold one tensor an expert and
projection (`mlp.experts.3.gate_proj.weight`; Mixtral: `block_sparse_moe.experts.3.w1.weight`);
transformers 5 may also write its own fused form (`mlp.experts.gate_up_proj`, [E, 2F, D]). gpt-oss
is published fused alone, with inputs before outputs, [E, D, 2F], and gates and ups by turns; so are
its experts' biases. The package's own format names its experts as those of other families.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from moejax.models.config import ModelConfig, weight_shapes
from moejax.models.layer_index import layer_indices

_DENSE = ("gate_proj", "up_proj", "down_proj")
_EXPERT_PROJECTIONS = {"mixtral": ("w1", "w3", "w2")}  # the others': _DENSE
_MOE_MODULE = {"mixtral": "block_sparse_moe"}  # the others': "mlp"
# The others': "shared_experts".
_SHARED_MODULE = {"qwen3_next": "shared_expert", "qwen3_5_moe": "shared_expert"}
# Where files of a model with a vision tower have its decoder; those of decoders alone: "model".
_NESTED = "model.language_model"
# Buffers that transformers recomputes and that old checkpoints hold nevertheless.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
# The head that predicts further tokens at once (Qwen), which decoding here does not use.
_MULTI_TOKEN = re.compile(r"^mtp\.")
_VISION = re.compile(r"^model\.visual\.")
_FUSED = (".experts.gate_up_proj", ".experts.gate_up_proj_blocks")  # plain, and in MXFP4
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_FURTHER = re.compile(r"\.(enorm|hnorm|eh_proj)\.")  # what only a layer for further tokens has
_HAVE_FURTHER_LAYERS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Destination of a checkpoint's tensor: `weights[leaf][index][start : start + shape[0]]`."""

    name: str
    leaf: str
    index: tuple[int, ...]  # leading positions: layer, then expert
    start: int  # first row
    shape: tuple[int, ...]
    is_interleaved: bool = False  # gate and up rows by turns, where the leaf has gates, then ups
    is_transposed: bool = False  # [..., inputs, outputs]

    @property
    def by_rows(self) -> "Placement":
        """Placement of the same matrices with outputs before inputs."""
        if not self.is_transposed:
            return self
        *lead, inputs, outputs = self.shape
        return dataclasses.replace(self, shape=(*lead, outputs, inputs), is_transposed=False)

    def rows(self, part: np.ndarray) -> np.ndarray:
        """View of `part` in the order of the tensor's numbers, perhaps with an axis cut in two.

        `part` is `weights[leaf][index]`, or has other numbers of its rows.
        """
        if not (self.is_interleaved or self.is_transposed):
            return part[self.start : self.start + self.shape[0]]
        if self.is_interleaved:
            axis = len(self.by_rows.shape) - (1 if self.leaf.endswith("bias") else 2)
            *lead, rows = part.shape[: axis + 1]
            halves = part.reshape(*lead, 2, rows // 2, *part.shape[axis + 1 :])
            part = halves.swapaxes(axis, axis + 1)
        return np.moveaxis(part, -1, len(self.shape) - 2) if self.is_transposed else part


@dataclasses.dataclass(frozen=True)
class _Spelling:
    """Spelling of the experts' names in a checkpoint."""

    moe_module: str  # "mlp" | "block_sparse_moe"
    fused: bool  # one tensor for all experts of a layer
    root: str = "model"  # before the decoder's names


def published_spelling(family: str) -> _Spelling:
    """Spelling of the makers' own checkpoints, which every reader knows."""
    return _Spelling(moe_module=_MOE_MODULE.get(family, "mlp"), fused=family == "gpt_oss")


def expert_spelling(family: str) -> _Spelling:
    """Spelling with a tensor for each expert and projection: that of the package's own format."""
    return dataclasses.replace(published_spelling(family), fused=False)


def find_spelling(family: str, names: Collection[str]) -> _Spelling:
    """Finds the spelling of a checkpoint with tensors of these `names`."""
    root = _NESTED if any(name.startswith(f"{_NESTED}.") for name in names) else "model"
    own = [name for name in names if name.startswith(f"{root}.")]  # not of `mtp.*`
    text = "\n".join(own)  # searched at once: a file may have a million names
    modules = {module for module in ("mlp", "block_sparse_moe") if f".{module}.experts." in text}
    published = _MOE_MODULE.get(family, "mlp")
    return _Spelling(
        moe_module="mlp" if modules == {"mlp"} else published,
        fused=any(name.endswith(_FUSED) for name in own),
        root=root,
    )


def ignored(config: ModelConfig, names: Collection[str]) -> set[str]:
    """Tensors of a checkpoint that no model here needs."""
    left_out = {*multi_token(config, names), *vision_tower(config, names)}
    return {name for name in names if _IGNORED.search(name)} | left_out


def vision_tower(config: ModelConfig, names: Collection[str]) -> list[str]:
    """Tensors of a checkpoint that read images, beside a decoder of text."""
    if config.family != "qwen3_5_moe":
        return []
    return [name for name in names if _VISION.match(name)]


def multi_token(config: ModelConfig, names: Collection[str]) -> list[str]:
    """Tensors of a checkpoint that predict further tokens at once.

    In DeepSeek-V3 and GLM-4.5 they are layers after the last one, with norms of their own that tell
    them from a decoder's: a config with one layer too few does not lose that layer.
    """
    if config.family in ("qwen3_next", "qwen3_5_moe"):
        return [name for name in names if _MULTI_TOKEN.match(name)]
    if config.family not in _HAVE_FURTHER_LAYERS:
        return []
    layers = {name: int(found[1]) for name in names if (found := _LAYER.match(name))}
    marked = {layer for name, layer in layers.items() if _FURTHER.search(name)}
    end = config.num_layers
    while end in marked:
        end += 1
    return [name for name, layer in layers.items() if config.num_layers <= layer < end]


def placements(config: ModelConfig, spelling: _Spelling) -> Iterator[Placement]:
    """Destinations of every tensor of a checkpoint; together they fill each leaf exactly once."""
    c, shapes, root = config, weight_shapes(config), spelling.root
    yield from _whole(shapes, (), {"embed": f"{root}.embed_tokens.weight"})
    for index in layer_indices(config):
        assert isinstance(index.layer, int)
        assert isinstance(index.mixer, int) and isinstance(index.mlp, int)
        layer, mixer, mlp = (index.layer,), (index.mixer,), (index.mlp,)
        prefix = f"{root}.layers.{index.layer}"
        yield from _whole(shapes, layer, {"attention.norm": f"{prefix}.input_layernorm.weight"})
        if index.is_delta:
            yield from _delta_net(c, shapes, mixer, f"{prefix}.linear_attn")
        elif c.latent:
            yield from _latent_attention(shapes, mixer, f"{prefix}.self_attn")
        else:
            yield from _attention(c, shapes, mixer, f"{prefix}.self_attn")
        yield from _whole(shapes, layer, {"mlp_norm": f"{prefix}.post_attention_layernorm.weight"})
        if index.is_sparse:
            moe_prefix = f"{prefix}.{spelling.moe_module}"
            yield from _experts(c, shapes, spelling, mlp, moe_prefix)
            yield from _shared_expert(c, shapes, mlp, moe_prefix)
        else:
            yield from _gated_mlp(f"{prefix}.mlp", "mlp", mlp, _DENSE, c.mlp_dim, c.model_dim)
    yield from _whole(shapes, (), {"final_norm": f"{root}.norm.weight", "head": "lm_head.weight"})


Shapes = Mapping[str, tuple[int, ...]]  # of `weight_shapes`


def _whole(shapes: Shapes, index: tuple[int, ...], names: Mapping[str, str]) -> Iterator[Placement]:
    """Tensors that fill leaves at an index alone, by leaf; those that the model has."""
    for leaf, name in names.items():
        if leaf in shapes:
            yield Placement(name, leaf, index, 0, shapes[leaf][len(index) :])


def _attention(
    c: ModelConfig, shapes: Shapes, at: tuple[int, ...], prefix: str
) -> Iterator[Placement]:
    """Queries, keys and values, stacked by rows in `qkv_proj`; norms and biases if any."""
    kv_dim = c.num_kv_heads * c.head_dim
    query_dim = c.qkv_dim - 2 * kv_dim  # with gates
    rows = {"q": (0, query_dim), "k": (query_dim, kv_dim), "v": (query_dim + kv_dim, kv_dim)}
    for x, (start, size) in rows.items():
        shape = (size, c.model_dim)
        yield Placement(f"{prefix}.{x}_proj.weight", "attention.qkv_proj", at, start, shape)
        if c.attention_bias:
            yield Placement(f"{prefix}.{x}_proj.bias", "attention.qkv_bias", at, start, (size,))
    names = {
        "o_proj": "o_proj.weight", "o_bias": "o_proj.bias", "sinks": "sinks",
        "q_norm": "q_norm.weight", "k_norm": "k_norm.weight",
    }  # fmt: skip
    yield from _whole(shapes, at, {f"attention.{x}": f"{prefix}.{y}" for x, y in names.items()})


def _latent_attention(shapes: Shapes, at: tuple[int, ...], prefix: str) -> Iterator[Placement]:
    """Projections to and from latents, and the latents' norms."""
    names = {
        "q_proj": "q_proj", "q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj",
        "kv_a": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "kv_b": "kv_b_proj",
        "o_proj": "o_proj",
    }  # fmt: skip
    names = {f"attention.{leaf}": f"{prefix}.{name}.weight" for leaf, name in names.items()}
    yield from _whole(shapes, at, names)


def _delta_net(
    c: ModelConfig, shapes: Shapes, at: tuple[int, ...], prefix: str
) -> Iterator[Placement]:
    """Projections, convolution, decays and the norm of the output."""
    assert c.delta_net is not None
    of, heads = c.delta_net, c.delta_net.num_value_heads
    parts = {"qkvz": of.conv_dim + of.value_width, "ba": 2 * heads}
    if not of.rows_by_head:
        parts = {"qkv": of.conv_dim, "z": of.value_width, "b": heads, "a": heads}
    starts = {"z": of.conv_dim, "a": heads}  # in a leaf, of what does not begin it
    for name, size in parts.items():
        leaf = "delta.qkvz_proj" if name[0] in "qz" else "delta.ba_proj"
        start, shape = starts.get(name, 0), (size, c.model_dim)
        yield Placement(f"{prefix}.in_proj_{name}.weight", leaf, at, start, shape)
    names = {
        "conv": "conv1d.weight", "dt_bias": "dt_bias", "a_log": "A_log", "norm": "norm.weight",
        "o_proj": "out_proj.weight",
    }  # fmt: skip
    yield from _whole(shapes, at, {f"delta.{x}": f"{prefix}.{y}" for x, y in names.items()})


def _shared_expert(
    c: ModelConfig, shapes: Shapes, at: tuple[int, ...], prefix: str
) -> Iterator[Placement]:
    """Shared expert, and its gate if the model has one."""
    if not c.shared_dim:
        return
    module = f"{prefix}.{_SHARED_MODULE.get(c.family, 'shared_experts')}"
    yield from _gated_mlp(module, "shared", at, _DENSE, c.shared_dim, c.model_dim)
    yield from _whole(shapes, at, {"shared.gate": f"{module}_gate.weight"})


def _experts(
    c: ModelConfig, shapes: Shapes, spelling: _Spelling, at: tuple[int, ...], prefix: str
) -> Iterator[Placement]:
    """Router and experts of a sparse layer."""
    is_gpt_oss, experts = c.family == "gpt_oss", f"{prefix}.experts"
    module = f"{prefix}.router" if is_gpt_oss else f"{prefix}.gate"
    names = {"moe.router": f"{module}.weight", "moe.logit_bias": f"{module}.bias"}
    yield from _whole(shapes, at, names)
    turns = _whole(shapes, at, {"moe.gate_up_bias": f"{experts}.gate_up_proj_bias"})
    yield from (dataclasses.replace(bias, is_interleaved=True) for bias in turns)
    names = {
        "moe.down_bias": f"{experts}.down_proj_bias",
        "moe.router_bias": f"{prefix}.gate.e_score_correction_bias",
    }
    yield from _whole(shapes, at, names)
    if spelling.fused:
        names = {"moe.gate_up": f"{experts}.gate_up_proj", "moe.down": f"{experts}.down_proj"}
        for one in _whole(shapes, at, names):
            num, outputs, inputs = one.shape
            shape = (num, inputs, outputs) if is_gpt_oss else one.shape
            yield dataclasses.replace(
                one, shape=shape, is_transposed=is_gpt_oss,
                is_interleaved=is_gpt_oss and one.leaf == "moe.gate_up",
            )  # fmt: skip
        return
    projections = _EXPERT_PROJECTIONS.get(c.family, _DENSE)
    for expert in range(c.num_experts):
        name, index = f"{experts}.{expert}", (*at, expert)
        yield from _gated_mlp(name, "moe", index, projections, c.expert_dim, c.model_dim)


def _gated_mlp(
    prefix: str,
    leaf: str,
    index: tuple[int, ...],
    projections: tuple[str, str, str],
    width: int,
    model_dim: int,
) -> Iterator[Placement]:
    """Gated MLP: gate above up in `gate_up`, and down."""
    gate, up, down = (f"{prefix}.{projection}.weight" for projection in projections)
    yield Placement(gate, f"{leaf}.gate_up", index, 0, (width, model_dim))
    yield Placement(up, f"{leaf}.gate_up", index, width, (width, model_dim))
    yield Placement(down, f"{leaf}.down", index, 0, (model_dim, width))
