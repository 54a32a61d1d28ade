"""Pages give what slots in one piece give, to the bit; the pool gives none to two rows."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax.inference.continuous import _PagePool, _RowPages
from moejax.models.config import Pages
from moejax.models.kv_cache import KVCache
from moejax.weights import linear as ops
from pallas_kernels import decode_attention, qkv_to_cache
from pallas_kernels.decode_attention import Latent
from pallas_kernels.target import SIMULATED
from tests import decode_attention_test, kernel_wiring_test, qkv_to_cache_test, slow
from tests.host_test_case import HostTestCase

SIZE = 16


def in_pages(cache: np.ndarray, size: int, fill: Any) -> tuple[np.ndarray, np.ndarray]:
    """Pages [L, P, K, size, C] of a cache [L, B, K, S, C] in any order, and int32[B, n] of them."""
    layers, batch, heads, length, width = cache.shape
    each = -(-length // size)
    padded = np.full((layers, batch, heads, each * size, width), fill, cache.dtype)
    padded[:, :, :, :length] = cache
    numbers = np.random.default_rng(5).permutation(batch * each).astype(np.int32) + 1
    pages = np.full((layers, 1 + batch * each, heads, size, width), fill, cache.dtype)
    table = numbers.reshape(batch, each)
    parts = padded.reshape(layers, batch, heads, each, size, width)
    pages[:, table] = np.moveaxis(parts, 3, 2)
    return pages, table


def in_one_piece(pages: np.ndarray, table: np.ndarray, length: int) -> np.ndarray:
    """The cache whose pages those are."""
    found = np.moveaxis(np.asarray(pages)[:, table], 3, 2)
    return found.reshape(*found.shape[:3], -1, found.shape[5])[:, :, :, :length]


class KernelsTest(HostTestCase):
    """On a CPU, interpreted; the same as they are without pages."""

    interpret = True

    @property
    def how(self) -> dict[str, Any]:
        return {"implementation": "triton", "interpret": self.interpret}

    # Several parts of a plain cache and of latents, and the reference; decode attention has others.
    @slow.where(
        lambda name, splits: splits == 1 or (splits and name in ("window", "group_of_five"))
    )
    @parameterized.product(
        name=("qwen3_30b_4", "window", "latent", "group_of_five"), splits=(1, 4, None)
    )
    def test_attention(self, name: str, splits: int | None):
        """`splits`: None: by the reference."""
        shape = decode_attention_test.SHAPES[name]
        of = decode_attention_test.random_operands(shape, "bfloat16", seed=3)
        how: dict[str, Any] = {"implementation": "reference"}
        if splits:
            how = {**self.how, "tiles": decode_attention.AttentionTiles(16, splits, 4, 2)}
        expected = decode_attention_test.run(decode_attention_test.CALL, of, shape, **how)
        keys, table = in_pages(of.keys, 2 * SIZE, np.nan)
        if isinstance(of.values, Latent):
            values: Any = of.values._replace(keys=in_pages(of.values.keys, 2 * SIZE, np.nan)[0])
        else:
            values = in_pages(of.values, 2 * SIZE, np.nan)[0]
        paged = of._replace(keys=keys, values=values)
        found = decode_attention_test.run(
            decode_attention_test.CALL, paged, shape, pages=table, **how
        )
        np.testing.assert_array_equal(found, expected)

    @slow.where(lambda name, way: way == "triton" and name == "qwen3_30b_5")
    @parameterized.product(name=("qwen3_30b_5", "one_kv"), way=("triton", "reference"))
    def test_writes(self, name: str, way: str):
        shape = qkv_to_cache_test.SHAPES[name]
        of = qkv_to_cache_test.random_operands(shape, "bfloat16", seed=3)
        of = of._replace(positions=jnp.asarray(of.positions))
        how = self.how if way == "triton" else {"implementation": way}
        norms = None
        if of.q_scales is not None and of.k_scales is not None:
            norms = qkv_to_cache.HeadNorms(of.q_scales, of.k_scales, shape.eps)
        keys, table = map(jnp.asarray, in_pages(of.keys, SIZE, 0))
        values = jnp.asarray(in_pages(of.values, SIZE, 0)[0])
        length = table.shape[1] * SIZE
        positions = jnp.where(of.positions == shape.length, length, of.positions)
        operands = {"layer": of.layer, "cos": of.cos, "sin": of.sin, "norms": norms}
        expected = qkv_to_cache.qkv_to_cache(
            jnp.asarray(of.qkv),
            jnp.asarray(of.keys),
            jnp.asarray(of.values),
            positions=of.positions,
            **operands,
            **how,
        )
        found = qkv_to_cache.qkv_to_cache(
            jnp.asarray(of.qkv), keys, values, positions=positions, pages=table, **operands, **how
        )
        np.testing.assert_array_equal(found[0], expected[0])
        for pages, before, whole in zip(found[1:], (keys, values), expected[1:], strict=True):
            np.testing.assert_array_equal(in_one_piece(pages, table, shape.length), whole)
            np.testing.assert_array_equal(np.asarray(pages)[:, 0], before[:, 0])

    def test_tables_that_do_not_fit_are_named(self):
        shape = decode_attention_test.SHAPES["one_slot"]
        of = decode_attention_test.random_operands(shape, "bfloat16", seed=3)
        for pages, said in (
            (np.zeros((3, 1), np.int32), r"pages: int32\[3, 1\], not int32\[2, n\]"),
            (np.zeros((2, 1), np.int32), "pages of 8 slots: no power of two of at least 16"),
        ):
            with self.assertRaisesRegex(ValueError, said):
                decode_attention_test.run(decode_attention_test.CALL, of, shape, pages=pages)


@pytest.mark.gpu
class DeviceKernelsTest(KernelsTest):
    """Compiled."""

    interpret = False

    def setUp(self):
        super().setUp()
        self.enter_context(jax.default_device(jax.devices("gpu")[0]))


class CacheTest(HostTestCase):
    """XLA's reads and writes of pages beside those of slots in one piece."""

    def test_tokens_and_reads(self):
        rng = np.random.default_rng(0)
        whole = rng.standard_normal((2, 3, 2, 40, 4)).astype(np.float32)
        pages, table = in_pages(whole, SIZE, 0)
        one = KVCache(jnp.asarray(whole), jnp.asarray(whole))
        paged = KVCache(jnp.asarray(pages), jnp.asarray(pages), table=jnp.asarray(table))
        self.assertEqual((paged.batch_size, paged.length), (3, 48))
        new = jnp.asarray(rng.standard_normal((3, 1, 2, 4)), jnp.float32)
        positions = jnp.asarray([0, 39, 48], jnp.int32)  # the last one is dropped
        one, paged = (cache.write_token(1, new, 2 * new, positions) for cache in (one, paged))
        for kv_length in (7, 16, 40):
            for found, expected in zip(
                paged.read(1, kv_length), one.read(1, kv_length), strict=True
            ):
                np.testing.assert_array_equal(found, expected)
        self.assertFalse(np.any(np.asarray(paged.keys)[:, 0]))


class StepTest(HostTestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(ops, "MIN_ROW_OUTPUTS", ops.MIN_KERNEL_OUTPUTS))

    @parameterized.product(kind=("QWEN", "LATENT", "NEXT"), cached=("kernel", "xla"))
    @pytest.mark.slow
    def test_a_decode_step_and_a_row_that_rests(self, kind: str, cached: Any):
        """To the bit what it is without pages; the row that rests writes nothing."""
        config = getattr(kernel_wiring_test, kind)
        kernels = ops.Kernels(SIMULATED) if cached == "kernel" else ops.NO_KERNELS
        model = kernel_wiring_test.small_model(config, kernels)
        spec = kernel_wiring_test.SPEC._replace(cached=cached)
        whole = kernel_wiring_test.filled_cache(config, 2)
        keys, table = in_pages(np.asarray(whole.keys), 2 * SIZE, 0)
        values, _ = in_pages(np.asarray(whole.values), 2 * SIZE, 0)
        paged = whole._replace(
            keys=jnp.asarray(keys), values=jnp.asarray(values), table=jnp.asarray(table)
        )
        tokens, positions = jnp.array([[3], [5]], jnp.int32), jnp.array([[9], [40]], jnp.int32)
        mask = jnp.array([[True], [False]])
        step = jax.jit(lambda cache: model(tokens, positions, mask, cache, spec)[:2])
        with kernel_wiring_test.interpreted():
            expected, hidden = step(whole)
            after, found = step(paged)
        np.testing.assert_array_equal(found[0], hidden[0])
        for name, before in (("keys", keys), ("values", values)):
            pages = np.asarray(getattr(after, name))
            now = in_one_piece(pages, table, 64)
            np.testing.assert_array_equal(now[:, 0], np.asarray(getattr(expected, name))[:, 0])
            self.assertFalse(np.array_equal(pages[:, table[0]], before[:, table[0]]))
            np.testing.assert_array_equal(pages[:, table[1]], before[:, table[1]])
            np.testing.assert_array_equal(pages[:, 0], before[:, 0])


def taken(pool: _PagePool, prompt: list[int], limit: int) -> _RowPages | None:
    return pool.take(*pool.find(prompt), limit)


class PoolTest(absltest.TestCase):
    def test_full_pages_are_shared_and_the_last_is_copied(self):
        pool, prompt = _PagePool(Pages(12, 4)), list(range(10))
        first = taken(pool, prompt, 14)
        assert first is not None
        self.assertEqual((first.num_shared, len(first.numbers), first.source), (0, 4, []))
        self.assertEqual(pool.find(prompt)[1], 0)  # nobody knows whether it is finite
        pool.hold(first, prompt)
        pool.hold(first, [77])
        self.assertEqual(pool.find([*prompt, 77, 5])[1], 11)
        self.assertEqual(pool.find(prompt)[1], 9)  # its last token must be run
        second = taken(pool, [*prompt, 78], 12)
        assert second is not None
        self.assertEqual((second.num_shared, second.source), (10, first.numbers[:3]))
        self.assertEqual(second.numbers[:2], first.numbers[:2])
        self.assertLen({*first.numbers, *second.numbers}, 5)
        self.assertEqual((pool.num_used, pool.num_kept), (5, 0))
        pool.copied(second)
        pool.release(first)
        self.assertEqual((pool.num_used, pool.num_kept), (3, 1))  # one had no tokens
        pool.release(second)
        self.assertEqual((pool.num_used, pool.num_kept), (0, 3))
        self.assertEqual(pool.find([*prompt, 77, 5])[1], 11)

    def test_what_was_used_longest_ago_is_given_away_first_from_its_end(self):
        pool = _PagePool(Pages(6, 4))
        for start in (0, 100):
            row = taken(pool, list(range(start, start + 9)), 9)
            assert row is not None
            pool.hold(row, list(range(start, start + 9)))
            pool.release(row)
        self.assertEqual((pool.num_used, pool.num_kept), (0, 6))
        again = taken(pool, [*range(8), 50], 9)  # the first is newer now
        assert again is not None
        pool.release(again)
        self.assertIsNotNone(taken(pool, [7] * 8, 12))  # a free one, and two of those
        self.assertEqual(pool.find([*range(100, 109), 1])[1], 4)
        self.assertEqual(pool.find([*range(9), 1])[1], 8)

    def test_a_row_waits_until_its_pages_are_there(self):
        pool = _PagePool(Pages(5, 4))
        first = taken(pool, [1] * 9, 12)
        assert first is not None
        pool.hold(first, [1] * 9)
        before = pool.num_used
        self.assertIsNone(taken(pool, [1] * 8 + [2] * 8, 17))  # shares two, needs three more
        self.assertEqual((pool.num_used, pool.num_kept), (before, 0))
        pool.release(first)
        self.assertIsNotNone(taken(pool, [1] * 8 + [2] * 8, 17))

    def test_any_rows(self):
        """No page is lost, none is another row's unless it is shared, and tokens are right."""
        rng = np.random.default_rng(0)
        pool, rows = _PagePool(Pages(40, 4)), []
        content: dict[int, list[int]] = {}
        for _ in range(3000):
            if rows and (rng.random() < 0.45):
                row, tokens = rows.pop(rng.integers(len(rows)))
                pool.release(row)
                continue
            prompt = rng.integers(1, 3, rng.integers(1, 30)).tolist()
            limit = len(prompt) + int(rng.integers(0, 9))
            row = taken(pool, prompt, limit)
            if row is None:
                self.assertTrue(rows)
                continue
            for i, page in enumerate(row.source):
                part = prompt[4 * i : min(4 * i + 4, row.num_shared)]
                self.assertEqual(content[page][: len(part)], part)
            others = {page for other, _ in rows for page in other.numbers}
            own = row.numbers[row.num_shared // 4 :]
            self.assertFalse(others & {*own})
            self.assertFalse({*own} & {*row.source})
            self.assertLen(row.numbers, -(-limit // 4))
            pool.copied(row)
            tokens = [*prompt, *rng.integers(1, 3, limit - len(prompt)).tolist()]
            for i in range(row.num_shared // 4, len(row.numbers)):
                content[row.numbers[i]] = tokens[4 * i : 4 * i + 4]
            if rng.random() < 0.9:
                pool.hold(row, tokens[row.num_held :])
            rows.append((row, tokens))
            self.assertLessEqual(len({p for r, _ in rows for p in r.numbers}), pool.num_used)
        for row, _ in rows:
            pool.release(row)
        self.assertEqual(pool.num_used, 0)
        self.assertIsNotNone(taken(pool, [9], 160))  # all of them
