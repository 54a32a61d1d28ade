"""Given texts under a policy: read one at a time, with promotions between chunks of its period."""

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moejax import Engine, cli, evaluate, generate
from moejax.evaluation.perplexity import log_likelihood
from moejax.experts.cache import ExpertMemory
from moejax.experts.tiering import Tiering
from moejax.inference import steps
from moejax.inference.chunking import next_chunk
from moejax.text.windows import Windowing
from tests import tiny_engine

TEXT = "".join(f"the {a} fox jumps over {b} dogs. " for a in "abcdefgh" for b in "xyz")
DYNAEXQ = {"policy": "dynaexq", "settings": {"period": 24}, "slots": (3, 8)}
DYMOE = {"policy": "dymoe", "settings": {"retention": 0.5}, "slots": (2, 8)}
MADE = {"tiers": ("int4", "int2"), "quantizer": "rtn", "group_size": 16}


def total_chunk(
    program: Any, spec: Any, state: Any, experts: Any, inputs: Any, chunk: steps.Chunk
) -> steps.StepResult:
    """A step of `Runner.scan_windows`: the nats of each token at its own place."""
    cache, total = state
    places = jnp.arange(chunk.tokens.shape[1], dtype=jnp.int32)
    wanted = (chunk.start + places)[None] < chunk.lengths[:, None]
    targets = jnp.where(wanted, chunk.tokens, -1)
    found = steps.score_chunk(program, spec, cache, experts, inputs, chunk, places, targets)
    total += found.output.sum()
    return steps.StepResult((found.state, total), found.experts, None, found.recorded)


class PolicyScoringTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.checkpoint = cls.folder / "model"
        cls.text = cls.folder / "text.txt"
        cls.text.write_text(TEXT)

    def engine(self, **policy: Any) -> Engine:
        engine = tiny_engine.load_tiny_engine(self.checkpoint, policy=Tiering(**MADE, **policy))
        self.addCleanup(engine.close)
        return engine

    def nats(self, engine: Engine, batch_size: int) -> float:
        ids = engine.tokenizer.encode(TEXT)[:401]
        how = {"batch_size": batch_size}
        return log_likelihood(ids, Windowing(50, 50), engine.score, **how).nats

    @parameterized.parameters(DYNAEXQ, DYMOE)
    @pytest.mark.slow
    def test_one_figure_at_every_batch_size_in_real_and_emulated_slots(self, **policy):
        found = []
        for emulate, batch_size in ((False, 1), (False, 8), (True, 8)):
            engine = self.engine(**policy, emulate=emulate)
            found.append(self.nats(engine, batch_size))
            self.assertBetween(engine.ledger.shares["int4"], 0.05, 0.95)
        np.testing.assert_allclose(found, found[0], rtol=1e-6)

    def test_promotions_between_chunks_of_the_period(self):
        engine, counts = self.engine(**DYNAEXQ), []
        step = ExpertMemory.step

        def counting(memory: ExpertMemory, since: Any = None, num_tokens: int = 0) -> Any:
            counts.append(num_tokens)
            return step(memory, since, num_tokens)

        with mock.patch.object(ExpertMemory, "step", counting):
            self.nats(engine, 8)
        ends = np.cumsum(counts).tolist()
        self.assertEqual(ends[-1], 400)
        # The policy is asked when each period has passed, not some tokens later.
        self.assertContainsSubset(range(24, 400, 24), ends)
        self.assertGreaterEqual(engine.ledger.asked, 400 // 24)
        self.assertGreaterEqual(engine.ledger.tiers["int4"].total("bulk"), 6)
        self.assertIn(
            f"between steps the policy was asked {engine.ledger.asked} times what to move",
            engine.ledger.describe(),
        )

    @pytest.mark.slow
    def test_rows_of_logits_do_not_meet_in_the_policy(self):
        rows = np.random.default_rng(0).integers(0, 160, (3, 40))
        together = self.engine(**DYNAEXQ).logits(rows)
        engine = self.engine(**DYNAEXQ)
        alone = np.concatenate([engine.logits(row[None]) for row in rows])
        np.testing.assert_array_equal(together, alone)
        self.assertGreater(engine.ledger.shares["int4"], 0)

    @pytest.mark.slow
    def test_windows_that_are_folded_come_one_at_a_time(self):
        rng, lengths = np.random.default_rng(1), np.array([48, 40], np.int32)
        windows = rng.integers(0, 160, (2, 48)).astype(np.int32)
        totals, ledgers = [], []
        for rows in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
            engine, total = self.engine(**DYNAEXQ), jnp.float32(0)
            for row in rows:
                total = engine._runner.scan_windows(total_chunk, total, windows[row], lengths[row])
            totals.append(float(total))
            ledgers.append((engine.ledger.asked, engine.ledger.shares))
            self.assertGreaterEqual(engine.ledger.asked, lengths.sum() // 24)
        self.assertEqual(*totals)
        self.assertEqual(*ledgers)

    @pytest.mark.slow
    def test_continuations_are_scored_alike_at_every_batch_size(self):
        pairs = [(TEXT[i : i + 60], TEXT[i + 60 : i + 70]) for i in range(0, 400, 50)]
        scores = [
            [scored.log_likelihood for scored in engine.loglikelihood(pairs, batch_size=size)]
            for engine, size in ((self.engine(**DYNAEXQ), 1), (self.engine(**DYNAEXQ), 4))
        ]
        self.assertEqual(*scores)

    def run_main(self, command: cli.Command, *arguments: str, **fields: Any) -> tuple[str, str]:
        fields = {
            "checkpoint": self.checkpoint, "policy.name": "dynaexq", "policy.slots": "('3','8')",
            "policy.tiers": "('int4','int2')", "policy.quantizer": "rtn",
            "policy.group_size": 16, **fields,
        }  # fmt: skip
        out, err = io.StringIO(), io.StringIO()
        flags = [f"--config.{name}={value}" for name, value in fields.items()]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.assertEqual(cli.exit_status(command, ["x", *arguments, *flags]), 0, err.getvalue())
        return out.getvalue(), err.getvalue()

    @pytest.mark.slow
    def test_evaluate_gives_one_perplexity_and_says_how_it_read(self):
        self.engine(**DYNAEXQ)
        found = []
        for batch_size in (1, 8):
            output = self.folder / f"{batch_size}.json"
            out, _ = self.run_main(
                evaluate.COMMAND, text=self.text, window=64, batch_size=batch_size,
                fidelity_share=0, output=output, **{"policy.settings": "period=32"},
            )  # fmt: skip
            record = json.loads(output.read_text())
            self.assertEqual(record["protocol"]["batch_size"], 1)
            self.assertGreater(record["ledger"]["asked"], 5)
            self.assertRegex(out, r"stride 64, one at a time, ")
            self.assertRegex(out, r"promotions to int4 [1-9]")
            found.append(record["perplexity"])
        self.assertEqual(*found)

    @pytest.mark.slow
    def test_a_run_too_short_for_the_policy_says_so(self):
        self.engine(**DYNAEXQ)
        _, err = self.run_main(generate.COMMAND, "--prompt=the fox", max_new_tokens=4)
        self.assertIn(
            "WARNING: between steps the policy was asked 0 times what to move, so it moved "
            "nothing: the run was too short for it",
            err,
        )


class NextChunkTest(parameterized.TestCase):
    @parameterized.parameters(
        (100, 128, 1024, 128),  # what is left, padded
        (100, 128, 24, 16),  # a power of two
        (84, 112, 8, 8),
        (9, 12, 1, 1),
        (12, 40, 1024, 16),
        (8, 8, 1024, 8),  # padding does not reach past the cache
    )
    def test_size(self, num_left, room, most, expected):
        self.assertEqual(next_chunk(num_left, room, most), expected)


if __name__ == "__main__":
    absltest.main()
