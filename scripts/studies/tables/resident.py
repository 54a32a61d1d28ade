"""Rows of resident models of real shapes: of `moejax.benchmark`, and of the script before it."""

import re

from scripts.studies.tables.rows import Found, Results

# By quantity: the figure of `moejax.benchmark`, tokens of the prompt, and an earlier row's name.
_QUANTITIES = {
    "TPOT": ("TPOT median", 512, "TPOT, random cache, calls of 16"),
    "TTFT": ("TTFT median", 2048, "TTFT"),
    "prefill": ("prefill throughput", 2048, "prefill"),
}


def resident(results: Results, quantity: str, model: str, bits: str, batch: int) -> Found | None:
    """The latest row of a model whose experts and attention have so many bits, such as "INT4"."""
    figure, prompt, earlier = _QUANTITIES[quantity]
    form = f"{bits} g64 float, attention {bits}, head bf16"
    now = re.escape(
        f"{figure}, {model}, random weights, {form}, batch {batch}, {batch} prompts of {prompt} "
        "random tokens; routing "
    )
    before = rf"batch {batch} prompt {prompt} {earlier}, {model}, \d+ layers, {form}"
    return results.latest(rf"{now}.*|{before}, prefill by mosaic and mosaic.*")
