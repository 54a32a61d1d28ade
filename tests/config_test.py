"""Run configurations: defaults in one place, names and values checked."""

import contextlib
import dataclasses
import pathlib
import re

from absl.testing import parameterized
from ml_collections import config_dict

from moejax import cli, generate
from moejax.config.commands import EvaluateConfig, GenerateConfig, MemoryConfig, PlanConfig
from moejax.config.options import from_config_dict, options, to_config_dict
from moejax.config.policy import NAMES, SETTINGS, PolicyConfig
from moejax.config.serve import ServeConfig
from moejax.errors import MoejaxError
from moejax.experts.budget import Limits
from moejax.inference.generation import GenerationSettings
from moejax.policies.make import POLICIES, settings_of
from scripts.documents.config_tables import MAINS

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def load(path: pathlib.Path) -> GenerateConfig:
    """The configuration that a file under configs/ stands for."""
    return cli.parse(generate.COMMAND, ["generate", f"--config={path}"])[0]


def is_special(name: str, default: object) -> bool:
    """Whether a default means another thing than a number of its kind; a seed of 0 does not."""
    return default in (None, 0, -1) and not isinstance(default, bool) and name != "seed"


class ConfigTest(parameterized.TestCase):
    def test_round_trip(self):
        config = GenerateConfig(checkpoint="x", temperature=0.5, stop=("a", "b"))
        self.assertEqual(from_config_dict(GenerateConfig, to_config_dict(config)), config)

    def test_missing_fields_keep_their_defaults(self):
        values = config_dict.ConfigDict({"seed": 3})
        self.assertEqual(from_config_dict(GenerateConfig, values), GenerateConfig(seed=3))

    def test_demo_config_is_the_defaults(self):
        self.assertEqual(load(CONFIGS / "demo.py"), GenerateConfig())

    @parameterized.parameters("qwen3_30b_a3b", "mixtral_8x7b")
    def test_named_config_is_valid_and_names_a_hub_checkpoint(self, name):
        self.assertRegex(load(CONFIGS / f"{name}.py").checkpoint, r"^\w+/[\w.-]+$")

    def test_request_is_what_the_engine_takes(self):
        settings = GenerationSettings.of(**GenerateConfig(top_k=7, stop=("x",)).request())
        self.assertEqual(settings, GenerationSettings(top_k=7, stop=("x",)))
        # Only what has no place on a command line is left to the engine's own callers.
        plain = dataclasses.asdict(GenerationSettings(stop=("x",)))
        every = {name: value for name, value in plain.items() if name != "ignore_eos"}
        self.assertEqual(GenerateConfig(**every).request(), every)
        # Omitted settings come from the checkpoint.
        self.assertEqual(set(GenerateConfig().request()), {"seed", "add_special_tokens"})

    def test_what_a_server_answers_with(self):
        of_checkpoint = {"temperature": 0.6, "top_k": 20}
        plain = GenerationSettings(max_new_tokens=512, temperature=1.0)
        self.assertEqual(ServeConfig().settings({}), plain)
        by_checkpoint = dataclasses.replace(plain, **of_checkpoint)
        self.assertEqual(ServeConfig().settings(of_checkpoint), by_checkpoint)
        given = ServeConfig(temperature=0.0, max_new_tokens=7)
        expected = GenerationSettings(max_new_tokens=7, top_k=20)
        self.assertEqual(given.settings(of_checkpoint), expected)

    def test_names_are_locked(self):
        with self.assertRaises(AttributeError):
            to_config_dict(GenerateConfig()).temprature = 1.0

    def test_groups(self):
        config = GenerateConfig(memory=MemoryConfig(device_gib=12, slots=4))
        values = to_config_dict(config)
        self.assertEqual(values.memory.device_gib, 12)
        self.assertEqual(from_config_dict(GenerateConfig, values), config)
        with self.assertRaises(AttributeError):
            values.memory.device_gb = 1.0
        some = config_dict.ConfigDict({"memory": {"host_gib": 3}})
        expected = GenerateConfig(memory=MemoryConfig(host_gib=3.0))
        self.assertEqual(from_config_dict(GenerateConfig, some), expected)

    def test_memory_is_what_a_budget_takes(self):
        self.assertEqual(MemoryConfig().limits(), Limits())
        names = [field.name for field in dataclasses.fields(Limits)]
        self.assertEqual([field.name for field in dataclasses.fields(MemoryConfig)], names)

    def test_options_are_all_fields_and_those_of_groups(self):
        found = {option.name: option.default for option in options(GenerateConfig(seed=5))}
        self.assertEqual(found["seed"], 5)
        self.assertEqual(found["memory.slots"], -1)
        self.assertNotIn("memory", found)
        groups = (MemoryConfig, PolicyConfig)
        fields = sum(len(dataclasses.fields(of)) for of in (GenerateConfig, *groups))
        self.assertLen(found, fields - len(groups))

    def test_settings_are_those_of_the_policies(self):
        self.assertEqual(set(NAMES), set(POLICIES))
        self.assertEqual(set(SETTINGS), {name for of in POLICIES for name in settings_of(of)})
        for name, meaning in SETTINGS.items():
            policies, colon, _ = meaning.partition(": ")
            for policy in policies.split(", ") if colon else POLICIES:
                if name != "seed":
                    self.assertIn(name, settings_of(policy))

    @parameterized.parameters(*POLICIES)
    def test_help_shows_the_defaults_of_a_policy(self, name):
        lines = PolicyConfig(name=name).more_help()
        for setting, default in settings_of(name).items():
            if setting == "lists":
                continue
            value = str(default) if default != () else ""
            [line] = [of for of in lines if of.startswith(f"  {setting}=")]
            self.assertRegex(line, rf"^  {setting}={re.escape(value)} ")
            if is_special(setting, default):
                self.assertRegex(line, rf"; {value.removesuffix('.0')}: \S")

    def test_help_fits_two_screens(self):
        self.assertLess(len(options(GenerateConfig())), 60)

    @parameterized.parameters(*MAINS)
    def test_what_special_defaults_mean_is_said(self, main):
        for option in options(MAINS[main]):
            if is_special(option.name, option.default):
                said = "None" if option.default is None else f"{option.default:g}"
                self.assertRegex(option.meaning, rf"; {said}: \S", option.name)

    def test_a_plan_takes_the_configuration_of_a_run(self):
        values = to_config_dict(GenerateConfig(context=7, memory=MemoryConfig(slots=3)))
        config = from_config_dict(PlanConfig, values)
        self.assertEqual(config, PlanConfig(context=7, memory=MemoryConfig(slots=3)))

    def test_what_is_compared_with_the_exact_model(self):
        default = EvaluateConfig().fidelity_share
        for name, share, is_refused in (
            ("dymoe", 0.5, False), ("", 0.5, True), ("", 0.0, False), ("", default, False),
        ):  # fmt: skip
            config = EvaluateConfig(policy=PolicyConfig(name=name), fidelity_share=share)
            refused = self.assertRaisesRegex(MoejaxError, "without policy.name: give policy.name")
            with refused if is_refused else contextlib.nullcontext():
                config.check()

    @parameterized.parameters(
        ({"memory": {"device_gb": 1.0}}, "'memory.device_gb'; did you mean 'memory.device_gib'?"),
        ({"device_gib": 1.0}, "no config field 'device_gib'; did you mean 'memory.device_gib'?"),
        ({"seed": {"slots": 1}}, "no config field 'seed.slots'; did you mean 'memory.slots'?"),
        ({"memory": 5}, "memory has no value of its own; it is a group: memory.device_gib, "),
        ({"memory": {"slots": 1.5}}, "memory.slots=1.5 must be of type int"),
        ({"memory": {"slots": -2}}, "memory.slots=-2 must be at least -1"),
        ({"memory": {"device_gib": -1}}, "memory.device_gib=-1.0 must be 0 (no limit)"),
        ({"memory": {"host_gib": float("inf")}}, "memory.host_gib=inf must be"),
        ({"policy": {"name": "dymoe", "slots": ("²",)}}, "policy.slots: '²' is not a number of"),
        ({"memory": {"transient": -1}}, "memory.transient=-1 must be 0"),
        ({"temprature": 1.0}, "no config field 'temprature'; did you mean 'temperature'?"),
        ({"checkpoint": ""}, "checkpoint=''"),
        ({"context": -1}, "context=-1 must be 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"stop": (5,)}, "must be a tuple of strings"),
        ({"top_k": True}, "top_k=True must be of type int"),
        ({"temperature": "hot"}, "temperature='hot' must be of type float"),
        ({"record_importance": True}, "record_importance=True has no effect without record_trace"),
        ({"record_foreseen": 4}, "record_foreseen=4 has no effect without record_trace: give r"),
        ({"fidelity_share": 0.5}, "fidelity_share=0.5 has no effect without policy.name"),
        ({"add_special_tokens": 1}, "add_special_tokens=1 must be of type bool"),
    )
    def test_wrong_values_are_named(self, values, said):
        with self.assertRaises(MoejaxError) as caught:
            from_config_dict(GenerateConfig, config_dict.ConfigDict(values))
        self.assertIn(said, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))
