"""Models in several precisions, texts and runs of the studies of quality.

A run is teacher-forced: windows of a text are fed chunk by chunk through the engine's own steps,
with the policy's state and the tables of its slots carried from chunk to chunk. All copies of all
experts stay in memory (`TierSpec.emulated`): which copy serves is what the tables of the slots say,
and the products are those of the same numbers, so perplexity is that of a run whose experts move.
"""

import dataclasses
import functools
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoints.open import open_checkpoint
from moejax.devices import put
from moejax.experts.cache import ExpertMemory, TierMemory
from moejax.experts.ledger import Ledger
from moejax.experts.residency import CacheSizes, seeded
from moejax.experts.state import ExpertCache, TierSpec
from moejax.inference import steps
from moejax.inference.runner import Runner
from moejax.models.attention import causal_attention
from moejax.models.config import ModelConfig
from moejax.models.expert_products import ExpertPairs, ExpertStacks, combine, products_by_block
from moejax.models.moe import Experts, MoeInputs, Routing
from moejax.models.transformer import ChunkSpec, merge_weights, model_definition
from moejax.policies.base import AnyPolicy, Decision, Observation, PolicySpec
from moejax.quantization.pipeline.calibration import shipped_text
from moejax.quantization.pipeline.quantizers import Program, quantize_stack
from moejax.quantization.pipeline.recipe import Scheme
from moejax.text.corpus import joined_rows
from moejax.text.tokenizer import Tokenizer
from moejax.weights import linear as ops
from moejax.weights.linear import Index

EXPERTS = ("moe.gate_up", "moe.down")
DOMAINS = ("books", "textbooks", "code", "math", "chinese")
BITS = {"int4": 4, "int3": 3, "int2": 2}
GROUP_SIZE = 64
MILO, MILO_RANK = "int3, milo", 16
MILO_PASSES = 20  # of its iteration at most, as `moejax.quantize` has it
TRAIN_CHARACTERS = 2_000_000  # of a training text, which is not scored


class Beside(Protocol):
    """Measures a run of some windows beside the exact model; `exact.py` has two."""

    def of_served(self, served: "Served", batch: int) -> tuple[np.ndarray, dict[str, Any]]:
        """Runs the windows: nats float64[n], and what else was found."""
        ...

    def of_hidden(self, hidden: Sequence[jax.Array]) -> tuple[np.ndarray, dict[str, Any]]:
        """Finds the same in last hidden states [1, T, D] of each window."""
        ...


@dataclasses.dataclass(frozen=True)
class Windows:
    """Token windows int32[n, T + 1] of a text, its name, and the domain of each."""

    name: str
    tokens: np.ndarray
    domains: tuple[str, ...]
    beside: Beside | None = None  # not of runs `as_decode`

    def batches(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields windows, so many at once, and their lengths int32."""
        for first in range(0, len(self.tokens), size):
            part = self.tokens[first : first + size]
            yield part, np.full(len(part), part.shape[1] - 1, np.int32)

    @property
    def num_targets(self) -> int:
        """Tokens that are scored."""
        return self.tokens.shape[0] * (self.tokens.shape[1] - 1)


class Texts:
    """Texts cut into windows."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, length: int):
        """Reads a folder with eval/wikitext2.{test,valid}.raw.xz and {valid,train}/*.jsonl.xz."""
        self._folder, self._tokenizer, self.length = folder, tokenizer, length

    def wikitext(self, count: int, *, scored: bool = True) -> Windows:
        """Windows spread over the test text; not to be scored, over the validation text."""
        split = "test" if scored else "valid"
        packed = (self._folder / "eval" / f"wikitext2.{split}.raw.xz").read_bytes()
        content = joined_rows(lzma.decompress(packed).decode())
        return self._cut("wikitext-2", content, count, "wiki")

    def domain(self, name: str, count: int, *, scored: bool = True) -> Windows:
        """Windows spread over a held-out text; not to be scored, over the first training text."""
        path = self._folder / ("valid" if scored else "train") / f"{name}.jsonl.xz"
        texts: list[str] = []
        with lzma.open(path, "rt", encoding="utf-8") as rows:
            for row in rows:
                texts.append(json.loads(row)["text"])
                if not scored and sum(map(len, texts)) > TRAIN_CHARACTERS:
                    break
        content = "\n\n".join(texts)
        content = content if scored else content[:TRAIN_CHARACTERS]
        return self._cut(name, content, count, name)

    def mixed(self, each: int, *, scored: bool = True) -> Windows:
        """All domains in turn, window by window."""
        parts = [self.domain(name, each, scored=scored) for name in DOMAINS]
        tokens = np.stack([part.tokens for part in parts], axis=1)
        return Windows("mixed", tokens.reshape(-1, tokens.shape[-1]), DOMAINS * each)

    def calibration(self, count: int) -> Windows:
        """Windows of the text that ships, which is none of the others."""
        return self._cut("calibration", shipped_text(), count, "calibration")

    def _cut(self, name: str, content: str, count: int, domain: str) -> Windows:
        ids = np.asarray(self._tokenizer.encode(content), np.int32)
        starts = np.linspace(0, len(ids) - self.length - 1, count).astype(int)
        return Windows(
            name, np.stack([ids[s : s + self.length + 1] for s in starts]), (domain,) * count
        )


class Model:
    """A model whose float32 fits: dense weights, and its experts in every precision."""

    def __init__(self, checkpoint: str, device: jax.Device, method: str):
        """Loads; `method` quantizes."""
        opened = open_checkpoint(checkpoint)
        tokenizer = Tokenizer.from_directory(opened.directory)
        assert tokenizer is not None
        self.config: ModelConfig = opened.config
        self.device, self.tokenizer = device, tokenizer
        self.weights: Any = dict(opened.load(dtype="float32", device=device, progress=False))
        self.dense = {n: leaf for n, leaf in self.weights.items() if n not in EXPERTS}
        gate_up, down = (self._rows(self.weights[n]) for n in EXPERTS)
        self._method, self._experts = method, {"bf16": (gate_up, down)}

    def experts(self, tier: str) -> tuple[jax.Array, jax.Array]:
        """Rows of all experts in a precision, quantized when they are first asked for."""
        if tier not in self._experts:
            quantized = (
                functools.partial(_compensated, bits=3, rank=MILO_RANK)
                if tier == MILO
                else functools.partial(_rounded, bits=BITS[tier], method=self._method)
            )
            gate_up, down = (self._by_layer(quantized, rows) for rows in self._experts["bf16"])
            self._experts[tier] = gate_up, down
        return self._experts[tier]

    def _by_layer(self, quantized: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
        """Quantizes a layer's matrices at a time: a solver's temporaries are many times as large.

        Each matrix stops by itself, so that the result is that of all at once.
        """
        each = self.config.num_experts
        parts = [quantized(rows[i : i + each]) for i in range(0, len(rows), each)]
        return jnp.concatenate(parts)

    @staticmethod
    def _rows(stack: jax.Array) -> jax.Array:
        return stack.reshape(-1, *stack.shape[2:])

    @property
    def num_layers(self) -> int:
        """M."""
        return len(self.config.moe_layers)

    def nbytes(self, tier: str) -> int:
        """Bytes of an expert as it would be stored: codes and float16 scales and zeros."""
        weights = 3 * self.config.model_dim * self.config.expert_dim
        if tier not in BITS:
            return 2 * weights
        return weights * BITS[tier] // 8 + 2 * 2 * weights // GROUP_SIZE


def _rounded(rows: jax.Array, bits: int, method: str) -> jax.Array:
    return quantize_stack(rows, *_how(rows, bits, method)).tensor.dequantize()


def _how(rows: jax.Array, bits: int, method: str, rank: int = 0) -> tuple[Any, None, Program]:
    """Ranks, no calibration and the program of a stack."""
    scheme = Scheme(
        method=method, bits=bits, group_size=min(GROUP_SIZE, rows.shape[-1]), zero_kind="float",
        scale_dtype="float16", factor_bits=3 if rank else 8,
    )  # fmt: skip
    program = Program(scheme=scheme, max_rank=rank, passes=MILO_PASSES if rank else 1)
    return jnp.full(len(rows), rank, jnp.int32), None, program


def _compensated(rows: jax.Array, bits: int, rank: int) -> jax.Array:
    """MiLo's matrices: codes, and INT3 factors of one rank (wider ones where those do harm)."""
    found = quantize_stack(rows, *_how(rows, bits, "milo", rank))
    (factors,), (wider,) = found.factors, found.safe_factors
    assert factors is not None
    product = _product(factors)
    if wider is not None:
        product = jnp.where(found.surged[:, None, None], _product(wider), product)
    return found.tensor.dequantize() + product


def _product(factors: Any) -> jax.Array:
    u, v = (factor.dequantize() for factor in factors)
    return jnp.einsum("crn,crk->cnk", u, v, precision="highest")


@dataclasses.dataclass
class Measured:
    """A run over windows."""

    nats: np.ndarray  # of each window
    num_targets: int  # tokens that were scored
    shares: dict[str, float]  # of the gate mass, what became of it (`Ledger.shares`)
    promoted: int  # experts that bulk transfers brought since the run began
    # what the windows' `beside` found
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """Perplexity of all windows."""
        return float(np.exp(self.nats.sum() / self.num_targets))

    @property
    def by_window(self) -> tuple[float, ...]:
        """Nats a token of each window."""
        return tuple((self.nats * len(self.nats) / self.num_targets).tolist())


class Served:
    """The model under one policy; its programs serve all settings of it that sweep."""

    def __init__(
        self,
        model: Model,
        policy: AnyPolicy,
        tiers: Sequence[str],
        slots: Sequence[int],
        prefetch: int = 0,
    ):
        """Tables of `slots` of a layer in each tier; `prefetch` experts of the next layer."""
        config, self.model, self.tiers, self.slots = model.config, model, tiers, tuple(slots)
        shape = (model.num_layers, config.num_experts)
        places = np.arange(model.num_layers * config.num_experts).reshape(shape)
        memories = []
        for name, count in zip(tiers, slots, strict=True):
            cache = CacheSizes(
                num_layers=model.num_layers, num_experts=config.num_experts, slots=count,
                transient=1, banks=2 if prefetch else 1,
            )  # fmt: skip
            spec = TierSpec(cache, prefetch, emulated=True)
            made = TierMemory(spec, *model.experts(name), places, model.device)
            made.ledger.expert_bytes = model.nbytes(name)
            memories.append(made)
        width = config.experts_per_token
        self.memory = ExpertMemory(memories, tiers, policy, width=width)
        self.runner = Runner(
            config, model.dense, model.device, kernels=ops.NO_KERNELS, memory=self.memory
        )

    def begin(self, policy: AnyPolicy, held: Sequence[np.ndarray | None] = ()) -> None:
        """Before any token: settings, and what the slots hold (None: the first experts)."""
        first = np.arange(self.model.config.num_experts, dtype=np.int32)
        given = held or [None] * len(self.slots)
        content = [
            np.tile(first[:count], (self.model.num_layers, 1)) if one is None else one
            for one, count in zip(given, self.slots, strict=True)
        ]
        self.memory.read_counters()
        self.memory.reset()
        self.memory._state, self.memory._gate = self.memory._init_policy(policy)
        names = dict.fromkeys(self.tiers)
        self.memory.ledger = Ledger(
            {n: t.ledger for n, t in zip(names, self.memory.tiers, strict=True)}
        )
        for tier, experts in zip(self.memory.tiers, content, strict=True):
            slots = put(seeded(tier.spec.cache, experts), self.memory.place)
            tier.pool = dataclasses.replace(tier.pool, residency=slots)
            tier.ledger.layers = []

    def run(self, windows: Windows, batch: int, *, as_decode: bool = False) -> Measured:
        """Scores windows in their order, so many at once.

        Args:
          as_decode: a token of each window is a step, as when they are generated.
        """
        self.memory.read_counters()
        self.memory.ledger.gate = None
        nats: list[np.ndarray] = []
        more: dict[str, Any] = {}
        if windows.beside is not None:
            found, more = windows.beside.of_served(self, batch)
            nats = [found]
        for part, lengths in windows.batches(batch) if windows.beside is None else ():
            if as_decode:
                zeros = jnp.zeros(len(part), jnp.float32), jnp.asarray(part)
                found, _ = self.runner.scan_windows(_decode_chunk, zeros, part[:, :-1], lengths)
                nats.append(np.asarray(found, np.float64))
            else:
                nats.append(self.runner.score(part[:, :-1], lengths, part[:, 1:]))
        ledger = self.memory.read_counters()
        return Measured(
            np.concatenate(nats), windows.num_targets, ledger.shares, ledger.total("bulk"), more
        )


def _decode_chunk(
    program: steps.StepProgram,
    spec: ChunkSpec,
    state: Any,
    experts: ExpertCache | None,
    inputs: steps.StepInputs,
    chunk: steps.TokenChunk,
) -> steps.StepResult[Any]:
    """A step for `Runner.scan_windows`: tokens one after the other; adds up nats float32[B]."""
    cache, (nats, tokens) = state
    model = merge_weights(program.definition, inputs.weights)
    spec = spec._replace(is_first=False, kv_length=cache.keys.shape[3], kv_lengths=(), cached="xla")

    def one(carry: Any, at: jax.Array) -> tuple[Any, None]:
        cache, experts, nats = carry
        places = jnp.full((len(tokens), 1), at)
        own, target = (jnp.take_along_axis(tokens, places + i, axis=1) for i in (0, 1))
        mask = places < chunk.lengths[:, None]
        cache, experts, hidden, _ = steps.run_layers(
            program, spec, model, cache, experts, inputs, own, places, mask
        )
        lost = model.negative_log_likelihood(hidden, target, steps.SCORED_BYTES)
        return (cache, experts, nats + lost), None

    places = chunk.start + jnp.arange(chunk.tokens.shape[1], dtype=jnp.int32)
    carry, _ = jax.lax.scan(one, (cache, experts, nats), places)
    cache, experts, nats = carry
    return steps.StepResult((cache, (nats, tokens)), experts, None, None)


class EachToken:
    """Teacher-forced as if each token were decoded on its own, all copies of all tiers there.

    The policy is asked once a token, with no other token beside it; its state stays as it begins.
    """

    def __init__(self, model: Model, policy: AnyPolicy, tiers: Sequence[str]):
        """Compiles one program for all settings that sweep."""
        config, self.model, self.policy = model.config, model, policy
        self.spec = PolicySpec(
            num_layers=model.num_layers,
            num_experts=config.num_experts,
            width=config.experts_per_token,
            tiers=tuple(tiers),
            expert_bytes=tuple(model.nbytes(name) for name in tiers),
            slots=(config.num_experts,) * len(tiers),
        )
        parts = zip(*(model.experts(name) for name in tiers), strict=True)
        self._stacks = tuple(jnp.concatenate(part)[None] for part in parts)
        self._definition = model_definition(config, holds_experts=False)
        self._score = jax.jit(self._nats)

    def run(self, policy: AnyPolicy, windows: Windows) -> Measured:
        """Scores windows one at a time; without shares."""
        state = policy.init(self.spec)
        found = [
            self._score(state, self.model.dense, self._stacks, jnp.asarray(row[None]))
            for row in windows.tokens
        ]
        nats, hidden = zip(*found, strict=True)
        more = windows.beside.of_hidden(hidden)[1] if windows.beside else {}
        return Measured(np.array(nats, np.float64), windows.num_targets, {}, 0, more)

    def _nats(
        self, state: Any, weights: Any, stacks: Any, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Nats of a window, and its last hidden states."""
        model = merge_weights(self._definition, weights)
        c, inputs = self.model.config, tokens[:, :-1]
        rows_of_tier = self.model.num_layers * c.num_experts

        def decided(layer: Index, routing: Routing) -> Decision:
            def alone(probabilities: jax.Array, ids: jax.Array, weights: jax.Array) -> Decision:
                resident = jnp.ones((len(self.spec.tiers), c.num_experts), bool)
                seen = Observation(
                    jnp.int32(layer), probabilities[None], ids[None], weights[None],
                    jnp.ones(1, bool), resident,
                )  # fmt: skip
                return self.policy.decide(state, seen)[0]._replace(ahead=None)

            return jax.vmap(alone)(routing.probabilities, routing.ids, routing.weights)

        class Decided(Experts):
            def __call__(self, carry: None, inputs: MoeInputs) -> tuple[jax.Array, None, None]:
                layer, x, routing, token_mask, *_ = inputs
                found = decided(layer.mlp, routing)
                ids, tier, share = (part[:, 0] for part in (found.ids, found.tier, found.weights))
                row = tier * rows_of_tier + layer.mlp * c.num_experts + ids
                pairs = ExpertPairs(jnp.maximum(row, 0), (tier >= 0) & token_mask[:, None])
                products = products_by_block(x, pairs, held, num_copies, 2**28)
                return combine(products, pairs, share, x.dtype), None, None

        held = ExpertStacks(stacks[0], stacks[1], 0)
        num_copies = len(self.spec.tiers) * c.num_experts
        places = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None]
        hidden, _, _ = model.layers(
            inputs, places, jnp.ones(inputs.shape, bool),
            lambda _, q, k, v: causal_attention(q, k, v, c.sliding_window, "xla"), Decided(),
        )  # fmt: skip
        return jnp.sum(model.negative_log_likelihood(hidden, tokens[:, 1:], 2**26)), hidden
