"""A policy of one's own, `policy.name=module:Class`: the page's example, in every main."""

import contextlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from absl.testing import parameterized

from moejax import benchmark, cli, evaluate, generate, plan, serve
from moejax.errors import MoejaxError
from moejax.evaluation.lm_eval_model import _read_arguments
from moejax.experts.tiering import Tiering
from moejax.policies.base import Policy
from moejax.policies.make import _class_of, make_policy, settings_of
from tests import tiny_engine
from tests.folder_case import FolderTestCase

PAGE = (Path(__file__).parents[1] / "docs/policies.md").read_text("utf-8")
[SOURCE] = [
    text
    for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    if "class FirstHigh" in text
]
BROKEN = """

class NoPolicy:
    pass


@dataclasses.dataclass(frozen=True)
class Undecided(Policy):
    name: ClassVar[str] = "undecided"

    def init(self, spec):
        return None
"""
NAME = "own_policy_of_a_test:FirstHigh"


class OwnPolicyTest(FolderTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = cls.class_folder()
        (cls.folder / "own_policy_of_a_test.py").write_text(SOURCE + BROKEN)
        (cls.folder / "broken_policy_of_a_test.py").write_text("1 / 0")

    def setUp(self):
        super().setUp()
        # Like the command that pip installs: the current directory is not on the path.
        path = [place for place in sys.path if place and Path(place) != Path.cwd()]
        self.enterContext(contextlib.chdir(self.folder))
        self.addCleanup(sys.path.__setitem__, slice(None), list(sys.path))
        sys.path[:] = path
        self.addCleanup(sys.modules.pop, "own_policy_of_a_test", None)

    @parameterized.named_parameters(
        (main.__name__.rpartition(".")[2], main)
        for main in (generate, plan, evaluate, serve, benchmark)
    )
    def test_every_main_takes_it(self, main):
        argv = ["x", f"--policy.name={NAME}", "--policy.settings=count=2", "--tiers=int4,int2"]
        config, _ = cli.parse(main.COMMAND, argv)
        tiering = config.policy.tiering()
        self.assertEqual(tiering.settings, {"count": 2})
        made = make_policy(tiering.policy, **tiering.settings)
        self.assertIsInstance(made, Policy)
        self.assertEqual((made.name, made.count), ("first_high", 2))

    def test_lm_eval_takes_it(self):
        config = _read_arguments({"policy.name": NAME, "policy.settings": "count=2"})
        self.assertEqual(config.policy.tiering().settings, {"count": 2})

    @pytest.mark.slow
    def test_the_engine_runs_it(self):
        model = tiny_engine.CONFIG
        policy = Tiering(
            policy=NAME, settings={"count": model.experts_per_token}, tiers=("int4", "int2"),
            slots=(model.num_experts,) * 2, quantizer="rtn", group_size=16,
        )  # fmt: skip
        with tiny_engine.load_tiny_engine(self.folder / "model", policy=policy) as engine:
            engine.logits(np.arange(12)[None])
            self.assertEqual(engine.ledger.shares["int4"], 1)  # the default is one expert

    def test_settings_are_its_fields(self):
        self.assertEqual(settings_of(NAME), {"count": 1})
        config, _ = cli.parse(generate.COMMAND, ["generate", f"--policy.name={NAME}"])
        self.assertIn("  count=1", config.policy.more_help()[1])

    @parameterized.parameters(
        ("own_policy_of_a_test:Nothing", "cannot be imported .*no attribute 'Nothing'"),
        ("own_policy_of_a_test:NoPolicy", "is no dataclass that derives from moejax.policies.base"),
        ("own_policy_of_a_test:dataclasses", "is no dataclass that derives from"),
        ("own_policy_of_a_test:Undecided", "lacks decide"),
        ("broken_policy_of_a_test:X", "cannot be imported .ZeroDivisionError: division by zero"),
        ("no_such_module_of_a_test:X", "cannot be imported .ModuleNotFoundError: No module named"),
        ("first_high", "there is no policy 'first_high'"),
    )
    def test_what_is_none(self, name, said):
        with self.assertRaisesRegex(MoejaxError, said) as caught:
            _class_of(name)
        self.assertNotIn("\n", str(caught.exception))

    def test_mistakes_in_settings(self):
        config, _ = cli.parse(
            generate.COMMAND, ["generate", f"--policy.name={NAME}", "--settings=cuont=2"]
        )
        with self.assertRaisesRegex(MoejaxError, "no setting 'cuont'; did you mean 'count'"):
            config.policy.tiering()

    @parameterized.parameters(
        ("--policy.settings=count", "policy.settings: 'count' is not NAME=VALUE"),
        ("--policy.settings=count=1,2", "policy.settings: .* gives a setting several values"),
        ("--policy.settings=count=1,count=2", "policy.settings: count stands twice"),
    )
    def test_settings_that_cannot_be_read(self, flag, said):
        with self.assertRaisesRegex(MoejaxError, said):
            cli.parse(generate.COMMAND, ["generate", "--policy.name=dymoe", flag])

    def test_a_former_flag_by_its_short_name(self):
        said = "--retention is now written --config.policy.settings=retention=VALUE"
        with self.assertRaisesRegex(flags.Error, said):
            cli.parse(generate.COMMAND, ["generate", "--retention=0.75"])
        said = said.replace("--retention", "policy.retention")
        with self.assertRaisesRegex(flags.Error, said):
            cli.parse(generate.COMMAND, ["generate", "--config.policy.retention=0.75"])
