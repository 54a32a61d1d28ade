"""Single values of packed rows, for factors whose rows are read across."""

from pallas_kernels import layout
from pallas_kernels.packed import PLAIN_BITS
from pallas_kernels.stream.emit import Mlir, Value
from pallas_kernels.stream.matrix import Matrix


def num_words(matrix: Matrix) -> int:
    """Words that a value is in: of its planes, with its scale, with its zero."""
    if matrix.form.bits == PLAIN_BITS:
        return 1
    return matrix.form.planes + 1 + (matrix.zero_kind in ("float", "integer"))


class Element:
    """One value of a pool's row, whatever its form: its words are loaded or copied, then used.

    Addresses are of the index first and of the row last: of values of one index and many rows a
    compiler then makes all but a multiplication once.
    """

    def __init__(self, e: Mlir, matrix: Matrix, row: Value, index: Value):
        """Row and index in the row are i32."""
        self.e, self.matrix, self.row = e, matrix, row
        m = matrix
        self.words: list[Value] = []
        self.sources: list[tuple[Value, int]] = []  # address, bytes more
        self.bits: list[Value] = []  # where in the word
        if m.form.bits == PLAIN_BITS:
            self._small(m.words, index, 2, m.num_inputs)
            return
        self.planes = layout.planes(m.num_inputs, m.form.bits)
        for plane in self.planes:
            word, bit = self._place(plane, index)
            at = e.offset(e.offset(m.words, word, 4), row, 4 * m.num_words)
            self.sources.append((at, 4 * plane.first_word))
            self.bits.append(bit)
        group = e.div(index, m.group_size)
        self._small(m.scales, group, m.scale_bytes, m.num_groups)
        if size := {"float": m.scale_bytes, "integer": 1}.get(m.zero_kind):
            self._small(m.zeros, group, size, m.num_groups)

    def _small(self, base: Value, index: Value, size: int, row_length: int) -> None:
        """The aligned word in which a number of 1, 2 or 4 bytes lies."""
        e, each = self.e, 4 // size
        among = e.rem(e.add(e.mul(self.row, row_length), index), each) if each > 1 else e.const(0)
        # A word further on, so that the index is not negative.
        at = e.offset(base, e.sub(e.add(index, each), among), size)
        self.sources.append((e.offset(at, self.row, size * row_length), -4))
        self.bits.append(e.mul(among, 8 * size))

    def load(self) -> "Element":
        """Its words to registers."""
        self.words = [self.e.load(at, imm, 1, in_order=True)[0] for at, imm in self.sources]
        return self

    def copy(self, to: Value, pitch: int) -> None:
        """Starts copying them to shared memory: `pitch` bytes from one to the next."""
        for number, (at, imm) in enumerate(self.sources):
            self.e.copy_async(to, number * pitch, at, imm, 1, 4)

    def load_copied(self, at: Value, pitch: int) -> "Element":
        """From there to registers."""
        numbers = range(len(self.sources))
        self.words = [self.e.load_shared(at, number * pitch, "b32") for number in numbers]
        return self

    def _place(self, plane: layout.Plane, index: Value) -> tuple[Value, Value]:
        """Word of the plane and bit where its part of a code begins, by `layout`."""
        e, width = self.e, plane.width
        block, k = e.div(index, layout.BLOCK), e.rem(index, layout.BLOCK)
        length = layout.padded_length(self.matrix.num_inputs)
        full, rest = divmod(length, layout.BLOCK)

        def within(codes: int) -> tuple[Value, Value]:
            each = codes * width // 16  # of a position
            return e.div(k, each), e.shr(e.rem(k, each), 1)

        position, word = within(layout.BLOCK if full else rest)
        if full and rest:
            short = e.compare(block, "eq", full)
            pairs = zip(within(rest), (position, word), strict=True)
            position, word = (e.select(short, a, b) for a, b in pairs)
        word = e.add(word, e.mul(block, layout.BLOCK * width // layout.WORD_BITS))
        return word, e.add(e.mul(e.band(index, 1), 16), e.mul(position, width))

    def value(self) -> Value:
        """float32 of it, once its words are in registers."""
        e, m = self.e, self.matrix
        words = [e.shr(*pair) for pair in zip(self.words, self.bits, strict=True)]
        if m.form.bits == PLAIN_BITS:
            return e.f32_of_16(m.form.kind, words[0])
        code = e.const(0)
        for plane in self.planes:
            part = e.band(words.pop(0), (1 << plane.width) - 1)
            code = e.bor(code, e.shl(part, plane.shift))
        number, scale = e.byte_to_f32(code, 0), words[0]
        if m.zero_kind == "symmetric":
            number = e.fadd(number, -float(2 ** (m.form.bits - 1)))
        elif m.zero_kind == "integer":
            number = e.fma(e.byte_to_f32(words[1], 0), -1.0, number)
        else:
            number = e.fma(self._float(words[1]), -1.0, number)
        return e.fmul(number, self._float(scale))

    def _float(self, bits: Value) -> Value:
        if self.matrix.scale_bytes == 2:
            return self.e.half_to_f32(bits, 0)
        return self.e.f32_of_bits(bits)
