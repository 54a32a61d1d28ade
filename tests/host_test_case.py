"""Tests that run on the CPU even where JAX sees a GPU, whose float32 products are shorter."""

import jax
from absl.testing import parameterized


class HostTestCase(parameterized.TestCase):
    """Arrays that a test makes are on the CPU, and so is what it computes."""

    def setUp(self):
        super().setUp()
        self.enter_context(jax.default_device(jax.devices("cpu")[0]))
