"""Run configurations: defaults in one place, names and values checked."""

import dataclasses
import pathlib

from absl.testing import absltest, parameterized
from ml_collections import config_dict

from moejax import cli, generate
from moejax.config import GenerateConfig, from_config_dict, to_config_dict
from moejax.errors import MoejaxError
from moejax.generation import GenerationSettings

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def load(path: pathlib.Path) -> GenerateConfig:
    """The configuration that a file under configs/ stands for."""
    return cli.parse(generate.COMMAND, ["generate", f"--config={path}"])[0]


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
        names = {field.name for field in dataclasses.fields(GenerationSettings)}
        self.assertEqual(names - set(GenerateConfig().request()), {"ignore_eos"})

    def test_names_are_locked(self):
        with self.assertRaises(AttributeError):
            to_config_dict(GenerateConfig()).temprature = 1.0

    @parameterized.parameters(
        ({"temprature": 1.0}, "no config field 'temprature'; did you mean 'temperature'?"),
        ({"zzz": 1.0}, "no config field 'zzz'; did you mean '"),
        ({"checkpoint": ""}, "checkpoint=''"),
        ({"context": -1}, "context=-1 must be 0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"temperature": -1}, "temperature=-1.0 must be 0"),
        ({"temperature": float("nan")}, "temperature=nan must be"),
        ({"top_k": -1}, "top_k=-1 must be"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"min_p": 1.5}, "min_p=1.5 must be from 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be"),
        ({"seed": -1}, "seed=-1 must be from 0"),
        ({"stop": ("",)}, "stop="),
        ({"stop": (5,)}, "must be strings; quote a number"),
        ({"top_k": 1.5}, "top_k=1.5 must be of type int"),
        ({"top_k": True}, "top_k=True must be of type int"),
        ({"temperature": "hot"}, "temperature='hot' must be of type float"),
        ({"add_special_tokens": 1}, "add_special_tokens=1 must be of type bool"),
    )
    def test_wrong_values_are_named(self, values, said):
        with self.assertRaises(MoejaxError) as caught:
            from_config_dict(GenerateConfig, config_dict.ConfigDict(values))
        self.assertIn(said, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))


if __name__ == "__main__":
    absltest.main()
