"""Rounds of the kernel for many rows: every block of K of every tile is multiplied once."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels.mosaic_prefill.rounds import LEAST_RUN, Piece, Rounds


def pieces_of(rounds: Rounds) -> list[list[Piece]]:
    """Pieces of each thread block, in its order."""
    workers = jnp.arange(rounds.num_workers, dtype=jnp.int32)
    counts = np.asarray(jax.vmap(rounds.num_pieces)(workers))
    numbers = jnp.arange(counts.max(), dtype=jnp.int32)
    every = jax.vmap(jax.vmap(rounds.piece, (None, 0)), (0, None))(workers, numbers)
    found = jax.tree.map(np.asarray, every)
    return [
        [Piece(*(field[worker, i] for field in found)) for i in range(count)]
        for worker, count in enumerate(counts)
    ]


class RoundsTest(parameterized.TestCase):
    @parameterized.parameters(
        (1, 54), (3, 2), (22, 16), (40, 54), (88, 16), (131, 5), (132, 54), (133, 54), (160, 54),
        (264, 20), (432, 20), (592, 14), (1728, 20), (7, 1),
    )  # fmt: skip
    def test_every_block_is_multiplied_once(self, num_tiles, num_blocks):
        for shares_k in (False, True):
            rounds = Rounds(num_tiles, num_blocks, 132, shares_k)
            all_pieces = pieces_of(rounds)
            times = np.zeros((num_tiles, num_blocks), int)
            for piece in itertools.chain(*all_pieces):
                self.assertGreater(piece.num_blocks, 0)
                times[piece.tile, piece.block : piece.block + piece.num_blocks] += 1
            np.testing.assert_array_equal(times, 1)
            runs = [sum(piece.num_blocks for piece in of) for of in all_pieces]
            if rounds.num_shared:
                self.assertLessEqual(max(runs) - min(runs), 1)
                self.assertGreaterEqual(min(runs), min(LEAST_RUN, num_blocks))

    @parameterized.parameters((22, 16), (40, 54), (131, 5), (160, 54), (432, 20), (1728, 20))
    def test_sums_are_added_by_the_block_that_ends_a_tile(self, num_tiles, num_blocks):
        all_pieces = pieces_of(Rounds(num_tiles, num_blocks, 132, True))
        # A thread block has one place for sums, left first and by an earlier one than adds them.
        left = {}
        for worker, of in enumerate(all_pieces):
            self.assertTrue(all(piece.last_worker == worker for piece in of[1:]))
            if of[0].last_worker != worker:
                left[worker] = of[0].tile, of[0].last_worker
        added = []
        for worker, of in enumerate(all_pieces):
            for piece in of:
                if piece.last_worker == worker:
                    peers = range(piece.first_worker, worker)
                    expected = [(piece.tile, worker)] * len(peers)
                    self.assertEqual([left[peer] for peer in peers], expected)
                    self.assertEqual(piece.block > 0, bool(peers))
                    added += peers
            ends = [p for p in of if p.first_worker < p.last_worker == worker]
            self.assertLessEqual(len(ends), 1)  # it counts the parts of one tile
        self.assertEqual(sorted(added), sorted(left))
