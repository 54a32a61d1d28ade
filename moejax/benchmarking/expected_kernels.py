"""Whether packed products run on kernels where the device has any.

A benchmark that fell back to another implementation measures something else; it ends with one line
before it measures.
"""

from collections.abc import Mapping

from moejax.errors import MoejaxError
from moejax.inference.kernel_warnings import KERNELS
from moejax.inference.runner import Runner
from moejax.weights import linear as ops
from moejax.weights.linear import KernelChoice
from pallas_kernels.target import MIN_CAPABILITY

EVERY_KERNEL = "every kernel"  # refuses, for what the matrix is: `ops._choose_product`


def _allowed(kernels: ops.Kernels) -> tuple[str, ...]:
    """The implementations that packed products may run on; (): any at all, and none."""
    if kernels.implementation:
        return (kernels.implementation,)
    target = kernels.target
    capability = None if target is None or target.platform != "gpu" else target.capability
    return KERNELS if capability is not None and capability >= MIN_CAPABILITY else ()


def _wrong_kernels(products: Mapping[str, KernelChoice], may: tuple[str, ...]) -> list[str]:
    """A line for each packed product that some kernel takes and none of `may` serves."""
    return [
        f"{name}: {of.describe()}"
        for name, of in products.items()
        if of.packed and of.implementation not in may and EVERY_KERNEL not in of.refusals
    ]


def refuse_dequantized(runner: Runner, batch: int, *, prompt: int, context: int) -> None:
    """Refuses packed products that run on no kernel of a device that has kernels.

    Forms that no kernel takes on any device (FP8, act-order; docs/kernels.md) may be dequantized.

    Args:
      prompt: tokens of each prompt; 0: none is run.
      context: slots of the cache; no matter without a prompt.

    Raises:
      MoejaxError: naming what runs on none, and why.
    """
    if not (may := _allowed(runner.kernels)):
        return
    chunks = runner.chunks(batch, prompt, context, runner.short_chunk)
    calls = [("prefill", batch * size) for size in sorted({size for _, size in chunks})]
    for phase, num_tokens in [*calls, ("decode", batch)]:
        if wrong := _wrong_kernels(runner.kernel_choices(num_tokens, batch), may):
            said = "; ".join(wrong)
            raise MoejaxError(f"{phase} of packed weights would run on no kernel: {said}")
