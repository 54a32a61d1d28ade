"""Result rows of a sweep."""

from collections.abc import Iterator, Sequence

from moejax.files import result_rows as results
from moejax.routing.simulate.costs import Machine
from moejax.routing.simulate.sweeping import SweepPoint


def rows(
    policy: str, names: Sequence[str], swept: Sequence[SweepPoint], machines: Sequence[Machine]
) -> Iterator[results.ResultRow]:
    """Yields a row for each setting and speed of the link.

    Args:
      names: the settings in text.
      swept: the result of each.
      machines: one per speed of the link.
    """
    versions = results.package_versions("moejax", "jax")
    today, command = results.today(), results.command_line()
    for machine in machines:
        for name, one in zip(names, swept, strict=True):
            found = one.figures(machine)
            yield results.ResultRow(
                what=f"sweep, {policy}, {name}, {machine.link_gib_per_s:.4g} GiB/s, TPOT",
                figure=found.pop("tpot_ms"),
                unit="ms",
                baseline=found,
                device="simulated",
                versions=versions,
                date=today,
                command=command,
            )
