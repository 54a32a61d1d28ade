"""Tables of docs/ that come from committed rows, and a real plan."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping

from moejax import cli, plan
from moejax.experts.budget import describe
from moejax.files.result_rows import ResultRow, read_rows
from moejax.planning import budget_of, model_of
from scripts.documents.commands import ROOT

STUDIES = ROOT / "scripts/studies"
PLAN = ("--config.shape=Qwen3-30B-A3B", "--config.bits=4", "--config.attention_bits=4",
        "--config.memory.device_gib=8", "--config.memory.host_gib=12",
        "--config.memory.prefetch=8", "--config.memory.bulk=4",
        "--config.context=4096")  # fmt: skip
RECIPE = ("--config.shape=Qwen3-30B-A3B", "--config.bits=4", "--config.attention_bits=4",
          "--config.memory.device_gib=11", "--config.context=4096")  # fmt: skip
TIERED = ("--config.policy.name=dynaexq", "--config.policy.tiers=int4,int2",
          "--config.memory.device_gib=0.15", "--config.context=512", "--config.dtype=bfloat16",
          "--config.platform=gpu")  # fmt: skip


Rows = dict[str, ResultRow]  # by implementation
Curves = dict[str, dict[int, Rows]]  # by "section | shape and form", then by rows of x or tokens


def kernel_tables() -> str:
    """Times of packed products beside other libraries, from the rows of `bench_kernels`."""
    rows = read_rows(STUDIES / "kernels/kernels_h200.jsonl")
    lines, curves = [_of_whom(rows), ""], _curves(rows)
    for name, sizes in curves.items():
        section, form = name.split(" | ")
        # By every packed form stands the bf16 product of its shape by cuBLAS.
        plain = curves.get(f"{section} | {form.split()[0]} bfloat16", {})
        beside = {
            size: {n: r for n, r in plain.get(size, {}).items() if n == "cublas"} | of
            for size, of in sorted(sizes.items())
        }
        what = "rows of x" if section == "dense" else "tokens"
        lines += [f"**{section}, {form}**, microseconds by {what}:", "", _times_table(beside), ""]
    return "\n".join(lines).rstrip()


def _curves(rows: list[ResultRow]) -> Curves:
    """The times of products and layers."""
    found: Curves = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        parts = row.what.split(" | ")
        size = re.fullmatch(r"[MT] (\d+)", parts[2]) if len(parts) == 4 else None
        if row.unit == "us" and size:
            found[" | ".join(parts[:2])][int(size[1])][parts[3]] = row
    return found


def _times_table(sizes: Mapping[int, Rows]) -> str:
    """Microseconds by implementation and size, and what bytes and operations allow."""
    lines = [f"| us | {' | '.join(map(str, sizes))} |", "| --- |" + " ---: |" * len(sizes)]
    for name in dict.fromkeys(name for rows in sizes.values() for name in rows):
        cells = [f"{rows[name].figure:.1f}" if name in rows else "" for rows in sizes.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    bounds = [f"{_bound(rows):.1f}" for rows in sizes.values()]
    return "\n".join([*lines, f"| bound by bytes or operations | {' | '.join(bounds)} |"])


def _bound(rows: Rows) -> float:
    """Microseconds of the packed form: baselines beside it read more."""
    packed = min(rows.values(), key=lambda row: row.baseline["bandwidth_bound_us"])
    return max(float(packed.baseline[f"{kind}_bound_us"]) for kind in ("bandwidth", "compute"))


def small_kernel_tables() -> str:
    """Times of attention and of routing, ours and XLA's."""
    lines: list[str] = []
    for file in ("attention_h200", "router_h200"):
        rows = read_rows(STUDIES / f"kernels/{file}.jsonl")
        lines += [_of_whom(rows), "", "| us | ours | XLA |", "| --- | ---: | ---: |"]
        lines += [f"| {r.what} | {r.figure:.1f} | {r.baseline['xla']:.1f} |" for r in rows]
        lines += [""]
    return "\n".join(lines).rstrip()


def memory_table() -> str:
    """TPOT and TTFT under device budgets, beside the resident model."""
    rows = read_rows(STUDIES / "speed/memory_h200.jsonl")
    latest: dict[str, ResultRow] = {row.what: row for row in rows}
    lines = [_of_whom(rows), ""]
    lines += ["| model, INT4 | budget | what | slots | hits | TPOT, ms |"]
    lines += ["| --- | ---: | --- | --- | ---: | ---: |"]
    pattern = re.compile(
        r"(load on demand|cache|cache and prefetch), the demo model's routing, (\d+ slots of \d+), "
        r"ahead \d+, TPOT, (Mixtral-8x7B|Qwen3-30B-A3B), .*?(\d+) GiB, batch 1"
    )
    found = []
    for what, row in latest.items():
        if match := pattern.match(what):
            found.append((match[3], int(match[4]), -row.figure, match, row))
    for model, gib, _, match, row in sorted(found, key=lambda one: one[:3]):
        hits = f"{100 * row.baseline['hit_rate']:.0f} %"
        lines += [f"| {model} | {gib} GiB | {match[1]} | {match[2]} | {hits} | {row.figure:.1f} |"]
    return "\n".join(lines)


def a_plan() -> str:
    """Plan that `moejax.plan` prints of a shape, and of the demo in two tiers."""
    config, _ = cli.parse(plan.COMMAND, ["plan", *PLAN])
    name, _, sizes, _ = model_of(config)
    head = f"{name}, experts in {sizes.expert_form}, on a gpu"
    whole = "\n".join([*_command(PLAN), "", "```text", head, *describe(budget_of(config)), "```"])
    config, _ = cli.parse(plan.COMMAND, ["plan", *TIERED])
    tiers = describe(budget_of(config))
    said = ["And of two tiers under a policy:", "", *_command(TIERED), "", "```text", *tiers, "```"]
    return "\n".join([whole, "", *said])


def recipe_plan() -> str:
    """Plans of the recipe's model under its own budget and under the measured one."""
    rows = ["| plan | `memory.device_gib=11` | `memory.device_gib=12` |", "| --- | ---: | ---: |"]
    plans = []
    for gib in ("11", "12"):
        words = [*RECIPE, f"--config.memory.device_gib={gib}"]
        config, _ = cli.parse(plan.COMMAND, ["plan", *words])
        plans.append("\n".join(describe(budget_of(config))))
    for said, pattern in (
        ("device memory", r"device total .*= (.*) of \d+"),
        ("host memory", r"host   total .*= (.*)"),
        ("slots of a layer, of 128", r"slots: (\d+) of"),
        ("over the link at worst, a token", r"worst: (.*?) a token"),
        ("over the link at worst, a prefill chunk of 1024", r"worst: (.*?) a full"),
    ):
        cells = [match[1] for one in plans if (match := re.search(pattern, one))]
        rows.append(f"| {said} | {' | '.join(cells)} |")
    return "\n".join([*_command(RECIPE), "", *rows])


def recipe_times() -> str:
    """The recipe's model under 12 GiB, by the newest row of each kind."""
    rows = read_rows(STUDIES / "speed/memory_h200.jsonl")
    tail = ", Qwen3-30B-A3B, 48 layers, INT4 g64 float, attention INT4, head bf16, 12 GiB, batch 1"
    lines = ["| what | figure |", "| --- | ---: |"]
    found = []
    for pattern, said in (
        (r"cache, prompt of 512, TTFT", "first token of a prompt of 512 tokens"),
        (r"cache, \d+ slots of 128, ahead 0, TPOT", "a later token, made-up routing"),
        (r"cache, the demo model's routing, \d+ slots of 128, ahead 0, TPOT",
         "a later token, the demo model's routing"),
        (r"load on demand, the demo.*0 slots of 128, ahead 0, TPOT",
         "a later token where no expert is cached"),
        (r"cache, peak of the device", "peak on the device"),
    ):  # fmt: skip
        row = [row for row in rows if re.fullmatch(pattern + re.escape(tail), row.what)][-1]
        hits = row.baseline.get("hit_rate")
        more = f", {100 * hits:.0f} % hits" if hits else ""
        lines.append(f"| {said}{more} | {row.figure:.1f} {row.unit} |")
        found.append(row)
    return "\n".join(
        [*lines, "", f"{_of_whom(found)[:-1]}: `scripts/studies/speed/memory_h200.jsonl`."]
    )


def _command(arguments: tuple[str, ...]) -> list[str]:
    quoted = [re.sub(r"=(\(.*)", r'="\1"', word) for word in arguments]
    lines, line = [], "python -m moejax.plan"
    for word in quoted:
        if len(line) + len(word) > 90:
            lines.append(f"{line} \\")
            line = " "
        line = f"{line} {word}"
    return ["```bash", *lines, line, "```"]


def _of_whom(rows: list[ResultRow]) -> str:
    """Device, versions and dates of a table."""
    devices = sorted({row.device for row in rows})
    dates = sorted({row.date for row in rows})
    names = sorted({name for row in rows for name in row.versions} - {"python", "jaxlib"})
    said = ", ".join(
        f"{name} {'/'.join(sorted({row.versions[name] for row in rows if name in row.versions}))}"
        for name in names
    )
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{', '.join(devices)}; {said}; {when}."


REGIONS: dict[str, Callable[[], str]] = {
    "kernels": kernel_tables,
    "small kernels": small_kernel_tables,
    "memory": memory_table,
    "plan": a_plan,
    "recipe plan": recipe_plan,
    "recipe times": recipe_times,
}
