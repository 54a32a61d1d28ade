"""Quantization of a Hugging Face directory into another, a shard at a time.

Shards (a layer each, and one for tensors of no layer) are written whole and marked as done one
after the other; config.json comes last. The written bytes depend on the source and on the settings
alone, so a run that resumes after a kill ends with equal bytes.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.checkpoints.formats.interfaces import Tensors
from moejax.checkpoints.formats.manifest import MANIFEST_FILE, Manifest, check_files
from moejax.checkpoints.safetensors_reader import INDEX_FILE, read_header
from moejax.checkpoints.safetensors_writer import write_safetensors
from moejax.errors import MoejaxError
from moejax.files.whole import WrittenFile, json_text, write_whole
from moejax.models.hf.config import read_json
from moejax.quantization.pipeline import manifest
from moejax.quantization.pipeline.batches import Programs, Task
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
    kurtosis_bytes,
    measure_kurtosis,
    needs_frequency,
    needs_kurtosis,
    plan_ranks,
    read_policy,
)
from moejax.quantization.pipeline.recipe import CALIBRATED, COMPENSATED, Recipe, Scheme, schemes
from moejax.quantization.pipeline.resume_log import Ledger
from moejax.quantization.pipeline.shard import ShardResult, quantize_shard
from moejax.quantization.ranks import RankPolicy
from moejax.text.tokenizer import Tokenizer
from moejax.weights.qtensor import QTensor


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
    num_shards: int
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
    ledger = Ledger(job.output, _identity(job, inventory, tokens))
    if ledger.is_finished():
        return _outcome_before(job.output, len(inventory.shards))
    files = [shard.file for shard in inventory.shards]
    others = [INDEX_FILE, manifest.CONFIG_FILE, MANIFEST_FILE, REPORT_FOLDER]
    with ledger.opened([*files, *others, *manifest.COPIED_FILES]):
        done = ledger.done_shards(files)
        run = _Run(job, inventory, ledger, chosen, tokens)
        try:
            notes, remarks = run.quantize(policy, done)
        finally:
            run.meter.close()
        ledger.close()
    records = _records(notes)
    return Outcome(
        output=job.output,
        was_done=False,
        shards_before=len(done),
        num_shards=len(files),
        records=records,
        totals=manifest.totals(records),
        seconds=dict(run.meter.seconds),
        remarks=tuple(remarks),
    )


class _Run:
    """One run over a model, from the first unfinished shard."""

    def __init__(
        self,
        job: Job,
        inventory: Inventory,
        ledger: Ledger,
        chosen: Mapping[str, Scheme],
        tokens: np.ndarray | None,
    ) -> None:
        self.job, self.inventory, self.ledger = job, inventory, ledger
        self.chosen, self.tokens = chosen, tokens
        self.meter = Meter(visible=job.progress)

    def quantize(
        self, policy: RankPolicy, done: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Quantizes all shards; returns their notes, and remarks for people."""
        self.meter.add(_quantized_bytes(self.inventory.shards[len(done) :], self.chosen))
        plan = self.ledger.note("ranks")
        if plan is None:
            plan = self.ledger.keep("ranks", self._plan_ranks(policy))
        notes = self._quantize_shards(plan["ranks"], done)
        with self.meter.phase("finish"):
            remarks = _finish(self.job, self.inventory, self.ledger, notes)
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
        frequencies: Mapping[tuple[int, int], float] = {}
        if not _is_compensated(self.chosen):
            return {"ranks": {}, "capped": []}
        self.meter.title("survey")
        if needs_kurtosis(policy):
            self.meter.add(kurtosis_bytes(self.inventory, self.chosen))
            kurtosis = measure_kurtosis(
                self.inventory, self.chosen, device=self.job.device, meter=self.meter
            )
        if needs_frequency(policy):
            frequencies = router_frequencies(self.inventory, self._calibration_run())
        return plan_ranks(
            policy,
            self.inventory,
            self.chosen,
            factor_bits=self.job.recipe.default.factor_bits,
            kurtosis=kurtosis,
            frequencies=frequencies,
        )

    def _quantize_shards(
        self, ranks: Mapping[str, int], done: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Quantizes and writes unfinished shards; returns the notes of all."""
        tasks = {
            entry.name: Task(entry, self.chosen[entry.name], ranks.get(entry.name, 0))
            for entry in self.inventory.entries
            if entry.name in self.chosen and self.chosen[entry.name].method != "none"
        }
        shards = self.inventory.shards
        check_space(self.job.output, self.job.source, shards[len(done) :], tasks)
        by_shard = [
            [tasks[entry.name] for entry in shard.entries if entry.name in tasks]
            for shard in shards
        ]
        on_gpu = self.job.device.platform == "gpu"
        programs = Programs(by_shard, self.job.passes, use_kernel=on_gpu)
        calibrated = [
            i for i, own in enumerate(by_shard) if any(t.scheme.method in CALIBRATED for t in own)
        ]
        last = max(calibrated, default=-1)
        text = self._calibration_run() if len(done) <= last else None
        notes = list(done)
        for i, shard in enumerate(shards):
            self.meter.title(shard.title)
            if i < len(done):
                if text is not None and i < last:
                    text.advance(shard, self._read_back(shard, notes[i]["records"]))
                continue
            result = quantize_shard(
                shard,
                tasks,
                programs,
                device=self.job.device,
                meter=self.meter,
                calibrate=text.capture(shard).calibrate if text and i in calibrated else None,
                write_matrix=WRITERS[self.job.recipe.format],
            )
            notes.append(self._write(i, shard, result))
            if text is not None and i < last:
                text.advance(shard, result.matrices)
        return notes

    def _write(self, i: int, shard: Shard, result: ShardResult) -> dict[str, Any]:
        """Writes a shard and marks it as done; returns its note."""
        with self.meter.phase("write"):
            written = write_safetensors(
                self.job.output / shard.file, result.tensors, manifest.RESUME
            )
            note = {
                "size": written.size,
                "sha256": written.sha256,
                "tensors": list(result.tensors),
                "records": result.records,
                "histograms": result.histograms,
            }
            return self.ledger.keep_shard(i, note)

    def _read_back(self, shard: Shard, records: Mapping[str, Any]) -> dict[str, QTensor]:
        """Reads the matrices of a finished shard."""
        path = self.job.output / shard.file
        return read_back(path, self.job.recipe.format, records, Tensors(read_header(path)))

    def _calibration_run(self) -> CalibrationRun:
        assert self.tokens is not None
        return CalibrationRun(self.inventory, self.tokens, device=self.job.device, meter=self.meter)


def _finish(
    job: Job, inventory: Inventory, ledger: Ledger, notes: list[dict[str, Any]]
) -> list[str]:
    """Writes the model's other files, config.json last; returns remarks for people."""
    records = _records(notes)
    files = {
        shard.file: WrittenFile(note["size"], note["sha256"])
        for shard, note in zip(inventory.shards, notes, strict=True)
    }
    weight_map = {
        name: shard.file
        for shard, note in zip(inventory.shards, notes, strict=True)
        for name in note["tensors"]
    }
    num_bytes = sum(record["bytes"] for record in records.values())
    files[INDEX_FILE] = manifest.write_index(job.output, weight_map, num_bytes)
    files |= manifest.copy_other_files(job.source, job.output)
    histograms = {name: found for note in notes for name, found in note["histograms"].items()}
    missing = draw_report(job.output, records, histograms)
    quantization = config_of(job.recipe.format, records)
    config = json_text(manifest.config_fields(job.source, quantization)).encode()
    files[manifest.CONFIG_FILE] = WrittenFile(len(config), hashlib.sha256(config).hexdigest())
    made_of = {name: value for name, value in ledger.identity.items() if name != "versions"}
    manifest.write_manifest(job.output, made_of=made_of, records=records, files=files)
    write_whole(job.output / manifest.CONFIG_FILE, config, manifest.RESUME)
    return [missing] if missing else []


def _records(notes: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: record for note in notes for name, record in note["records"].items()}


def _outcome_before(output: Path, num_shards: int) -> Outcome:
    fields = read_json(output / MANIFEST_FILE)
    files = {name: (said["size"], said["sha256"]) for name, said in fields["files"].items()}
    made = Manifest(path=output / MANIFEST_FILE, matrices={}, files=files)
    check_files(made, checksums=True)
    return Outcome(
        output=output,
        was_done=True,
        shards_before=num_shards,
        num_shards=num_shards,
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
    """Encodes text to int32[S, T] if a method or the rank policy needs it.

    Raises:
      MoejaxError: as `calibration_tokens`.
    """
    by_policy = needs_frequency(policy) and _is_compensated(chosen)
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


def _quantized_bytes(shards: tuple[Shard, ...], chosen: Mapping[str, Scheme]) -> int:
    """Source bytes of all matrices to quantize."""
    return sum(
        entry.source.num_bytes
        for shard in shards
        for entry in shard.entries
        if entry.name in chosen and chosen[entry.name].method != "none"
    )
