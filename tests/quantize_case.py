"""Shared parts of tests of whole quantizations: a source, jobs, kills, digests."""

import hashlib
import os
import pathlib
import shutil
import tempfile
from typing import ClassVar
from unittest import mock

import jax
import numpy as np
from safetensors.numpy import load_file

from moejax.quantization.pipeline import run as pipeline
from moejax.quantization.pipeline.recipe import Recipe, Scheme, parse_rules
from moejax.quantization.pipeline.run import Job, quantize_checkpoint
from tests.folder_case import FolderTestCase
from tests.random_checkpoints import TINY, write_random_checkpoint, write_tokenizer


class Killed(BaseException):
    """Stands for SIGKILL: no handler of ours takes it for an error."""


def stopped_after(count: int, error: BaseException):
    """A patch by which something is made to last `count` times, and then `error` is raised."""
    return mock.patch.object(os, "fsync", side_effect=[*[None] * count, error])


def digests(directory: pathlib.Path) -> dict[str, str]:
    """Digests of every file, by its path."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def all_tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Tensors that the safetensors library finds in all files of a directory."""
    return {
        name: tensor
        for path in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


class QuantizeTestCase(FolderTestCase):
    """Has a small random checkpoint, jobs on it, and no drawing unless a test asks for it."""

    fields: ClassVar[dict] = {}  # in which the checkpoint differs from the tiny one

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.shared = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.source = write_random_checkpoint(cls.shared / "source", **cls.fields)
        write_tokenizer(cls.source, TINY["vocab_size"])

    def setUp(self):
        super().setUp()
        # Drawing takes longer than all the rest; two tests do it.
        self.drawing = mock.patch.object(pipeline, "draw_report", return_value=None)
        self.drawing.start()
        self.addCleanup(mock.patch.stopall)

    def job(
        self,
        *rules,
        source=None,
        output=None,
        rank="Dense-8",
        passes=3,
        target="moejax",
        text=None,
        **changes,
    ) -> Job:
        fields = {
            "method": "rtn",
            "bits": 3,
            "group_size": 32,
            "zero_kind": "auto",
            "scale_dtype": "float16",
            "factor_bits": 8,
        }
        default = Scheme(**{**fields, **changes})
        return Job(
            source=source or self.source,
            output=output or self.directory / "out",
            recipe=Recipe(default=default, rules=parse_rules("; ".join(rules)), format=target),
            rank_policy=rank,
            passes=passes,
            calibration_text=text,
            calibration_samples=4,
            calibration_length=32,
            device=jax.devices("cpu")[0],
            progress=False,
        )

    def copy_of_source(self) -> pathlib.Path:
        return pathlib.Path(shutil.copytree(self.source, self.directory / "copy"))

    def assert_refused(self, job, *messages):
        with self.assert_one_line(*messages):
            quantize_checkpoint(job)
        self.assertFalse((job.output / "config.json").exists())

    def undisturbed(self) -> tuple[dict[str, str], int]:
        """Digests of an undisturbed run, and how many times it made something last."""
        job = self.job(output=self.directory / "undisturbed")
        with mock.patch.object(os, "fsync") as fsync:
            quantize_checkpoint(job)
        return digests(job.output), fsync.call_count
