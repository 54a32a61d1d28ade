"""Fetches experts into slots in a step, from host rows or from the disk."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from moejax.experts.cache_plan import Jobs
from moejax.experts.disk_callback import with_disk_rows
from moejax.experts.expert_pool import ExpertStore, PoolSpec
from moejax.weights import linear as ops
from moejax.weights.linear import Index
from moejax.weights.qtensor import Weight
from pallas_kernels import expert_fetch

Slots = tuple[Weight, Weight]  # a bank of `ExpertPool`


@dataclasses.dataclass(frozen=True, eq=False)
class Fetching:
    """Copies experts into the slots of one pool, in one trace.

    `kernels` are those that may copy.
    """

    spec: PoolSpec
    store: ExpertStore
    kernels: ops.Kernels

    def job(self, pools: Slots, jobs: Jobs) -> expert_fetch.Job | None:
        """Returns the copy from host memory; None where there is nothing to copy."""
        store = self.store
        if not jobs.rows.size or self.spec.is_still or not store.gate_up.shape[0]:
            return None
        return expert_fetch.Job(pools, (store.gate_up, store.down), jobs.rows, jobs.slots)

    def by(self, job: expert_fetch.Job) -> str:
        """Name of the implementation that copies.

        Raises:
          ValueError: on a GPU the kernel refuses.
        """
        if self.kernels.target is None:
            return "reference"
        chosen = expert_fetch.choose(job.pools, job.hosts, self.kernels.target)
        if self.kernels.target.platform == "gpu" and chosen.implementation == "reference":
            raise ValueError(f"experts cannot be fetched: {chosen.describe()}")
        return chosen.implementation

    def from_host(self, pools: Slots, jobs: Jobs, beside: Slots | None = None) -> Slots:
        """Returns the slots with experts copied from host rows.

        Args:
          pools: donate them.
          beside: slots that products read while this copies, once what these wait for is there.
        """
        job = self.job(pools, jobs)
        if job is None:
            return pools
        how = self.by(job)
        if beside is None or how != "triton":
            return expert_fetch.fetch(*job, implementation=how)
        tiles = expert_fetch.default_tiles_beside()
        return expert_fetch.fetch(*job, implementation=how, tiles=tiles, after=beside)

    def from_disk(self, pools: Slots, layer: Index, jobs: Jobs) -> tuple[Slots, jax.Array | None]:
        """Returns slots with experts fetched from the disk, and their int32[] count."""
        rows, slots, experts = jobs
        if self.spec.read is None or not rows.size or self.spec.is_still:
            return pools, None
        assert experts is not None
        absent = (experts >= 0) & (rows < 0)
        pools = with_disk_rows(pools, self.spec.read, layer, experts, slots, absent)
        return pools, jnp.sum(absent)


def from_host_together(
    fetchings: Sequence[Fetching], pools: Sequence[Slots], jobs: Sequence[Jobs]
) -> list[Slots]:
    """Fetches for each pool, in one launch where the kernel takes several."""
    asked = list(zip(fetchings, pools, jobs, strict=True))
    made = [of.job(slots, wanted) for of, slots, wanted in asked]
    some = {i: job for i, job in enumerate(made) if job is not None}
    if len(some) < 2 or any(fetchings[i].by(job) != "triton" for i, job in some.items()):
        return [of.from_host(slots, wanted) for of, slots, wanted in asked]
    came = expert_fetch.fetch_all(list(some.values()), implementation="triton")
    found = dict(zip(some, came, strict=True))
    return [found.get(i, slots) for i, slots in enumerate(pools)]
