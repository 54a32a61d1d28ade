"""Quantization of a Hugging Face directory into another, a shard at a time.

Shards (a layer each, and one for tensors of no layer) are written whole and marked as done one
after the other; config.json comes last. The written bytes depend on the source and on the settings
alone, so a run that resumes after a kill ends with equal bytes.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.checkpoints.formats.interfaces import Tensors
from moejax.checkpoints.formats.manifest import MANIFEST_FILE, check_files, read_files
from moejax.checkpoints.safetensors_reader import INDEX_FILE, read_header
from moejax.checkpoints.safetensors_writer import write_safetensors
from moejax.errors import MoejaxError
from moejax.files.whole import WrittenFile, json_text, write_json, write_whole
from moejax.models.hf.config import read_json, text_fields
from moejax.quantization.pipeline import manifest
from moejax.quantization.pipeline.batches import BatchPlan, MatrixTask
from moejax.quantization.pipeline.calibration import NUM_SAMPLES, calibration_tokens
from moejax.quantization.pipeline.calibration_pass import CalibrationRun, router_frequencies
from moejax.quantization.pipeline.disk_space import check_space
from moejax.quantization.pipeline.export import WRITERS, config_of, read_back
from moejax.quantization.pipeline.inventory import (
    Inventory,
    Shard,
    source_fingerprint,
    take_inventory,
)
from moejax.quantization.pipeline.plots import REPORT_FOLDER, draw_report
from moejax.quantization.pipeline.progress import Meter
from moejax.quantization.pipeline.quantizers import kernel_remarks
from moejax.quantization.pipeline.rank_planning import (
    Frequencies,
    measure_kurtosis,
    plan_ranks,
    read_policy,
)
from moejax.quantization.pipeline.recipe import CALIBRATED, COMPENSATED, Recipe, Scheme, schemes
from moejax.quantization.pipeline.resume_log import ResumeLog
from moejax.quantization.pipeline.shard import ShardResult, quantize_shard
from moejax.quantization.ranks import RankPolicy
from moejax.text.tokenizer import Tokenizer

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
    policy = read_policy(job.rank_policy)
    tokens = _calibration_tokens(job, inventory, chosen, policy)
    log = ResumeLog(job.output, _identity(job, inventory, tokens))
    if log.is_finished():
        return _outcome_before(job.output, len(inventory.shards))
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
    log: ResumeLog
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
        """Plans the ranks, surveying the whole model if the policy needs it."""
        kurtosis: Mapping[str, float] = {}
        frequencies: Frequencies = {}
        if not _is_compensated(self.chosen):
            return {"ranks": {}, "capped": []}
        self.meter.bar.set_description_str("survey")
        if policy.needs("kurtosis"):
            kurtosis = measure_kurtosis(
                self.inventory, self.chosen, device=self.job.device, meter=self.meter
            )
        if policy.needs("frequency"):
            frequencies = router_frequencies(self.inventory, self._calibration_run())
        return plan_ranks(
            policy,
            self.inventory,
            self.chosen,
            factor_bits=self.job.recipe.default.factor_bits,
            kurtosis=kurtosis,
            frequencies=frequencies,
        )

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
                    path, target = job.output / shard.file, job.recipe.format
                    tensors = Tensors(read_header(path))
                    text.advance(shard, read_back(path, target, notes[i]["records"], tensors))
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
            return self.log.keep_shard(i, note)

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
        made_of = {name: value for name, value in self.log.identity.items() if name != "versions"}
        manifest.write_manifest(output, made_of=made_of, records=records, files=files)
        write_whole(output / manifest.CONFIG_FILE, config, manifest.RESUME)
        return [missing] if missing else []


def _records(notes: list[Note]) -> dict[str, dict[str, Any]]:
    return {name: record for note in notes for name, record in note["records"].items()}


def _outcome_before(output: Path, num_shards: int) -> Outcome:
    made = read_files(output)
    assert made is not None
    check_files(made, checksums=True)
    fields = read_json(made.path)
    return Outcome(
        output=output,
        was_done=True,
        shards_before=num_shards,
        records={**fields["tensors"], **fields["plain"]},
        totals=fields["totals"],
        seconds={},
        remarks=(),
    )


def _is_compensated(chosen: Mapping[str, Scheme]) -> bool:
    return any(scheme.method in COMPENSATED for scheme in chosen.values())


def _calibration_tokens(
    job: Job, inventory: Inventory, chosen: Mapping[str, Scheme], policy: RankPolicy
) -> np.ndarray | None:
    """Encodes text to int32[S, T] if a method or the rank policy needs it."""
    by_policy = policy.needs("frequency") and _is_compensated(chosen)
    if not by_policy and not any(scheme.method in CALIBRATED for scheme in chosen.values()):
        return None
    return calibration_tokens(
        Tokenizer.from_directory(job.source),
        vocab_size=inventory.config.vocab_size,
        max_positions=inventory.config.context_limit,
        text=job.calibration_text,
        num_samples=job.calibration_samples or NUM_SAMPLES,
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
