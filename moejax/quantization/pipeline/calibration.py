"""Calibration text of quantizers, and its samples."""

import lzma
from pathlib import Path

import numpy as np

from moejax.errors import MoejaxError
from moejax.text.tokenizer import Tokenizer

TEXT_PATH = Path(__file__).parent / "calibration_text" / "text.xz"
NUM_SAMPLES, SAMPLE_LENGTH = 128, 2048  # as GPTQ's authors take them


def shipped_text() -> str:
    """Text that ships: prose, code, maths, Chinese, freely licensed (see its README.md)."""
    return lzma.decompress(TEXT_PATH.read_bytes()).decode()


def calibration_tokens(
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    max_positions: int,
    text: str | None = None,  # the user's own; None: the text that ships
    num_samples: int = 0,  # S; 0: NUM_SAMPLES, or as many as the text has, at least one
    length: int = 0,  # T; 0: SAMPLE_LENGTH, or the model's context if that is shorter
) -> np.ndarray:
    """Samples a text at even distances: int32[S, T].

    Raises:
      MoejaxError: no tokenizer or not the model's, a text that is too short, or samples that do
        not fit the model.
    """
    if tokenizer is None:
        raise MoejaxError(
            "calibration needs a tokenizer.json beside the checkpoint; add the file, or take a "
            "method without calibration (milo, hqq, rtn)"
        )
    if num_samples < 0 or length < 0:
        raise MoejaxError(
            f"calibration of {num_samples} samples of {length} tokens; give at least one sample"
        )
    length = length or min(SAMPLE_LENGTH, max_positions)
    if length > max_positions:
        raise MoejaxError(
            f"calibration samples of {length} tokens do not fit the model's context of "
            f"{max_positions}; make them shorter"
        )
    chosen = shipped_text() if text is None else text
    ids = np.asarray(tokenizer.encode(chosen, add_special_tokens=False), np.int64)
    available = len(ids) // length
    if available < (least := max(1, num_samples)):
        what = "the calibration text that ships" if text is None else "the calibration text"
        raise MoejaxError(
            f"{what} has {len(ids)} tokens, {least} x {length} = {least * length} are needed; give "
            "a longer text, or fewer or shorter samples"
        )
    if wrong := ids[ids >= vocab_size].tolist():
        raise MoejaxError(
            f"tokenizer.json gives token {wrong[0]}, outside the model's vocabulary of "
            f"{vocab_size}; it is not the model's tokenizer"
        )
    count = num_samples or min(NUM_SAMPLES, available)
    starts = np.arange(count) * len(ids) // count
    return ids[starts[:, None] + np.arange(length)].astype(np.int32)
