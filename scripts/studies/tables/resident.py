"""Rows of resident models of real shapes: of `moejax.benchmark`, and of the script before it."""

import re

from scripts.studies.tables.rows import Found, Results

NONE = (0, 0)  # no compensators
# By quantity: the figure of `moejax.benchmark`, tokens of the prompt, and an earlier row's name.
_QUANTITIES = {
    "TPOT": ("TPOT median", 512, "TPOT, random cache, calls of 16"),
    "TTFT": ("TTFT median", 2048, "TTFT"),
    "prefill": ("prefill throughput", 2048, "prefill"),
}


def resident(
    results: Results,
    quantity: str,
    model: str,
    bits: str,
    batch: int,
    ranks: tuple[int, int] = NONE,
) -> Found | None:
    """The latest row of a model whose experts and attention have so many bits, such as "INT4".

    `ranks` are of compensators: of dense matrices, and of experts.
    """
    figure, prompt, earlier = _QUANTITIES[quantity]
    form = f"{bits} g64 float, attention {bits}, head bf16"
    terms = f", compensators of rank {ranks[0]}, of experts {ranks[1]}" if any(ranks) else ""
    now = re.escape(
        f"{figure}, {model}, random weights, {form}{terms}, batch {batch}, {batch} prompts of "
        f"{prompt} random tokens; routing "
    )
    if terms:
        return results.latest(rf"{now}.*")
    before = rf"batch {batch} prompt {prompt} {earlier}, {model}, \d+ layers, {form}"
    return results.latest(rf"{now}.*|{before}, prefill by mosaic and mosaic.*")
