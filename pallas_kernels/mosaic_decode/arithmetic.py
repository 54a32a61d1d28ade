"""Arithmetic of one thread, as methods that emit MLIR: words, float32, packed 16-bit floats."""

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as _arith
from jaxlib.mlir.dialects import llvm as _llvm

Value = Any  # an MLIR value, or a Python number where a constant will do
# Their stubs are of the generated classes, which the modules replace with handier ones.
arith: Any = _arith
llvm: Any = _llvm


def i32() -> ir.Type:
    """MLIR type of words and indices."""
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    """MLIR type of addresses."""
    return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
    """MLIR type of sums."""
    return ir.F32Type.get()


_COMPARISONS = {"eq": 0, "ne": 1, "lt": 2, "le": 3, "gt": 4, "ge": 5}


class Arithmetic:
    """Instructions of `emit` that touch neither memory nor other threads."""

    def const(self, value: Value) -> Value:
        """Converts a Python int to an i32 constant; returns anything else unchanged."""
        if isinstance(value, int):
            signed = value - 2**32 if value >= 2**31 else value
            return arith.constant(i32(), ir.IntegerAttr.get(i32(), signed))
        return value

    def const_f32(self, value: Value) -> Value:
        """Converts a Python number to a float32 constant; returns anything else unchanged."""
        if isinstance(value, int | float):
            return arith.constant(f32(), ir.FloatAttr.get(f32(), float(value)))
        return value

    def add(self, a: Value, b: Value) -> Value:
        """a + b."""
        return arith.addi(self.const(a), self.const(b))

    def sub(self, a: Value, b: Value) -> Value:
        """a - b."""
        return arith.subi(self.const(a), self.const(b))

    def mul(self, a: Value, b: Value) -> Value:
        """a b."""
        return arith.muli(self.const(a), self.const(b))

    def div(self, a: Value, b: Value) -> Value:
        """a / b of unsigned values."""
        return arith.divui(self.const(a), self.const(b))

    def rem(self, a: Value, b: Value) -> Value:
        """a mod b of unsigned values."""
        return arith.remui(self.const(a), self.const(b))

    def band(self, a: Value, b: Value) -> Value:
        """a & b."""
        return arith.andi(self.const(a), self.const(b))

    def bor(self, a: Value, b: Value) -> Value:
        """a | b."""
        return arith.ori(self.const(a), self.const(b))

    def bxor(self, a: Value, b: Value) -> Value:
        """a ^ b."""
        return arith.xori(self.const(a), self.const(b))

    def shl(self, a: Value, b: Value) -> Value:
        """a << b."""
        return arith.shli(self.const(a), self.const(b))

    def shr(self, a: Value, b: Value) -> Value:
        """a >> b, zeros shifted in."""
        return a if isinstance(b, int) and b == 0 else arith.shrui(self.const(a), self.const(b))

    def rotate(self, a: Value, count: int) -> Value:
        """Rotates a word to the left."""
        if not count:
            return a
        return self.asm(i32(), [a], f"shf.l.wrap.b32 $0, $1, $1, {count};", "=r,r")

    def permute(self, low: Value, high: Value, selector: Value) -> Value:
        """Word of four of the bytes 0..7 of high:low; hex digits of the selector name them."""
        text = "prmt.b32 $0, $1, $2, $3;"
        return self.asm(i32(), [low, high, selector], text, "=r,r,r,r")

    def smaller(self, a: Value, b: Value) -> Value:
        """min(a, b) of signed values."""
        return arith.minsi(self.const(a), self.const(b))

    def compare(self, a: Value, how: str, b: Value) -> Value:
        """i1: a `how` b of signed values."""
        return arith.cmpi(
            ir.IntegerAttr.get(i64(), _COMPARISONS[how]), self.const(a), self.const(b)
        )

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """a where the condition holds, else b."""
        return arith.select(condition, self.either(a), self.either(b))

    def either(self, value: Value) -> Value:
        """Converts a Python number to a constant: float32 for a float, else i32."""
        return self.const_f32(value) if isinstance(value, float) else self.const(value)

    def both(self, a: Value, b: Value) -> Value:
        """Conjunction of two conditions."""
        return arith.andi(a, b)

    def merge(self, a: Value, mask: int, b: Value, how: str) -> Value:
        """Merges words in one instruction of three operands (lop3).

        Compilers do not find it if two operands are constants.

        Args:
          how: "or" for (a & mask) | b; "select" for (a & mask) | (b & ~mask).
        """
        table = {"or": 0xEA, "select": 0xE2}[how]
        return self.asm(i32(), [a, mask, b], f"lop3.b32 $0, $1, $2, $3, {table:#x};", "=r,r,r,r")

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a b + c in float32, rounded once."""
        return self.asm(
            f32(),
            [self.const_f32(a), self.const_f32(b), self.const_f32(c)],
            "fma.rn.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
        )

    def fadd(self, a: Value, b: Value) -> Value:
        """a + b in float32."""
        return arith.addf(self.const_f32(a), self.const_f32(b))

    def fmin(self, a: Value, b: Value) -> Value:
        """min(a, b) in float32; NaN if one is."""
        return self._extreme("min", a, b)

    def fmax(self, a: Value, b: Value) -> Value:
        """max(a, b) in float32; NaN if one is."""
        return self._extreme("max", a, b)

    def _extreme(self, which: str, a: Value, b: Value) -> Value:
        operands = [self.const_f32(a), self.const_f32(b)]
        return self.asm(f32(), operands, f"{which}.NaN.f32 $0, $1, $2;", "=f,f,f")

    def fmul(self, a: Value, b: Value) -> Value:
        """a b in float32."""
        return arith.mulf(self.const_f32(a), self.const_f32(b))

    def asm(self, result: ir.Type | None, operands: Sequence[Value], ptx: str, constraints: str,
        effects: bool = False,
    ) -> Any:  # fmt: skip
        """One inline PTX statement."""
        return llvm.inline_asm(
            result, [self.const(o) for o in operands], ptx, constraints, has_side_effects=effects
        )

    def _asm_many(
        self,
        count: int,
        kind: ir.Type,
        operands: Sequence[Value],
        ptx: str,
        constraints: str,
        effects: bool,
    ) -> list[Value]:
        if count == 1:
            return [self.asm(kind, operands, ptx, constraints, effects)]
        struct = llvm.StructType.get_literal([kind] * count)
        found = self.asm(struct, operands, ptx, constraints, effects)
        return [llvm.extractvalue(kind, found, [i]) for i in range(count)]

    def count_ones(self, word: Value) -> Value:
        """Bits set in a word."""
        return self.asm(i32(), [word], "popc.b32 $0, $1;", "=r,r")

    def fma_pair(self, kind: str, a: Value, b: Value, c: Value) -> Value:
        """a b + c of two 16-bit floats each, rounded once; `kind` is bf16 or f16."""
        return self.asm(i32(), [a, b, c], f"fma.rn.{kind}x2 $0, $1, $2, $3;", "=r,r,r,r")

    def half_to_f32(self, word: Value, half: int) -> Value:
        """float32 of the fp16 in one half of a word."""
        move = "mov.b32 {l, h}, $1; cvt.f32.f16 $0, " + ("l" if half == 0 else "h") + ";"
        return self.asm(f32(), [word], "{ .reg .b16 l, h; " + move + " }", "=f,r")

    def f32_of_bits(self, word: Value) -> Value:
        """The float32 with these bits."""
        return arith.bitcast(f32(), self.const(word))

    def byte_to_f32(self, word: Value, byte: int) -> Value:
        """Converts a byte of a word to float32: 2^23 + b as bits, less 2^23 (exact)."""
        low = self.band(self.shr(word, 8 * byte), 0xFF)
        return self.fadd(self.f32_of_bits(self.bor(low, 0x4B000000)), -8388608.0)

    def f32_to_16(self, kind: str, value: Value) -> Value:
        """i32 whose low half is the value rounded to bf16 or f16."""
        text = "{ .reg .b16 h; cvt.rn." + kind + ".f32 h, $1; mov.b32 $0, {h, h}; }"
        return self.asm(i32(), [value], text, "=r,f")

    def f32_of_16(self, kind: str, word: Value) -> Value:
        """float32 of the bf16 or f16 in the low half."""
        return self.f32_of_bits(self.shl(word, 16)) if kind == "bf16" else self.half_to_f32(word, 0)

    def exp2(self, value: Value) -> Value:
        """2^value, to about 2 ulp (the hardware's)."""
        return self.asm(f32(), [value], "ex2.approx.ftz.f32 $0, $1;", "=f,f")

    def reciprocal(self, value: Value) -> Value:
        """1 / value, rounded."""
        return self.asm(f32(), [value], "rcp.rn.f32 $0, $1;", "=f,f")
