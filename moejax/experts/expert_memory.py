"""What an engine holds of experts that move: the pool, the host's rows, the ledger."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import MoejaxError
from moejax.experts import residency
from moejax.experts.disk_cache import DiskExperts
from moejax.experts.expert_pool import ExpertPool, ExpertStore, PoolSpec
from moejax.experts.ledger import Ledger, no_counts
from moejax.experts.transfer_programs import last_uses
from moejax.experts.transfers import Transfers
from moejax.weights.qtensor import Compensator, Weight


@dataclasses.dataclass
class ExpertMemory:
    """Experts of one model.

    Attributes:
      spec: static facts, part of every compiled step.
      pool: the device's state; replaced after each step, to which it is donated.
      store: operands of the steps.
      ledger: sums of what the steps counted, as of the last `settle`.
      disk: of experts that the store lacks; None where it has all.
      transfers: who is asked for experts between steps; None where that is not planned for.
      fill: gives a new pool its first experts; None: it starts empty.
    """

    spec: PoolSpec
    pool: ExpertPool
    store: ExpertStore
    ledger: Ledger
    disk: DiskExperts | None = None
    transfers: Transfers | None = None
    fill: Callable[["ExpertMemory"], ExpertPool] | None = None
    _lock: Any = dataclasses.field(default_factory=threading.RLock, repr=False)
    _forgotten: int = 0  # failures of the disk of which nothing is cached any more

    @classmethod
    def of_rows(
        cls,
        spec: PoolSpec,
        gate_up: Weight,
        down: Weight,
        row_of: np.ndarray,
        device: jax.Device,
        terms: tuple[tuple[Compensator, ...], tuple[Compensator, ...]] = ((), ()),
    ) -> "ExpertMemory":
        """Around a store that is there; allocates the pool, empty, on the device.

        Args:
          spec: of the pool.
          gate_up: [R, 2F, D], rows of the host store, without low-rank terms.
          down: [R, D, F].
          row_of: int32[M, E], row of each expert; -1 for what is on the disk alone.
          device: of the pool.
          terms: low-rank terms of gate and up, and of down, on the device, starts and ranks [M, E].
        """
        pool = _empty_pool(spec, (gate_up, down), device)
        rows = jax.device_put(np.asarray(row_of, np.int32), device)
        expert_bytes = sum(
            math.prod(leaf.shape[1:]) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(pool.banks[0])
        )
        return cls(spec, pool, ExpertStore(gate_up, down, rows, terms), Ledger(expert_bytes))

    @property
    def tiers(self) -> tuple["ExpertMemory", ...]:
        """None: the experts are stored in one form, and no policy decides."""
        return ()

    def stacks(self) -> dict[str, Weight]:
        """A bank as the leaves [1, S, ...] that it stands for, with low-rank terms; shapes."""
        found = {}
        names = ("moe.gate_up", "moe.down")
        for name, slots, terms in zip(names, self.pool.banks[0], self.store.terms, strict=True):
            stack = jax.eval_shape(lambda s: jax.tree.map(lambda leaf: leaf[None], s), slots)
            if terms:
                num_slots = self.spec.cache.num_slots
                placed = [
                    dataclasses.replace(
                        jax.eval_shape(lambda t: t, term),
                        start=jax.ShapeDtypeStruct((1, num_slots), "int32"),
                        rank=jax.ShapeDtypeStruct((1, num_slots), "int32"),
                    )
                    for term in terms
                ]
                stack = dataclasses.replace(stack, compensators=tuple(placed))
            found[name] = stack
        return found

    @property
    def failures(self) -> int:
        """Times that the disk failed a step so far."""
        return self.disk.failures if self.disk else 0

    @property
    def failure(self) -> str:
        """Why the last of them did."""
        return self.disk.error if self.disk else ""

    def begin_session(self) -> int:
        """`failures` as of now, for `step` and `reading`; what failed before is none of its own."""
        with self._lock:
            self._forget_failed()
            return self.failures

    @contextlib.contextmanager
    def step(
        self, since: int | None = None, num_tokens: int = 0, *, sends: bool = True
    ) -> Iterator[None]:
        """Around the dispatch of a step, of which there is one at a time.

        What was read from the disk gets its rows of host memory first, and transfers go on. A pool
        that a failed step took with it is replaced by an empty one.

        Args:
          since: what `begin_session` returned; None: failures of the disk are the caller's to see.
          num_tokens: that the step runs; does not matter here, see `TieredMemory.step`.
          sends: what is ready to cross the link beside the step is put there; else the caller does
            it by `send`.

        Raises:
          MoejaxError: a step since then could not read an expert.
        """
        del num_tokens
        with self._lock:
            try:
                self._before_step(since)
                if sends:
                    self.send()
                yield
            except BaseException as error:
                lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(self.pool))
                if lost or isinstance(error, jax.errors.JaxRuntimeError):
                    self.renew()
                raise

    def send(self) -> None:
        """See `Transfers.send`."""
        if self.transfers is not None:
            self.transfers.send()

    def _before_step(self, since: int | None) -> None:
        self._forget_failed()
        check_failures(self, since)
        if self.disk is not None and self.disk.advance(lambda: _last_uses(self.pool)):
            place = self.store.row_of.sharding
            row_of = jax.device_put(self.disk.row_of.copy(), place)
            self.store = dataclasses.replace(self.store, row_of=row_of)
        if self.transfers is not None:
            self.pool = self.transfers.advance(self.pool)

    @contextlib.contextmanager
    def reading(self, since: int | None = None) -> Iterator[None]:
        """Around the host's reading of results, which it may use only if this raises nothing.

        Args:
          since: as of `step`.

        Raises:
          MoejaxError: an expert could not be read from the disk since then; the next step starts
            with an empty cache.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError:
            with self._lock:
                self.renew()
            raise
        check_failures(self, since)

    def _forget_failed(self) -> None:
        """Where the disk failed a step since the last call: what is cached may be wrong."""
        if self.failures == self._forgotten:
            return
        try:
            self.pool.residency.clock.block_until_ready()  # no step is left that could fail too
        except jax.errors.JaxRuntimeError:
            self.renew()
        self._forgotten = self.failures
        empty = residency.empty(self.spec.cache)
        place = self.pool.residency.clock.sharding
        used = None if self.pool.used is None else np.zeros(self.pool.used.shape, np.int32)
        residency_, used = jax.device_put((empty, used), place)
        self.pool = dataclasses.replace(self.pool, residency=residency_, used=used)

    def renew(self) -> None:
        """A new pool, with what `fill` says; the counts since the last `settle` are lost."""
        if self.transfers is not None:
            self.transfers.forget_steps()
        if self.disk is not None:
            self.disk.read_since()  # what steps read whose counts are lost
        for leaf in jax.tree.leaves(self.pool):
            if not leaf.is_deleted():
                leaf.delete()  # there may be no room for two
        device = self.store.row_of.device
        self.pool = _empty_pool(self.spec, (self.store.gate_up, self.store.down), device)
        if self.fill is not None:
            self.pool = self.fill(self)

    def settle(self) -> Ledger:
        """The ledger after all steps so far, for which it waits."""
        with self._lock:  # to the end: a step of another thread would take the pool, or be lost
            with self.reading():
                counts = jax.device_get(self.pool.counts)
            place = self.pool.counts.events.sharding
            fresh = no_counts(self.spec.cache.num_layers, counts.gate.shape[1] - 1)
            # First: what is added may be an error, and is not to be added again.
            self.pool = dataclasses.replace(self.pool, counts=jax.device_put(fresh, place))
            if self.transfers is not None:
                self.ledger.bulk_requests = dataclasses.asdict(self.transfers.counters)
            self.ledger.add(counts, disk=self.disk.read_since() if self.disk else {})
            return self.ledger

    def close(self) -> None:
        """Ends transfers and reading; a step that needs the disk afterwards is an error."""
        with self._lock:
            if self.transfers is not None:
                self.transfers.close()
            if self.disk is not None:
                self.disk.close()


_last_uses = jax.jit(last_uses)


class MayFail(Protocol):
    """What counts its failures."""

    @property
    def failures(self) -> int:
        """How many so far; never falls."""

    @property
    def failure(self) -> str:
        """Why the last one was."""


def check_failures(memory: MayFail, since: int | None) -> None:
    """Raises MoejaxError where something failed after `since` was noted; None: no matter."""
    if since is not None and memory.failures != since:
        raise MoejaxError(memory.failure)


def _empty_pool(spec: PoolSpec, rows: tuple[Weight, Weight], device: jax.Device) -> ExpertPool:
    def slots(row: Any) -> jax.Array:
        return jnp.zeros((spec.cache.num_slots, *row.shape[1:]), row.dtype, device=device)

    used = None
    if spec.read is not None:
        size = (spec.cache.num_layers, spec.cache.num_experts)
        used = jnp.zeros(size, jnp.int32, device=device)
    return ExpertPool(
        tuple(jax.tree.map(slots, rows) for _ in range(spec.cache.banks)),
        jax.device_put(residency.empty(spec.cache), device),
        jax.device_put(no_counts(spec.cache.num_layers), device),
        used,
    )
