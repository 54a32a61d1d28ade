"""Small traces: the last of a prompt and the first decoded tokens of a recorded one."""

import numpy as np

from moejax.routing.trace import DECODE, OPTIONAL, PREFILL, Trace


def cut(trace: Trace, prompt: int, tokens: int) -> Trace:
    """The last tokens of a trace's prompt and its first decoded ones, without the parts at will."""
    of_prompt, decoded = (np.flatnonzero(trace.phase == phase) for phase in (PREFILL, DECODE))
    rows = np.concatenate([of_prompt[len(of_prompt) - prompt :], decoded[:tokens]])
    kept = {name: array[rows] for name, array in trace.tensors().items() if name not in OPTIONAL}
    said = f"{trace.facts['text']}; of {len(trace)} the prompt's last {prompt} and {tokens} more"
    facts = {**trace.facts, "text": said}
    return Trace(num_experts=trace.num_experts, facts=facts, **kept)
