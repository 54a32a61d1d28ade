"""How the perplexities of a section are taken: two scales that are not to be compared."""

from scripts.studies.tables import subjects
from scripts.studies.tables.paper import Paper
from scripts.studies.tables.rows import Found

POLICIES = {
    subjects.STUDY: f"{subjects.STUDY} | dynaexq | wikitext-2 | uniform bf16 | 0",
    subjects.DEMO: "dynaexq | dynaexq bf16/int4 | wikitext-2 | uniform | 0",
}
QUANTIZED = "table | unquantized | perplexity"
QUANTIZED_WINDOW = 2048  # scripts/studies/quantizers/quantized.py


def of_policies(paper: Paper, *labels: str) -> str:
    """Protocol of the rows of `scripts/studies/quality/policies.py`, of the models named."""
    found = {label: paper.results.get(POLICIES[label]) for label in labels}
    parts = [_of_model(paper, label, one) for label, one in found.items() if one]
    if not parts:
        return ""
    return (
        f"Perplexities of this section: {'; '.join(parts)}. MiLo's section scores the whole test "
        "text in longer windows, so that its perplexities are of another scale."
    )


def _of_model(paper: Paper, label: str, found: Found) -> str:
    window, wiki, each = (
        found.more[key] for key in ("window", "windows of wikitext-2", "windows of each domain")
    )
    domains = found.more["domains"]
    return (
        f"{subjects.NAMES[label]} on {found.row.device}, WikiText-2's test text in {wiki} windows "
        f"of {window} tokens ({wiki * window:,}), mixed text in {each} windows of {window} of each "
        f"of {len(domains)} domains ({each * len(domains) * window:,}: {', '.join(domains)}); "
        f"unquantized WikiText-2 has {paper.shown(found)}"
    )


def of_quantizers(paper: Paper) -> str:
    """Protocol of the rows of `scripts/studies/quantizers/demo_quantization.py`."""
    found = paper.results.get(QUANTIZED)
    if found is None:
        return ""
    windows, tokens = found.more["windows"], found.more["tokens"]
    return (
        "Perplexities of this section: the demo model on an H200, the whole test text of "
        f"WikiText-2 in {windows} windows of {QUANTIZED_WINDOW} tokens that do not overlap "
        f"({tokens:,} scored tokens); unquantized it has {paper.shown(found, '{:.3f}')}. The other "
        "papers' sections score a few windows of 512, so that their perplexities are of another "
        "scale."
    )
