"""Neighbouring values of packed rows, brought to shared memory and unpacked by the simulator."""

import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels.mosaic_decode import low_rank_spec
from pallas_kernels.mosaic_decode.matrix import matrix_of
from pallas_kernels.mosaic_decode.u_factor import Columns
from pallas_kernels.testing.simulator import Simulator
from tests import packed_operands, slow
from tests.host_test_case import HostTestCase
from tests.packed_operands import Form, seed


class ColumnsTest(HostTestCase):
    @slow.repeats()
    @parameterized.product(
        bits=(2, 3, 4, 8, 16), zero_kind=("float", "integer", "symmetric"),
        length=(32, 300, 513, 700), group_size=(48, 33),
    )  # fmt: skip
    def test_every_value_of_some_rows(self, bits, zero_kind, length, group_size):
        """Windows all along the rows, also across their ends."""
        rng, rows = np.random.default_rng(seed(self.id())), 3
        form = Form(bits, group_size, zero_kind, "float32" if length > 400 else "float16")
        form = Form(16, dtype="bfloat16") if bits == 16 else form
        weights = packed_operands.random_matrices(
            rng, form, num_slots=1, shape=(rows, length), used={0}
        )
        leaves = [a for a in (weights.words, weights.scales, weights.zeros) if a is not None]
        buffers = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in leaves]
        shared = np.zeros(1 << 16, np.uint8)
        for first, count in ((-16, 32), (0, 32), (96, 48), (250, 112), (length // 2 * 2 - 4, 16)):
            e = Simulator(0, 64, [*buffers, shared], len(buffers))
            addresses = [e.address(i) for i in range(len(buffers))]
            matrix = low_rank_spec.addressed(matrix_of(weights, "bf16"), addresses)
            columns = Columns(e, matrix, e.const(first), count)
            at, warp, lane = e.shared_address(len(buffers)), e.threads // 32, e.threads % 32
            columns.start_copy(e.const(1), at, e.const(rows - 1), e.const(rows), warp, 2, lane)
            index = np.minimum(max(0, first) + 2 * (e.threads % (count // 2)), length - 1)
            index = index // 2 * 2
            for r in range(rows - 1):
                place = columns.position_of(index)
                found = columns.values(place, e.const(1 + r), at + r * columns.pitch)
                for half, values in enumerate(found):
                    inside = index + half < min(length, first + count)
                    expected = packed_operands.values(weights, 0)[1 + r]
                    expected = expected[index[inside] + half]
                    np.testing.assert_allclose(values[inside], expected, rtol=1e-5, atol=1e-7)


if __name__ == "__main__":
    absltest.main()
