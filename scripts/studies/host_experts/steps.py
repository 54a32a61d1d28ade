"""Steps of layers of experts, with and without jobs for the host, and tokens to run them on."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.experts.host_worker import Library, Workers
from moejax.experts.pinned_memory import allocate_host_arrays
from moejax.weights.qtensor import QTensor
from pallas_kernels import expert_fetch, grouped_dequant_matmul, host_job, layout
from pallas_kernels import host_mailbox as mailbox
from pallas_kernels.packed import PackedMatrices

LAYERS, EXPERTS, WIDTH = 48, 128, 8  # of Qwen3-30B-A3B
MODEL_DIM, EXPERT_DIM = 2048, 768
BITS, GROUP = 4, 64
SLOTS = 192  # of the pool: the first WIDTH are for what is fetched, the others are hits
SHAPES = ((2 * EXPERT_DIM, MODEL_DIM), (MODEL_DIM, EXPERT_DIM))  # [outputs, inputs]
MAILBOX = mailbox.Mailbox(MODEL_DIM)
EXPERT_BYTES = sum(n * k // 2 + 4 * n * k // GROUP for n, k in SHAPES)

Matrices = tuple[PackedMatrices, PackedMatrices]


@dataclasses.dataclass(frozen=True, repr=False)
class Store:
    """Experts in host memory, and the mailbox, with their addresses."""

    hosts: Matrices
    views: list[np.ndarray]  # words, scales, zeros of gate_up, then of down
    mailbox: np.ndarray  # uint8
    kept: Any  # what owns the memory

    def start(self, library: Library, count: int) -> Workers:
        """Has threads serve the mailbox."""
        views: list[Any] = self.views
        gate_up, down = (
            QTensor(
                words=views[3 * i], scales=views[3 * i + 1], zeros=views[3 * i + 2],
                num_inputs=inputs, bits=BITS, group_size=GROUP,
            )
            for i, (_, inputs) in enumerate(SHAPES)
        )  # fmt: skip
        return library.start(count, self.mailbox, gate_up, down)

    def put_input(self, x: np.ndarray, weights: np.ndarray) -> None:
        """Writes a job's input, as `host_job.post` does."""
        self.mailbox[mailbox.X : mailbox.X + 4 * x.size].view(np.float32)[:] = x
        at = mailbox.WEIGHTS
        self.mailbox[at : at + 4 * weights.size].view(np.float32)[:] = weights

    def reply(self) -> np.ndarray:
        """float32[D], the sum that the last job got."""
        at = MAILBOX.reply + mailbox.Y
        return self.mailbox[at : at + 4 * MODEL_DIM].view(np.float32).copy()


class Token(NamedTuple):
    """A token's routing, by layer; what runs where. Several are stacked: [T, ...]."""

    src: Any  # int32[L, A], rows to fetch; -1: none
    dst: Any  # int32[L, A], their slots
    tier: Any  # int32[L, A], 0: on the GPU, -1: not
    slot: Any  # int32[L, A]
    hosted: Any  # int32[L, A], rows that the host multiplies; -1: none


def packed(arrays: Sequence[Any]) -> Matrices:
    """Joins words, scales and zeros of gate_up, then of down."""
    made = [
        PackedMatrices(
            words=arrays[3 * i], scales=arrays[3 * i + 1], zeros=arrays[3 * i + 2],
            num_inputs=inputs, bits=BITS, group_size=GROUP,
        )
        for i, (_, inputs) in enumerate(SHAPES)
    ]  # fmt: skip
    return made[0], made[1]


def _shapes(count: int) -> list[jax.ShapeDtypeStruct]:
    found = []
    for outputs, inputs in SHAPES:
        words = (count, outputs, layout.num_words(inputs, BITS))
        groups = (count, outputs, layout.num_groups(inputs, GROUP))
        found += [jax.ShapeDtypeStruct(words, jnp.uint32)]
        found += [jax.ShapeDtypeStruct(groups, jnp.float16)] * 2
    return found


def make_store(device: jax.Device, rows: int) -> Store:
    """Random experts whose outputs are about as large as their inputs."""
    rng = np.random.default_rng(0)
    letters = jax.ShapeDtypeStruct((MAILBOX.nbytes,), jnp.uint8)
    made = allocate_host_arrays([*_shapes(rows), letters], device)
    views = [array.views[0] for array in made]
    for view in views[:-1]:
        few = min(rows, 61)
        if view.dtype == np.uint32:
            part = rng.integers(0, 2**32, (few, *view.shape[1:]), np.uint32)
        else:
            is_scale = view is views[1] or view is views[4]
            low, width = (0.003, 0.004) if is_scale else (7.0, 1.0)
            part = (low + width * rng.random((few, *view.shape[1:]))).astype(np.float16)
        for start in range(0, rows, few):
            view[start : start + few] = part[: rows - start]
    views[-1][:] = 0
    return Store(packed([array.array for array in made[:-1]]), views[:-1], views[-1], made)


def make_pools(store: Store) -> Matrices:
    """Slots on the device, filled with the first rows."""
    return packed([jnp.asarray(view[:SLOTS]) for view in store.views])


def address_of(store: Store) -> jax.Array:
    """int32[2], halves of the mailbox's address."""
    return jnp.asarray(np.array([store.mailbox.ctypes.data], np.uint64).view(np.int32))


class Carry(NamedTuple):
    """Values that a token hands to the next, in one place: addresses in a graph stay."""

    pools: Matrices
    x: jax.Array  # [1, D]
    jobs: jax.Array  # int32[2], the state of jobs
    turn: jax.Array  # int32[], the token among those stacked


def first_carry(pools: Matrices) -> Carry:
    """The carry of a first token."""
    x = jax.random.normal(jax.random.key(0), (1, MODEL_DIM)).astype(jnp.bfloat16)
    return Carry(pools, x, jnp.zeros(2, jnp.int32), jnp.int32(0))


def make_token(
    rng: np.random.Generator, rows: int, num_hosted: Sequence[int], hit_rate: float = 0.0,
    layers: int = LAYERS,
) -> Token:  # fmt: skip
    """Draws a token's routing: each of A experts is a hit with some probability.

    Args:
      num_hosted: by number of misses, 0 to A, how many of them the host multiplies.
    """
    src = np.full((layers, WIDTH), -1, np.int32)
    tier, at_host = np.zeros_like(src), np.full_like(src, -1)
    slot = WIDTH + rng.integers(0, SLOTS - WIDTH, src.shape, np.int32)
    for layer in range(layers):
        misses = np.flatnonzero(rng.random(WIDTH) >= hit_rate)
        wanted = rng.choice(rows, len(misses), replace=False)
        hosted = num_hosted[len(misses)]
        tier[layer, misses[:hosted]] = -1
        src[layer, misses[hosted:]] = wanted[hosted:]
        slot[layer, misses[hosted:]] = misses[hosted:]
        at_host[layer, misses[:hosted]] = wanted[:hosted]
    dst = np.where(src >= 0, slot, -1)
    return Token(src, dst, tier, slot, at_host)


def make_step(layers: int, posts: bool, implementation: str | None = None) -> Callable[..., Any]:
    """Builds a step from (carry, hosts, tokens, address) to a carry; the first is to be donated.

    Args:
      posts: jobs are posted and waited for; without, none may be in the tokens.
      implementation: of the products.
    """

    @jax.jit  # one trace serves all layers
    def layer(
        pools: Matrices, x: jax.Array, jobs: jax.Array, hosts: Matrices, of: Token,
        address: jax.Array,
    ) -> Any:  # fmt: skip
        weights, hosted = jnp.full((1, WIDTH), 1 / WIDTH, jnp.float32), of.hosted[None]
        if posts:
            jobs = host_job.post(x, hosted, weights, jobs, address)
        pools = expert_fetch.fetch(pools, hosts, of.src, of.dst, after=jobs if posts else ())
        pairs = grouped_dequant_matmul.Assignments(of.tier[None], of.slot[None], weights)
        y = grouped_dequant_matmul.moe_layer(
            x, pairs, pools[:1], pools[1:], implementation=implementation
        ).astype(jnp.float32)
        if posts:
            y, jobs = host_job.add_reply(y, hosted, jobs, address)
        return pools, (y * jax.lax.rsqrt(jnp.mean(y * y) + 1e-12)).astype(jnp.bfloat16), jobs

    def step(carry: Carry, hosts: Matrices, tokens: Token, address: jax.Array) -> Carry:
        pools, x, jobs, turn = carry
        token = Token(*(part[turn] for part in tokens))
        for number in range(layers):
            of_layer = Token(*(part[number] for part in token))
            pools, x, jobs = layer(pools, x, jobs, hosts, of_layer, address)
        return Carry(pools, x, jobs, (turn + 1) % len(tokens.src))

    return step


class Runner:
    """A compiled step; runners of one store share what tokens carry."""

    def __init__(
        self, store: Store, shared: list[Carry], layers: int = LAYERS, posts: bool = True
    ) -> None:
        """Compiles when it first runs.

        Args:
          shared: the carry, one element, replaced by each token.
        """
        self._step = jax.jit(make_step(layers, posts), donate_argnums=0)
        self._store, self._shared, self._address = store, shared, address_of(store)

    def run(self, tokens: Token) -> None:
        """Starts the next one of stacked tokens."""
        self._shared[0] = self._step(self._shared[0], self._store.hosts, tokens, self._address)

    def wait(self) -> Carry:
        """Waits for what was started; ValueError if a reply was late."""
        carry = jax.block_until_ready(self._shared[0])
        if int(carry.jobs[1]):
            raise ValueError("a reply was late")
        return carry

    def restart(self) -> None:
        """Has the next token begin from the first input."""
        carry = self._shared[0]
        self._shared[0] = first_carry(carry.pools)._replace(jobs=carry.jobs)
