"""GPUs that are not there, and programs that are lowered or compiled for them."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from moejax.inference import runner
from moejax.models import attention, delta_net, expert_products, moe, stacked, transformer
from moejax.weights import linear
from pallas_kernels import op
from pallas_kernels.packed import PackedMatrices
from pallas_kernels.target import Target

SKIP_CHECKS = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"  # the plugin looks for CUDA libraries otherwise


class Gpu(NamedTuple):
    """Facts of a GPU, from NVIDIA's data sheets and CUDA's table of compute capabilities."""

    kind: str
    capability: tuple[int, int]
    num_processors: int
    shared_kib: int  # of a multiprocessor; a program may have 1 KiB less
    threads: int  # of a multiprocessor
    l2_mib: int
    bandwidth_gb: int  # a second

    @property
    def target(self) -> Target:
        return Target("gpu", self.capability, self.num_processors)

    @property
    def description(self) -> str:
        """XLA's text proto of it."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 fpus_per_core: 128
              shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_kib << 10}
              shared_memory_per_block_optin: {self.shared_kib - 1 << 10}
              threads_per_core_limit: {self.threads} core_count: {self.num_processors}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth_gb}000000000 l2_cache_size: {self.l2_mib << 20}
              clock_rate_ghz: 1.7 device_memory_size: 23622320128
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            device_description_str: "{self.kind}"
        """


GPUS = {
    "A100": Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 164, 2048, 40, 1555),
    "A10": Gpu("NVIDIA A10", (8, 6), 72, 100, 1536, 6, 600),
    "L4": Gpu("NVIDIA L4", (8, 9), 58, 100, 1536, 48, 300),
    "H100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 228, 2048, 50, 3352),
    "B200": Gpu("NVIDIA B200", (10, 0), 148, 228, 2048, 126, 8000),
    "RTX_PRO_6000": Gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 188, 100, 1536,
                        128, 1597),
}  # fmt: skip


@contextlib.contextmanager
def described(gpu: Gpu) -> Iterator[None]:
    """From jax 0.11.2 on, Triton's lowering asks for a device: an abstract one does."""
    if jax.__version_info__ < (0, 11, 2):
        yield
        return
    device = jax.sharding.AbstractDevice(device_kind=gpu.kind, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


@contextlib.contextmanager
def pretended(target: Target) -> Iterator[None]:
    """Runners and kernels choose as on a target, to be traced; the traces are forgotten."""
    with (
        mock.patch.object(runner, "target_of", lambda _: target),
        mock.patch.object(op, "current_target", lambda: target),
    ):
        yield
    for jitted in (
        attention.token_attention, attention._prompt_attention, transformer._queries_and_cache,
        delta_net._states_in_place,
        expert_products._grouped, linear._kernel_product, moe._routing_by_kernel,
        stacked.norm_of_sum,
    ):  # fmt: skip
        jitted.clear_cache()


def devices_of(gpu: Gpu, count: int = 1) -> Sequence[jax.Device]:
    """GPUs of one process, which are not there; needs JAX's CUDA plugin."""
    from jax.experimental import topologies

    topology = f"1x1x{count}"
    return topologies.get_topology_desc(
        platform="cuda", topology_name=topology, topology=topology, target_config=gpu.description
    ).devices


class Program(NamedTuple):
    """A product by Triton: its function for a target, its operands' shapes."""

    function: Callable[..., Any]  # takes `target`
    operands: tuple[Any, ...]
    weights: tuple[PackedMatrices, ...]  # among the operands
    max_launches: int

    def lower(self, gpu: Gpu, sharding: Any = None) -> Any:
        """For CUDA; `sharding` of every operand."""

        def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        function = jax.jit(functools.partial(self.function, target=gpu.target))
        with described(gpu):
            traced = function.trace(*jax.tree.map(placed, self.operands))
            return traced.lower(lowering_platforms=("cuda",))


def leaf(*sizes: int, dtype: str) -> Any:
    """An array's shape and dtype."""
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))
