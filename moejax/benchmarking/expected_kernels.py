"""Whether packed products run on the kernels that a measurement is to be of.

A benchmark that fell back to another implementation measures something else; it ends with one line
before it measures. What is expected, in words:

  * "auto": a kernel, if the device has any for packed weights; on Hopper, for shapes of which
    every product fits it, Mosaic's. (Others have products that only Triton's take: inputs that are
    no multiple of 256, as DeepSeek-V2-Lite's experts have.) An implementation that was forced,
    where one was.
  * "any": a kernel, wherever it runs. "mosaic", "triton": that one. "none": nothing.
"""

from collections.abc import Iterator, Mapping

from moejax.errors import MoejaxError
from moejax.inference.runner import Runner
from moejax.models.config import weight_shapes
from moejax.models.kernel_choice import KernelChoice, expected_kernel
from moejax.models.leaf_kinds import leaves_of
from moejax.models.shapes import CONFIGS
from moejax.weights import linear as ops
from pallas_kernels.dequant_matmul.triton import MIN_CAPABILITY
from pallas_kernels.layout import BLOCK
from pallas_kernels.target import Target

KERNELS = ("mosaic", "triton")
EXPECTATIONS = ("auto", *KERNELS, "any", "none")
EVERY_KERNEL = "every kernel"  # refuses, for what the matrix is: `ops.choose_product`
PACKED_LEAVES = leaves_of("attention", "experts", "shared_experts", "mlp")


def allowed(wanted: str, kernels: ops.Kernels, shape: str = "") -> tuple[str, ...]:
    """Implementations that packed products may run on by one of `EXPECTATIONS`; (): any, none."""
    if wanted in KERNELS:
        return (wanted,)
    if wanted == "any":
        return KERNELS
    if wanted == "none":
        return ()
    if kernels.implementation:
        return (kernels.implementation,)
    if not has_kernels(kernels.target):
        return ()
    best = expected_kernel(kernels.target)
    return ("mosaic",) if best == "mosaic" and fits_mosaic(shape) else KERNELS


def fits_mosaic(shape: str) -> bool:
    """Whether every product of a shape that may be packed has inputs in whole blocks."""
    if shape not in CONFIGS:
        return False
    sizes = weight_shapes(CONFIGS[shape])
    return not any(sizes[leaf][-1] % BLOCK for leaf in PACKED_LEAVES if leaf in sizes)


def has_kernels(target: Target | None) -> bool:
    """Whether a device runs kernels for packed weights at all."""
    capability = None if target is None or target.platform != "gpu" else target.capability
    return capability is not None and capability >= MIN_CAPABILITY


def wrong_kernels(products: Mapping[str, KernelChoice], may: tuple[str, ...]) -> list[str]:
    """A line for each packed product that is served by none of `may`, as `allowed` gives them."""
    if not may:
        return []
    return [
        f"{name}: {of.describe()}"
        for name, of in products.items()
        if of.packed and of.implementation not in may
    ]


def _phases(
    runner: Runner, batch: int, prompt: int, context: int
) -> Iterator[tuple[str, dict[str, KernelChoice]]]:
    """Phase and what serves it: of the chunks of a prompt (0 tokens: none), then of decode."""
    for size in sorted(
        {size for _, size in runner.chunks(batch, prompt, context, runner.short_chunk)}
    ):
        yield "prefill", runner.kernel_choices(batch * size, batch)
    yield "decode", runner.kernel_choices(batch, batch)


def require_kernels(
    runner: Runner, batch: int, wanted: str, *, shape: str = "", prompt: int = 0, context: int = 0
) -> None:
    """Ends a script where packed products of a run are served by what is not expected.

    Args:
      wanted: one of `EXPECTATIONS`.
      prompt: tokens of each prompt; 0: none is run.
      context: slots of the cache; no matter without a prompt.

    Raises:
      SystemExit: with all of them in a line.
    """
    may = allowed(wanted, runner.kernels, shape)
    wrong = [
        f"{phase} {line}"
        for phase, products in _phases(runner, batch, prompt, context)
        for line in wrong_kernels(products, may)
    ]
    if wrong:
        raise SystemExit("not the expected kernel: " + "; ".join(wrong))


def refuse_dequantized(runner: Runner, batch: int, *, prompt: int, context: int) -> None:
    """Refuses packed products that run on no kernel of a device that has kernels.

    Forms that no kernel takes on any device (FP8, act-order; docs/kernels.md) may be dequantized.

    Raises:
      MoejaxError: naming what runs on none, and why.
    """
    may = allowed("auto", runner.kernels)
    for phase, products in _phases(runner, batch, prompt, context):
        fit = {name: of for name, of in products.items() if EVERY_KERNEL not in of.refusals}
        if wrong := wrong_kernels(fit, may):
            said = "; ".join(wrong)
            raise MoejaxError(f"{phase} of packed weights would run on no kernel: {said}")
