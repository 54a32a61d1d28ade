"""MiLo's recipe by the hqq library and torch: what ours is measured beside."""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np


class HqqLibrary:
    """INT3 in groups of 64 along the inputs; HQQ with the library's default solver.

    Wheels and unpacked sources in a folder are put on the path, for machines that have no network.
    """

    def __init__(self, rank: int, passes: int, folder: str) -> None:
        self.rank, self.passes = rank, passes
        for path in sorted(Path(folder).glob("*")) if folder else ():
            if path.name == "hqq_src" or path.match("termcolor-*.whl"):
                sys.path.append(str(path.resolve()))
        import torch
        from hqq.core.quantize import Quantizer

        self.torch, self.quantizer = torch, Quantizer
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        print(f"torch {torch.__version__} on {self.device}")

    def tensor(self, weights: jax.Array) -> Any:
        """The weights as a torch tensor of their own."""
        try:
            return self.torch.from_dlpack(weights).clone().to(self.device)
        except Exception:
            return self.torch.tensor(np.array(weights), device=self.device)

    def hqq(self, weights: Any) -> Any:
        """Values that the library's codes stand for; codes are left unpacked, in its favour."""
        codes, meta = self.quantizer.quantize(
            weights, nbits=3, channel_wise=True, group_size=64, optimize=True, round_zero=False,
            axis=1, bitpack=False, device=self.device,
        )  # fmt: skip
        return self.quantizer.dequantize(codes, meta | {"compute_dtype": self.torch.float32})

    def milo(self, weights: Any) -> Any:
        """MiLo's recipe, as its code does it."""
        low_rank = self.torch.zeros((), device=self.device)
        for _ in range(self.passes):
            quantized = self.hqq(weights - low_rank)
            u, sigma, v = self.svd_lowrank(weights - quantized)
            low_rank = (u * sigma) @ v.T
        return quantized + low_rank

    def svd_lowrank(self, weights: Any) -> Any:
        """(U, sigma, V) as MiLo's appendix C takes them."""
        return self.torch.svd_lowrank(weights, q=self.rank, niter=2)

    def timed(self, run: Callable[[], Any], repeats: int) -> tuple[float, Any]:
        """Median seconds, and the last value; nothing runs before to warm up."""
        times, value = [], None
        for _ in range(repeats):
            self._wait()
            start = time.perf_counter()
            value = run()
            self._wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times), value

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def error(self, weights: Any, approximation: Any) -> float:
        """|W - W'| / |W|."""
        return float((weights - approximation).norm() / weights.norm())
