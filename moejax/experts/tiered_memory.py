"""What an engine holds of experts that are stored in several tiers, under a policy."""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from moejax.experts import residency
from moejax.experts.cache_plan import Jobs
from moejax.experts.expert_memory import ExpertMemory, check_failures
from moejax.experts.expert_pool import ExpertPool, ExpertStore
from moejax.experts.gate_mass import TieredLedger
from moejax.experts.host_store import Expert
from moejax.experts.pooled import PooledExperts
from moejax.experts.tiered import Asked, TieredPool, TieredSpec, ask, no_gate
from moejax.experts.transfer_programs import is_ready
from moejax.models.config import ModelConfig
from moejax.policies.base import (
    AnyPolicy,
    PolicySpec,
    Requests,
)
from moejax.policies.make import with_kernels
from moejax.programs import CompiledPrograms
from moejax.weights import linear as ops
from moejax.weights.qtensor import Weight

NOBODY_SAYS = 2**30  # tokens: more than any policy rests for
POLL_S = 2e-4  # between looks at transfers that are waited for


@dataclasses.dataclass
class _Rest:
    """Since when the policy need not be asked.

    Attributes:
      pending: what was on its way when it was asked.
      tokens: that may pass (`Policy.tokens_until_change`).
      passed: at most so many have.
    """

    pending: Any = None
    tokens: int = 0
    passed: int = 0


class TieredMemory:
    """One `ExpertMemory` a tier, the policy's state, and what it asks for between steps.

    Attributes:
      spec: static facts, part of every compiled step.
      tiers: of falling fidelity; their pools are those of `pool`.
      ledger: sums of what the steps counted, as of the last `settle`.
    """

    def __init__(
        self,
        policy: AnyPolicy,
        names: Sequence[str],
        tiers: Sequence[ExpertMemory],
        *,
        width: int,
    ):
        """Around memories of the tiers, all of one model; the policy's state is as before a token.

        Args:
          policy: who decides; on a GPU by its kernels (`with_kernels`).
          names: of the tiers.
          tiers: their memories.
          width: A, experts a token.

        Raises:
          MoejaxError: the policy's settings do not suit the tiers.
        """
        pools = tuple(tier.spec for tier in tiers)
        self.tiers = tuple(tiers)
        self.device: jax.Device = next(iter(tiers[0].store.row_of.devices()))
        policy = with_kernels(policy, self.device.platform)
        self.spec = TieredSpec(policy, tuple(names), pools)
        self._policy_spec = policy_spec(self.spec, tiers, width)
        between = policy.transfer_tiers(self._policy_spec)
        pools = tuple(
            dataclasses.replace(pool, between_steps=i in between) for i, pool in enumerate(pools)
        )
        self.spec = dataclasses.replace(self.spec, pools=pools)
        self._state, self._gate = self._fresh()
        self.ledger = TieredLedger({n: t.ledger for n, t in zip(names, tiers, strict=True)})
        self.programs = CompiledPrograms()
        self._answer: Asked | None = None
        self._counts = False  # whether tokens had run when that was asked
        self._num_asked = 0  # since the last `settle`
        self._rest = _Rest()
        self._coming: dict[Any, jax.Array] = {}
        self._room: dict[int, jax.Array] = {}
        held = self.pool, *self._on_their_way()
        said = jax.eval_shape(functools.partial(ask, self.spec), *held)[1]
        self._asks = len(said.moved.layer) + len(said.ahead.layer) > 0
        self._is_emulated = any(pool.emulated for pool in pools)
        self.ledger.asked = 0 if self._asks else None
        if len(said.ahead.layer) and not any(tier.disk and tier.disk.cache for tier in tiers):
            logging.warning(
                "the policy's foresight does nothing: no tier has experts on the disk and rows of "
                "host memory to read them to"
            )
        self._lock = threading.RLock()

    @property
    def pool(self) -> TieredPool:
        """The device's state; replaced after each step, to which it is donated."""
        return TieredPool(tuple(tier.pool for tier in self.tiers), self._state, self._gate)

    @pool.setter
    def pool(self, pool: TieredPool) -> None:
        for tier, own in zip(self.tiers, pool.pools, strict=True):
            tier.pool = own
        self._state, self._gate = pool.state, pool.gate

    @property
    def store(self) -> tuple[ExpertStore, ...]:
        """Operands of the steps."""
        return tuple(tier.store for tier in self.tiers)

    @property
    def asks(self) -> bool:
        """Whether the policy has experts moved between steps."""
        return self._asks

    def stacks(self) -> dict[str, Weight]:
        """See `ExpertMemory.stacks`; of the first tier."""
        return self.tiers[0].stacks()

    @property
    def failures(self) -> int:
        """See `ExpertMemory.failures`; of all tiers."""
        return sum(tier.failures for tier in self.tiers)

    @property
    def failure(self) -> str:
        """Likewise: why the last one of the first tier that had any was."""
        return next((tier.failure for tier in self.tiers if tier.failures), "")

    def begin_session(self) -> int:
        """See `ExpertMemory.begin_session`."""
        with self._lock:
            return sum([tier.begin_session() for tier in self.tiers])

    @contextlib.contextmanager
    def step(self, since: int | None = None, num_tokens: int = 0) -> Iterator[None]:
        """See `ExpertMemory.step`; a policy whose state a failed step took begins anew.

        Args:
          since: as there.
          num_tokens: that the step runs, padding too; 0: nobody says, and the policy is asked for
            transfers before the next step.
        """
        with self._lock, contextlib.ExitStack() as stack:
            for tier in self.tiers:  # each forgets what it may have wrong before one is raised
                stack.enter_context(tier.step(sends=False))
            try:
                check_failures(self, since)
                self._before_step(num_tokens or NOBODY_SAYS)
                for tier in self.tiers:
                    tier.send()
                yield
            except BaseException as error:
                leaves = jax.tree.leaves((self._state, self._gate))
                lost = any(leaf.is_deleted() for leaf in leaves)
                if lost or isinstance(error, jax.errors.JaxRuntimeError):
                    self._begin_anew()
                raise

    @contextlib.contextmanager
    def reading(self, since: int | None = None) -> Iterator[None]:
        """See `ExpertMemory.reading`."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            with self._lock:  # all at once: a step of another thread takes all of them
                for tier in self.tiers:
                    tier.renew()
                self._begin_anew()
            raise
        check_failures(self, since)

    def settle(self) -> TieredLedger:
        """The ledger after all steps so far, for which it waits."""
        with self._lock, self.reading():
            for tier in self.tiers:
                tier.settle()
            self.ledger.add(np.asarray(jax.device_get(self._gate), np.float64))
            self._gate = jax.device_put(np.zeros(self._gate.shape, np.float32), self.device)
            if self._asks:
                self.ledger.asked = (self.ledger.asked or 0) + self._num_asked
                self._num_asked = 0
        return self.ledger

    def close(self) -> None:
        """See `ExpertMemory.close`."""
        for tier in self.tiers:
            tier.close()

    def catch_up(self, since: int | None = None) -> int:
        """Moves all that the policy wants moved now, and waits until it is in slots.

        Called between the chunks of a text that is scored, so that what a policy promotes, and
        when, is not left to the clock.

        Args:
          since: see `ExpertMemory.begin_session`.

        Returns:
          Tokens before which it asks for nothing more (`Policy.tokens_until_change`).
        """
        with self._lock, self.reading(since):
            has_run, self._answer = self._rest.passed > 0, None
            self._num_asked += has_run
            last: Any = None
            while True:
                self._arrive(since)
                self.pool, answer = self._ask()
                moved, ahead, idle = jax.device_get(answer)
                self._request(moved)
                self._read_ahead(ahead)
                rows = np.stack(moved)
                if rows.max(initial=-1) < 0 or not self.spec.policy.repeats_requests:
                    break
                if np.array_equal(rows, last):
                    break  # what could not be moved
                last = rows
            self._arrive(since)
            self._rest = _Rest(self._pending(), max(1, int(idle)))
            return int(idle)

    def _arrive(self, since: int | None) -> None:
        """Waits for the transfers that are on their way."""
        moving = [tier for tier in self.tiers if tier.transfers is not None]
        while any(tier.transfers and tier.transfers.num_pending for tier in moving):
            for tier in moving:
                with tier.step(since):
                    pass
            time.sleep(POLL_S)

    def _ask(self) -> tuple[TieredPool, Asked]:
        """Dispatches the question what the policy wants moved."""
        held = (self.pool, *self._on_their_way())
        program = self.programs.get(ask, (self.spec,), held, num_donated=1)
        return program(*held)

    def _before_step(self, num_tokens: int) -> None:
        """Passes on what the policy asked for after an earlier step, and asks once more.

        It is not asked while it has said that nothing would come of it.
        """
        if not self._asks:
            return
        rest = self._rest
        if self._answer is not None:
            # Emulated slots are for the outcome: when they change is not left to the clock.
            if not (self._is_emulated or is_ready(self._answer.idle)):
                rest.passed += num_tokens
                return
            answer, self._answer = self._answer, None
            self._num_asked += self._counts
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # of a step that failed
                moved, ahead, idle = jax.device_get(answer)
                self._request(moved)
                self._read_ahead(ahead)
                rest.tokens = int(idle)
        pending = self._pending()
        if rest.passed >= rest.tokens or pending != rest.pending:
            self.pool, self._answer = self._ask()
            for numbers in jax.tree.leaves(self._answer):
                numbers.copy_to_host_async()
            self._counts = rest.passed > 0
            self._rest = rest = _Rest(pending)
        rest.passed += num_tokens

    def _request(self, requests: Requests) -> None:
        rows = zip(*(np.asarray(numbers).tolist() for numbers in requests), strict=True)
        for layer, expert, tier in rows:
            if layer >= 0 and (transfers := self.tiers[tier].transfers) is not None:
                transfers.request(layer, [expert])

    def _read_ahead(self, requests: Requests) -> None:
        """Tells the disk what the policy foresees, where it foresees anything."""
        rows = np.stack([np.asarray(numbers) for numbers in requests], axis=1)
        for i, tier in enumerate(self.tiers):
            found = rows[(rows[:, 0] >= 0) & (rows[:, 2] == i), :2].tolist()
            if tier.disk is not None and found:
                tier.disk.foresee([(layer, expert) for layer, expert in found])

    def _pending(self) -> tuple[tuple[Expert, ...], ...]:
        """Of each tier what is on its way between steps."""
        return tuple(tuple(tier.transfers.pending) if tier.transfers else () for tier in self.tiers)

    def _on_their_way(self) -> tuple[jax.Array, jax.Array]:
        """bool[M, T, E], what is; int32[], experts that may set out before the next step.

        Copied to the device where they differ from those of the last time: a copy waits for the
        step before, and what waits for it begins later.
        """
        free = [tier.transfers.num_free for tier in self.tiers if tier.transfers]
        room, pending = min(free, default=np.iinfo(np.int32).max), self._pending()
        if room not in self._room:
            self._room = {room: jax.device_put(np.int32(room), self.device)}
        if pending not in self._coming:
            cache = self.spec.cache
            coming = np.zeros((cache.num_layers, len(self.tiers), cache.num_experts), bool)
            for i, experts in enumerate(pending):
                for layer, expert in experts:
                    coming[layer, i, expert] = True
            self._coming = {pending: jax.device_put(coming, self.device)}
        return self._coming[pending], self._room[room]

    def _fresh(self, policy: AnyPolicy | None = None) -> tuple[Any, jax.Array]:
        state = (policy or self.spec.policy).init(self._policy_spec)
        state = jax.device_put(state, self.device)
        # Leaves of their own: a state may name one array twice, which cannot be donated.
        state = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(state)
        gate = no_gate(self.spec.cache.num_layers, len(self.tiers))
        return state, jax.device_put(gate, self.device)

    def _begin_anew(self, policy: AnyPolicy | None = None) -> None:
        self._state, self._gate = self._fresh(policy)
        self._answer, self._rest = None, _Rest()

    def reset(self, policy: AnyPolicy | None = None, held: Sequence[np.ndarray] = ()) -> None:
        """As before any token.

        Args:
          policy: another one that the same programs serve: it differs in settings that sweep.
          held: int32[M, n] of each tier, what its slots hold; () for what they hold now. Of tiers
            that are emulated: no bytes are moved for it.

        Raises:
          ValueError: steps follow the rule of a policy (`Policy.decode_rule`) whose form is not the
            other one's.
        """
        if policy is not None and not any(tier.spec.emulated for tier in self.tiers):
            own, other = (
                jax.eval_shape(one.decode_rule, self._state) for one in (self.spec.policy, policy)
            )
            differ = str(jax.tree.structure(own)) != str(jax.tree.structure(other))
            if own is not None and differ:
                raise ValueError(f"{policy} has another rule than {self.spec.policy}: open it anew")
        with self._lock:
            self._begin_anew(policy)
            for tier, experts in zip(self.tiers, held, strict=len(held) > 0):
                assert tier.spec.emulated
                content = residency.seeded(tier.spec.cache, experts)
                content = jax.device_put(content, self.device)
                tier.pool = dataclasses.replace(tier.pool, residency=content)


def policy_spec(spec: TieredSpec, tiers: Sequence[ExpertMemory], width: int) -> PolicySpec:
    """What the policy may know.

    Args:
      spec: of the tiers; its policy has them checked.
      tiers: their memories.
      width: A, experts a token.
    """
    cache = spec.cache
    return PolicySpec(
        num_layers=cache.num_layers,
        num_experts=cache.num_experts,
        width=width,
        tiers=spec.names,
        expert_bytes=tuple(tier.ledger.expert_bytes for tier in tiers),
        slots=tuple(pool.cache.slots for pool in spec.pools),
    )


def warm(
    memory: ExpertMemory, config: ModelConfig, kernels: ops.Kernels, experts: np.ndarray
) -> None:
    """Fills the pool as `warmed`, and again whenever it is lost.

    A pool that holds every expert from now on is complete (`PoolSpec.is_complete`): to be called
    before the spec is used.
    """
    memory.pool = warmed(memory, config, kernels, experts)
    memory.fill = lambda lost: warmed(lost, config, kernels, experts)
    if experts.shape[1] == memory.spec.cache.num_experts and not memory.spec.emulated:
        memory.spec = dataclasses.replace(memory.spec, is_complete=True)


def warmed(
    memory: ExpertMemory, config: ModelConfig, kernels: ops.Kernels, experts: np.ndarray
) -> ExpertPool:
    """The pool with experts in its slots, as they lie before any token.

    Args:
      memory: empty, and of host rows that have these experts.
      config: of the model.
      kernels: which may copy.
      experts: int32[M, n], n at most the slots of a layer, different ones in a row.
    """
    spec, store = dataclasses.replace(memory.spec, is_complete=False), memory.store
    cache = spec.cache
    content = jax.device_put(residency.seeded(cache, experts), next(iter(store.row_of.devices())))

    def fill(pool: ExpertPool, store: ExpertStore) -> ExpertPool:
        runs = PooledExperts(spec, config, pool, store, "block", kernels, is_prefill=False)
        for bank in range(cache.banks if not spec.emulated else 0):
            layers = np.arange(bank, cache.num_layers, cache.banks)
            first = layers[:, None] // cache.banks * cache.slots
            slots = (first + np.arange(experts.shape[1])[None]).reshape(-1).astype(np.int32)
            rows = store.row_of[layers[:, None], experts[layers]].reshape(-1)
            if slots.size:
                runs.fill(bank, Jobs(rows, jnp.asarray(slots), None))
        return runs.pool

    pool = jax.jit(fill, donate_argnums=0)(memory.pool, store)
    return dataclasses.replace(pool, residency=content)
