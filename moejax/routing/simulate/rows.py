"""Rows of a sweep's results."""

from collections.abc import Iterator, Sequence

from moejax.files import result_rows as results
from moejax.routing.simulate.costs import Machine
from moejax.routing.simulate.sweeping import Swept


def rows(
    policy: str, names: Sequence[str], swept: Sequence[Swept], machines: Sequence[Machine]
) -> Iterator[results.ResultRow]:
    """One for each setting and speed of the link.

    Args:
      policy: its name.
      names: of the settings.
      swept: what was found of each.
      machines: of the times.
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
