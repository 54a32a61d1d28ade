"""The jobs of `scripts.bench_gpu`: every row measured on a GPU, by command."""

import dataclasses
from collections.abc import Iterator, Sequence

PARTS = ("tests", "models", "kernels", "policies", "quantizers", "benchmark", "baselines")

STUDIES = "scripts.studies"
SPEED, KERNELS = f"{STUDIES}.speed", f"{STUDIES}.kernels"
BENCH_MODEL = f"{SPEED}.bench_model"
LARGE_GIB = 66.0  # of the largest resident model


@dataclasses.dataclass(frozen=True)
class Job:
    """A process that measures.

    Attributes:
      part: one of `PARTS`.
      name: of all jobs, its own.
      seconds: that it took on an H200, with nothing compiled before; roughly.
      words: after `python`; `{rows}` is the folder of rows, `{programs}` that of programs.
      memory: GiB of the card that JAX may take, below 1 a share of it; 0: as it does by itself.
      warm: GiB that it needs beside others, for its programs alone; 0: they are not worth it.
      size: GiB of the model that it makes on the device, where its part's jobs make smaller ones.
    """

    part: str
    name: str
    seconds: float
    words: tuple[str, ...]
    memory: float = 0
    warm: float = 0
    size: float = 0

    def arguments(self, rows: str, programs: str) -> list[str]:
        """Arguments after `python`, for a folder of rows and one of compiled programs."""
        return [word.format(rows=rows, programs=programs) for word in self.words]


def _job(
    part: str, name: str, seconds: float, module: str, *words: str, file: str = "", gib: float = 0,
    size: float = 0,
) -> Job:  # fmt: skip
    """Makes a job of `python -m module`; `file`: flags of rows and programs, and the rows' file."""
    kept: Sequence[str] = ()
    if file:
        out, programs, stem = file.split()
        kept = [f"--{out}={{rows}}/{stem}.jsonl"]
        kept = kept if programs == "-" else [*kept, f"--{programs}={{programs}}"]
    return Job(part, name, seconds, ("-m", module, *words, *kept), gib, size=size)


def _tests() -> Iterator[Job]:
    """Workers share a card: a kernel's test takes little of it, a whole engine's more."""
    kernels = (
        "residual_norm", "router_topk", "buddy_search", "cache_plan",
        "decode_attention", "qkv_to_cache", "dequant_matmul", "expert_mlp",
        "grouped_dequant_matmul", "hqq_solve", "expert_fetch_device",
        "bench_kernels", "delta_step",
    )  # fmt: skip
    engines = ("pooled_device", "tiered_device", "host_store", "ssd", "checkpoints")
    common = ("-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider")
    for name, files, workers, fraction, of, seconds in (
        ("kernels", kernels, 18, 0.03, "not beyond", 320),
        ("engines", engines, 14, 0.04, "not beyond", 290),
        ("whole card", kernels, 0, 0.9, "beyond", 120),
    ):
        paths = [f"tests/{file}_test.py" for file in files]
        words = ["-m", "pytest", *common, "-n", str(workers), "-k", of, *paths]
        yield Job("tests", f"tests, {name}", seconds, tuple(words), fraction)


def _models() -> Iterator[Job]:
    of = "output cache packed_model"
    decode = ("--decode_only", "--prompt=512", "--context=1024", "--steps_per_call=16")
    for shape, bits in (
        ("Mixtral-8x7B", 3), ("Mixtral-8x7B", 4), ("Qwen3-30B-A3B", 4), ("Qwen3-30B-A3B", 3),
    ):  # fmt: skip
        model = (f"--shape={shape}", f"--bits={bits}")
        name = f"{shape} INT{bits}"
        batches = ("--batch=1", "--batch=4", "--batch=16", "--batch=32")
        yield _job(
            "models", f"decode, {name}", 130, BENCH_MODEL, *model, *decode, *batches,
            file=of,
        )  # fmt: skip
        yield _job(
            "models", f"prompts, {name}", 70, BENCH_MODEL, *model, "--prefill_only",
            "--prompt=512", "--prompt=2048", file=of,
        )  # fmt: skip
        yield _job(
            "models", f"prompts of one chunk, {name}", 60, BENCH_MODEL, *model,
            "--prefill_only", "--prompt=512", "--prompt=2048", "--context=2112", file=of,
        )  # fmt: skip
    of = "output cache other_models"
    for shape, bits, seconds, size in (
        ("DeepSeek-V2-Lite", 16, 90, 0), ("DeepSeek-V2-Lite", 4, 90, 0),
        ("Qwen3-Next-80B-A3B", 4, 130, LARGE_GIB),
    ):  # fmt: skip
        model = (f"--shape={shape}", f"--bits={bits}", "--expect_prefill=any")
        yield _job(
            "models", f"decode, {shape} {bits}", seconds, BENCH_MODEL, *model,
            "--expect=any", "--batch=1", "--batch=8", *decode, file=of, size=size,
        )  # fmt: skip
        # Decode starts from a random cache: TTFT and what prompts take are of runs of their own.
        prompts = ("--batch=1", "--batch=8", "--prompt=512", "--context=1024")
        if size:
            prompts = ("--prompt=2048", "--prompt=4096", "--prompt=8192")
        yield _job(
            "models", f"prompts, {shape} {bits}", 150 if size else 90, BENCH_MODEL,
            *model, "--prefill_only", *prompts, file=of, size=size,
        )  # fmt: skip


def _kernels() -> Iterator[Job]:
    """The table of products in one process: shares of a run are of the same clocks."""
    table = ("--shapes=4096x14336,14336x4096", "--bits=16,3,4,2", "--m=1,4,16,64,1024,4096")
    beside = "--implementations=mosaic,cublas,humming"
    of = "out cache kernels"
    for name, seconds, words in (
        ("the table", 170, ("--only=dense", *table, beside, "--time_limit_s=170")),
        ("other kernels and libraries", 110, (
            "--only=dense", "--shapes=4096x14336", "--bits=3,4,2", "--m=1,16",
            "--implementations=unpack,torch,gemlite,triton", "--time_limit_s=110",
        )),
        ("experts", 130, ("--only=grouped", "--time_limit_s=130")),
        ("compensators", 50, ("--only=compensator", "--time_limit_s=50")),
    ):  # fmt: skip
        yield _job("kernels", name, seconds, f"{KERNELS}.bench_kernels", *words, file=of)
    yield _job("kernels", "routers", 60, f"{KERNELS}.bench_router", file="output - router")
    yield _job(
        "kernels",
        "attention",
        60,
        f"{KERNELS}.bench_attention",
        file="output - attention",
    )


def _policies() -> Iterator[Job]:
    of, bench = "out programs policies", f"{SPEED}.bench_policies"

    def section(name: str, seconds: float, *words: str, section: str, gib: float = 0) -> Job:
        given = (f"--section={section}", "--host_gib=4", *words)
        return _job("policies", name, seconds, bench, *given, file=of, gib=gib)

    yield section("DynaExq", 170, section="dynaexq")
    for gib, seconds in ((16, 300), (24, 280)):  # in room for the budget and what is replayed
        yield section(
            f"DyMoE under {gib} GiB", seconds, f"--gib={gib}", section="dymoe", gib=gib + 12
        )
    yield section("BuddyMoE", 350, section="buddymoe")
    yield section("a miss's time", 120, section="latency")
    yield section("a policy's own cost", 190, section="cost")
    yield section("all together under 16 GiB", 200, "--gib=16", section="compose", gib=28)
    yield section("DynaExq, bf16 and INT4", 330, section="dynaexq_wide", gib=130)
    yield section(
        "DynaExq, Qwen3-Next", 340, "--model=Qwen3-Next-80B-A3B", "--tiers=4,2", "--zipf=1",
        section="dynaexq_wide", gib=130,
    )  # fmt: skip
    for batch in (1, 8):
        yield section(
            f"BuddyMoE, V2-Lite, batch {batch}", 330, "--model=DeepSeek-V2-Lite", "--zipf=1",
            f"--batch={batch}", section="buddymoe",
        )  # fmt: skip
    yield _job(
        "policies", "sweep", 220, f"{SPEED}.bench_sweep", "--device=gpu", "--settings=1000",
        "--nowarm", file="output - sweep",
    )  # fmt: skip


def _quantizers() -> Iterator[Job]:
    """Beside the hqq library, where it and torch are installed."""
    of = "output cache quantizers"
    yield _job("quantizers", "quantizers", 170, f"{STUDIES}.quantizers.bench_quantizers", file=of)


def _benchmark() -> Iterator[Job]:
    """Measures as users do: prompts run, budgets swept, policies, random weights."""
    qwen3 = ("--config.shape=Qwen3-30B-A3B", "--config.attention_bits=4", "--config.context=1024")
    mixtral = ("--config.shape=Mixtral-8x7B", "--config.attention_bits=4", "--config.context=1024")
    for name, words in {
        "qwen3": (*qwen3, "--config.budgets=(8,12,16)", "--config.batches=(1,4,16)"),
        "qwen3_whole": (*qwen3, "--config.budgets=(24,)", "--config.batches=(1,4,16,32)"),
        "mixtral": (*mixtral, "--config.budgets=(12,16,24,32)", "--config.memory.prefetch=2"),
        "dynaexq": ("--config=configs/benchmark_dynaexq.py", "--config.num_prompts=32"),
        **{f"slots_{n}": (*qwen3, f"--config.memory.slots={n}") for n in (8, 24, 48, 80)},
    }.items():
        output = f"--config.output={{rows}}/benchmark_{name}.json,{{rows}}/benchmark.jsonl"
        yield _job(
            "benchmark", f"benchmark, {name}", 300, "moejax.benchmark", *words, output,
            "--config.compilation_cache={programs}", "--config.platform=gpu",
        )  # fmt: skip


def _baselines() -> Iterator[Job]:
    """Transformers with accelerate's offload, where it is installed."""
    for shape, gib, forms in (
        ("Mixtral-8x7B", 24, ("int4", "bf16")), ("Qwen3-30B-A3B", 12, ("int4", "bf16")),
        ("Mixtral-8x7B", 16, ("int4",)),
    ):  # fmt: skip
        for form in forms:
            share = ("--share=0.97",) if form == "int4" else ()
            yield _job(
                "baselines", f"accelerate, {shape} {form} under {gib} GiB", 150,
                f"{STUDIES}.dymoe.bench_accelerate", f"--model={shape}", f"--gib={gib}",
                f"--form={form}", *share, file="out - accelerate",
            )  # fmt: skip


WARM_GIB = {"kernels": 10.0, "models": 34.0, "policies": 26.0}  # by part
MOST_WARM_GIB = 70.0  # what needs more compiles when it measures


def _warmed(job: Job) -> Job:
    """With what it needs to compile beside others."""
    gib = job.memory or job.size or WARM_GIB.get(job.part, 0.0)
    compiles = job.part in WARM_GIB and any("{programs}" in word for word in job.words)
    return dataclasses.replace(job, warm=gib if compiles and gib <= MOST_WARM_GIB else 0.0)


def jobs() -> list[Job]:
    """All, by part."""
    makers = (
        _tests, _models, _kernels, _policies, _quantizers, _benchmark, _baselines,
    )  # fmt: skip
    return [_warmed(job) for make in makers for job in make()]
