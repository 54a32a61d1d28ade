"""XLA flags that make compiling for a CPU quick, for programs that run once, for milliseconds."""

import importlib.metadata
import importlib.util
import os


def set_flags() -> None:
    """Sets the flags in the environment; to be called before JAX is imported.

    Without optimisation and with XLA's older, plainer emitters, compiling takes a third of the
    time. Programs for a GPU are compiled as users compile them.
    """
    if any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return
    flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    # An unknown flag ends a process.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    if importlib.metadata.version("jaxlib").startswith(("0.10.", "0.11.")):
        # One LLVM module and not 32: these programs are small, and each module has a price.
        flags.append("--xla_cpu_parallel_codegen_split_count=1")
    # The last of a flag's values wins, so the environment's own values stand.
    os.environ["XLA_FLAGS"] = " ".join((*flags, os.environ.get("XLA_FLAGS", "")))
