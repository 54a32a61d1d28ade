"""The expert cache as an engine holds it between steps: slots, the host's rows, a policy's state.

`ExpertMemory` has one `TierMemory` for each stored form of the experts. Without a policy there is
one tier, and what a step needs is fetched on demand.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from moejax.devices import REPLICATED, DeviceMesh, Place, mesh_of, put, specs_of
from moejax.errors import MoejaxError
from moejax.experts import residency
from moejax.experts.disk_cache import DiskExperts
from moejax.experts.host_cores import HostCores
from moejax.experts.host_store import Expert
from moejax.experts.ledger import Ledger, TierLedger
from moejax.experts.state import (
    CacheSpec,
    ExpertCache,
    HostJobs,
    HostRows,
    TierSlots,
    TierSpec,
    no_gate,
)
from moejax.experts.tier_step import TierStep
from moejax.experts.tiering import STORED
from moejax.experts.transfer_programs import TransferRequests, is_ready, request_transfers
from moejax.experts.transfers import Transfers
from moejax.models.config import ModelConfig
from moejax.models.leaf_kinds import EXPERT_LEAVES
from moejax.policies.base import AnyPolicy, PolicySpec
from moejax.policies.make import with_kernels
from moejax.programs import CompiledPrograms
from moejax.weights import linear as ops
from moejax.weights.qtensor import Compensator, Weight
from pallas_kernels.cache_plan import Fetch

UNKNOWN_TOKENS = 2**30  # more than any policy rests for
POLL_S = 2e-4  # between looks at transfers that are waited for

_copied = jax.jit(jnp.copy)  # ready when every step so far is over; its operand is not donated


class TierMemory:
    """Experts of one model in one stored form; `ExpertMemory` guards it by its lock.

    Attributes:
      spec: static facts, part of every compiled step.
      pool: the device's state; replaced after each step, to which it is donated.
      store: operands of the steps.
      ledger: sums of what the steps counted, as of the last `ExpertMemory.read_counters`.
      disk: reads experts that the store lacks; None where it has all.
      host: multiplies some misses of decode steps (`use_host`); None: all are fetched.
      transfers: move experts between steps; None where none are planned.
      fill: gives a new pool its first experts; None: it starts empty.
      base: the next tier where this one refines it (`TierSpec.refines`).
    """

    def __init__(
        self,
        spec: TierSpec,
        gate_up: Weight,
        down: Weight,
        row_of: np.ndarray,
        place: Place,
        terms: tuple[tuple[Compensator, ...], tuple[Compensator, ...]] = ((), ()),
        disk: DiskExperts | None = None,
    ) -> None:
        """Wraps a filled store (fields as of `HostRows`); allocates an empty pool.

        `place`: the device, or the replicated sharding of a mesh.
        """
        rows = put(np.asarray(row_of, np.int32), place)
        self.spec, self.store = spec, HostRows(gate_up, down, rows, terms)
        self.pool = self._empty_pool()
        leaves = jax.tree.leaves((gate_up, down))
        nbytes = (math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in leaves)
        over_all = spec.refines > 0 and not spec.shares_slots
        self.ledger = TierLedger(sum(nbytes), over_all)
        self.disk = disk
        self.host: HostCores | None = None
        self.base: TierMemory | None = None
        self.transfers: Transfers | None = None
        self.fill: Callable[[TierMemory], TierSlots] | None = None
        self._forgotten = 0  # failures of the disk of which nothing is cached any more

    def _empty_pool(self) -> TierSlots:
        cache, place, mesh = self.spec.cache, self.store.row_of.sharding, self.mesh

        def slots(count: int) -> tuple[Weight, Weight]:
            """Slots of one array, on each device."""
            count, where = count * (mesh.size if mesh else 1), mesh.split() if mesh else place
            rows = self.store.gate_up, self.store.down
            return jax.tree.map(
                lambda row: jnp.zeros((count, *row.shape[1:]), row.dtype, device=where), rows
            )

        used = None
        if self.spec.read is not None:
            used = jnp.zeros((cache.num_layers, cache.num_experts), jnp.int32, device=place)
        num_banks = 0 if self.spec.shares_slots else cache.banks
        banks = tuple(slots(cache.num_slots) for _ in range(num_banks))
        state = (self._empty_tables(), residency.no_counts(cache.num_layers))
        tables, counts = self._put(state)
        jobs = None if self.store.jobs is None else put(self._host_state(), place)
        apart = slots(cache.apart) if cache.apart else None
        return TierSlots(banks, tables, counts, used, apart, jobs)

    def _host_state(self) -> np.ndarray:
        """State of jobs before the next one, int32[2]."""
        assert self.host is not None
        return np.asarray([self.host.last_number, 0], np.int32)

    def use_host(self, host: HostCores) -> None:
        """Has the host's cores multiply some misses from now on."""
        self.host, place = host, self.store.row_of.sharding
        self.store = dataclasses.replace(self.store, jobs=HostJobs(*put(host.operands, place)))
        self.pool = dataclasses.replace(self.pool, jobs=put(self._host_state(), place))

    def _put(self, state: Any) -> Any:
        """Puts tables or counts on the device; where experts are handed out each has its own."""
        if not self.spec.handed_out:
            return put(state, self.store.row_of.sharding)
        assert self.mesh is not None
        return self.mesh.own(state)

    def _empty_tables(self) -> residency.Residency:
        content = residency.empty(self.spec.cache)
        if self.spec.shares_slots:  # the next tier's has the planes of both
            content = dataclasses.replace(content, table=content.table[:, :0])
        return content

    @property
    def mesh(self) -> DeviceMesh | None:
        """Mesh whose devices have a share of every expert; None: one device has them whole."""
        return mesh_of(self.store.row_of.sharding)

    def stacks(self) -> dict[str, Weight]:
        """Shapes of a device's bank as leaves [1, S, ...], with low-rank terms."""
        found, num_slots = {}, self.spec.cache.num_slots
        by_slot = jax.ShapeDtypeStruct((1, num_slots), "int32")
        shares, pool = self.spec.shares_slots, self.pool
        if shares:
            assert self.base is not None
            pool = self.base.pool
        slots, terms = jax.eval_shape(
            lambda bank, terms: (jax.tree.map(lambda leaf: leaf[None, :num_slots], bank), terms),
            pool.banks[0], self.store.terms,
        )  # fmt: skip
        if shares:
            slots = tuple(stack.words for stack in slots)
        if self.base is not None:
            leading = self.base.stacks()
            by_slot = jax.ShapeDtypeStruct((1, self.base.spec.cache.num_slots), "int32")
            slots = [
                self.spec.refined(
                    leading[name], jax.ShapeDtypeStruct(plane.shape[1:], plane.dtype), by_slot
                )
                for name, plane in zip(EXPERT_LEAVES, slots, strict=True)
            ]
        for name, stack, own in zip(EXPERT_LEAVES, slots, terms, strict=True):
            placed = tuple(dataclasses.replace(term, start=by_slot, rank=by_slot) for term in own)
            found[name] = dataclasses.replace(stack, compensators=placed) if own else stack
        return found

    @property
    def _failures(self) -> int:
        """Times that the disk, or the host's cores, failed a step so far."""
        return sum(of.failures for of in (self.disk, self.host) if of)

    @property
    def _error(self) -> str:
        """Error of a failure."""
        return next(of.error for of in (self.disk, self.host) if of and of.failures)

    @property
    def _is_lost(self) -> bool:
        """Whether a failed step consumed the slots donated to it."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.pool))

    def advance(self) -> None:
        """Moves experts read from disk to host rows, and advances transfers."""
        if self.host is not None:
            self.host.wake()
        if self.disk is not None and self.disk.advance(lambda: _copied(self.pool.used)):
            place = self.store.row_of.sharding
            row_of = put(self.disk.row_of.copy(), place)
            self.store = dataclasses.replace(self.store, row_of=row_of)
        if self.transfers is not None:
            self.pool = self.transfers.advance(self.pool)

    def send(self) -> None:
        """Sends one expert, as `Transfers.send`."""
        if self.transfers is not None:
            self.transfers.send()

    def _forget_failed(self) -> None:
        """Empties the slots if the disk failed a step since the last call: they may be wrong."""
        if self._failures == self._forgotten:
            return
        try:
            self.pool.residency.clock.block_until_ready()  # no step is left that could fail too
        except jax.errors.JaxRuntimeError:
            self._reallocate()
        self._forgotten = self._failures
        self._forget()
        if self.host is not None and self.host.failures:  # every miss is fetched from now on
            self.store = dataclasses.replace(self.store, jobs=None)
            self.pool = dataclasses.replace(self.pool, jobs=None)

    def _forget(self) -> None:
        """Empties the slots, and those that it shares."""
        if self.spec.shares_slots:
            assert self.base is not None
            self.base._forget()
        used = None if self.pool.used is None else np.zeros(self.pool.used.shape, np.int32)
        state = self._put({"residency": self._empty_tables(), "used": used})
        self.pool = dataclasses.replace(self.pool, **state)

    def _reallocate(self) -> None:
        """Allocates a new pool, filled by `fill`; unread counts are lost."""
        if self.transfers is not None:
            self.transfers.forget_steps()
        if self.disk is not None:
            self.disk.counts_since()  # what steps read whose counts are lost
        for leaf in jax.tree.leaves(self.pool):
            if not leaf.is_deleted():
                leaf.delete()  # there may be no room for two
        self.pool = self._empty_pool()
        if self.fill is not None:
            self.pool = self.fill(self)

    def _read_counters(self) -> None:
        """Adds the counts of all steps so far to the ledger; waits for them."""
        counts = jax.device_get(self.pool.counts)
        if self.spec.handed_out:
            assert self.mesh is not None
            counts = self.mesh.sum_own(counts)
        fresh = residency.no_counts(self.spec.cache.num_layers)
        # First: what is added may be an error, and is not to be added again.
        self.pool = dataclasses.replace(self.pool, counts=self._put(fresh))
        if self.transfers is not None:
            self.ledger.bulk_requests = dataclasses.asdict(self.transfers.counters)
        self.ledger.add(counts, disk=self.disk.counts_since() if self.disk else {})

    def close(self) -> None:
        """Ends transfers and reading; a step that needs the disk afterwards is an error."""
        for part in (self.transfers, self.disk, self.host):
            if part is not None:
                part.close()


@dataclasses.dataclass
class _PollingBackoff:
    """Tokens that may pass before the policy is asked again."""

    in_flight: Any = None  # experts in flight when the policy was asked
    tokens: int = 0  # that may pass (`Policy.tokens_until_change`)
    passed: int = 0  # upper bound on the tokens since then


class ExpertMemory:
    """Experts of one model in T tiers, a policy's state and its transfers.

    Attributes:
      spec: static facts, part of every compiled step.
      tiers: in order of falling fidelity.
      ledger: sums of what the steps counted, as of the last `read_counters`.
    """

    def __init__(
        self,
        tiers: Sequence[TierMemory],
        names: Sequence[str] = (STORED,),
        policy: AnyPolicy | None = None,  # None: the router alone decides, with one tier
        *,
        width: int = 0,  # A, experts a token; for the policy
    ):
        """Joins the memories of one model's tiers; the policy's state is fresh."""
        if policy is None and len(tiers) != 1:
            raise ValueError(f"{len(tiers)} tiers and no policy that chooses among them")
        for tier, following in itertools.pairwise((*tiers, None)):
            if tier is not None and tier.spec.refines:
                tier.base = following
        pools = tuple(tier.spec for tier in tiers)
        self.tiers = tuple(tiers)
        self.place, self.mesh = tiers[0].store.row_of.sharding, tiers[0].mesh
        if policy is not None:
            device: jax.Device = next(iter(self.place.device_set))
            policy, cache = with_kernels(policy, device.platform), tiers[0].spec.cache
            self._policy_spec = PolicySpec(
                num_layers=cache.num_layers, width=width,
                num_experts=tiers[0].spec.handed_out or cache.num_experts,
                tiers=tuple(names), expert_bytes=tuple(tier.ledger.expert_bytes for tier in tiers),
                slots=tuple(tier.spec.cache.slots for tier in tiers),
                prefetch=tuple(tier.spec.prefetch for tier in tiers),
            )  # fmt: skip
            between = policy.transfer_tiers(self._policy_spec)
            pools = tuple(
                dataclasses.replace(pool, between_steps=i in between)
                for i, pool in enumerate(pools)
            )
        self.spec = CacheSpec(policy, tuple(names), pools)
        self._state, self._gate = self._init_policy(policy)
        self.ledger = Ledger({n: t.ledger for n, t in zip(names, tiers, strict=True)})
        self.programs = CompiledPrograms(mesh=self.mesh)
        self._answer: TransferRequests | None = None
        self._answer_counts = False  # whether tokens had run when that was asked
        self._num_polls = 0  # since the last `read_counters`
        self._backoff = _PollingBackoff()
        self._in_flight_on_device: tuple[Any, Any] = None, None  # what it is of, and the arrays
        self._lock = threading.RLock()
        self.moves_experts, self._is_emulated = False, any(pool.emulated for pool in pools)
        if policy is None or tiers[0].spec.handed_out:
            return
        operands = self.pool, *self._in_flight_and_room()
        found = jax.eval_shape(functools.partial(request_transfers, self.spec), *operands)[1]
        self.moves_experts = len(found.moved.layer) + len(found.ahead.layer) > 0
        self.ledger.asked = 0 if self.moves_experts else None
        if len(found.ahead.layer) and not any(tier.disk and tier.disk.cache for tier in tiers):
            logging.warning(
                "the policy's foresight does nothing: no tier has experts on the disk and rows of "
                "host memory to read them to"
            )

    @property
    def pool(self) -> ExpertCache:
        """The device's state; replaced after each step, to which it is donated."""
        return ExpertCache(tuple(tier.pool for tier in self.tiers), self._state, self._gate)

    @pool.setter
    def pool(self, pool: ExpertCache) -> None:
        for tier, own in zip(self.tiers, pool.tiers, strict=True):
            tier.pool = own
        self._state, self._gate = pool.state, pool.gate

    @property
    def store(self) -> tuple[HostRows, ...]:
        """Operands of the steps."""
        return tuple(tier.store for tier in self.tiers)

    def stacks(self) -> dict[str, Weight]:
        """Gives the stacks, as `TierMemory.stacks`; of the first tier."""
        return self.tiers[0].stacks()

    @property
    def _failures(self) -> int:
        """Times that the disk failed a step so far."""
        return sum(tier._failures for tier in self.tiers)

    def failure_count(self) -> int:
        """Returns the number of failures now, against which `step` and `reading` compare."""
        with self._lock:
            for tier in self.tiers:
                tier._forget_failed()
            return self._failures

    def _check_failures(self, failures_before: int | None) -> None:
        """Raises MoejaxError if the disk failed after `failure_count` gave `failures_before`."""
        if failures_before is not None and self._failures != failures_before:
            raise MoejaxError(next(tier._error for tier in self.tiers if tier._failures))

    @contextlib.contextmanager
    def step(self, failures_before: int | None = None, num_tokens: int = 0) -> Iterator[None]:
        """Wraps the dispatch of a step, one step at a time.

        Experts read from the disk get their rows of host memory first, and transfers go on. If the
        step fails, empty slots and the policy's initial state replace those donated to it.

        Args:
          failures_before: by `failure_count`; None: the caller checks for failures of the disk.
          num_tokens: tokens of the step with padding; 0: not known, and the policy is asked for
            transfers before the next step.

        Raises:
          MoejaxError: a step after that could not read an expert.
        """
        with self._lock, self._replacing_lost():
            self._advance(failures_before)
            self._poll_policy(num_tokens or UNKNOWN_TOKENS)
            for tier in self.tiers:
                tier.send()
            yield
            if (host := self.tiers[0].host) is not None:
                host.wake()  # a program that was compiled may have kept its threads waiting

    def _advance(self, failures_before: int | None) -> None:
        for tier in self.tiers:  # each, before one is raised
            tier._forget_failed()
        self._check_failures(failures_before)
        for tier in self.tiers:
            tier.advance()

    @contextlib.contextmanager
    def _replacing_lost(self) -> Iterator[None]:
        """Replaces what was donated to a step that raised."""
        try:
            yield
        except BaseException as error:
            has_failed = isinstance(error, jax.errors.JaxRuntimeError)
            for tier in self.tiers:
                if has_failed or tier._is_lost:
                    tier._reallocate()
            leaves = jax.tree.leaves((self._state, self._gate))
            if has_failed or any(leaf.is_deleted() for leaf in leaves):
                self.reset()
            raise

    @contextlib.contextmanager
    def reading(self, failures_before: int | None = None) -> Iterator[None]:
        """Wraps the host's reading of results, which are valid if this returns.

        After a failure of the disk, a MoejaxError, the next step starts with an empty cache.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError:
            with self._lock:  # all at once: a step of another thread takes all of them
                for tier in self.tiers:
                    tier._reallocate()
                self.reset()
            raise
        self._check_failures(failures_before)

    def read_counters(self) -> Ledger:
        """Waits for all steps so far and returns the ledger."""
        with self._lock, self.reading():  # a step of another thread would take the pool, or be lost
            for tier in self.tiers:
                tier._read_counters()
            if self._gate is not None:
                gate = np.asarray(jax.device_get(self._gate), np.float64)
                if self.spec.tiers[0].handed_out:
                    assert self.mesh is not None
                    gate = self.mesh.sum_own(gate)
                self.ledger.add(gate)
                self._gate = self._no_gate()
            if self.moves_experts:
                self.ledger.asked = (self.ledger.asked or 0) + self._num_polls
                self._num_polls = 0
        return self.ledger

    def close(self) -> None:
        """Ends transfers and reading; a step that needs the disk afterwards is an error."""
        with self._lock:
            for tier in self.tiers:
                tier.close()

    def catch_up(self, failures_before: int | None = None) -> int:
        """Carries out the policy's transfers now and waits until they end.

        Called between the chunks of a text that is scored, so that what a policy promotes, and
        when, is not left to the clock.

        Returns:
          Tokens before which it asks for nothing more (`Policy.tokens_until_change`).
        """
        with self._lock, self.reading(failures_before):
            self._num_polls += self._backoff.passed > 0
            self._answer, last, repeats = None, np.zeros(0), True
            while repeats:
                self._wait_for_transfers(failures_before)
                self.pool, answer = self._dispatch_requests()
                rows, idle = self._carry_out(answer)
                repeats = self._policy.repeats_requests and rows.max(initial=-1) >= 0
                repeats = repeats and not np.array_equal(rows, last)  # what could not be moved
                last = rows
            self._wait_for_transfers(failures_before)
            self._backoff = _PollingBackoff(self._in_flight(), max(1, idle))
            return idle

    @property
    def _policy(self) -> AnyPolicy:
        assert self.spec.policy is not None
        return self.spec.policy

    def _wait_for_transfers(self, failures_before: int | None) -> None:
        """Waits for the transfers in flight."""
        moving = [tier for tier in self.tiers if tier.transfers is not None]
        while any(tier.transfers and tier.transfers.pending for tier in moving):
            with self._replacing_lost():
                self._advance(failures_before)
                for tier in moving:
                    tier.send()
            time.sleep(POLL_S)

    def _dispatch_requests(self) -> tuple[ExpertCache, TransferRequests]:
        """Dispatches the policy's choice of transfers; waits for nothing."""
        operands = (self.pool, *self._in_flight_and_room())
        results = (specs_of(operands[0]), REPLICATED) if self.mesh else REPLICATED
        program = self.programs.get(
            request_transfers, (self.spec,), operands, num_donated=1, results=results
        )
        return program(*operands)

    def _poll_policy(self, num_tokens: int) -> None:
        """Requests the policy's last choice of transfers, and dispatches the next.

        It is not asked while it has said that nothing would come of it.
        """
        if not self.moves_experts:
            return
        backoff = self._backoff
        if self._answer is not None:
            # Emulated slots are for the outcome: when they change is not left to the clock.
            if not (self._is_emulated or is_ready(self._answer.idle)):
                backoff.passed += num_tokens
                return
            answer, self._answer = self._answer, None
            self._num_polls += self._answer_counts
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # of a step that failed
                _, backoff.tokens = self._carry_out(answer)
        in_flight = self._in_flight()
        if backoff.passed >= backoff.tokens or in_flight != backoff.in_flight:
            self.pool, self._answer = self._dispatch_requests()
            for numbers in jax.tree.leaves(self._answer):
                numbers.copy_to_host_async()
            self._answer_counts = backoff.passed > 0
            self._backoff = backoff = _PollingBackoff(in_flight)
        backoff.passed += num_tokens

    def _carry_out(self, answer: TransferRequests) -> tuple[np.ndarray, int]:
        """Requests transfers and disk prefetches; returns int32[3, R] transfers and idle tokens."""
        moved, ahead, idle = jax.device_get(answer)
        for layer, expert, tier in np.stack(moved, axis=1).tolist():
            if layer >= 0 and (transfers := self.tiers[tier].transfers) is not None:
                transfers.request(layer, [expert])
        rows = np.stack(ahead, axis=1).tolist()
        for i, one in enumerate(self.tiers):
            experts = [(layer, expert) for layer, expert, of in rows if layer >= 0 and of == i]
            if one.disk is not None and experts:
                one.disk.prefetch(experts)
        return np.stack(moved), int(idle)

    def _in_flight(self) -> tuple[tuple[Expert, ...], ...]:
        """Experts of each tier that are between host and slots."""
        return tuple(tuple(tier.transfers.pending) if tier.transfers else () for tier in self.tiers)

    def _in_flight_and_room(self) -> tuple[jax.Array, jax.Array]:
        """bool[M, T, E], what is in flight; int32[], experts that may set out before the next step.

        Copied to the device where they differ from those of the last time: a copy waits for the
        step before, and what waits for it begins later.
        """
        in_flight = self._in_flight()
        if in_flight != self._in_flight_on_device[0]:
            free = [
                max(0, tier.transfers.most_in_flight - len(experts))
                for tier, experts in zip(self.tiers, in_flight, strict=True)
                if tier.transfers
            ]
            room, cache = min(free, default=np.iinfo(np.int32).max), self.spec.cache
            mask = np.zeros((cache.num_layers, len(self.tiers), cache.num_experts), bool)
            for i, experts in enumerate(in_flight):
                for layer, expert in experts:
                    mask[layer, i, expert] = True
            operands = put((mask, np.int32(room)), self.place)
            self._in_flight_on_device = in_flight, operands
        return self._in_flight_on_device[1]

    def _init_policy(self, policy: AnyPolicy | None) -> tuple[Any, jax.Array | None]:
        """A policy's state and gate mass before any token; nothing without a policy."""
        if policy is None:
            return (), None
        state = put(policy.init(self._policy_spec), self.place)
        # Leaves of their own: a state may name one array twice, which cannot be donated.
        state = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(state)
        return state, self._no_gate()

    def _no_gate(self) -> jax.Array:
        gate: jax.Array = self.tiers[0]._put(no_gate(self.spec.cache.num_layers, len(self.tiers)))
        return gate

    def reset(self) -> None:
        """Returns the policy to its state before any token."""
        with self._lock:
            self._state, self._gate = self._init_policy(self.spec.policy)
            self._answer, self._backoff = None, _PollingBackoff()


def preload(
    memory: TierMemory, config: ModelConfig, kernels: ops.Kernels, experts: np.ndarray
) -> None:
    """Fills an empty memory's slots with its initial experts, and again whenever they are lost.

    A pool that holds every expert from now on is complete (`TierSpec.is_complete`), in order of
    their ids: to be called before the spec is used.

    Args:
      kernels: those that may copy.
      experts: int32[M, n], in host rows, n at most the slots of a layer, different ones in a row;
        of layers that have one slot less the last is left out.
    """
    has_all = memory.spec.cache.slots == experts.shape[1] == memory.spec.cache.num_experts
    if has_all:
        experts = np.sort(experts, axis=1)
    memory.pool = _preloaded_pool(memory, config, kernels, experts)
    memory.fill = lambda lost: _preloaded_pool(lost, config, kernels, experts)
    if has_all and not memory.spec.emulated:
        memory.spec = dataclasses.replace(memory.spec, is_complete=True)


def _preloaded_pool(
    memory: TierMemory, config: ModelConfig, kernels: ops.Kernels, experts: np.ndarray
) -> TierSlots:
    spec, store = dataclasses.replace(memory.spec, is_complete=False), memory.store
    cache = spec.cache
    content = memory._put(residency.seeded(cache, experts))

    def fill(pool: TierSlots, store: HostRows) -> TierSlots:
        tier = TierStep(spec, config, store, "block", kernels)
        for bank in range(cache.banks if not spec.emulated else 0):
            layers = np.arange(bank, cache.num_layers, cache.banks)
            local = np.arange(experts.shape[1])[None]
            first = cache.first_slot(jnp.asarray(layers // cache.banks, jnp.int32))
            slots = first[:, None] + local
            exists = local < cache.slots_by_layer(cache.num_layers)[layers, None]
            rows = jnp.where(exists, store.row_of[layers[:, None], experts[layers]], -1)
            if slots.size:
                job = Fetch(rows.reshape(-1), slots.reshape(-1))
                pool = tier.copy_rows(pool, bank, bank, job)
        return pool

    program: Any = fill
    if memory.mesh is not None:
        program = memory.mesh.map(fill, (memory.pool, store), specs_of(memory.pool))
    pool = jax.jit(program, donate_argnums=0)(memory.pool, store)
    return dataclasses.replace(pool, residency=content)
