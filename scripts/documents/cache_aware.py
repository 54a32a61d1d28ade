"""The table of cache-aware routing in docs/policies.md, from the rows of its study."""

from moejax.files.result_rows import ResultRow, read_rows
from scripts.documents.commands import ROOT

ROWS = ROOT / "scripts/studies/quality/cache_aware.jsonl"
SHOWN = (
    "on_demand", "cache_aware, lambda 0.05, J 1", "cache_aware, lambda 0.1, J 1",
    "cache_aware, lambda 0.2, J 1", "cache_aware, lambda 0.2, J 2", "cache_aware, lambda 0.5, J 1",
    "buddymoe, rho 1, gains", "buddymoe, rho 2, gains",
)  # fmt: skip


def table() -> str:
    """Perplexity, bytes and hits of some settings, by text and slots."""
    rows = read_rows(ROWS)
    found: dict[tuple[str, str, str], ResultRow] = {}
    for row in rows:
        _, text, slots, name = row.what.removesuffix(", demo, bf16").split(" | ")
        found[text, slots, name] = row
    columns = list(dict.fromkeys((text, slots) for text, slots, _ in found))
    head = " | ".join(f"{text}, {slots}" for text, slots in columns)
    lines = [f"| perplexity (kB a token) | {head} |", "| --- |" + " ---: |" * len(columns)]
    for name in SHOWN:
        cells = [
            f"{row.figure:.2f} ({float(row.baseline['bytes_per_token']) / 1e3:.0f})"
            for row in (found[text, slots, name] for text, slots in columns)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    first = rows[0]
    tokens = {text: found[text, slots, name].baseline["tokens"] for text, slots, name in found}
    counted = ", ".join(f"{count} tokens of {text}" for text, count in tokens.items())
    said = f"{first.device}; jax {first.versions['jax']}; {first.date}; {counted}."
    return "\n".join([said, "", *lines])
