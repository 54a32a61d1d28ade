"""XLA flags that make compiling for a CPU quick, for programs that run once, for milliseconds."""

import importlib.metadata
import importlib.util
import os


def xla_flags() -> str:
    """Returns the value of XLA_FLAGS, which is to be set before JAX is imported.

    Without optimisation and with XLA's older, plainer emitters, compiling takes a third of the
    time. Programs for a GPU are compiled as users compile them.
    """
    given = os.environ.get("XLA_FLAGS", "")
    if any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return given
    flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    # An unknown flag ends a process.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    if importlib.metadata.version("jaxlib").startswith(("0.10.", "0.11.")):
        # One LLVM module and not 32: these programs are small, and each module has a price.
        flags.append("--xla_cpu_parallel_codegen_split_count=1")
    # The last of a flag's values wins, so the environment's own values stand.
    return " ".join((*flags, given))
