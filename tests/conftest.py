"""Settings of every test: strict dtypes and ranks, no network, what a `gpu` test needs."""

import gc
import os
from collections.abc import Iterator

# Read when huggingface_hub is imported, so before anything that imports it.
os.environ["HF_HUB_OFFLINE"] = "1"

# Torch and OpenBLAS wait for their threads by spinning: beside another worker that doubled the
# time of what runs tiny models of transformers. Read when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Most of the time of tests on a CPU was XLA's, optimising programs that run once. Read when JAX
# first compiles; processes inherit it.
from scripts import quick_compile

# Eight CPU devices are for tests of meshes; all others take the first.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {quick_compile.xla_flags()}"

import jax
import pytest

# Importing and tracing make objects by the million, of which few are in cycles: looking for those
# as often as Python does by default took a twentieth of the time.
gc.disable()
gc.set_threshold(50_000, 20, 50)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs under .pytest_cache, and shares a GPU's memory among workers."""
    cache = getattr(config, "cache", None)  # not there with -p no:cacheprovider
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    # Workers share one GPU: none takes most of it at its start, and each has its part at most.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1 and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", f"{0.7 / workers:.3f}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu`, with a reason that the summary prints, where they cannot run.

    `@pytest.mark.gpu(gib=20)` needs so much memory, more than one of several workers has.
    """
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if jax.default_backend() != "gpu":
        reason = f"needs a GPU; JAX sees only {jax.default_backend()}"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
        return
    there = jax.devices()[0].memory_stats()["bytes_limit"] / 2**30
    for item in marked:
        needed = item.get_closest_marker("gpu").kwargs.get("gib", 0)
        if needed > there:
            reason = f"needs {needed} GiB of GPU memory, has {there:.1f}: run it by -n 0"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Looks for cycles from here on, but not among what was imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Drops compiled programs after each file: kept to the end they took 5 GB a worker."""
    yield
    jax.clear_caches()
