"""Speed of policies: real shapes, random weights, routing and its probabilities replayed.

    python -m scripts.studies.speed.bench_policies --section=dynaexq
    XLA_CLIENT_MEM_FRACTION=0.95 python -m scripts.studies.speed.bench_policies \
        --section=dynaexq_wide
    XLA_CLIENT_MEM_FRACTION=0.2 python -m scripts.studies.speed.bench_policies --section=dymoe \
        --gib=16
    python -m scripts.studies.speed.bench_policies --section=buddymoe
    python -m scripts.studies.speed.bench_policies --section=cost

Sections, each described by `measure_speed.py` of its paper, or by `cost.py`:

  * dynaexq: Qwen3-30B-A3B, INT4 for the hot and INT2 for all, against uniform INT2; the workload
    shifts. dynaexq_wide: bf16 and INT4, or `--tiers`, under 32 and 48 GiB, against the time that
    the bytes take, and the resident models of either precision.
  * dymoe: Mixtral-8x7B, the rows of DyMoE's Table 3 under 16 and 24 GiB, or `--gib`.
  * buddymoe: Qwen3-30B-A3B, throughput and bytes at cache rates.
  * cost: Qwen3-30B-A3B, each policy's own time in a step, all experts resident, or at cache rates.

What the routers say is made up (`moejax.benchmarking.routing` says how), or is that of
`--trace=FILE`, which `record_traces` writes: of another shape with experts mapped, several in turn
as a workload that shifts. Rows say which under `routing`. It is the same for all rows of a section,
but for the resident model, which has no pool to replay it. Steps are timed by calls of
`--per_call`; a TPOT is their mean, so that what promotions take is in it, the median beside it.
Everything but the experts is bf16, as in the papers, unless `--attention_bits` says less. Where
packed experts would run on no kernel the section fails before it measures.
`--model=tiny --device=cpu --context=128 --prompt=16 --steps=16 --per_call=4` tries a section; with
budgets also `--gib=0.0085 --split=2,8 --bulk=4`.
"""

import traceback
from pathlib import Path

from absl import app, flags

from moejax.devices import choose_device, enable_compilation_cache
from moejax.models.shapes import CONFIGS
from scripts.studies.measuring import Report
from scripts.studies.speed.harness import Lab, Options, Run, Sizes
from scripts.studies.speed.sections import PROMPTED, SECTIONS

_SECTION = flags.DEFINE_multi_enum("section", [], list(SECTIONS), "what to measure")
_MODEL = flags.DEFINE_enum("model", "", ["", *sorted(CONFIGS)], "shape; '': the section's")
_BATCH = flags.DEFINE_multi_integer("batch", [], "sequences, each a measurement; []: the section's")
_PLANES = flags.DEFINE_bool("planes", False, "dynaexq, dymoe: INT4 is INT2 and a plane")
_TIERS = flags.DEFINE_list("tiers", ["16", "4"], "dynaexq_wide: bits of both precisions")
_GIB = flags.DEFINE_multi_float("gib", [], "of device memory; []: the section's")
_RATE = flags.DEFINE_multi_float("cache_rate", [], "buddymoe, cost: c; []: 0.75, 0.5, 0.375; 1")
_BULK = flags.DEFINE_integer("bulk", 32, "experts on their way between steps at once")
_HOST = flags.DEFINE_float("host_gib", 0, "of a precision's rows, shared by experts; 0: all rows")
_ZIPF = flags.DEFINE_float("zipf", -1, "exponent of the popularity; -1: the shape's, or 0")
_TRACE = flags.DEFINE_multi_string("trace", [], "recorded traces to replay; []: made-up routing")
_SPLIT = flags.DEFINE_string("split", "high", "slots of two tiers: high, rule, or such as 4,0")
_TTFT = flags.DEFINE_bool("ttft", True, "buddymoe, dymoe, dynaexq_wide: prompts too")
_PROMPT = flags.DEFINE_integer("prompt", 512, "tokens of the prompt")
_CONTEXT = flags.DEFINE_integer("context", 1024, "cache length")
_STEPS = flags.DEFINE_integer("steps", 0, "decode steps a measurement; 0: the section's")
_PER_CALL = flags.DEFINE_integer("per_call", 8, "decode steps of a call")
_WHERE = flags.DEFINE_string("device", "gpu", "gpu; cpu only tries the script")
_FILE = flags.DEFINE_string("out", "", "JSON Lines file that rows are appended to")
_PROGRAMS = flags.DEFINE_string("programs", "", "persistent compilation cache")
_ATTENTION = flags.DEFINE_integer("attention_bits", 16, "of attention in all methods")
_ONLY = flags.DEFINE_multi_string("only", [], "measurements whose name has one of these; []: all")


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the rows."""
    del argv
    if not _SECTION.value:
        raise SystemExit(f"--section: at least one of {', '.join(SECTIONS)}")
    device = choose_device(_WHERE.value)
    enable_compilation_cache(_PROGRAMS.value)
    options = Options(
        batches=_BATCH.value, tiers=[int(bits) for bits in _TIERS.value], gibs=_GIB.value,
        cache_rates=_RATE.value, bulk=_BULK.value, split=_SPLIT.value, ttft=_TTFT.value,
        planes=_PLANES.value, exponent=None if _ZIPF.value < 0 else _ZIPF.value, only=_ONLY.value,
        traces=[Path(name) for name in _TRACE.value],
    )  # fmt: skip
    failed: list[str] = []
    lab: Lab | None = None
    for name in _SECTION.value:
        section, model, steps = SECTIONS[name]
        model = _MODEL.value or model
        sizes = Sizes(_CONTEXT.value, _PROMPT.value, _STEPS.value or steps, _PER_CALL.value)
        prompts = options.ttft and name in PROMPTED
        if prompts and sizes.prompt + sizes.num_replayed > sizes.context:
            raise SystemExit("--context has no room for the prompt and the steps after it")
        if lab is None or lab.shape != model:
            lab = Lab(CONFIGS[model], model, device, sizes, _HOST.value, _ATTENTION.value)
        lab.sizes = sizes
        attention = "bf16" if _ATTENTION.value == 16 else f"INT{_ATTENTION.value}"
        about = f"{name}, {model}, {lab.config.num_layers} layers, attention {attention}"
        run = Run(lab, Report(device, about, _FILE.value), options)
        print(f"== {about}", flush=True)
        try:
            section(run)
        except Exception as error:  # the sections after it are measured all the same
            traceback.print_exc()
            failed.append(f"{name}: {error!s:.200}")
        print(f"-- {name}\n{run.report.table()}", flush=True)
        failed += [f"{name}: {what}" for what in run.failed]
    if failed:
        raise SystemExit("FAILED: " + "; ".join(failed))


if __name__ == "__main__":
    app.run(main)
