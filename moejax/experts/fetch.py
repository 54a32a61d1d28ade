"""Fetches experts into slots in a step, from host rows or from the disk."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

from moejax.experts.cache_plan import Jobs
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
        """Returns slots with experts fetched from the disk, and their int32[] count.

        The step waits for the host where there are some.
        """
        rows, slots, experts = jobs
        if self.spec.read is None or not rows.size or self.spec.is_still:
            return pools, None
        assert experts is not None
        absent = (experts >= 0) & (rows < 0)
        read_rows = self.spec.read
        leaves, tree = jax.tree.flatten(pools)
        shapes = [jax.ShapeDtypeStruct((len(experts), *p.shape[1:]), p.dtype) for p in leaves]

        def read() -> list[jax.Array]:
            asked = jnp.where(absent, experts, -1)
            return list(io_callback(read_rows, tuple(shapes), jnp.int32(layer), asked))

        def nothing() -> list[jax.Array]:
            return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]

        found = jax.lax.cond(jnp.any(absent), read, nothing)
        places = jnp.where(absent, slots, len(leaves[0]))
        filled = [p.at[places].set(new, mode="drop") for p, new in zip(leaves, found, strict=True)]
        return jax.tree.unflatten(tree, filled), jnp.sum(absent)


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
