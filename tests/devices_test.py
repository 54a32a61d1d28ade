"""Devices that are not there, and places where compiled programs cannot be kept."""

import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from moejax.devices import (
    choose_device,
    enable_compilation_cache,
    plain_memory_errors,
)
from moejax.errors import MoejaxError

ROOT = Path(__file__).parents[1]


class LostDeviceTest(absltest.TestCase):
    def test_a_mesh_says_it_in_one_line(self):
        lost = jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_LAUNCH_FAILED\nmore")
        with (
            self.assertRaisesRegex(MoejaxError, "a GPU of the mesh failed.*LAUNCH.*start") as said,
            plain_memory_errors(jax.devices()[0], waits=True),
        ):
            raise lost
        self.assertNotIn("\n", str(said.exception))
        for waits, error in ((False, lost), (True, jax.errors.JaxRuntimeError("INTERNAL: a bug"))):
            with (
                self.assertRaises(jax.errors.JaxRuntimeError),
                plain_memory_errors(jax.devices()[0], waits=waits),
            ):
                raise error

    def test_collectives_that_fail_with_a_newer_jax(self):
        said = "INTERNAL: NCCL operation ncclGetPeerDevicePointer(w) failed: unhandled system error"
        with (
            self.assertRaisesRegex(MoejaxError, r"collectives of JAX .* failed .*==0\.11\.2"),
            plain_memory_errors(jax.devices()[0]),
        ):
            raise jax.errors.JaxRuntimeError(said)

    def test_memory_that_ends_is_said_on_a_mesh_too(self):
        for waits in (False, True):
            with (
                self.assertRaisesRegex(MoejaxError, "is out of memory .*take a shorter context"),
                plain_memory_errors(jax.devices()[0], waits=waits),
            ):
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: CUDA_ERROR_OUT_OF_MEMORY")


class ChooseDeviceTest(parameterized.TestCase):
    def test_first_device(self):
        self.assertEqual(choose_device("cpu"), jax.devices("cpu")[0])
        self.assertEqual(choose_device("auto"), jax.devices()[0])

    @parameterized.parameters("auto", "cpu", "gpu")
    def test_nothing_starts(self, platform):
        for error in (AssertionError(), RuntimeError("Unable to\ninitialize")):
            with (
                mock.patch.object(jax, "devices", side_effect=error),
                mock.patch.object(jax, "local_devices", side_effect=error),
                self.assertRaisesRegex(
                    MoejaxError, f"platform '{platform}' was asked for.*JAX has no device: .+"
                ) as caught,
            ):
                choose_device(platform)
            self.assertNotIn("\n", str(caught.exception))

    def test_jax_is_kept_from_the_device(self):
        def local_devices(backend=None):
            raise RuntimeError(f"Unknown backend {backend}")

        with (
            mock.patch.object(jax, "local_devices", local_devices),
            mock.patch.object(jax, "devices", lambda: [mock.Mock(platform="gpu")]),
            self.assertRaisesRegex(MoejaxError, "'cpu' was asked for.*sees only gpu; choose"),
        ):
            choose_device("cpu")

    def test_platforms_of_the_environment_are_named(self):
        probe = (
            "from moejax.devices import choose_device\n"
            "from moejax.errors import MoejaxError\n"
            "try: choose_device('auto')\n"
            "except MoejaxError as error: print(error)"
        )
        env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "nothing"}
        done = subprocess.run(
            [sys.executable, "-c", probe], env=env, capture_output=True, text=True, check=True
        )
        self.assertRegex(
            done.stdout, r"\Aplatform 'auto' was asked for, and JAX may use only 'nothing'.*\n\Z"
        )


class CompilationCacheTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"):
            self.addCleanup(jax.config.update, name, jax.config.values[name])
        self.addCleanup(enable_compilation_cache, "")  # runs first: closes the test's own

    def assert_refused(self, directory, message):
        with self.assertRaisesRegex(MoejaxError, f"compilation cache .*{message}.*for none"):
            enable_compilation_cache(directory)

    def test_off_is_off(self):
        enable_compilation_cache(str(self.folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(7)).block_until_ready()
        kept = set(self.folder.iterdir())
        self.assertNotEmpty(kept)
        self.assertIsNone(enable_compilation_cache(""))
        self.assertIsNone(jax.config.values["jax_compilation_cache_dir"])
        jax.jit(lambda x: x * 5 + 2)(jnp.ones(9)).block_until_ready()
        self.assertEqual({path for path in self.folder.iterdir() if path not in kept}, set())

    def test_the_process_own_place_wins_over_auto(self):
        jax.config.update("jax_compilation_cache_dir", str(self.folder))
        self.assertEqual(enable_compilation_cache("auto"), self.folder)

    def test_nobodys_home(self):
        jax.config.update("jax_compilation_cache_dir", None)
        with mock.patch.dict(os.environ), mock.patch.object(pwd, "getpwuid", side_effect=KeyError):
            os.environ.pop("HOME", None)
            os.environ.pop("XDG_CACHE_HOME", None)
            self.assert_refused("auto", "auto cannot be used .*home directory")
        self.assert_refused("~nobody-here/x", "~nobody-here/x cannot be used .*home directory")

    def test_directory_that_cannot_be_written(self):
        # Patched, for root may write anywhere.
        with mock.patch.object(os, "access", return_value=False):
            self.assert_refused(str(self.folder), "no permission to write")

    def test_file_in_the_way(self):
        (self.folder / "file").touch()
        self.assert_refused(str(self.folder / "file"), "File exists")
