"""Decoding under policies, teacher-forced: what crosses the link, and how far predictions move.

Each token of a window is a decode step of the engine's own, under the policy, with tables in place
of slots (`bench.py`); bulk transfers land after each call of 16 tokens. Predictions
are compared with those of the model before any of it was quantized.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.experts import tiered
from moejax.inference import steps
from moejax.inference.runner import Runner
from moejax.models.kv_cache import KVCache
from moejax.policies.base import AnyPolicy
from moejax.routing.simulate.costs import Machine, Traffic, step_ms
from moejax.routing.simulate.segments import CALL_STEPS
from scripts.studies.quality.bench import Model, Served, Windows

# A model whose routing is the demo's, of the size of Qwen3-30B-A3B: bytes of its experts for a
# token in INT4 (48 layers of 8, 2,654,208 each), a resident decode step on an H200, PCIe 5 x16.
TOKEN_BYTES = 48 * 8 * 2_654_208
ROOM = 64  # experts that set out between two calls, as of `simulation.sweeping`
MACHINE = Machine(base_ms=1.89, link_gib_per_s=50.0)


class Compared(NamedTuple):
    """exact: float32[T, V], log-probabilities; kl: float32[T], nats, of a window's tokens."""

    exact: jax.Array
    kl: jax.Array


def forced(
    program: steps.Program,
    spec: Any,
    state: tuple[KVCache, Compared],
    experts: Any,
    inputs: steps.StepInputs,
    chunk: steps.Chunk,
) -> steps.StepResult[tuple[KVCache, Compared]]:
    """Step for `Runner.scan_windows`: a window int32[1, T], T % 16 == 0, token by token."""
    cache, compared = state
    alone = spec._replace(is_first=False, kv_length=cache.length)
    assert isinstance(program.experts, tiered.ExpertCacheSpec)
    sizes = program.experts.cache
    no_coming = jnp.zeros((sizes.num_layers, len(program.experts.pools), sizes.num_experts), bool)

    def token(carry: tuple[KVCache, Any], now: Any) -> tuple[tuple[KVCache, Any], jax.Array]:
        token, position, exact = now
        one = steps.Chunk(token[None, None], position, position[None] + 1)
        cache, experts, logits, _ = steps.chunk_logits(program, alone, *carry, inputs, one)
        found = jax.nn.log_softmax(logits[0, 0].astype(jnp.float32))
        return (cache, experts), jnp.sum(jnp.exp(exact) * (exact - found))

    def call(carry: tuple[KVCache, Any], now: Any) -> tuple[tuple[KVCache, Any], jax.Array]:
        (cache, experts), kl = jax.lax.scan(token, carry, now)
        experts, _ = tiered.ask(program.experts, experts, no_coming, jnp.int32(ROOM))
        return (cache, experts), kl

    count = chunk.tokens.shape[1]
    rows = (chunk.tokens[0], jnp.arange(count, dtype=jnp.int32), compared.exact)
    rows = jax.tree.map(lambda a: a.reshape(-1, CALL_STEPS, *a.shape[1:]), rows)
    (cache, experts), kl = jax.lax.scan(call, (cache, experts), rows)
    return steps.StepResult((cache, Compared(compared.exact, kl.reshape(-1))), experts, None, None)


class Exact:
    """The model's own predictions, each window's once."""

    def __init__(self, model: Model):
        self._runner = Runner(model.config, model.weights, model.device)
        self._found: dict[bytes, jax.Array] = {}

    def of(self, tokens: np.ndarray) -> jax.Array:
        """float32[T, V] log-probabilities after each of int32[T]."""
        key = tokens.tobytes()
        if key not in self._found:
            logits = self._runner.logits(tokens[None])[0]
            self._found[key] = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
        return self._found[key]


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A setting: nats a token of the exact model to it, and what moved for it.

    Attributes:
      kl: mean over the tokens.
      link: bytes over the link, as a share of those of loading every expert on demand in INT4.
      tpot_ms: of `MACHINE`, whose experts for a token have `TOKEN_BYTES` in INT4.
      hit_rate: experts that were in a slot of their tier.
      shares: of the gate mass, what became of it.
      device: bytes of the slots, as a share of all experts in INT4.
    """

    kl: float
    link: float
    tpot_ms: float
    hit_rate: float
    shares: dict[str, float]
    device: float


class Decoding:
    """A policy's programs, for all settings of it that sweep."""

    def __init__(self, model: Model, exact: Exact, policy: AnyPolicy, tiers: Any, slots: Any):
        """Tables of `slots` of a layer in each tier."""
        self.exact, self.model = exact, model
        self.served = Served(model, policy, tiers, slots)

    def run(self, policy: AnyPolicy, warm: Windows, windows: Windows) -> Decoded:
        """From slots that hold the first experts, through `warm`, which does not count."""
        served, memory = self.served, self.served.memory
        served.begin(policy, held_first(served.slots, self.model))
        self._windows(warm)
        memory.settle()
        memory.ledger.gate = None
        for tier in memory.tiers:
            tier.ledger.layers = []
        kl = self._windows(windows)
        ledger = memory.settle()
        nbytes = np.array([self.model.nbytes(name) for name in served.tiers])
        config, full = self.model.config, self.model.nbytes("int4")
        each = full * self.model.num_layers * config.experts_per_token
        tiers = list(ledger.tiers.values())
        traffic = Traffic(
            num_layers=self.model.num_layers,
            steps=kl.size,
            fetches=0,
            misses=np.array([tier.total("misses") for tier in tiers]),
            ahead=np.zeros((1, len(tiers)), np.int64),
            bulk=np.array([tier.total("bulk") for tier in tiers]),
            expert_bytes=nbytes * TOKEN_BYTES / each,
        )
        return Decoded(
            kl=float(kl.mean()),
            link=sum(traffic.bytes_by_cause.values()) / TOKEN_BYTES,
            tpot_ms=step_ms(MACHINE, traffic),
            hit_rate=ledger.hit_rate,
            shares=ledger.shares,
            device=float(nbytes @ np.array(served.slots)) / (full * config.num_experts),
        )

    def _windows(self, windows: Windows) -> np.ndarray:
        """float[n T], nats of each token."""
        found = []
        for row in windows.tokens:
            tokens = row[:-1]
            compared = Compared(self.exact.of(tokens), jnp.zeros(len(tokens), jnp.float32))
            compared = jax.tree.map(jnp.copy, compared)  # donated
            lengths = np.full(1, len(tokens), np.int32)
            done = self.served.runner.scan_windows(forced, compared, tokens[None], lengths)
            found.append(np.asarray(done.kl))
        return np.concatenate(found)


def held_first(slots: tuple[int, ...], model: Model) -> list[np.ndarray]:
    """int32[M, n] of each tier: the first experts, none in two tiers that are not whole."""
    held, taken = [], 0
    is_whole = [count >= model.config.num_experts for count in slots]
    for count, whole in zip(slots, is_whole, strict=True):
        if any(is_whole) and not whole:
            row = np.zeros(0, np.int32)
        else:
            first = 0 if whole else taken
            row = np.arange(first, min(first + count, model.config.num_experts), dtype=np.int32)
            taken += 0 if whole else len(row)
        held.append(np.tile(row, (model.num_layers, 1)))
    return held
