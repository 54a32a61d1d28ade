"""Single values of packed rows, for factors whose rows are read across."""

from pallas_kernels import layout
from pallas_kernels.packed import PLAIN_BITS
from pallas_kernels.stream.emit import Mlir, Value
from pallas_kernels.stream.matrix import Matrix


class Element:
    """One value of a pool's row, whatever its form: loaded at once, computed later."""

    def __init__(self, e: Mlir, matrix: Matrix, row: Value, index: Value):
        """Row and index in the row are i32."""
        self.e, self.matrix = e, matrix
        m = matrix
        if m.form.bits == PLAIN_BITS:
            at = e.offset(e.offset(m.words, row, 2 * m.num_inputs), index, 2)
            self.words = [(e.load_small(at, 0, 2), e.const(0), layout.Plane(PLAIN_BITS, 0, 0, 0))]
            return
        base = e.offset(m.words, row, 4 * m.num_words)
        self.words = []
        for plane in layout.planes(m.num_inputs, m.form.bits):
            word, bit = self._place(plane, index)
            (found,) = e.load(e.offset(base, word, 4), 4 * plane.first_word, 1)
            self.words.append((found, bit, plane))
        group = e.div(index, m.group_size)

        def constant(base: Value, size: int) -> Value:
            at = e.offset(e.offset(base, row, size * m.num_groups), group, size)
            return e.load_small(at, 0, size)

        self.scale = constant(m.scales, m.scale_bytes)
        sizes = {"float": m.scale_bytes, "integer": 1}
        if size := sizes.get(m.zero_kind):
            self.zero = constant(m.zeros, size)

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
        """float32 of it."""
        e, m = self.e, self.matrix
        if m.form.bits == PLAIN_BITS:
            return e.f32_of_16(m.form.kind, self.words[0][0])
        code = e.const(0)
        for word, bit, plane in self.words:
            part = e.band(e.shr(word, bit), (1 << plane.width) - 1)
            code = e.bor(code, e.shl(part, plane.shift))
        number = e.byte_to_f32(code, 0)
        if m.zero_kind == "symmetric":
            number = e.fadd(number, -float(2 ** (m.form.bits - 1)))
        elif m.zero_kind == "integer":
            number = e.fma(e.byte_to_f32(self.zero, 0), -1.0, number)
        else:
            number = e.fma(self._float(self.zero), -1.0, number)
        return e.fmul(number, self._float(self.scale))

    def _float(self, bits: Value) -> Value:
        if self.matrix.scale_bytes == 2:
            return self.e.half_to_f32(bits, 0)
        return self.e.f32_of_bits(bits)
