"""Chunks of prompts and lengths of caches, in a few sizes; each is one program."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from moejax.errors import MoejaxError
from moejax.experts.budget import Budget
from moejax.models import attention
from moejax.models.config import ModelConfig, Pages
from pallas_kernels.target import Target

MIN_PREFILL_LENGTH = 16
MAX_PREFILL_LENGTH = 1024  # longer prompts go chunk by chunk
# Or by so many, where a plan finds that fewer passes over experts that move are worth the memory.
MAX_MOVING_LENGTH = 4096
SCORE_BYTES = 2**30  # of the float32 attention scores of one chunk and layer
MAX_PREFILL_TOKENS = 4096  # of a chunk of all sequences, where scores take no memory
MIN_KV_LENGTH = 256
# On a CPU compiling takes seconds: short prompts go through one program, whatever their length.
CPU_CHUNK_LENGTH = 64
# A cache has so many slots even where a call needs fewer, if all its sequences take no more bytes:
# the next turns of a conversation then run the same programs.
CACHE_LENGTH = 1024
CACHE_BYTES = 2**28
# Sizes of a running batch, by platform: a GPU pads at little cost, and compiles for longer.
RUNNING_CHUNKS = {"cpu": (64, 256), "gpu": (64, 1024)}
RUNNING_KV_LENGTHS = {"cpu": (), "gpu": (1024,)}  # beside S; a CPU's programs choose among several


def length_bucket(length: int, smallest: int, largest: int, factor: int = 2) -> int:
    """Smallest `smallest` * `factor`^n that holds `length`, at most `largest`."""
    bucket = smallest
    while bucket < length:
        bucket *= factor
    return min(bucket, largest)


def kv_bucket(length: int, cache_length: int) -> int:
    """Slots that attention reads to see `length` of them.

    Buckets are coarse, since each is a program: a decode of 2,048 tokens compiles three.
    """
    return length_bucket(length, MIN_KV_LENGTH, cache_length, factor=4)


def kv_buckets(cache_length: int) -> tuple[int, ...]:
    """All values of `kv_bucket`, rising, without the whole cache."""
    found = [MIN_KV_LENGTH]
    while found[-1] < cache_length:
        found.append(4 * found[-1])
    return tuple(found[:-1])


def least_cache_length(config: ModelConfig, batch_size: int, itemsize: int) -> int:
    """Slots of a sequence's cache that are cheap; see `CACHE_LENGTH`."""
    least = CACHE_LENGTH
    slot_bytes = batch_size * config.cached_values * itemsize
    while least > MIN_KV_LENGTH and least * slot_bytes > CACHE_BYTES:
        least //= 2
    return least


@dataclasses.dataclass(frozen=True)
class PlannedSizes:
    """Call sizes that the memory limits were planned for; 0: any."""

    batch: int = 0  # sequences at once
    context: int = 0  # S, slots of the cache of each
    chunk: int = 0  # positions of each in a prefill step
    pages: int = 0  # of a running batch; 0: sequences begin together, each with a cache of its own

    @classmethod
    def of(cls, budget: Budget) -> "PlannedSizes":
        """Sizes of a budget; without a limit of the device the chunk alone."""
        run = budget.run
        if not budget.limits.device_gib:
            return cls(chunk=run.chunk)
        return cls(run.batch, run.context, run.chunk, run.num_pages)

    def check(self, batch: int, cache_length: int, pages: Pages | None = None) -> None:
        """Raises MoejaxError for a call that exceeds the plan; `pages`: of a running batch."""
        is_running = pages is not None
        if self.batch and is_running != bool(self.pages) and (is_running or batch > 1):
            kind = "rows that come and go" if is_running else "prompts that begin together"
            raise MoejaxError(f"memory was not planned for {kind}: load with running={is_running}")
        if self.batch and batch > self.batch:
            raise MoejaxError(
                f"{batch} prompts, but memory was planned for {self.batch}: load with batch={batch}"
            )
        if self.context and cache_length > self.context:
            raise MoejaxError(
                f"{cache_length} positions, but memory was planned for {self.context}: load with "
                f"context={cache_length}, or raise memory.device_gib"
            )


@dataclasses.dataclass(frozen=True)
class FixedSizes:
    """The few sizes of a running batch's calls: few programs serve all rows."""

    chunks: tuple[int, ...]  # positions of prompt chunks, rising
    kv_lengths: tuple[int, ...]  # slots of the cache that a call reads, rising; the last is S

    @classmethod
    def of(cls, platform: str, longest: int, context: int) -> "FixedSizes":
        """Sizes for a platform; no chunk exceeds `longest`, and S is `context`.

        A chunk longer than `MAX_PREFILL_LENGTH` was planned for experts that move: each chunk
        brings them anew, so that few long ones let others wait for less in all.
        """
        chunks = {min(size, longest, context) for size in RUNNING_CHUNKS[platform]}
        if longest > MAX_PREFILL_LENGTH:
            chunks.add(min(longest, context))
        reads = {kv for kv in RUNNING_KV_LENGTHS[platform] if 2 * kv <= context} | {context}
        return cls(tuple(sorted(chunks)), tuple(sorted(reads)))

    @property
    def spare(self) -> int:
        """Positions by which a chunk may reach past the cache, with padding alone."""
        return self.chunks[0]

    def next_chunk(self, start: int, length: int) -> int:
        """Positions of the chunk from `start` on, of a prompt of `length` tokens.

        It is the longest that has tokens for its most part, or that takes the place of more than
        two of the size below: each reads most experts, however few tokens it has.
        """
        left, room = length - start, self.kv_lengths[-1] - start
        fitting = [size for size in self.chunks if size <= room] or [self.spare]
        sizes = itertools.pairwise(fitting)
        longer = (size for below, size in sizes if left > min(2 * below, size // 2))
        return max(longer, default=fitting[0])

    def kv_length(self, length: int) -> int:
        """Slots that a call reads to see `length` of them."""
        return next((kv for kv in self.kv_lengths if kv >= length), self.kv_lengths[-1])


def longest_chunk(
    config: ModelConfig,
    batch_size: int,
    cache_length: int,
    planned: PlannedSizes | None = None,
    stores_scores: bool = True,
) -> int:
    """Positions of a prefill chunk, a power of two.

    Its scores B H T S fit `SCORE_BYTES`, and its tokens B T are at most those of the planned chunk:
    a cache that is shorter than the planned one would else allow a longer chunk.

    Args:
      stores_scores: False where attention takes no memory for them; a chunk whose tokens B T are at
        most `MAX_PREFILL_TOKENS` is then as good.
    """
    most_tokens = 0
    if planned:  # prompts of a running batch come one by one
        most_tokens = planned.chunk * (1 if planned.pages else planned.batch)
    row = 4 * batch_size * config.num_heads * cache_length

    def fits(length: int) -> bool:
        num_tokens = batch_size * length
        has_room = length * row <= SCORE_BYTES
        has_room |= not stores_scores and num_tokens <= MAX_PREFILL_TOKENS
        return has_room and (not most_tokens or num_tokens <= most_tokens)

    longest = max(MAX_PREFILL_LENGTH, planned.chunk if planned else 0)
    while longest > MIN_PREFILL_LENGTH and not fits(longest):
        longest //= 2
    return longest


def planned_chunks(
    config: ModelConfig, batch_size: int, cache_length: int, itemsize: int, target: Target
) -> tuple[int, ...]:
    """Positions of a prefill chunk among which a plan chooses, rising; see `make_budget`.

    Args:
      itemsize: bytes of a number of the activations.
      target: the device, see `attention.stores_scores`.
    """
    stored = attention.stores_scores(config, itemsize, target)
    found = [min(cache_length, longest_chunk(config, batch_size, cache_length, None, stored))]
    if target.platform == "gpu":
        longer = PlannedSizes(chunk=MAX_MOVING_LENGTH)
        most = longest_chunk(config, batch_size, cache_length, longer, stored)
        while 2 * found[-1] <= min(most, cache_length):
            found.append(2 * found[-1])
    return tuple(found)


def slice_tokens(
    rows: Sequence[Sequence[int]] | np.ndarray, start: int, size: int, fill: int = 0
) -> np.ndarray:
    """Takes `size` tokens of each row from `start` on, int32[B, size], padded by `fill`."""
    tokens = np.full((len(rows), size), fill, np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        part = row[start : start + size]
        padded[: len(part)] = part
    return tokens


def prefill_chunks(
    length: int, cache_length: int, longest: int, short: int = 0
) -> Iterator[tuple[int, int]]:
    """Yields (start, size) of the prefill chunks of `length` positions within the cache.

    Args:
      longest: positions of a chunk at most.
      short: positions of all chunks of what is no longer than four of them; 0: of none.
    """
    start = 0
    while start < length:
        largest = min(longest, cache_length - start)
        size = length_bucket(length - start, MIN_PREFILL_LENGTH, largest)
        if length - start <= 4 * short:
            size = min(short, largest)
        yield start, size
        start += size


def next_chunk(num_left: int, room: int, most: int) -> int:
    """Size of the next chunk of given tokens of which at most `most` may be read at once.

    It is a power of two, so that few programs serve any `most`; padding fills the last chunk alone.
    `room` are slots of the cache for them.
    """
    if num_left <= most:
        return length_bucket(num_left, MIN_PREFILL_LENGTH, room)
    return 1 << (most.bit_length() - 1)


def cache_length(
    longest: int, num_new: int, context: int, planned: int, model_limit: int, least: int
) -> int:
    """Cache length S for a prompt of `longest` and an answer of `num_new` tokens.

    Args:
      longest: tokens of the longest prompt.
      num_new: most tokens of an answer; it is cut where the cache ends.
      context: S of every call; 0: what is needed.
      planned: the most that memory was planned for.
      model_limit: the model's own.
      least: slots that there are in any case, where the limits allow.

    Raises:
      MoejaxError: the prompt leaves no room for an answer.
    """
    limit = context or planned
    if longest >= limit:
        mend = "shorten it"
        if limit < model_limit:
            mend += f", or raise context (the model takes {model_limit})"
        raise MoejaxError(
            f"a prompt of {longest} tokens leaves no room in the context of {limit}: {mend}"
        )
    return context or length_bucket(longest + num_new, min(least, planned), planned)


def scored_columns(targets: np.ndarray) -> np.ndarray:
    """Last P columns of int32[B, T] from the first scored one, int32[P]; P is a bucket."""
    counted = np.flatnonzero((targets >= 0).any(axis=0))
    length = targets.shape[1]
    num_last = length - int(counted[0]) if len(counted) else 0
    if num_last:
        num_last = length_bucket(num_last, MIN_PREFILL_LENGTH, length)
    return np.arange(length - num_last, length, dtype=np.int32)
