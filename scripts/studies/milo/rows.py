"""Rows of ours that MiLo's section reads, and what both of its files name."""

from scripts.studies.tables.rows import Found, Results

HQQ, FULL = "INT3 hqq", "unquantized"
S1 = "INT3 milo, Dense-25% + Kurtosis-8, INT3 factors"
S2 = "INT3 milo, Dense-50% + Sparse-16, INT3 factors"
DENSE = "INT3 milo, Dense-25%, INT3 factors"
KINDS = ("attention", "experts")
PASSES = 20


def demo(
    results: Results, label: str, quantity: str = "perplexity", part: str = "table"
) -> Found | None:
    """A row of the demo model's quantization."""
    return results.get(f"{part} | {label} | {quantity}")


def kernel(results: Results, shape: str, weights: str, rows: int, name: str) -> Found | None:
    """A product with a packed matrix."""
    return results.get(f"dense | {shape} {weights} | M {rows} | {name}")


def of_weights(results: Results, what: str) -> Found | None:
    """A row about the demo model's matrices."""
    return results.get(f"weights | {what} | demo")


def curve(results: Results, kind: str) -> list[Found | None]:
    """Error after each pass of MiLo."""
    label = f"{kind}, Uniform-12.5%"
    return [demo(results, label, f"pass {i}", "curve") for i in range(1, PASSES + 1)]
