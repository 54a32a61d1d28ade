"""The bound on what a step takes, beside peaks that were measured on a GPU."""

from absl.testing import parameterized

from moejax.experts.budget import RunSizes, workspace_nbytes
from moejax.inference.chunking import longest_chunk
from moejax.models.shapes import SHAPES

CONTEXT = 4096  # of `configs/benchmark_dynaexq.py`: what 2,048 and 256 tokens get
LAYERS, EXPERTS = 48, 128


class PeakTest(parameterized.TestCase):
    # `python -m moejax.benchmark --config=configs/benchmark_dynaexq.py --config.num_prompts=32` of
    # Qwen3-30B's shape on an H200, jax 0.11.2, 2026-11-23, GiB: peak and plan of that day, of which
    # the workspace; and the steps that its routing was replayed from, which no plan has.
    @parameterized.parameters(
        (1, 16.705, 16.500, 0.801, 256), (2, 18.080, 17.682, 1.603, 256),
        (4, 18.836, 18.460, 1.618, 256), (8, 20.408, 20.014, 1.649, 256),
        (16, 23.455, 23.077, 1.712, 128), (32, 29.470, 29.202, 1.837, 64),
    )  # fmt: skip
    def test_what_compiling_tries_is_in_the_bound(self, batch, peak, planned, workspace, steps):
        """The peaks were above the plan: XLA tries the largest product, two results at once."""
        replayed = 2 * 4 * steps * LAYERS * batch * EXPERTS / 2**30
        config = SHAPES["Qwen3-30B-A3B"]
        run = RunSizes(
            config=config, weights_nbytes={}, batch=batch, context=CONTEXT, platform="gpu",
            chunk=longest_chunk(config, batch, CONTEXT),
        )  # fmt: skip
        bound = workspace_nbytes(run, num_tiers=2) / 2**30
        spare = planned - workspace + bound + replayed - peak
        self.assertBetween(spare, 0, 0.125)  # of which the allocator's reserve is most

    def test_gates_and_ups_stay_in_float32_until_terms_are_added(self):
        config, chunk = SHAPES["Mixtral-8x7B"], 1024
        run = RunSizes(
            config=config, weights_nbytes={}, batch=1, context=CONTEXT, platform="gpu", chunk=chunk,
            stores_scores=False,
        )  # fmt: skip
        without, found = (workspace_nbytes(run, has_terms=of) for of in (False, True))
        pairs = chunk * config.experts_per_token
        self.assertEqual(found - without, pairs * 2 * config.expert_dim * 2)
