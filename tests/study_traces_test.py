"""The study model's recorded traces: small, whole, and read by all that replays traces."""

from pathlib import Path

import pytest
from absl.testing import parameterized

from moejax import sweep
from moejax.benchmarking.routing import of_trace
from moejax.models.shapes import CONFIGS
from moejax.routing.trace import DECODE, PREFILL, read_trace
from scripts.studies.quality.bench import DOMAINS
from tests import commands

FOLDER = Path(__file__).parents[1] / "scripts/studies/study_model/traces"
MOST_BYTES = 500_000


class StudyTracesTest(parameterized.TestCase):
    def test_they_are_small_and_whole(self):
        paths = sorted(FOLDER.iterdir())
        self.assertEqual([path.stem for path in paths], sorted(DOMAINS))
        self.assertLess(sum(path.stat().st_size for path in paths), MOST_BYTES)
        for path in paths:
            trace = read_trace(path)
            self.assertEqual((trace.num_experts, trace.num_layers, trace.width), (16, 30, 4))
            counts = [int((trace.phase == phase).sum()) for phase in (PREFILL, DECODE)]
            self.assertEqual(counts, [40, 224])
            self.assertNotRegex(" ".join(trace.facts.values()), r"(^|[\s=])/\w")

    @parameterized.parameters("Qwen3-30B-A3B", "Mixtral-8x7B")
    def test_benchmarks_replay_them(self, shape):
        config = CONFIGS[shape]
        work = of_trace(
            config, read_trace(FOLDER / "books.trace"), 2, recall=0.85, seed=0, name="books"
        )
        self.assertEqual(work.ids.shape[1:], (len(config.moe_layers), 2, config.experts_per_token))
        self.assertLess(work.ids.max(), config.num_experts)
        self.assertIn("scaled from 16 experts", work.about)

    @pytest.mark.slow
    def test_sweeps_replay_them(self):
        trace = f"--config.trace={FOLDER / 'books.trace'}"
        _, *said = commands.run(
            sweep.COMMAND, trace, "--config.grid=slots=4,8", "--config.base_ms=2"
        )
        self.assertIn("slots=8", "".join(map(str, said)))
