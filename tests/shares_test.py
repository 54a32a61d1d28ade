"""Shares of an expert: whole groups, no bit changed, zeros where one is padded."""

import jax
import numpy as np
from absl.testing import parameterized

from moejax.weights.qtensor import Fp8Tensor, from_codes
from moejax.weights.shares import Shares, shares_of
from tests import slow
from tests.folder_case import FolderTestCase

E, D = 2, 40  # experts, and the model's width


def packed(rng, shape, bits, group_size, by_planes=False):
    groups = (*shape[:-1], -(-shape[-1] // group_size))
    return from_codes(
        rng.integers(0, 2**bits, shape, dtype=np.uint8),
        rng.uniform(0.1, 1, groups).astype(np.float32),
        rng.uniform(0, 2**bits, groups).astype(np.float32),
        bits=bits, group_size=group_size, zero_kind="float", by_planes=by_planes,
    )  # fmt: skip


def values(weight):
    if isinstance(weight, np.ndarray):
        return weight
    weight.check()
    return np.asarray(weight.dequantize())


class SharesTest(FolderTestCase):
    # Each form once, each cut in two forms.
    @slow.where(lambda cut, form: cut[0] != 160 and form not in ((3, False), (4, True)))
    @parameterized.product(
        cut=(  # width, shares, group
            (768, 8, 64),  # 12 groups: uneven
            (768, 2, 64),  # no multiple of a block of 256 codes
            (1024, 2, 128),
            (160, 3, 32),
            (100, 2, 32),  # the last group is short
        ),
        form=((2, False), (3, False), (4, False), (8, False), (4, True), (3, True), (16, False)),
    )
    def test_shares_make_up_the_expert(self, cut, form):
        width, count, group = cut
        bits, by_planes = form
        rng = np.random.default_rng(0)
        stacks = [(E, 2 * width, D), (E, D, width)]
        if bits == 16:
            gate_up, down = (rng.normal(size=shape).astype(np.float32) for shape in stacks)
        else:
            gate_up, down = (
                packed(rng, shape, bits, min(group, shape[-1]), by_planes) for shape in stacks
            )
        shares = shares_of(width, count, group)
        gates, ups, downs, seen = [], [], [], 0
        for i in range(count):
            start, stop = shares.span(i)
            self.assertEqual(start, seen)
            self.assertLess(start, stop)
            seen, size = stop, stop - start
            gate, up = np.split(values(shares.gate_up(gate_up, i)), 2, axis=-2)
            own = values(shares.down(down, i))
            self.assertEqual(gate.shape, (E, shares.share_width, D))
            self.assertEqual(own.shape, (E, D, shares.share_width))
            np.testing.assert_array_equal(gate[:, size:], 0)
            np.testing.assert_array_equal(up[:, size:], 0)
            gates.append(gate[:, :size])
            ups.append(up[:, :size])
            downs.append(own[..., :size])
        self.assertEqual(seen, width)
        found = np.concatenate([*gates, *ups], axis=-2)
        np.testing.assert_array_equal(found, values(gate_up))
        np.testing.assert_array_equal(np.concatenate(downs, axis=-1), values(down))

    def test_shares_differ_by_one_group_at_most(self):
        shares = shares_of(768, 8, 64)
        sizes = [stop - start for start, stop in map(shares.span, range(8))]
        self.assertCountEqual(sizes, [64] * 4 + [128] * 4)
        self.assertEqual(shares.share_width, 128)
        self.assertEqual(shares_of(14336, 4, None), Shares(4, 14336, 64))
        self.assertEqual(shares_of(192, 2, None), Shares(2, 192, 32))  # not padded
        self.assertEqual(shares_of(64, 8, None).share_width, 8)

    def test_what_is_not_cut(self):
        with self.assert_one_line("width 768 has 12 groups of 64, too few for a mesh of 13"):
            shares_of(768, 13, 64)
        shares = shares_of(256, 2, None)
        with self.assert_one_line("FP8", "a mesh does not serve"):
            form = Fp8Tensor(values=np.zeros(1), scales=np.zeros(1))
            shares.down(jax.tree.map(np.asarray, form), 0)
        with self.assert_one_line("cut groups of 128"):
            shares.down(packed(np.random.default_rng(0), (1, 8, 256), 4, 128), 0)
