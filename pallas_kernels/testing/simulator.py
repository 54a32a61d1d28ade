"""Numpy simulator of the Mosaic instructions, for all threads of a block at once.

A kernel body of `pallas_kernels.mosaic_decode` runs here unchanged on a CPU: its lanes load, keep
and multiply the values that they would on a GPU, with two exceptions. Threads run in step, so a
missing barrier has no effect; and a product sums its 16 terms exactly before it rounds. Unwritten
memory is NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

Value = Any

_BUFFER = 40  # bits of an address below the number of its buffer
_SHARED = 24  # the same of an address in shared memory
KINDS = {"bf16": jnp.dtype(jnp.bfloat16), "f16": np.dtype(np.float16)}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def run_blocks(
    # takes a `_Simulator`, then references to operands, outputs and scratch buffers
    body: Callable[..., None],
    num_blocks: int,
    num_threads: int,
    operands: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    shared_floats: Sequence[int],
    cluster: int = 1,
) -> None:
    """Runs a body for every block, one cluster after the other."""
    memory = [np.ascontiguousarray(a).view(np.uint8).reshape(-1) for a in operands]
    memory += [a.view(np.uint8).reshape(-1) for a in outputs]
    for block in range(num_blocks):
        lengths = [n for _ in range(cluster) for n in shared_floats]
        scratch = [np.full(n, np.nan, np.float32).view(np.uint8) for n in lengths]
        machine = _Simulator(block, num_threads, [*memory, *scratch], len(memory), cluster)
        body(machine, *range(len(memory) + len(shared_floats)))


def _to_odd(values: np.ndarray) -> np.ndarray:
    """Rounds float64 to float32 so that a second rounding to fewer bits is right.

    A float64 is made bfloat16 through float32; cut off with the last bit set where anything was
    lost, that one is never taken for half a unit of the result. What is too large becomes the
    largest float32, and infinite in fewer bits.
    """
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    bits = single.view(np.uint32) - (np.abs(single) > np.abs(values))
    return (bits | (single != values)).astype(np.uint32).view(np.float32)


def _of_words(operation: np.ufunc) -> Callable[["_Simulator", Value, Value], Value]:
    """An instruction of two words."""
    return lambda self, a, b: self._word(operation(self._word(a), self._word(b)))


def _of_floats(operation: np.ufunc) -> Callable[["_Simulator", Value, Value], Value]:
    """An instruction of two float32."""
    return lambda self, a, b: operation(self._float(a), self._float(b))


class _Simulator:
    """One block of threads. Methods are those of `emit.Mlir`; values are arrays over threads.

    A cluster is simulated as one block with the threads and the scratch buffers of all its blocks.
    """

    def __init__(
        self, block: int, num_threads: int, memory: list[np.ndarray], first_shared: int,
        cluster: int = 1,
    ):  # fmt: skip
        self.threads = np.arange(cluster * num_threads, dtype=np.int64)
        self.block, self.num_threads = cluster * block, num_threads
        self.memory, self.first_shared = memory, first_shared
        self.scratch = (len(memory) - first_shared) // cluster  # buffers of a block
        self.active = np.ones(len(self.threads), bool)
        self._constants: dict[int, np.ndarray] = {}

    # Words are int64 arrays in 0 .. 2^32 - 1; indices too (none is negative for long).

    # Most of a launch's time is in these three, called for every operand of every instruction.

    def _word(self, value: Value) -> np.ndarray:
        shape = self.threads.shape
        if type(value) is int:
            known = self._constants.get(value)
            if known is None or known.shape != shape:
                known = np.broadcast_to(np.int64(value & 0xFFFFFFFF), shape)
                self._constants[value] = known
            return known
        word: np.ndarray = np.asarray(value, np.int64) & 0xFFFFFFFF
        return word if word.shape == shape else np.broadcast_to(word, shape)

    def _signed(self, value: Value) -> np.ndarray:
        return (self._word(value) ^ 2**31) - 2**31

    def _float(self, value: Value) -> np.ndarray:
        single = np.asarray(value, np.float32)
        shape = self.threads.shape
        return single if single.shape == shape else np.broadcast_to(single, shape)

    def const(self, value: Value) -> Value:
        return self._word(value)

    def const_f32(self, value: Value) -> Value:
        return self._float(value)

    def either(self, value: Value) -> Value:
        return self._float(value) if isinstance(value, float) else value

    add, sub, mul = map(_of_words, (np.add, np.subtract, np.multiply))
    div, rem = map(_of_words, (np.floor_divide, np.remainder))
    band, bor, bxor = map(_of_words, (np.bitwise_and, np.bitwise_or, np.bitwise_xor))
    shl, shr = map(_of_words, (np.left_shift, np.right_shift))
    fadd, fmul, fmin, fmax = map(_of_floats, (np.add, np.multiply, np.minimum, np.maximum))

    def rotate(self, a: Value, count: int) -> Value:
        word = self._word(a)
        return word << count | word >> 32 - count

    def permute(self, low: Value, high: Value, selector: Value) -> Value:
        both, digits = self._word(high) << 32 | self._word(low), self._word(selector)
        found = [both >> 8 * (digits >> 4 * i & 7) & 0xFF for i in range(4)]
        return sum(byte << 8 * i for i, byte in enumerate(found))

    def smaller(self, a: Value, b: Value) -> Value:
        return self._word(np.minimum(self._signed(a), self._signed(b)))

    def compare(self, a: Value, how: str, b: Value) -> Value:
        return _COMPARE[how](self._signed(a), self._signed(b))

    def both(self, a: Value, b: Value) -> Value:
        return a & b

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        return np.where(condition, self.either(a), self.either(b))

    def merge(self, a: Value, mask: int, b: Value, how: str) -> Value:
        a, b = self._word(a), self._word(b)
        return (a & mask) | (b if how == "or" else b & ~np.int64(mask))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        a, b, c = (self._float(v).astype(np.float64) for v in (a, b, c))
        return (a * b + c).astype(np.float32)

    def special(self, name: str) -> Value:
        block, thread = np.divmod(self.threads, self.num_threads)
        return {"tid.x": thread, "ctaid.x": self.block + block}[name]

    def address(self, ref: int) -> Value:
        return np.broadcast_to(np.int64(ref) << _BUFFER, self.threads.shape)

    def shared_address(self, ref: int) -> Value:
        return self._word(ref << _SHARED)  # 32 bits, as on the GPU

    def _of_shared(self, at: Value, block: int | None = None) -> np.ndarray:
        """Shared memory of the threads' own blocks, or of one block of the cluster."""
        owner = self.threads // self.num_threads if block is None else block
        buffer = (at >> _SHARED) + owner * self.scratch
        return buffer << _BUFFER | at & (1 << _SHARED) - 1

    def offset(self, base: Value, count: Value, bytes_each: int = 1) -> Value:
        return base + self._word(count) * bytes_each

    def _bytes(self, at: Value, count: int, active: np.ndarray) -> np.ndarray:
        """Bytes uint8[threads, count]; zero in inactive threads."""
        out = np.zeros((len(self.threads), count), np.uint8)
        for buffer in np.unique(at[active] >> _BUFFER):
            mine = active & (at >> _BUFFER == buffer)
            first = at[mine] & (1 << _BUFFER) - 1
            if (first % count).any():
                raise IndexError(f"a load of {count} bytes is not aligned")
            if (first + count > len(self.memory[buffer])).any():
                raise IndexError(f"a load beyond the {len(self.memory[buffer])} bytes of {buffer}")
            out[mine] = self.memory[buffer][first[:, None] + np.arange(count)]
        return out

    def load(self, base: Value, imm: int, num_words: int, *, in_order: bool = False) -> list[Value]:
        words = self._bytes(base + imm, 4 * num_words, self.active).view(np.uint32)
        words = words.astype(np.int64)
        words[~self.active] = 0xDEADBEEF
        return list(words.T)

    def copy_async(
        self, to: Value, to_imm: int, base: Value, imm: int, present: Value, num_bytes: int
    ) -> None:
        active = self.active & (self._word(present) != 0)
        found = self._bytes(base + imm, num_bytes, active)
        self._put(self._of_shared(to) + to_imm, found)

    def copy_word_async(self, to: Value, base: Value, size: Value) -> None:
        size, found = self._word(size), np.zeros((len(self.threads), 4), np.uint8)
        assert (self._of_shared(to)[self.active] % 4 == 0).all(), "a word that is not aligned"
        assert (base[self.active] % 4 == 0).all(), "a word that is not aligned"
        for byte in range(4):
            found[:, byte] = self._bytes(base + byte, 1, self.active & (size > byte))[:, 0]
        self._put(self._of_shared(to), found)

    def copies_commit(self) -> None:
        pass

    def copies_wait(self, pending: int) -> None:
        pass

    def load_shared_words(self, at: Value, imm: int, count: int) -> list[Value]:
        raw = self._bytes(self._of_shared(at) + imm, 4 * count, self.active)
        return list(raw.view(np.uint32).astype(np.int64).T)

    def load_small(self, base: Value, imm: int, num_bytes: int) -> Value:
        found = self._bytes(base + imm, num_bytes, self.active)
        return found.view(_UNSIGNED[num_bytes])[:, 0].astype(np.int64)

    def _put(self, at: Value, values: np.ndarray) -> None:
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(len(self.threads), -1)
        for buffer in np.unique(at[self.active] >> _BUFFER):
            mine = self.active & (at >> _BUFFER == buffer)
            first = at[mine] & (1 << _BUFFER) - 1
            if (first + raw.shape[1] > len(self.memory[buffer])).any():
                raise IndexError(f"a store beyond the end of buffer {buffer}")
            self.memory[buffer][first[:, None] + np.arange(raw.shape[1])] = raw[mine]

    def store(self, base: Value, imm: int, value: Value, kind: str) -> None:
        typed = {"b16": np.uint16, "b32": np.uint32}
        values = self._float(value) if kind == "f32" else self._word(value).astype(typed[kind])
        self._put(base + imm, values)

    def load_shared(self, at: Value, imm: int, kind: str = "f32") -> Value:
        raw = self._bytes(self._of_shared(at) + imm, 4, self.active)
        if kind == "f32":
            return raw.view(np.float32)[:, 0]
        return raw.view(np.uint32)[:, 0].astype(np.int64)

    def load_cluster(self, at: Value, block: int, imm: int) -> Value:
        return self._bytes(self._of_shared(at, block) + imm, 4, self.active).view(np.float32)[:, 0]

    def store_shared(self, at: Value, imm: int, value: Value, kind: str = "f32") -> None:
        self.store(self._of_shared(at), imm, value, kind)

    def store_shared_floats(self, at: Value, imm: int, values: Sequence[Value]) -> None:
        rows = np.stack([self._float(value) for value in values], axis=1)
        self._put(self._of_shared(at) + imm, rows)

    def load_volatile(self, base: Value) -> Value:
        return self.load(base, 0, 1)[0]

    def shuffle(self, value: Value, lane: int) -> Value:
        return np.repeat(self._word(value).reshape(-1, 32)[:, lane], 32)

    def ballot(self, condition: Value) -> Value:
        flags = (condition & self.active).reshape(-1, 32).astype(np.int64)
        masks = (flags << np.arange(32)).sum(axis=1)
        return np.repeat(masks, 32)

    def count_ones(self, word: Value) -> Value:
        return np.bitwise_count(self._word(word)).astype(np.int64)

    def block_barrier(self) -> None:
        assert self.active.all(), "a barrier in a branch that not all threads take"

    def team_barrier(self, number: Value, num_threads: int) -> None:
        numbers = self._word(number)[self.active]
        assert (numbers > 0).all() and (numbers < 16).all(), "no such barrier"
        for team in np.unique(numbers):
            assert np.sum(numbers == team) == num_threads, "a barrier that not all of a team take"

    def cluster_arrive(self, writes: bool = True) -> None:
        self.block_barrier()

    def cluster_wait(self) -> None:
        self.block_barrier()

    def warp_barrier(self) -> None:
        pass

    def _pairs(self, kind: str, word: Value) -> np.ndarray:
        """Halves of a word, float64[threads, 2]."""
        halves = self._word(word).astype(np.uint32).reshape(-1, 1).view(KINDS[kind])
        found = halves.astype(np.float64)
        if kind == "bf16":  # XLA's threads read subnormal floats as zeros
            bits = halves.view(np.int16)
            small = (bits & 0x7F80 == 0) & (bits & 0x7F != 0)
            if small.any():
                exact = np.where(bits < 0, -1.0, 1.0) * (bits & 0x7F) * 2.0**-133
                found = np.where(small, exact, found)
        return found

    def mma(self, kind: str, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value]) -> Value:
        warps = len(self.threads) // 32
        of_a = [self._pairs(kind, v).reshape(warps, 8, 4, 2) for v in a]
        of_b = [self._pairs(kind, v).reshape(warps, 8, 8) for v in b]
        rows = [
            np.concatenate([of_a[r], of_a[r + 2]], axis=2).reshape(warps, 8, 16) for r in (0, 1)
        ]
        left = np.concatenate(rows, axis=1)
        right = np.concatenate(of_b, axis=2)  # [warps, columns, k]
        product = np.einsum("wrk,wck->wrc", left, right).reshape(warps, 2, 8, 4, 2)
        found = []
        for i, addend in enumerate(c):
            part = product[:, i // 2, :, :, i % 2].reshape(-1)
            found.append((part + self._float(addend)).astype(np.float32))
        return found

    def fma_pair(self, kind: str, a: Value, b: Value, c: Value) -> Value:
        a, b, c = (self._pairs(kind, v) for v in (a, b, c))
        rounded = np.ascontiguousarray(_to_odd(a * b + c).astype(KINDS[kind]))
        return rounded.view(np.uint32)[:, 0].astype(np.int64)

    def half_to_f32(self, word: Value, half: int) -> Value:
        return self._pairs("f16", word)[:, half].astype(np.float32)

    def f32_of_bits(self, word: Value) -> Value:
        return self._word(word).astype(np.uint32).view(np.float32)

    def byte_to_f32(self, word: Value, byte: int) -> Value:
        return (self._word(word) >> 8 * byte & 0xFF).astype(np.float32)

    def f32_to_16(self, kind: str, value: Value) -> Value:
        return self._float(value).astype(KINDS[kind]).view(np.uint16).astype(np.int64)

    def f32_of_16(self, kind: str, word: Value) -> Value:
        return self._pairs(kind, word)[:, 0].astype(np.float32)

    def exp2(self, value: Value) -> Value:
        with np.errstate(over="ignore"):
            return np.exp2(self._float(value))

    def reciprocal(self, value: Value) -> Value:
        return np.float32(1) / self._float(value)

    def loop(
        self, start: Value, stop: Value, step: Value, carried: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
    ) -> list[Value]:  # fmt: skip
        index, carried = self._signed(start), [self.either(v) for v in carried]
        before = self.active
        while True:
            self.active = before & (index < self._signed(stop))
            if not self.active.any():
                break
            after = body(index, list(carried))
            carried = [np.where(self.active, a, b) for a, b in zip(after, carried, strict=True)]
            index = index + self._signed(step)
        self.active = before
        return carried

    def when(self, condition: Value, body: Callable[[], None]) -> None:
        before = self.active
        self.active = before & condition
        if self.active.any():
            body()
        self.active = before
