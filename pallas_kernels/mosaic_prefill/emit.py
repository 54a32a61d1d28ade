"""Instructions of the prefill kernels beside those of `mosaic_decode`."""

from collections.abc import Sequence

from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels.mosaic_decode.emit import Mlir, Value, f32, i32

BYTE_OFFSET = 32768.0  # of `byte_number`


class Emitter(Mlir):
    """Emitter with more instructions; `tests` has them in numpy."""

    def bxor(self, a: Value, b: Value) -> Value:
        """Computes a ^ b; one may be a Python int."""
        return self.asm(i32(), [a, b], "xor.b32 $0, $1, $2;", "=r,r,r")

    def byte_number(self, word: Value, byte: int) -> Value:
        """Bits of the float32 32768 + b, b a byte of a word: bits 8 to 15 count ones there."""
        picked = f"prmt.b32 $0, $1, $2, {0x7404 | byte << 4:#x};"
        return self.asm(i32(), [word, 0x47000000], picked, "=r,r,r")

    def pack_pair(self, kind: str, low: Value, high: Value) -> Value:
        """Packs two float32 into a word, each rounded to `kind`: "bf16" or "f16"."""
        return self.asm(i32(), [high, low], f"cvt.rn.{kind}x2.f32 $0, $1, $2;", "=r,f,f")

    def store_matrices(self, at: Value, words: Sequence[Value]) -> None:
        """Stores 1, 2 or 4 transposed 8 x 8 matrices of 16 bits to shared memory.

        Args:
          at: shared address; lane l has that of row l mod 8 (as stored) of matrix l / 8.
          words: in lane (g, t), elements (2t, g) and (2t + 1, g) of each matrix as stored.
        """
        names = ",".join(f"${i + 1}" for i in range(len(words)))
        text = f"stmatrix.sync.aligned.m8n8.x{len(words)}.trans.shared.b16 [$0], {{{names}}};"
        self.asm(None, [at, *words], text, ",".join("r" * (1 + len(words))), effects=True)

    def quotient_of_exp(self, value: Value) -> Value:
        """Computes 1 / (1 + exp(-value)), to a few ulp; 0 if exp overflows."""
        below = self.fadd(self.exp2(self.fmul(value, -1.4426950408889634)), 1.0)
        return self.asm(f32(), [below], "rcp.approx.ftz.f32 $0, $1;", "=f,f")

    def store_four(self, base: Value, imm: int, words: Sequence[Value]) -> None:
        """Stores four words or float32 to global memory at base + imm, aligned."""
        text = f"st.global.v4.b32 [$0+{imm}], {{$1,$2,$3,$4}};"
        letter = "f" if words[0].type == f32() else "r"
        self.asm(None, [base, *words], text, "l" + f",{letter}" * 4, effects=True)

    def load_four(self, base: Value, imm: int) -> list[Value]:
        """Loads four float32 that another thread block stored, at base + imm, aligned."""
        text = f"ld.global.cg.v4.f32 {{$0,$1,$2,$3}}, [$4+{imm}];"
        return self._asm_many(4, f32(), [base], text, "=f,=f,=f,=f,l", True)

    def warpgroup_barrier(self) -> None:
        """Waits for the 128 threads; their shared writes are then visible."""
        mgpu_utils.warpgroup_barrier()
