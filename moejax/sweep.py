"""Replays a trace of routing through thousands of settings, without weights.

    python -m moejax.generate --prompt="..." --config.record_trace=x.trace
    python -m moejax.sweep --config.trace=x.trace --config.grid=slots=4:32:4
    python -m moejax.sweep --config=configs/sweep_qwen3_lru.py --config.trace=x.trace
    python -m moejax.sweep --config.trace=x.trace --config.recommend=True --config.device_gib=6 \
        --config.tiers=int4=2654208,int2=1474560

For each setting: hits, bytes over the link by cause, gate mass by tier, the time of a decode step
at each speed of the link, and two ceilings: Belady's cache in equal memory, and the time of the
bytes that it moves. The table on stdout has the settings on the Pareto front; all settings go to
the JSON Lines file and the plot.
"""

import time
from pathlib import Path

from absl import flags

from moejax import cli
from moejax.config.grid import described, eighths, settings
from moejax.config.sweep import SweepConfig, check_picture
from moejax.errors import MoejaxError, print_stderr
from moejax.files import result_rows as results
from moejax.files.whole import check_output
from moejax.routing.simulate.costs import Machine, calibrate, measured_rows


def _sweep(config: SweepConfig, values: flags.FlagValues) -> None:
    """Runs the grid, prints the table, writes the rows and the plot."""
    del values
    if not config.trace:
        raise MoejaxError("trace='' must be a file: give --config.trace=FILE")
    output, plot = _places(config)
    named = settings(config.grid) if config.grid else []
    chosen, bulk = _machines(config), None if config.bulk < 0 else config.bulk
    path = cli.user_path(config.trace)

    import jax

    from moejax.devices import asked_experts, asked_heads, choose_device, mesh_size
    from moejax.experts.tiering import Tiering, choose
    from moejax.routing.simulate import recommend as recommending
    from moejax.routing.simulate import sweeping, table
    from moejax.routing.trace import read_trace

    trace = read_trace(path)
    stored = {name: int(size) for name, size in (tier.split("=") for tier in config.tiers)}
    if not (stored := stored or trace.tiers or {}):
        raise MoejaxError(
            f"{path} does not say in which forms its model's experts are stored: give "
            "--config.tiers=NAME=BYTES, the bytes of an expert, such as int4=2654208"
        )
    first, *others = stored
    if others and not config.planes and stored[first] < stored[others[0]]:
        raise MoejaxError(
            f"tiers are of falling fidelity, but an expert of {first} has fewer bytes than one of "
            f"{others[0]}, as bit planes have: add --config.planes=True"
        )
    if asked_heads(config.mesh) is not None or asked_experts(config.mesh) is not None:
        raise MoejaxError(
            f"mesh={config.mesh}: a sweep models no attention, and no experts that are handed "
            "out; give the number alone"
        )
    count = mesh_size(config.mesh)
    stored = {name: -(-size // count) for name, size in stored.items()}  # on each device
    make = sweeping.Tiers.by_planes if config.planes else sweeping.Tiers
    tiers = make(names=tuple(stored), expert_bytes=tuple(stored.values()))
    device = choose_device(config.platform)
    if config.recommend:
        with jax.default_device(device):
            given = (config.device_gib, bulk, config.floor)
            print("\n".join(recommending.lines(trace, tiers, chosen, *given)))
        return
    grid = named or eighths(trace.num_experts, len(tiers.names))
    start = time.perf_counter()
    with jax.default_device(device):
        policy = (
            config.policy
            if config.policy == sweeping.LRU
            else lambda **given: choose(Tiering(policy=config.policy, settings=given)).policy
        )
        swept = sweeping.sweep(trace, policy, grid, tiers, bulk)
    spent = time.perf_counter() - start
    decoded = swept[0].traffic.steps
    about = (
        f"{config.policy}: {len(grid)} settings over {decoded} decoded steps of "
        f"{trace.num_layers} layers of {trace.num_experts} experts"
    )
    print_stderr(f"{about}: {spent:.1f} s, compiling included, on {device}")
    figures = {m.link_gib_per_s: [one.figures(m) for one in swept] for m in chosen}
    names = [described(one.setting) for one in swept]
    for link, found in figures.items():
        best = table.pareto(found)
        said = f"{len(best)} of {len(grid)} settings are beaten by no other one"
        print(f"\n{link:.4g} GiB/s; {said}\n")
        print("\n".join(table.table(names, found, table.spread(found, best, config.rows))))
    if output:
        results.append_rows(output, table.rows(config.policy, names, swept, chosen))
    if plot and (said := table.draw(plot, figures, about)):
        print_stderr(said)


def _places(config: SweepConfig) -> tuple[Path | None, Path | None]:
    """Paths of the rows and the picture; None for none."""
    output = cli.user_path(config.output) if config.output else None
    plot = cli.user_path(config.plot) if config.plot else None
    if output:
        check_output(output)
        results.check_rows(output)
    if plot:
        check_output(plot, "plot")
        check_picture(plot)
    if plot and plot == output:
        raise MoejaxError(f"output and plot are both {plot}: name two files")
    return output, plot


def _machines(config: SweepConfig) -> list[Machine]:
    """Makes one machine for each speed of the link; a calibration's own comes first."""
    base_ms, fetch_ms, found = config.base_ms, config.fetch_ms, []
    if config.calibration:
        measured = measured_rows(cli.user_path(config.calibration))
        fitted = calibrate(measured, config.overlap, fetch_ms)
        base_ms, found = fitted.base_ms, [fitted]
        print_stderr(
            f"calibrated by {len(measured)} measurements: {base_ms:.3f} ms a step, "
            f"{fitted.link_gib_per_s:.1f} GiB/s"
        )
    for speed in config.speeds():
        machine = Machine(
            base_ms=base_ms, link_gib_per_s=speed, fetch_ms=fetch_ms, overlap=config.overlap
        )
        found.append(machine)
    return found


COMMAND = cli.Command(doc=__doc__, default=SweepConfig(), body=_sweep)

if __name__ == "__main__":
    cli.run(COMMAND)
