"""Quantization of a Hugging Face directory into another, a shard at a time.

Shards (a layer each, and one for tensors of no layer) are written whole and marked as done one
after the other; config.json comes last. The written bytes depend on the source and on the settings
alone, so a run that resumes after a kill ends with equal bytes. It resumes by notes beside them:

    OUTPUT/.quantizing/run.json            what is being made, of what, with which versions
    OUTPUT/.quantizing/NOTE.json           what was found before the first layer, such as ranks
    OUTPUT/.quantizing/shard-00003.json    of a shard that is whole: its file's digest, its tensors

A shard counts as done once its note exists, which is written after the shard itself. The folder is
removed once config.json, written last, exists.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.checkpoints.formats.manifest import MANIFEST_FILE, check_files, read_files
from moejax.checkpoints.safetensors_reader import INDEX_FILE
from moejax.checkpoints.safetensors_writer import write_safetensors
from moejax.errors import MoejaxError
from moejax.files.whole import (
    PARTIAL,
    WrittenFile,
    check_directory,
    file_digest,
    json_text,
    write_json,
    write_whole,
)
from moejax.models.hf.config import read_json, text_fields
from moejax.quantization import ranks
from moejax.quantization.pipeline import manifest
from moejax.quantization.pipeline.batches import BatchPlan, MatrixTask
from moejax.quantization.pipeline.calibration import calibration_tokens
from moejax.quantization.pipeline.calibration_pass import (
    CalibrationRun,
    Frequencies,
    router_frequencies,
)
from moejax.quantization.pipeline.disk_space import check_space
from moejax.quantization.pipeline.export import WRITERS, config_of, read_back
from moejax.quantization.pipeline.inventory import (
    Entry,
    Inventory,
    Shard,
    source_fingerprint,
    take_inventory,
)
from moejax.quantization.pipeline.manifest import CONFIG_FILE, RESUME
from moejax.quantization.pipeline.plots import REPORT_FOLDER, draw_report
from moejax.quantization.pipeline.progress import Meter
from moejax.quantization.pipeline.quantizers import kernel_remarks
from moejax.quantization.pipeline.recipe import CALIBRATED, COMPENSATED, Recipe, Scheme, schemes
from moejax.quantization.pipeline.shard import ShardResult, quantize_shard
from moejax.quantization.ranks import RankPolicy, excess_kurtosis
from moejax.text.tokenizer import Tokenizer

WORK_FOLDER = ".quantizing"
_RUN_FILE = "run.json"
_MEND = "give a new directory as output"


class _ResumeLog:
    """Finished work in an output directory.

    Attributes:
      directory: the output.
      identity: settings and source by name; equal for runs whose results are equal.
      made_of: the same without versions, which are of no account once the result is there.
    """

    def __init__(self, directory: Path, identity: Mapping[str, Any]) -> None:
        self.directory = directory
        self.identity = dict(identity)
        self.made_of = {name: value for name, value in identity.items() if name != "versions"}
        self._work = directory / WORK_FOLDER

    def finished(self) -> dict[str, Any] | None:
        """Manifest of a directory that holds the whole result of this run, or None.

        Raises MoejaxError where it is another run's, or a file of it has changed.
        """
        if not (self.directory / CONFIG_FILE).exists():
            return None
        if (made := read_files(self.directory)) is None:
            raise MoejaxError(f"{self.directory} holds another model; {_MEND}")
        fields = read_json(made.path)
        found = fields.get("made_of")
        self._check_identity(found if isinstance(found, dict) else {}, self.made_of, "a model")
        for name, (size, _) in made.files.items():
            path = self.directory / name
            if not path.exists() or path.stat().st_size != size:
                raise MoejaxError(f"{path} was removed or changed after it was made; {_MEND}")
        shutil.rmtree(self._work, ignore_errors=True)
        check_files(made, checksums=True)
        return fields

    @contextlib.contextmanager
    def opened(self, own_files: Sequence[str]) -> Iterator[None]:
        """Locks the directory for this process; makes it and removes rests of a killed run.

        MoejaxError if it holds other files than `own_files`, or another process works in it.
        """
        run_file = self._work / _RUN_FILE
        try:
            names = {path.name for path in self.directory.iterdir()}
        except FileNotFoundError:
            names = set()
        except NotADirectoryError as error:
            raise MoejaxError(f"output {self.directory} is a file; give a directory") from error
        known = {WORK_FOLDER}
        if run_file.exists():
            self._check_identity(read_json(run_file), self.identity, "an unfinished run")
            known |= {*own_files, *(name + PARTIAL for name in own_files)}
        if foreign := sorted(names - known):
            rest = ", ..." if len(foreign) > 3 else ""
            raise MoejaxError(
                f"output {self.directory} holds other files ({', '.join(foreign[:3])}{rest}); "
                "give an empty or a new directory"
            )
        check_directory(self.directory, "output")
        self._work.mkdir(exist_ok=True)
        with self._locked():
            for path in (*self.directory.glob("*" + PARTIAL), *self._work.glob("*" + PARTIAL)):
                path.unlink()
            if not run_file.exists():
                write_json(run_file, self.identity, RESUME)
            yield

    def note(self, name: str) -> dict[str, Any] | None:
        """Returns the note of a name; None if it is missing."""
        path = self._work / f"{name}.json"
        return read_json(path) if path.exists() else None

    def keep(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Writes a note for later runs; returns it as a later run reads it."""
        write_json(self._work / f"{name}.json", fields, RESUME)
        return read_json(self._work / f"{name}.json")

    def done_shards(self, files: Sequence[str]) -> list[dict[str, Any]]:
        """Notes of finished shards, up to the first missing one."""
        notes: list[dict[str, Any]] = []
        for i, file in enumerate(files):
            note, path = self.note(_shard_note(i)), self.directory / file
            if note is None or not path.exists():
                break
            if list(file_digest(path)) != [note["size"], note["sha256"]]:
                break
            notes.append(note)
        return notes

    def close(self) -> None:
        """Removes the notes; the directory is finished."""
        shutil.rmtree(self._work)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks out other processes; the lock ends with the process."""
        handle = os.open(self._work, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise MoejaxError(f"another process is writing {self.directory}") from error
        try:
            yield
        finally:
            os.close(handle)

    def _check_identity(
        self, found: Mapping[str, Any], wanted: Mapping[str, Any], what: str
    ) -> None:
        """Raises MoejaxError naming the first difference of two runs."""
        # This run's identity, as JSON stores it.
        wanted = json.loads(json.dumps(wanted))
        for name in (*wanted, *found):
            if found.get(name) != wanted.get(name):
                said = (
                    "of another source checkpoint"
                    if name == "source"
                    else f"with {name}={found.get(name)}, not {wanted.get(name)}"
                )
                raise MoejaxError(f"output {self.directory} holds {what} {said}; {_MEND}")


def _compensated(inventory: Inventory, chosen: Mapping[str, Scheme]) -> list[Entry]:
    """Matrices whose method adds a compensator."""
    entries = (entry for entry in inventory.entries if entry.name in chosen)
    return [entry for entry in entries if chosen[entry.name].method in COMPENSATED]


def _shard_note(i: int) -> str:
    return f"shard-{i + 1:05}"


Note = dict[str, Any]  # of a finished shard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Job of a quantization: source, output, recipe and device."""

    source: Path
    output: Path
    recipe: Recipe
    rank_policy: str
    passes: int  # cap of MiLo's iteration
    calibration_text: str | None  # None: the text that ships
    calibration_samples: int  # 0: as many as is usual
    calibration_length: int  # tokens of a sample; 0: as many as is usual
    device: jax.Device
    progress: bool  # show a bar on stderr


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a run."""

    output: Path
    was_done: bool  # before this run began
    shards_before: int  # that an earlier run had finished
    records: Mapping[str, Mapping[str, Any]]  # of the manifest, by name
    totals: Mapping[str, Any]
    seconds: Mapping[str, float]  # of this run, by phase
    remarks: tuple[str, ...]  # a line each, for people


def quantize_checkpoint(job: Job) -> Outcome:
    """Quantizes a checkpoint, or resumes an interrupted run.

    Raises:
      MoejaxError: the source, the recipe or the output directory is not usable, the disk is full, a
        weight cannot be quantized, or a file of a finished output has changed.
    """
    inventory = take_inventory(job.source)
    manifest.check_other_files(job.source)
    if job.output.resolve() == job.source.resolve():
        raise MoejaxError(f"output {job.output} is the source itself; give another directory")
    chosen = schemes(job.recipe, inventory)
    policy = ranks.parse_policy(job.rank_policy)
    by_policy = {e.kind for e in _compensated(inventory, chosen) if chosen[e.name].rank is None}
    if by_policy:  # before there is an output, so that a corrected run may have its directory
        ranks.check_terms(policy, by_policy)
    tokens = _calibration_tokens(job, inventory, chosen, policy)
    log = _ResumeLog(job.output, _identity(job, inventory, tokens))
    if (made := log.finished()) is not None:
        return Outcome(
            output=job.output,
            was_done=True,
            shards_before=len(inventory.shards),
            records={**made["tensors"], **made["plain"]},
            totals=made["totals"],
            seconds={},
            remarks=(),
        )
    files = [shard.file for shard in inventory.shards]
    others = [INDEX_FILE, manifest.CONFIG_FILE, MANIFEST_FILE, REPORT_FOLDER]
    with log.opened([*files, *others, *manifest.COPIED_FILES]):
        done = log.done_shards(files)
        run = _Run(job, inventory, log, chosen, tokens, Meter(visible=job.progress))
        try:
            notes, remarks = run.quantize(policy, done)
        finally:
            run.meter.bar.close()
        log.close()
    records = _records(notes)
    return Outcome(
        output=job.output,
        was_done=False,
        shards_before=len(done),
        records=records,
        totals=manifest.totals(records),
        seconds=dict(run.meter.seconds),
        remarks=tuple(remarks),
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run over a model, from the first unfinished shard."""

    job: Job
    inventory: Inventory
    log: _ResumeLog
    chosen: Mapping[str, Scheme]  # of the matrices that are quantized, by name
    tokens: np.ndarray | None
    meter: Meter

    def quantize(self, policy: RankPolicy, done: list[Note]) -> tuple[list[Note], list[str]]:
        """Quantizes all shards; returns their notes, and remarks for people."""
        todo = [entry for shard in self.inventory.shards[len(done) :] for entry in shard.entries]
        self.meter.expect(sum(e.source.num_bytes for e in todo if e.name in self.chosen))
        plan = self.log.note("ranks")
        if plan is None:
            plan = self.log.keep("ranks", self._plan_ranks(policy))
        notes = self._quantize_shards(plan["ranks"], done)
        with self.meter.phase("finish"):
            remarks = self._finish(notes)
        if self.job.device.platform == "gpu":
            entries = (e for e in self.inventory.entries if e.name in self.chosen)
            remarks += kernel_remarks((e.shape, self.chosen[e.name]) for e in entries)
        if capped := plan["capped"]:
            names = ", ".join(capped[:3]) + (", ..." if len(capped) > 3 else "")
            remarks.append(f"{len(capped)} matrices got the full rank min(N, K) ({names})")
        return notes, remarks

    def _plan_ranks(self, policy: RankPolicy) -> dict[str, Any]:
        """Plans the rank of every matrix that gets a compensator.

        A matrix with a rank of its own is left out of the policy's averages.

        Returns:
          "ranks" by name, and "capped": the names for which the policy exceeds min(N, K).
          MoejaxError if the policy does not fit the model.
        """
        if not (compensated := _compensated(self.inventory, self.chosen)):
            return {"ranks": {}, "capped": []}
        self.meter.bar.set_description_str("survey")
        kurtosis: Mapping[str, float] = {}
        frequencies: Frequencies = {}
        if policy.needs("kurtosis"):
            kurtosis = self._measure_kurtosis([e for e in compensated if e.kind == "experts"])
        if policy.needs("frequency"):
            frequencies = router_frequencies(self.inventory, self._calibration_run())
        fixed: dict[str, int] = {}
        matrices = []
        for entry in compensated:
            scheme, (num_rows, num_inputs) = self.chosen[entry.name], entry.shape
            if scheme.rank is not None:
                fixed[entry.name] = min(scheme.rank, num_rows, num_inputs)
                continue
            matrices.append(
                ranks.RankedMatrix(
                    name=entry.name,
                    kind=entry.kind,
                    num_rows=num_rows,
                    num_inputs=num_inputs,
                    kurtosis=kurtosis.get(entry.name),
                    frequency=frequencies.get((entry.layer, entry.expert)),
                    all_widths=_all_widths(scheme),
                )
            )
        if not matrices:
            return {"ranks": fixed, "capped": []}
        factor_bits = self.job.recipe.default.factor_bits
        plan = ranks.assign_ranks(policy, matrices, factor_bits=factor_bits)
        found = {of.name: rank for of, rank in zip(matrices, plan.ranks, strict=True)}
        return {"ranks": {**found, **fixed}, "capped": list(plan.capped)}

    def _measure_kurtosis(self, experts: Sequence[Entry]) -> dict[str, float]:
        """Measures the excess kurtosis of matrices, by name."""
        self.meter.expect(sum(entry.source.num_bytes for entry in experts))
        compute, found = jax.jit(excess_kurtosis), {}
        for entry in experts:
            with self.meter.phase("survey"):
                weights = jax.device_put(entry.read(), self.job.device)
                found[entry.name] = float(compute(weights))
            self.meter.bar.update(entry.source.num_bytes)
        return found

    def _quantize_shards(self, ranks: Mapping[str, int], done: list[Note]) -> list[Note]:
        """Quantizes and writes unfinished shards; returns the notes of all."""
        job, shards = self.job, self.inventory.shards
        tasks = {
            entry.name: MatrixTask(entry, self.chosen[entry.name], ranks.get(entry.name, 0))
            for entry in self.inventory.entries
            if entry.name in self.chosen
        }
        check_space(job.output, job.source, shards[len(done) :], tasks)
        by_shard = [[tasks[e.name] for e in shard.entries if e.name in tasks] for shard in shards]
        plan = BatchPlan(by_shard, job.passes, use_kernel=job.device.platform == "gpu")
        calibrated = [
            i for i, own in enumerate(by_shard) if any(t.scheme.method in CALIBRATED for t in own)
        ]
        last = max(calibrated, default=-1)
        text = self._calibration_run() if len(done) <= last else None
        notes = list(done)
        for i, shard in enumerate(shards):
            self.meter.bar.set_description_str(shard.title)
            if i < len(done):
                if text is not None and i < last:
                    path, records = job.output / shard.file, notes[i]["records"]
                    text.advance(shard, read_back(path, job.recipe.format, records))
                continue
            calibrate = None
            if text is not None and i in calibrated:
                calibrate = functools.partial(text.calibrate, text.capture(shard))
            result = quantize_shard(
                shard,
                tasks,
                plan,
                device=job.device,
                meter=self.meter,
                calibrate=calibrate,
                write_matrix=WRITERS[job.recipe.format],
            )
            notes.append(self._write(i, shard, result))
            if text is not None and i < last:
                text.advance(shard, result.matrices)
        return notes

    def _write(self, i: int, shard: Shard, result: ShardResult) -> Note:
        """Writes a shard and marks it as done; returns its note."""
        with self.meter.phase("write"):
            path = self.job.output / shard.file
            written = write_safetensors(path, result.tensors, manifest.RESUME)
            note = {
                **written._asdict(),
                "tensors": list(result.tensors),
                "records": result.records,
                "histograms": result.histograms,
            }
            return self.log.keep(_shard_note(i), note)

    def _calibration_run(self) -> CalibrationRun:
        assert self.tokens is not None
        return CalibrationRun(self.inventory, self.tokens, device=self.job.device, meter=self.meter)

    def _finish(self, notes: list[Note]) -> list[str]:
        """Writes the model's other files, config.json last; returns remarks for people."""
        output, source, records = self.job.output, self.job.source, _records(notes)
        files: dict[str, WrittenFile] = {}
        weight_map: dict[str, str] = {}
        histograms: dict[str, Any] = {}
        for shard, note in zip(self.inventory.shards, notes, strict=True):
            files[shard.file] = WrittenFile(note["size"], note["sha256"])
            weight_map |= dict.fromkeys(note["tensors"], shard.file)
            histograms |= note["histograms"]
        num_bytes = sum(record["bytes"] for record in records.values())
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        files[INDEX_FILE] = write_json(output / INDEX_FILE, index, manifest.RESUME)
        files |= manifest.copy_other_files(source, output)
        missing = draw_report(output, records, histograms)
        quantization = config_of(self.job.recipe.format, records)
        fields = text_fields(read_json(source / manifest.CONFIG_FILE))
        fields = {**fields, "quantization_config": quantization}
        config = json_text(fields).encode()
        files[manifest.CONFIG_FILE] = WrittenFile(len(config), hashlib.sha256(config).hexdigest())
        manifest.write_manifest(output, made_of=self.log.made_of, records=records, files=files)
        write_whole(output / manifest.CONFIG_FILE, config, manifest.RESUME)
        return [missing] if missing else []


def _records(notes: list[Note]) -> dict[str, dict[str, Any]]:
    return {name: record for note in notes for name, record in note["records"].items()}


def _calibration_tokens(
    job: Job, inventory: Inventory, chosen: Mapping[str, Scheme], policy: RankPolicy
) -> np.ndarray | None:
    """Encodes text to int32[S, T] if a method or the rank policy needs it."""
    methods = {scheme.method for scheme in chosen.values()}
    by_policy = policy.needs("frequency") and not methods.isdisjoint(COMPENSATED)
    if not by_policy and methods.isdisjoint(CALIBRATED):
        return None
    return calibration_tokens(
        Tokenizer.from_directory(job.source),
        vocab_size=inventory.config.vocab_size,
        max_positions=inventory.config.context_limit,
        text=job.calibration_text,
        num_samples=job.calibration_samples,
        length=job.calibration_length,
    )


def _identity(job: Job, inventory: Inventory, tokens: np.ndarray | None) -> dict[str, Any]:
    """Everything that determines the output."""
    text = "none"
    if tokens is not None:
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()
        text = f"{tokens.shape[0]} x {tokens.shape[1]} tokens, {digest[:16]}"
    default = dataclasses.asdict(job.recipe.default)
    del default["rank"]
    has_planes = any(rule.changes.get("planes") for rule in job.recipe.rules)
    if not (job.recipe.default.planes or has_planes):
        del default["planes"], default["plane_weight"], default["rank_divisor"]
    return {
        "source": source_fingerprint(inventory),
        "format": job.recipe.format,
        **default,
        "rules": [rule.text for rule in job.recipe.rules],
        "rank": job.rank_policy,
        "passes": job.passes,
        "calibration": text,
        "versions": {"jax": jax.__version__, "platform": job.device.platform},
    }


def _all_widths(scheme: Scheme) -> float:
    """Ranks of all widths together over the narrowest's, before any is rounded down."""
    others = range(1, len(scheme.planes)) if scheme.rank_divisor else ()
    return 1 + sum(float(scheme.rank_divisor) ** -i for i in others)
