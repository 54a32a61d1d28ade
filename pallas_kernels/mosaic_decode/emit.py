"""Instructions of the streaming kernels, as methods that emit MLIR.

Everything here runs while a Mosaic GPU kernel is being lowered, inside `inline_mgpu`: values are
registers of one thread, `i32` unless said, and a warp's 32 threads run together. Instructions use
LLVM's operations where they exist; the others (cached loads, matrix products, packed 16-bit
arithmetic) are one line of PTX.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import scf as _scf

from pallas_kernels.mosaic_decode.arithmetic import Arithmetic, arith, llvm
from pallas_kernels.mosaic_decode.arithmetic import Value as Value
from pallas_kernels.mosaic_decode.arithmetic import f32 as f32
from pallas_kernels.mosaic_decode.arithmetic import i32 as i32
from pallas_kernels.mosaic_decode.arithmetic import i64 as i64

scf: Any = _scf  # its stub is of the generated classes, which the module replaces


class Mlir(Arithmetic):
    """The instructions as MLIR, emitted where Mosaic GPU lowers a kernel."""

    def special(self, name: str) -> Value:
        """Reads a special register, such as tid.x or ctaid.x."""
        return self.asm(i32(), [], f"mov.u32 $0, %{name};", "=r")

    def address(self, ref: Value) -> Value:
        """Address, i64, of a reference's first element (a generic address)."""
        return llvm.ptrtoint(i64(), mgpu_utils.memref_ptr(ref))

    def shared_address(self, ref: Value) -> Value:
        """Address, i32, of a reference in shared memory, in its own address space."""
        return llvm.ptrtoint(i32(), mgpu_utils.memref_ptr(ref))

    def offset(self, base: Value, count: Value, bytes_each: int = 1) -> Value:
        """Computes base + count * bytes_each, i64; `count` is unsigned."""
        if isinstance(count, int):
            wide = arith.constant(i64(), ir.IntegerAttr.get(i64(), count * bytes_each))
        else:
            each = arith.constant(i64(), ir.IntegerAttr.get(i64(), bytes_each))
            wide = arith.muli(arith.extui(i64(), count), each)
        return arith.addi(base, wide)

    def load(
        self,
        base: Value,
        imm: int,
        num_words: int,
        *,
        in_order: bool = False,
    ) -> list[Value]:
        """Loads 1, 2 or 4 words of read-only global memory at base + imm (bytes).

        Args:
          imm: constant bytes.
          num_words: 1, 2 or 4; the address is aligned to as much.
          in_order: keeps LLVM's order with other such loads and with copies.
        """
        vector = "" if num_words == 1 else f".v{num_words}"
        names = ",".join(f"${i}" for i in range(num_words))
        into = names if num_words == 1 else "{" + names + "}"
        body = f"ld.global.nc{vector}.b32 {into}, [${num_words}+{imm}];"
        return self._asm_many(num_words, i32(), [base], body, "=r," * num_words + "l", in_order)

    def copy_async(
        self, to: Value, to_imm: int, base: Value, imm: int, present: Value, num_bytes: int
    ) -> None:
        """Starts a copy of 4, 8 or 16 bytes, global to shared; zeros if `present` is 0."""
        cache = "cg" if num_bytes == 16 else "ca"
        text = (
            f"cp.async.{cache}.shared.global.L2::128B [$0+{to_imm}], [$1+{imm}], {num_bytes}, $2;"
        )
        size = self.select(self.compare(present, "ne", 0), num_bytes, 0)
        self.asm(None, [to, base, size], text, "r,l,r", effects=True)

    def copy_word_async(self, to: Value, base: Value, size: Value) -> None:
        """Starts a copy of a word's first `size` (i32, 1 to 4) bytes, then zeros."""
        text = "cp.async.ca.shared.global.L2::128B [$0], [$1], 4, $2;"
        self.asm(None, [to, base, size], text, "r,l,r", effects=True)

    def copies_commit(self) -> None:
        """Ends a group of copies."""
        self.asm(None, [], "cp.async.commit_group;", "", effects=True)

    def copies_wait(self, pending: int) -> None:
        """Waits until at most `pending` of this thread's groups of copies are in flight."""
        self.asm(None, [], f"cp.async.wait_group {pending};", "", effects=True)

    def load_shared_words(self, at: Value, imm: int, count: int) -> list[Value]:
        """Loads 1, 2 or 4 words of shared memory at a 32-bit address plus imm."""
        if count == 1:
            return [self.load_shared(at, imm, "b32")]
        names = ",".join(f"${i}" for i in range(count))
        text = f"ld.shared.v{count}.b32 {{{names}}}, [${count}+{imm}];"
        return self._asm_many(count, i32(), [at], text, "=r," * count + "r", True)

    def load_small(self, base: Value, imm: int, num_bytes: int) -> Value:
        """Loads 1, 2 or 4 bytes of read-only global memory at base + imm, zero extended to i32."""
        kind = {1: "u8", 2: "u16", 4: "b32"}[num_bytes]
        return self.asm(i32(), [base], f"ld.global.nc.{kind} $0, [$1+{imm}];", "=r,l")

    def store(self, base: Value, imm: int, value: Value, kind: str) -> None:
        """Stores a value (b16: the low half of an i32; b32; f32) to global memory at base + imm."""
        if kind == "b16":
            text = "{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0+" + f"{imm}], h; }}"
            self.asm(None, [base, value], text, "l,r", effects=True)
        else:
            letter = "f" if kind == "f32" else "r"
            self.asm(
                None,
                [base, value],
                f"st.global.{kind} [$0+{imm}], $1;",
                f"l,{letter}",
                effects=True,
            )

    def load_shared(self, at: Value, imm: int, kind: str = "f32") -> Value:
        """Loads one f32 or b32 of shared memory at a 32-bit address plus imm."""
        letter, of = ("f", f32()) if kind == "f32" else ("r", i32())
        return self.asm(of, [at], f"ld.shared.{kind} $0, [$1+{imm}];", f"={letter},r", effects=True)

    def load_cluster(self, at: Value, block: int, imm: int) -> Value:
        """Loads one f32 of another cluster block's shared memory, at this block's address."""
        there = self.asm(i32(), [at, block], "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r")
        text = f"ld.shared::cluster.f32 $0, [$1+{imm}];"
        return self.asm(f32(), [there], text, "=f,r", effects=True)

    def store_shared(self, at: Value, imm: int, value: Value, kind: str = "f32") -> None:
        """Stores one f32 or b32 to shared memory at a 32-bit address plus imm."""
        letter = "f" if kind == "f32" else "r"
        self.asm(
            None, [at, value], f"st.shared.{kind} [$0+{imm}], $1;", f"r,{letter}", effects=True
        )

    def store_shared_floats(self, at: Value, imm: int, values: Sequence[Value]) -> None:
        """Stores 2 or 4 float32 to shared memory at an address plus imm, in one instruction."""
        operands, count = [at, *(self.const_f32(value) for value in values)], len(values)
        names = ",".join(f"${1 + i}" for i in range(count))
        text = f"st.shared.v{count}.f32 [$0+{imm}], {{{names}}};"
        self.asm(None, operands, text, "r" + ",f" * count, effects=True)

    def load_volatile(self, base: Value) -> Value:
        """Loads a word of global memory, i32, here and no later."""
        return self.asm(i32(), [base], "ld.volatile.global.b32 $0, [$1];", "=r,l", effects=True)

    def shuffle(self, value: Value, lane: int) -> Value:
        """Returns a lane's value, i32, to all lanes of the warp, which all take part."""
        text = f"shfl.sync.idx.b32 $0, $1, {lane}, 31, 0xffffffff;"
        return self.asm(i32(), [value], text, "=r,r", effects=True)

    def ballot(self, condition: Value) -> Value:
        """Collects a condition of all 32 lanes as bits of an i32."""
        flag = self.select(condition, 1, 0)
        text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
        return self.asm(i32(), [flag], text, "=r,r", effects=True)

    def block_barrier(self) -> None:
        """Waits for all threads of the block; their shared writes are then visible."""
        self.asm(None, [], "bar.sync 0;", "", effects=True)

    def team_barrier(self, number: Value, num_threads: int) -> None:
        """Waits for whole warps of the block that share a number in 1..15."""
        self.asm(None, [number], f"bar.sync $0, {num_threads};", "r", effects=True)

    def cluster_arrive(self, writes: bool = True) -> None:
        """Starts a barrier of a cluster's blocks; without `writes` it orders reads alone.

        `cluster_wait` has to follow.
        """
        self.warp_barrier()
        how = "release" if writes else "relaxed"  # without the fence that a release is
        self.asm(None, [], f"barrier.cluster.arrive.{how}.aligned;", "", effects=True)

    def cluster_wait(self) -> None:
        """Ends the cluster's barrier: shared writes before it are then visible."""
        self.warp_barrier()
        self.asm(None, [], "barrier.cluster.wait.acquire.aligned;", "", effects=True)

    def warp_barrier(self) -> None:
        """Waits for all threads of the warp; their shared writes are then visible."""
        self.asm(None, [], "bar.warp.sync 0xffffffff;", "", effects=True)

    def mma(
        self, kind: str, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value]
    ) -> list[Value]:
        """Multiplies m16n8k16: four float32 of c + a b; a has 4, b 2 pairs of `kind`.

        Lane (g, t) = (lane / 4, lane mod 4) holds a[0], a[2] of row g and a[1], a[3] of row g + 8,
        at k = 2t, 2t+1 and 2t+8, 2t+9; b of column g at the same k; c of rows g, g, g+8, g+8 and
        columns 2t, 2t+1.
        """
        text = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};"
        )
        operands = [*a, *b, *(self.const_f32(value) for value in c)]
        return self._asm_many(4, f32(), operands, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", False)

    def loop(self, start: Value, stop: Value, step: Value, carried: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
    ) -> list[Value]:  # fmt: skip
        """Emits a loop over range(start, stop, step), i32, carrying values; returns the last."""
        carried = list(carried)
        made = scf.ForOp(self.const(start), self.const(stop), self.const(step), carried)
        with ir.InsertionPoint(made.body):
            scf.yield_(list(body(made.induction_variable, list(made.inner_iter_args))))
        return list(made.results)

    def when(self, condition: Value, body: Callable[[], None]) -> None:
        """Runs the body in the threads where the condition holds."""
        made = scf.IfOp(condition)
        with ir.InsertionPoint(made.then_block):
            body()
            scf.yield_([])
