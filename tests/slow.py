"""Tests that take long and say little that others do not: skipped unless they are asked for."""

import os
import unittest


def asked() -> bool:
    """Whether slow tests are to run."""
    return bool(os.environ.get("MOEJAX_SLOW_TESTS"))


def skip_unless_asked() -> None:
    """To be called first; `MOEJAX_SLOW_TESTS=1 scripts/run_tests.sh` runs what calls it.

    Raises:
      unittest.SkipTest: slow tests are not asked for.
    """
    if not asked():
        raise unittest.SkipTest("takes long: MOEJAX_SLOW_TESTS=1 runs it")
