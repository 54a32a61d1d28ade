"""Stacks of equal matrices of a model, quantized under recipes.

All matrices of one shape are quantized in one call, whatever their layer and expert, so that a
recipe costs one compilation a shape; ranks are data. The programs are those of
`python -m moejax.quantize`. What they give is counted in bytes as it is stored, and dequantized by
`QTensor` to float32 for scoring.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.config import ModelConfig
from moejax.models.hf.names import Placement, placements, published_spelling
from moejax.quantization import ranks as ranks_lib
from moejax.quantization.pipeline.quantizers import (
    Calibration,
    Program,
    QuantizedStack,
    StackFactors,
    quantize_stack,
)
from moejax.quantization.pipeline.recipe import CALIBRATED, COMPENSATED, Scheme
from moejax.quantization.statistics import excess_kurtosis
from moejax.weights.qtensor import Compensator, Factor

KINDS = {"attention": "attention", "moe": "experts", "mlp": "mlp"}  # by a leaf's first name
# Matrices of smaller ranks are solved by one program, whose sketches of 24 + 8 rows are what
# a GPU still decomposes in true batches.
SHARED_RANK = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One row of the table."""

    method: str  # "fp", or one of `moejax.quantization.pipeline.recipe.METHODS`
    bits: int = 3
    group_size: int = 64
    zero_kind: str = "float"
    policy: str = ""  # of ranks; "": no compensators
    factor_bits: int = 8
    passes: int = 20

    @property
    def label(self) -> str:
        """Label that the table prints."""
        if self.method == "fp":
            return "unquantized"
        parts = [f"INT{self.bits} {self.method}"]
        if self.zero_kind != "float":
            parts.append(f"{self.zero_kind} zero")
        if self.group_size != 64:
            parts.append(f"group {self.group_size}")
        if self.policy:
            parts.append(f"{self.policy}, INT{self.factor_bits} factors")
        if self.passes != 20:
            parts.append(f"{self.passes} pass{'es' * (self.passes > 1)}")
        return ", ".join(parts)

    def program(self, max_rank: int) -> Program:
        """Program of a stack whose ranks are at most `max_rank`."""
        scheme = Scheme(
            method=self.method,
            bits=self.bits,
            group_size=self.group_size,
            zero_kind=self.zero_kind,
            scale_dtype="float16",
            factor_bits=self.factor_bits,
        )
        used = max_rank if self.method in COMPENSATED else 0
        return Program(scheme=scheme, max_rank=used, passes=self.passes)


class Stack(NamedTuple):
    """All matrices of one shape and kind."""

    places: tuple[Placement, ...]
    matrices: tuple[ranks_lib.RankedMatrix, ...]
    weights: jax.Array  # float32[n, N, K]


class Quantized(NamedTuple):
    """A model under a recipe."""

    weights: dict[str, np.ndarray]  # float32 leaves
    num_bytes: int  # of the quantized matrices, everything counted
    seconds: float  # of quantizing, compilation left out
    relative_error: dict[str, float]  # by kind: sqrt(sum |W - W'|^2 / sum |W|^2)
    num_surged: int  # matrices whose INT3 factors were kept in INT8
    num_starved: int  # matrices that calibration did not reach


class Measured(NamedTuple):
    """A row of the table."""

    recipe: Recipe
    perplexity: float  # a token
    nats: tuple[float, ...]  # a token, of each batch of windows
    bits_per_byte: float
    bits_per_weight: float  # over the quantized matrices, everything counted
    model_bits_per_weight: float  # over the whole model, what is not quantized in bfloat16
    quantized: Quantized

    def figures(self) -> dict[str, tuple[float, str]]:
        """Figures that are written: (figure, unit) by name."""
        q = self.quantized
        return {
            "perplexity": (self.perplexity, "perplexity"),
            "bits per byte": (self.bits_per_byte, "bits/byte"),
            "bits per weight": (self.bits_per_weight, "bits"),
            "model bits per weight": (self.model_bits_per_weight, "bits"),
            "quantizing": (q.seconds, "s"),
            "surged": (float(q.num_surged), "matrices"),
            "starved": (float(q.num_starved), "matrices"),
        } | {f"relative error {kind}": (error, "") for kind, error in q.relative_error.items()}


def make_stacks(
    config: ModelConfig,
    weights: Mapping[str, jax.Array],
    frequencies: np.ndarray,
) -> list[Stack]:
    """The attention, expert and MLP matrices of a model, as the checkpoint names them.

    Args:
      config: of the model.
      weights: float32 leaves of `weight_shapes(config)`.
      frequencies: float64[M, E], share of a layer's assignments that each expert gets.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[Placement]] = defaultdict(list)
    for place in placements(config, published_spelling(config.family)):
        kind = KINDS.get(place.leaf.split(".")[0])
        if kind and len(place.shape) == 2 and place.leaf != "moe.router":
            groups[kind, place.shape].append(place)
    host = {name: np.asarray(leaf) for name, leaf in weights.items()}
    stacks = []
    for (kind, shape), places in groups.items():
        stacked = np.stack([place.rows(host[place.leaf][place.index]) for place in places])
        kurtosis = np.asarray(excess_kurtosis(jnp.asarray(stacked)))
        found = []
        for place, value in zip(places, kurtosis, strict=True):
            is_expert = kind == "experts"
            found.append(
                ranks_lib.RankedMatrix(
                    name=place.name,
                    kind=kind,
                    num_rows=shape[0],
                    num_inputs=shape[1],
                    kurtosis=float(value),
                    frequency=float(frequencies[place.index]) if is_expert else None,
                )
            )
        stacks.append(Stack(tuple(places), tuple(found), jnp.asarray(stacked, jnp.float32)))
    return stacks


def plan_ranks(recipe: Recipe, stacks: Sequence[Stack], multiple: int) -> list[np.ndarray]:
    """int32[n] a stack: the rank of each matrix under the recipe's policy."""
    if not recipe.policy:
        return [np.zeros(len(stack.places), np.int32) for stack in stacks]
    policy = ranks_lib.parse_policy(recipe.policy)
    matrices = [matrix for stack in stacks for matrix in stack.matrices]
    plan = ranks_lib.assign_ranks(
        policy, matrices, factor_bits=recipe.factor_bits, multiple=multiple
    )
    ends = np.cumsum([len(stack.places) for stack in stacks])[:-1]
    return np.split(np.array(plan.ranks, np.int32), ends)


class Quantizer:
    """Runs recipes on a model; a program is compiled once a shape and kept."""

    def __init__(
        self,
        weights: Mapping[str, jax.Array],
        stacks: Sequence[Stack],
        calibration: Sequence[Calibration] | None,
        max_ranks: Sequence[int],
        *,
        use_kernel: bool,
    ):
        """Takes what all recipes share.

        Args:
          weights: float32 leaves of the model.
          stacks: its matrices.
          calibration: of each stack; None: recipes that need it raise ValueError.
          max_ranks: of each stack, at least every rank that a recipe will ask for.
          use_kernel: solve HQQ by the GPU kernel where that serves the shape.
        """
        self.weights = {name: np.asarray(leaf) for name, leaf in weights.items()}
        self.stacks, self.calibration, self.max_ranks = stacks, calibration, max_ranks
        self.use_kernel = use_kernel
        self._compiled: dict[tuple[Program, int], Any] = {}
        self._dequantize = jax.jit(lambda tensor: tensor.dequantize())

    def prepare(self, work: Sequence[tuple[Recipe, Sequence[np.ndarray]]], threads: int) -> None:
        """Compiles all programs that recipes with their ranks need, side by side."""
        wanted = {}
        for recipe, ranks in work:
            for i in range(len(self.stacks)):
                program, arguments = self._call(recipe, i, ranks[i])
                wanted[program, i] = arguments

        def compiled(item: tuple[tuple[Program, int], tuple[Any, ...]]) -> Any:
            (program, _), arguments = item
            return quantize_stack.lower(*arguments, program).compile()

        with futures.ThreadPoolExecutor(threads) as pool:
            self._compiled |= dict(zip(wanted, pool.map(compiled, wanted.items()), strict=True))

    def run(self, recipe: Recipe, ranks: Sequence[np.ndarray]) -> Quantized:
        """The model under a recipe, with the rank of every matrix (`plan_ranks`)."""
        leaves = {name: leaf.copy() for name, leaf in self.weights.items()}
        num_bytes, seconds, num_surged, num_starved = 0, 0.0, 0, 0
        lost: dict[str, float] = defaultdict(float)
        whole: dict[str, float] = defaultdict(float)
        for i, stack in enumerate(self.stacks):
            result, spent = self._quantize(recipe, i, ranks[i])
            seconds += spent
            num_surged += int(np.sum(result.surged & (ranks[i] > 0)))
            num_starved += int(np.sum(result.starved))
            num_bytes += stored_bytes(result, ranks[i])
            values = sum_of_parts(result, ranks[i], self._dequantize)
            for place, rows in zip(stack.places, np.asarray(values), strict=True):
                place.rows(leaves[place.leaf][place.index])[...] = rows
            kind = stack.matrices[0].kind
            lost[kind] += float(jnp.sum((values - stack.weights) ** 2))
            whole[kind] += float(jnp.sum(stack.weights**2))
        errors = {kind: (lost[kind] / whole[kind]) ** 0.5 for kind in lost}
        return Quantized(leaves, num_bytes, seconds, errors, num_surged, num_starved)

    def _quantize(self, recipe: Recipe, i: int, ranks: np.ndarray) -> tuple[QuantizedStack, float]:
        program, arguments = self._call(recipe, i, ranks)
        if (program, i) not in self._compiled:
            self._compiled[program, i] = quantize_stack.lower(*arguments, program).compile()
        start = time.perf_counter()
        result = jax.block_until_ready(self._compiled[program, i](*arguments))
        return result, time.perf_counter() - start

    def _call(self, recipe: Recipe, i: int, ranks: np.ndarray) -> tuple[Program, tuple[Any, ...]]:
        largest = int(ranks.max())
        if 0 < largest <= SHARED_RANK:
            largest = SHARED_RANK
        elif largest:
            largest = self.max_ranks[i]
        calibration = None
        if recipe.method in CALIBRATED:
            if self.calibration is None:
                raise ValueError(f"{recipe.method} needs calibration")
            calibration = self.calibration[i]
        arguments = (self.stacks[i].weights, jnp.asarray(ranks), calibration)
        program = dataclasses.replace(recipe.program(largest), use_kernel=self.use_kernel)
        return program, arguments


def stored_bytes(result: QuantizedStack, ranks: np.ndarray) -> int:
    """Bytes of packed codes, scales, zeros, and the rows of factors that the ranks name."""
    total = result.tensor.nbytes
    surged = np.asarray(result.surged)
    (own,), (safe,) = result.factors, result.safe_factors
    for factors, is_used in ((own, ~surged), (safe, surged)):
        if factors is None:
            continue
        num_rows = np.where(is_used, ranks, 0).sum()
        for leaf in jax.tree.leaves(factors):
            # [C, R, ...]: the same bytes in every row of the C R.
            total += num_rows * leaf.nbytes // (leaf.shape[0] * leaf.shape[1])
    return int(total)


def sum_of_parts(result: QuantizedStack, ranks: np.ndarray, dequantize: Any) -> jax.Array:
    """float32[C, N, K]: codes and compensators together, by one `QTensor` of fixed shapes."""
    (own,), (safe,) = result.factors, result.safe_factors
    if own is None:
        return dequantize(result.tensor)
    surged = np.asarray(result.surged)
    parts = [_compensator(result, own, np.where(surged, 0, ranks))]
    if safe is not None:
        parts.append(_compensator(result, safe, np.where(surged, ranks, 0)))
    return dequantize(dataclasses.replace(result.tensor, compensators=tuple(parts)))


def _compensator(result: QuantizedStack, factors: StackFactors, ranks: np.ndarray) -> Compensator:
    """Pools that hold every row of the factors; `ranks` says which of them count."""
    num_rows = result.tensor.shape[-2]
    num_matrices, max_rank = factors.u.shape[:2]

    def pool(factor: Factor) -> Factor:
        return jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), factor)

    return Compensator(
        u=pool(factors.u),
        v=pool(factors.v),
        start=jnp.arange(num_matrices, dtype=jnp.int32) * max_rank,
        rank=jnp.asarray(ranks, jnp.int32),
        first_row=0,
        num_rows=num_rows,
        max_rank=max_rank,
    )
